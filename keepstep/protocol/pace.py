"""Whether a rank's main thread keeps up, or lives and makes no progress: in the data loader, in forward, in a collective.

The rank's other threads are alive then, so its links and its lease say nothing, and its leader goes on answering. Only the rank
itself knows, from the orders that its main thread has not carried out yet. How long is normal is learned:

    threshold  =  floor + 2 x the longest of the recent steps, at most ceiling;  until three steps are known
                  floor + 5 x the longest step of the life before (of its first step for the first), the ceiling without one
    stuck      =  the straggler policy, or 4 x threshold if that is longer

    order given ──threshold──> slow: said to the quorum, which goes on without this replica if others wait for it
                     │            ├── carried out ──> slow no more: it catches up, in the same life
                     └── stuck ───┴──> asks for the end of this life, again and again (`protocol/stuck.py`)

Slow counts only while an order to train is waiting: nobody waits for a replica that loads or replays. A life's first step is not
learned from, since it may compile; the next life's first step may take as long. A life that got stuck before it had steps of
its own hands nothing on: perhaps what it was told was wrong, and the next one must not end of that too. Of a step that was slow
no more than the threshold is learned: one hang must not hide the next, and steps that have become longer for good are known after
a few. A deadline that is told late says that the whole process stood still; then the main thread gets some more time.

Departs from the paper: it knows only one timeout. Pure; times in ns of one monotonic clock.
"""

from collections import deque
from dataclasses import dataclass

KNOWN = 3  # steps
RECENT = 64
MULTIPLE = 2
BEFORE = 5  # times what the life before took: beginnings vary, and three steps replace it
STUCK = 4
LATE_NS = 100_000_000  # of a deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceSettings:
    """What is never normal, and what always is (ns)."""

    floor_ns: int = 1_000_000_000
    ceiling_ns: int = 300_000_000_000
    straggler_ns: int = 60_000_000_000  # the quorum's policy

    def __post_init__(self) -> None:
        if not 0 < self.floor_ns <= self.ceiling_ns:
            raise ValueError("the floor of a pace must be positive and not above its ceiling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a life hands on to the next one (ns)."""

    first: int  # its first step
    longest: int  # of its recent steps, and of its first ones but for the very first

    def __post_init__(self) -> None:
        if not 0 < self.first < 1 << 62 or not 0 < self.longest < 1 << 62:
            raise ValueError("steps take some time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """The main thread has been at one order for `took`; `longest` of the recent steps, 0 if none is known."""

    took: int
    longest: int
    before: int = 0  # what a step took in the life before, if that is what counts yet


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepsUp:
    """It has carried out the order that it was slow with."""

    took: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """It will not come back, as far as anybody can tell. Said again after twice, four times as long."""

    took: int


Effect = Slow | KeepsUp | Stuck


class Pace:
    """One rank's main thread, seen from outside. It carries its orders out one by one, first to last."""

    def __init__(self, settings: PaceSettings, before: Learned | None = None) -> None:
        """`before`: what the life before has handed on."""
        self.settings, self._before = settings, before
        self._orders: deque[tuple[bool, int]] = deque()  # whether it is to train, and when it was given
        self._since = 0  # when the one before was carried out
        self._steps: deque[int] = deque(maxlen=RECENT)
        self._trained = 0
        self._first = 0  # what the first step took
        self._early = 0  # the longest of the next few
        self._misled = False  # perhaps what the life before has handed on was wrong
        self._slow = 0  # how often it was said of the order at hand
        self._stuck = 0

    @property
    def slow(self) -> bool:
        return self._slow > 0

    @property
    def threshold(self) -> int:
        """From when on an order takes too long."""
        if len(self._steps) >= KNOWN:
            usual = MULTIPLE * max(self._steps)
        elif self._before is not None:
            usual = BEFORE * max(self._before_now, *self._steps, 0)
        else:
            return self.settings.ceiling_ns
        return min(self.settings.ceiling_ns, self.settings.floor_ns + usual)

    @property
    def learned(self) -> Learned | None:
        """What the next life may begin with, if this one ended now; None: with nothing."""
        if len(self._steps) < KNOWN:
            return None if self._misled else self._before
        return Learned(first=self._first, longest=max(self._early, *self._steps))

    @property
    def _before_now(self) -> int:
        """What the step at hand took in the life before; 0 if that is not known, or does not count any more."""
        if self._before is None or len(self._steps) >= KNOWN:
            return 0
        return max(self._before.longest, 0 if self._trained else self._before.first)

    def on_order(self, *, trains: bool, now: int) -> None:
        """The main thread is to do one more thing."""
        self._orders.append((trains, now))

    def on_done(self, *, now: int) -> tuple[Effect, ...]:
        """It has carried out the first of its orders."""
        trains, _ = self._orders[0]
        took = now - self._begun
        self._orders.popleft()
        was_slow = self._slow + self._stuck > 0
        self._since, self._slow, self._stuck = now, 0, 0
        if trains:
            known = max(1, min(took, self.threshold))
            self._trained += 1
            if self._trained == 1:
                self._first = known
            else:
                self._early = self._early if len(self._steps) >= KNOWN else max(self._early, known)
                self._steps.append(known)
        return (KeepsUp(took=took),) if was_slow else ()

    def next_deadline(self) -> int | None:
        """When to call `on_time`, unless something else happens before."""
        if not self._orders:
            return None
        return min(self._next_stuck, self._next_slow) if self._awaited else self._next_stuck

    def on_time(self, *, now: int) -> tuple[Effect, ...]:
        """A deadline may have come."""
        due = self.next_deadline()
        if due is None or now < due:
            return ()
        if now - due > LATE_NS:
            self._since = self._begun + now - due + min(now - due, self.settings.floor_ns)
            return ()
        took = now - self._begun
        if now >= self._next_stuck:
            self._stuck += 1
            self._misled = self._misled or len(self._steps) < KNOWN
            return (Stuck(took=took),)
        self._slow += 1
        return (Slow(took=took, longest=max(self._steps, default=0), before=self._before_now),)

    @property
    def _begun(self) -> int:
        """When the order at hand could be begun."""
        return max(self._orders[0][1], self._since)

    @property
    def _next_slow(self) -> int:
        """Said again after twice, four times as long: the first time nobody may have waited yet."""
        return self._begun + (self.threshold << self._slow)

    @property
    def _next_stuck(self) -> int:
        return self._begun + (max(self.settings.straggler_ns, STUCK * self.threshold) << self._stuck)

    @property
    def _awaited(self) -> bool:
        return any(trains for trains, _ in self._orders)
