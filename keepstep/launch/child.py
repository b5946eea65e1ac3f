"""How a rank's process starts: tie its life to the launcher's, then become the user's script.

    python -m keepstep.launch.child SCRIPT ARGS...

The kernel kills this process when the launcher dies (PR_SET_PDEATHSIG), however that happens. Exits 127 if the launcher is gone
already. The end is quick: torch would take seconds to unwind, in which the others would still wait for this replica.
"""

import atexit
import contextlib
import ctypes
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
GONE = 127


def tie_to_parent(parent: int) -> None:
    """From now on this process dies with `parent`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(GONE)


def step_aside(env: Mapping[str, str]) -> None:
    """With KEEPSTEP_NICE, whatever keeps the job together gets a processor before us. Where Linux groups processes by session,
    that is said of the session."""
    nice = env.get("KEEPSTEP_NICE")
    if nice:
        os.setpriority(os.PRIO_PROCESS, 0, int(nice))
        with contextlib.suppress(OSError):  # this kernel does not group them
            Path("/proc/self/autogroup").write_text(nice)


def become(args: list[str]) -> NoReturn:
    """Runs the script as `python SCRIPT ARGS...` would, and ends the process."""
    step_aside(os.environ)
    script = args[0]
    os.environ["KEEPSTEP_SCRIPT_AT"] = repr(time.monotonic())  # for the `entered` event
    sys.argv = args
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = _code_of(end)
    except BaseException:  # noqa: BLE001  (the user's: shown as Python shows it)
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(Exception):  # an exit handler's own problem must not keep the process
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(
            OSError, ValueError, AttributeError
        ):  # nobody reads it, or the script closed or dropped it
            stream.flush()
    os._exit(code)


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def main() -> None:
    tie_to_parent(int(os.environ.pop("KEEPSTEP_PARENT")))
    if preload := os.environ.get("KEEPSTEP_PRELOAD"):  # `keepstep shadow`: what replaces the device
        __import__(preload)
    become(sys.argv[1:])


if __name__ == "__main__":
    main()
