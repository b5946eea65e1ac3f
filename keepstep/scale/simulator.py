"""A job with failures as discrete events: where every second of every replica goes.

    failures ──strike──> the job's loop: stalled? nobody left? somebody ready? else it works
                             │ replica lost                        ^ ready, at the end of a step
                             └──> its recovery, phase by phase ────┘ (struck again: from the start)

Every replica-second is spent on exactly one thing, so they add up to replicas x elapsed. Work goes on continuously between
events; steps only say when a replica may come back and what of a step is lost. The same seed gives the same failures to every
scenario with the same time between failures, so that scenarios can be compared.

Needs simpy (`pip install 'keepstep[scale]'`); without it ConfigError. No clock, no files.
"""

import random
from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any, cast

from keepstep.protocol.errors import ConfigError
from keepstep.scale.figures import Kind, Shows
from keepstep.scale.recovery import Phase
from keepstep.scale.scenario import Scenario

try:
    import simpy
except ImportError:
    raise ConfigError("keepstep simulate and keepstep plan need simpy: pip install 'keepstep[scale]'") from None

Process = Generator[Any, Any, None]
Strike = tuple[float, float, Kind]
ROUNDING_S = 1e-6
STOPPED = Kind(name="the whole job", count=1, shows=Shows.EXIT, new_host=False)
FOUND_SLOW = Kind(name="slow", count=1, shows=Shows.EXIT, new_host=True)


class Spent(StrEnum):
    """What a replica that is not being rebuilt spends its time on."""

    PRODUCTIVE = "productive"
    LOST = "computed twice"
    SLOW = "waiting for a slow rank"
    CHECKPOINT = "held up by a checkpoint"
    NOTICE = "stall: not noticed yet"
    PAUSE = "stall: power smoother, bug"
    RING = "stall: new ring"
    RETRY = "stall: step again"
    REJOIN = "stall: rejoin"
    RESTORE = "restoring a checkpoint"
    WAIT = "ready, until the step ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One simulated run. Replica-seconds."""

    elapsed_s: float
    replicas: int
    seconds: Mapping[Spent | Phase, float]
    failures: int
    restores: int  # how often no replica was left
    cold: int  # how often the reserve was empty

    @property
    def ettr(self) -> float:
        """Productive replica-seconds over all of them, as in the paper."""
        return self.share(Spent.PRODUCTIVE)

    def share(self, spent: Spent | Phase) -> float:
        return self.seconds.get(spent, 0.0) / (self.replicas * self.elapsed_s)


def simulate(scenario: Scenario, *, seed: int, seconds: float) -> Outcome:
    """Runs the job for so long."""
    env = simpy.Environment()
    job = _Job(env, scenario, seed)
    env.run(until=env.process(job.end_after(seconds)))
    return Outcome(
        elapsed_s=seconds,
        replicas=scenario.replicas,
        seconds=dict(job.spent),
        failures=job.failures,
        restores=job.restores,
        cold=job.cold,
    )


def strikes(scenario: Scenario, seed: int) -> Iterator[Strike]:
    """Failures without end: seconds after the one before, which replica (a number below 1 to be scaled), and the kind."""
    rng, counts = random.Random(f"{seed}/failures"), [kind.count for kind in scenario.kinds]
    while True:
        gap_s = scenario.mtbf_s if scenario.arrivals == "even" else rng.expovariate(1 / scenario.mtbf_s)
        yield gap_s, rng.random(), rng.choices(scenario.kinds, counts)[0]


