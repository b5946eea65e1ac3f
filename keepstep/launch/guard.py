"""The last line of defence against orphans: outlives the launcher by a moment, and kills what it leaves behind.

    python -m keepstep.launch.guard        reads "+PGID" and "-PGID" lines from stdin; at its end, kills every group still listed

The launcher cleans up by itself. If it is killed with SIGKILL, its ranks die with it (PR_SET_PDEATHSIG), but not their own
children; those are in the ranks' process groups.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        sign, pgid = line[0], int(line[1:])
        (groups.add if sign == "+" else groups.discard)(pgid)
    for pgid in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended by itself
            os.killpg(pgid, signal.SIGKILL)


if __name__ == "__main__":
    main()
