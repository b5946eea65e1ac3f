"""Simulated time: one queue of events, and processes that run, freeze and die.

An event belongs to a process or to the world. Events of a dead process never happen; those of a frozen one wait and then happen
all at once, late, in their order. Equal times keep the order in which they were planned, so that a run is a function of its
seed. Times are integer nanoseconds; a process has its own clock, which may run fast or slow and starts anywhere.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

MS = 1_000_000
SECOND = 1_000_000_000


class Process:
    """Something that runs on one machine."""

    __slots__ = ("alive", "drift", "frozen", "late", "name", "offset")

    def __init__(self, name: str, drift: float = 1.0, offset: int = 0) -> None:
        self.name = name
        self.alive = True
        self.frozen = False
        self.late: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.drift, self.offset = drift, offset

    @property
    def running(self) -> bool:
        return self.alive and not self.frozen


class Clock:
    """The queue of what is going to happen."""

    def __init__(self) -> None:
        self.now = 0
        self.events = 0
        self._queue: list[tuple[int, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0
        self._stopped = False

    def after(self, delay: int, process: Process | None, action: Callable[..., None], *args: Any) -> None:
        """Plans `action` for `delay` ns from now."""
        self._planned += 1
        heappush(self._queue, (self.now + delay, self._planned, process, action, args))

    def local(self, process: Process) -> int:
        """What the clock of `process` shows."""
        return process.offset + int(self.now * process.drift)

    def after_local(self, delay: int, process: Process, action: Callable[..., None], *args: Any) -> None:
        """The same for a delay by the clock of `process`."""
        self.after(int(delay / process.drift) + 1, process, action, *args)

    def run(self, until: int, events: int) -> None:
        """Lets everything happen, in order, until `stop` is called; at most up to a time and so many events."""
        queue, self._stopped = self._queue, False
        while queue and not self._stopped and self.events < events:
            now, _, process, action, args = heappop(queue)
            if now > until:
                return
            self.now = now
            self.events += 1
            if process is None or (process.alive and not process.frozen):
                action(*args)
            elif process.alive:
                process.late.append((action, args))

    def stop(self) -> None:
        """Ends `run` after the event that is happening."""
        self._stopped = True

    def thaw(self, process: Process) -> None:
        """What could not happen while the process was frozen happens now."""
        process.frozen = False
        late, process.late = process.late, []
        for action, args in late:
            self.after(0, process, action, *args)