class _Job:
    def __init__(self, env: Any, scenario: Scenario, seed: int) -> None:
        self._env, self._s = env, scenario
        self.spent: defaultdict[Spent | Phase, float] = defaultdict(float)
        self.failures = self.restores = self.cold = 0
        self._training = set(range(scenario.replicas))
        self._struck: dict[int, Kind] = {}  # trains as far as the loop knows, and is lost
        self._ready: dict[int, float] = {}  # since when
        self._recovering: dict[int, Any] = {}
        self._slow: set[int] = set()
        self._slowing: set[int] = set()  # as soon as the loop has counted what came before
        self._stall: deque[tuple[Spent, float]] = deque()
        self._progress = self._durable = 0.0  # seconds of training, in the job and in its newest checkpoint
        self._undone: deque[tuple[float, float, float]] = deque()  # progress from, to, and its replica-seconds
        self._spares = scenario.spares
        self._over = False
        self._loop = env.process(self._train())
        env.process(self._fail(strikes(scenario, seed)))
        if scenario.job_mtbf_s < inf:
            env.process(self._stop(random.Random(f"{seed}/stops")))
        if scenario.slow:
            env.process(self._slow_down(random.Random(f"{seed}/slow")))

    def end_after(self, seconds: float) -> Process:
        yield self._env.timeout(seconds)
        self._over = True
        for process in (self._loop, *self._recovering.values()):
            process.interrupt()
        yield self._env.timeout(0)
        for since in self._ready.values():
            self.spent[Spent.WAIT] += seconds - since

    # --- what fails ----------------------------------------------------------------------------------------------

    def _fail(self, coming: Iterator[Strike]) -> Process:
        for gap_s, where, kind in coming:
            yield self._env.timeout(gap_s)
            among = sorted(self._training) if self._s.arrivals == "even" else range(self._s.replicas)
            if among and self._strike(among[int(where * len(among))], kind):
                self.failures += 1

    def _stop(self, rng: random.Random) -> Process:
        while True:
            yield self._env.timeout(rng.expovariate(1 / self._s.job_mtbf_s))
            for replica in range(self._s.replicas):
                self._strike(replica, STOPPED)

    def _slow_down(self, rng: random.Random) -> Process:
        slow = self._s.slow
        assert slow is not None
        while True:
            yield self._env.timeout(rng.expovariate(1 / slow.mtbf_s))
            replica = int(rng.random() * self._s.replicas)
            if replica in self._training - self._slow - set(self._struck) and not self._over:
                self._slowing.add(replica)
                self._loop.interrupt()
                self._env.process(self._find(replica, slow.found_after_s))

    def _find(self, replica: int, after_s: float) -> Process:
        yield self._env.timeout(after_s)
        if replica in self._slow and replica not in self._struck:
            self._strike(replica, FOUND_SLOW)

    def _strike(self, replica: int, kind: Kind) -> bool:
        """Whether that made a difference."""
        if self._over or (self._s.spare_the_last and self._training - set(self._struck) <= {replica}):
            return False
        if replica in self._training:
            if replica not in self._struck:
                self._struck[replica] = kind
                self._loop.interrupt()
        elif self._s.while_down == "ignored":
            return False
        elif replica in self._ready:
            self.spent[Spent.WAIT] += self._env.now - self._ready.pop(replica)
            self._rebuild(replica, kind)
        else:
            self._recovering[replica].interrupt(kind)
        return True

    # --- a replica that was lost -----------------------------------------------------------------------------------

    def _rebuild(self, replica: int, kind: Kind) -> None:
        self._recovering[replica] = self._env.process(self._recover(replica, kind))

    def _recover(self, replica: int, kind: Kind) -> Process:
        while True:
            try:
                yield from self._phase(Phase.NOTICE, self._s.notice[kind.shows].after_s)
                for phase, seconds in self._s.recovery.phases(cold=kind.new_host and not self._take_spare()):
                    if seconds:
                        yield from self._phase(phase, seconds)
                break
            except simpy.Interrupt as again:
                if self._over:
                    return
                kind = cast(Kind, again.cause)
        del self._recovering[replica]
        self._ready[replica] = self._env.now
        if not self._over:
            self._loop.interrupt()

    def _phase(self, phase: Phase, seconds: float) -> Process:
        began = self._env.now
        try:
            yield self._env.timeout(seconds)
        finally:
            self.spent[phase] += self._env.now - began

    def _take_spare(self) -> bool:
        if self._spares is None:
            return True
        if not self._spares:
            self.cold += 1
            return False
        self._spares -= 1
        self._env.process(self._repair())
        return True

    def _repair(self) -> Process:
        yield self._env.timeout(self._s.repair_s)
        assert self._spares is not None
        self._spares += 1

    # --- the job -----------------------------------------------------------------------------------------------------

    def _train(self) -> Process:
        while not self._over:
            self._take_news()
            if not self._training:
                yield from self._restore()
            elif self._stall:
                yield from self._stand_still()
            else:
                left = self._until_the_step_ends() if self._ready else inf
                began = self._env.now
                at_the_end = yield from self._wait(left)
                self._worked(self._env.now - began, self._s.step_s if at_the_end else None)
                if at_the_end and not self._struck:
                    self._admit(Spent.WAIT)
                    self._stall.append((Spent.REJOIN, self._s.rejoin_s))

    def _wait(self, seconds: float) -> Generator[Any, Any, bool]:
        """Whether it passed undisturbed."""
        try:
            yield self._env.event() if seconds == inf else self._env.timeout(seconds)
        except simpy.Interrupt:
            return False
        return True

    def _restore(self) -> Process:
        """The first that is ready reads the checkpoint; whoever is ready by then trains with it."""
        until = min(self._ready.values(), default=inf) + self._s.restore_s
        if (yield from self._wait(max(0.0, until - self._env.now))) and self._ready:
            self._stall.clear()
            self._admit(Spent.RESTORE)

    def _stand_still(self) -> Process:
        cause, seconds = self._stall.popleft()
        began = self._env.now
        undisturbed = yield from self._wait(seconds)
        passed = self._env.now - began
        self.spent[cause] += passed * len(self._training)
        if not undisturbed:
            self._stall.appendleft((cause, max(0.0, seconds - passed)))

    def _take_news(self) -> None:
        self._slow |= self._slowing & self._training
        self._slowing.clear()
        struck, self._struck = self._struck, {}
        if not struck:
            return
        into = self._into_the_step()
        for replica, kind in struck.items():
            self._training.remove(replica)
            self._slow.discard(replica)
            if self._s.count_lost:
                self.spent[Spent.PRODUCTIVE] -= into
                self.spent[Spent.LOST] += into
                self._undone.append((self._progress, self._progress, -into))
            self._rebuild(replica, kind)
            stall = self._stall_of(kind, into)
            if sum(s for _, s in stall) > sum(s for _, s in self._stall):
                self._stall = deque(stall)
        if not self._training:
            self._lose_what_was_not_saved()

    def _stall_of(self, kind: Kind, into: float) -> tuple[tuple[Spent, float], ...]:
        notice, ring = self._s.notice[kind.shows], self._s.ring_s
        unnoticed = notice.after_s
        if notice.beside:  # noticed, and a new ring formed, while the survivors compute
            hidden = self._s.step_s - into
            unnoticed, ring = max(0.0, unnoticed - hidden), max(0.0, ring - max(0.0, hidden - unnoticed))
        return (
            (Spent.NOTICE, unnoticed),
            (Spent.PAUSE, self._s.pause_s),
            (Spent.RING, ring),
            (Spent.RETRY, self._s.retry_s),
        )

    def _admit(self, waited: Spent) -> None:
        for replica, since in self._ready.items():
            self.spent[waited] += self._env.now - since
            self._training.add(replica)
        self._ready.clear()

    # --- work ----------------------------------------------------------------------------------------------------------

    def _until_the_step_ends(self) -> float:
        return (self._s.step_s - self._into_the_step()) / self._rate()

    def _into_the_step(self) -> float:
        """0 at its end, whatever the remainder of two floats is."""
        into = self._progress % self._s.step_s
        return into if self._s.step_s - into > ROUNDING_S else 0.0

    def _rate(self) -> float:
        """Seconds of undisturbed training done in a second."""
        every, block = self._s.checkpoint_every_s, self._s.checkpoint_block_s
        slow = self._s.slow.factor if self._s.slow and self._slow else 1.0
        return 1 / slow / (1 + block / every)

    def _worked(self, seconds: float, whole: float | None) -> None:
        """`whole`: to the end of a step of so many seconds, exactly."""
        done = seconds * self._rate()
        members, before = len(self._training), self._progress
        self._progress += done
        if whole is not None:
            self._progress = round(self._progress / whole) * whole
        unslowed = seconds if not (self._s.slow and self._slow) else seconds / self._s.slow.factor
        self.spent[Spent.PRODUCTIVE] += members * done
        self.spent[Spent.SLOW] += members * (seconds - unslowed)
        self.spent[Spent.CHECKPOINT] += members * (unslowed - done)
        self._undone.append((before, self._progress, members * done))
        self._save()

    def _save(self) -> None:
        """The newest complete checkpoint; what is in it cannot be lost any more."""
        if self._s.checkpoint_every_s < inf:
            written = self._progress - self._s.checkpoint_write_s
            due = written // self._s.checkpoint_every_s * self._s.checkpoint_every_s
            self._durable = max(self._durable, (due + ROUNDING_S) // self._s.step_s * self._s.step_s)  # at a step's end
        while self._undone and self._undone[0][1] <= self._durable:
            self._undone.popleft()

    def _lose_what_was_not_saved(self) -> None:
        self.restores += 1
        if not self._s.count_lost:
            return
        lost = 0.0
        for start, end, seconds in self._undone:
            safe = max(0.0, self._durable - start)
            lost += seconds * (1 - safe / (end - start)) if end > start else seconds
        self._undone.clear()
        self.spent[Spent.PRODUCTIVE] -= lost
        self.spent[Spent.LOST] += lost
        self._progress = self._durable
