"""Where a rank's main thread has spent its time since the last commit, as far as it was not computing.

Goodput accounting (`observe.goodput`) reads them from the `commit` events. Costs two looks at the clock and a tuple a phase.
Main thread only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

MAX_PHASES = 64  # of one step; a step that has more is not told in full, and what is missing counts as computing

WAIT = "wait"  # for the next order: for a decision, or for an exchange and the vote
DATA_WAIT = "data_wait"  # for the step's batch
CKPT_BLOCKING = "ckpt_blocking"  # for a checkpoint that holds training up
DISCARDED = "discarded"  # computed gradients that nobody wanted


class Phases:
    """What is told with the next commit."""

    def __init__(self) -> None:
        self._since_commit: list[tuple[str, float, float]] = []

    def note(self, name: str, start: float, end: float) -> None:
        """From `start` to `end`, in monotonic seconds."""
        if len(self._since_commit) < MAX_PHASES:
            self._since_commit.append((name, round(start, 6), round(end, 6)))

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Notes what its block takes, also if that raises."""
        start = monotonic()
        try:
            yield
        finally:
            self.note(name, start, monotonic())

    def take(self) -> list[tuple[str, float, float]]:
        """All of them, and begins anew."""
        taken, self._since_commit = self._since_commit, []
        return taken
