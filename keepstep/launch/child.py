"""How a rank's process starts: tie its life to the launcher's, then become the user's script.

    python -m keepstep.launch.child SCRIPT ARGS...

The kernel kills this process when the launcher dies (PR_SET_PDEATHSIG), however that happens. Exits 127 if the launcher is gone
already.
"""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1
GONE = 127


def tie_to_parent(parent: int) -> None:
    """Dies with `parent`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(GONE)


def main() -> None:
    tie_to_parent(int(os.environ.pop("KEEPSTEP_PARENT")))
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
