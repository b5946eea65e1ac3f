"""What ranks have started and left behind: it ends with their replica, and never outlives the launcher.

Two ways to it, both on the launcher's loop. `Guard` is the launcher's side of `launch.guard`, a process that kills the ranks'
groups if the launcher itself is killed. `reap` ends what was orphaned onto the launcher (it is the subreaper of all), but not
what belongs to another replica that still runs.

Fails: OSError if the guard cannot be started. Everything else is best effort: a process that is gone is what we want.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path


class Guard:
    """The process that outlives us by a moment. Told which process groups are ours."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(Path(__file__).with_name("guard.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def add(self, groups: Iterable[int]) -> None:
        """These groups must not outlive us."""
        self._say("+", groups)

    def remove(self, groups: Iterable[int]) -> None:
        """They have ended; their numbers may mean somebody else soon."""
        self._say("-", groups)

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed it: we still clean up ourselves
            self._process.stdin.close()
        self._process.wait()

    def _say(self, sign: str, groups: Iterable[int]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed it: we still clean up ourselves
            self._process.stdin.write("".join(f"{sign}{group}\n" for group in groups).encode())
            self._process.stdin.flush()


def reap(known: Collection[int], living: Collection[str], groups: Collection[int]) -> None:
    """Ends and collects our children that are not `known`, but for those of the `living` incarnations and of these `groups`.

    An orphan of unknown descent is ended: it is more likely to hold a port or a device than to be missed.
    """
    for pid in _children():
        if pid in known:
            continue
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has ended meanwhile
            if os.getpgid(pid) in groups or _incarnation(pid) in living:
                os.waitpid(pid, os.WNOHANG)
                continue
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _incarnation(pid: int) -> str | None:
    """The life that started this process, by its environment; None if it does not say."""
    mark = b"KEEPSTEP_INCARNATION="
    with contextlib.suppress(OSError):  # it has ended, or is not ours to look into
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(mark):
                return entry.removeprefix(mark).decode(errors="replace")
    return None


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found
