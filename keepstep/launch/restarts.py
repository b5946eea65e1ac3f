"""Whether a replica gets another life: pure, one history a replica.

A life that has trained a step was worth its start, and the next begins at once. Lives in a row that trained nothing begin after
growing pauses, and end when they end for the same reason (unless that was a signal from outside) or too often: a crash loop must
not hide its cause in a thousand restarts.
"""

from dataclasses import dataclass, field

PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0)
FRUITLESS_MAX = 5


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
    lives: int = 0
    fruitless: list[str] = field(default_factory=list)  # why lives in a row ended that had trained nothing
    first_cause: str = ""  # why the first life failed that was not just killed

    def after(self, cause: str, *, killed: bool, trained: bool, job_has_trained: bool) -> Restart | GiveUp:
        """A life has failed because of `cause`."""
        if not killed:
            self.first_cause = self.first_cause or cause
        self.fruitless = [] if trained else [*self.fruitless, cause]
        again = len(self.fruitless) >= (3 if job_has_trained else 2) and self.fruitless[-1] == self.fruitless[-2]
        if (again and not killed) or len(self.fruitless) >= FRUITLESS_MAX:
            return self.give_up(f"{len(self.fruitless)} lives in a row ended before they had trained a step: {cause}")
        if self.lives > self.max_restarts:
            return self.give_up(f"it has been restarted {self.max_restarts} times (--max-restarts)")
        return Restart(PAUSES_S[min(len(self.fruitless), len(PAUSES_S) - 1)])

    def give_up(self, reason: str) -> GiveUp:
        """Names the first failure too: what comes later is often only its consequence."""
        if self.first_cause and self.first_cause not in reason:
            reason = f"{reason} (its first failure said: {self.first_cause})"
        return GiveUp(reason)
