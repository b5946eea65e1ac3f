"""Whether a replica gets another life: pure, one history a replica. Time is an argument (seconds of one monotonic clock).

A life that has trained a step was worth its start, and the next begins at once. A crash loop must not hide its cause in a
thousand restarts, so pauses grow, and it ends:

    lives in a row that trained nothing             pauses grow; the end when they fail alike (unless by a signal), or too often
    lives that train a little and then fail alike   pauses grow
    any lives                                       the end after `max_restarts` within `window_s`: a budget that refills, since a
                                                    job of months has more failures than any number that would stop a loop

A replica that moves to another host takes the failures within the window along (`told`, `recall`), so a loop that wanders over
hosts ends too. Their ages come from the wall clocks of both hosts: a wrong clock makes a budget too large or too small, no more.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from keepstep.protocol.roster import Failure

PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0)
FRUITLESS_MAX = 5
ALIKE_FREE = 2  # failures alike, of lives that trained, before the next one has to wait
TOLD_MAX = 64  # failures, newest, that the next host is told of
CAUSE_MAX = 500  # characters


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the next life after so many seconds."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No next life; why, in words."""

    reason: str


@dataclass(slots=True)
class History:
    """The lives of one replica so far."""

    max_restarts: int
    window_s: float
    lives: int = 0
    fruitless: list[str] = field(default_factory=list)  # why lives in a row ended that had trained nothing
    alike: int = 0  # failures in a row with one cause, and no signal from outside
    first_cause: str = ""  # why the first life failed that was not just killed
    last_cause: str = ""
    recent: deque[Failure] = field(default_factory=deque)  # within the window; `at_s` on the clock of `now`

    def after(self, cause: str, *, killed: bool, trained: bool, job_has_trained: bool, now: float) -> Restart | GiveUp:
        """A life has failed because of `cause`."""
        self._forget(now)
        self._note(Failure(cause=cause[:CAUSE_MAX], killed=killed, trained=trained, at_s=now))
        return self.judge(job_has_trained=job_has_trained)

    def _forget(self, now: float) -> None:
        while self.recent and self.recent[0].at_s <= now - self.window_s:
            self.recent.popleft()

    def _note(self, failure: Failure) -> None:
        cause, killed = failure.cause, failure.killed
        if not killed:
            self.first_cause = self.first_cause or cause
        self.alike = 0 if killed else self.alike + 1 if cause == self.last_cause else 1
        self.last_cause = cause
        self.fruitless = [] if failure.trained else [*self.fruitless, cause]
        self.recent.append(failure)

    def judge(self, *, job_has_trained: bool) -> Restart | GiveUp:
        """After all failures so far."""
        killed = self.alike == 0
        again = len(self.fruitless) >= (3 if job_has_trained else 2) and self.fruitless[-1] == self.fruitless[-2]
        if (again and not killed) or len(self.fruitless) >= FRUITLESS_MAX:
            return self.give_up(
                f"{len(self.fruitless)} lives in a row ended before they had trained a step: {self.last_cause}"
            )
        if len(self.recent) > self.max_restarts:
            return self._spent()
        return Restart(PAUSES_S[min(max(len(self.fruitless), self.alike - ALIKE_FREE, 0), len(PAUSES_S) - 1)])

    def _spent(self) -> GiveUp:
        """The budget is used up: a crash loop, unless the failures have nothing in common."""
        causes = Counter(failure.cause for failure in self.recent)
        said, times = causes.most_common(1)[0]
        said = said if times > 1 else self.last_cause
        of = f"{times} of {causes.total()} failures" if times > 1 else "its last failure"
        return self.give_up(
            f"it has been restarted {len(self.recent) - 1} times in {self.window_s:g} s (--max-restarts, --restart-window); "
            f"{of} said: {said}"
        )

    def told(self, *, now: float, wall_s: float) -> tuple[Failure, ...]:
        """For the host that this replica may move to: the newest failures, on the wall clock."""
        return tuple(replace(f, at_s=f.at_s - now + wall_s) for f in [*self.recent][-TOLD_MAX:])

    def recall(self, failures: Iterable[Failure], *, now: float, wall_s: float) -> None:
        """What another host has told. None of it lies in the future, whatever that host's clock says."""
        for failure in failures:
            self._note(replace(failure, at_s=now - max(0.0, wall_s - failure.at_s)))
        self._forget(now)

    def give_up(self, reason: str) -> GiveUp:
        """Names the first failure too: what comes later is often only its consequence."""
        if self.first_cause and self.first_cause not in reason:
            reason = f"{reason} (its first failure said: {self.first_cause})"
        return GiveUp(reason)

    def forgive(self) -> None:
        """Somebody asked for another life: what came before is no reason against it."""
        self.fruitless, self.alike, self.first_cause, self.last_cause = [], 0, "", ""
        self.recent.clear()
