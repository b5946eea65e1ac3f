"""Playing worlds: one, many, on several processes; and making a failing one smaller."""

import gc
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from keepstep.simulation.clock import SECOND
from keepstep.simulation.judge import Violation
from keepstep.simulation.plan import Plan, plan_of
from keepstep.simulation.world import Result, World

CHUNK = 100
SHORT = 8 * SECOND  # before everything heals


@dataclass(kw_only=True)
class Tally:
    """What many worlds came to."""

    seeds: int = 0
    steps: int = 0
    events: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        self.seeds += other.seeds
        self.steps += other.steps
        self.events += other.events
        self.endings += other.endings
        self.violations |= other.violations

    def __str__(self) -> str:
        return f"simulation: {self.seeds} seeds, {len(self.violations)} violations, {self.steps} steps"


def play(plan: Plan) -> Result:
    """One world. Raises Violation."""
    return World(plan).run()


def transcript(plan: Plan) -> tuple[list[str], Violation | None]:
    """One world in words, and how it failed, if it did."""
    world = World(plan, transcript=True)
    assert world.lines is not None
    try:
        result = world.run()
    except Violation as error:
        return world.lines, error
    world.say(None, f"ends well ({result.ending})")
    return world.lines, None


def play_seeds(seeds: Sequence[int]) -> Tally:
    """Many worlds, one after the other. They are full of cycles, and these are collected now and then: that is much faster."""
    tally = Tally()
    gc.disable()
    try:
        for seed in seeds:
            try:
                result = play(plan_of(seed))
            except Violation as error:
                tally.violations[seed] = str(error)
            else:
                tally.endings[result.ending] += 1
                tally.steps += result.steps
                tally.events += result.events
            tally.seeds += 1
            if tally.seeds % CHUNK == 0:
                gc.collect()
    finally:
        gc.enable()
    return tally


def play_many(first: int, count: int, processes: int) -> Iterator[Tally]:
    """The same on several processes: a tally for each bunch of seeds, as they come."""
    bunches = [range(at, min(at + CHUNK, first + count)) for at in range(first, first + count, CHUNK)]
    if processes == 1:
        yield from map(play_seeds, bunches)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(play_seeds, bunches)


# --- shrinking -------------------------------------------------------------------------------------------------


def shrink(plan: Plan) -> Plan:
    """A smaller plan that fails in the same way: fewer faults, then simpler settings. Plays it some dozens of times."""
    kind = _failure(plan)
    assert kind is not None, "a plan that does not fail cannot be made smaller"
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(plan):
            if _failure(smaller) == kind:
                plan, changed = smaller, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    everything = range(len(plan.faults))
    for left_out in everything:
        yield plan.only(tuple(i for i in everything if i != left_out))
    if plan.ranks > 1:
        faults = tuple(replace(fault, rank=min(fault.rank, plan.ranks - 2)) for fault in plan.faults)
        yield replace(plan, ranks=plan.ranks - 1, faults=faults)
    if plan.heal_at > SHORT:
        yield replace(plan, heal_at=SHORT)
    if plan.exchanges > 1:
        yield replace(plan, exchanges=1)
    if plan.jitter:
        yield replace(plan, jitter=0.0)
    if any(drift != 1.0 for drift in plan.drifts):
        yield replace(plan, drifts=())


def _failure(plan: Plan) -> str | None:
    """Which promise is broken: the words up to the first detail."""
    try:
        play(plan)
    except Violation as error:
        return str(error).split(": ", 1)[-1].split(":")[0].split(" ")[0]
    return None
