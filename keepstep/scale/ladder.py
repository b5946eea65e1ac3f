"""From the paper's numbers to ours, one mechanism at a time.

    the paper's arithmetic     failures like a clock, nothing fails during a recovery, nothing else counts: 44%, 80%, 88%
    what it leaves out         failures come at random; work that is done twice, and the 100 s of a rejoin, count
    ours                       one mechanism after the other on top of that; and each alone

Each rung is a function of the one before, so that it can also be put on the ground alone. Pure but for the simulator below it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from keepstep.protocol.errors import ConfigError
from keepstep.scale import closed_form, figures, recovery
from keepstep.scale.figures import Shows
from keepstep.scale.scenario import Notice, Scenario
from keepstep.scale.simulator import Outcome, simulate

DAYS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is told of a job; the paper's by default. `mtbf_s` of all GPUs: as often per GPU as in the paper, unless told."""

    gpus: int = int(figures.GPUS.value)
    replicas: int = int(figures.REPLICAS.value)
    step_s: float = figures.STEP.value
    mtbf_s: float | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.replicas < 1 or self.gpus % self.replicas:
            raise ConfigError(f"{self.gpus} GPUs cannot be divided into {self.replicas} replicas of equal size")

    @property
    def between_failures_s(self) -> float:
        return figures.MTBF.value * figures.GPUS.value / self.gpus if self.mtbf_s is None else self.mtbf_s


# --- the paper -----------------------------------------------------------------------------------------------------


def paper_sync(job: Job) -> Scenario:
    """All GPUs in one world; ten minutes at 98,304, the curve of Figure 2 elsewhere."""
    return Scenario(
        name="sync training",
        replicas=1,
        ranks=job.gpus,
        step_s=job.step_s,
        mtbf_s=job.between_failures_s,
        arrivals="even",
        recovery=recovery.from_checkpoint(job.gpus),
        while_down="ignored",
        count_lost=False,
    )


def paper_replicas(job: Job) -> Scenario:
    """FT-HSDP as it was measured: 3 min of stall, the replica back after the ten minutes of a sync recovery."""
    timeout = Notice(after_s=figures.TIMEOUT.value)
    return replace(
        paper_sync(job),
        name="FT-HSDP, 3 min stall",
        replicas=job.replicas,
        ranks=job.gpus // job.replicas,
        notice=dict.fromkeys(Shows, timeout),
        ring_s=figures.REBUILD_RING.value,
        pause_s=figures.POWER_PAUSE.value + figures.BUG_PAUSE.value,
        retry_s=figures.RETRAIN.value,
        recovery=recovery.flat(figures.SYNC_RECOVERY.value - timeout.after_s),
    )


def paper_fixed(job: Job) -> Scenario:
    """Without the two accidents: 1.5 min."""
    return replace(paper_replicas(job), name="FT-HSDP, 1.5 min stall", pause_s=0.0)


# --- what it leaves out -----------------------------------------------------------------------------------------------


def at_random(scenario: Scenario) -> Scenario:
    return replace(scenario, arrivals="random", while_down="again")


def count_lost(scenario: Scenario) -> Scenario:
    every = figures.CHECKPOINT_EVERY.value * scenario.step_s
    return replace(scenario, count_lost=True, checkpoint_every_s=every)


def count_rejoin(scenario: Scenario) -> Scenario:
    return replace(scenario, rejoin_s=figures.REJOIN_STALL.value)


# --- ours --------------------------------------------------------------------------------------------------------------


def rebuild_by_phases(scenario: Scenario) -> Scenario:
    """The phases of one replica instead of ten minutes. The part of the first step that all wait for stays where it is."""
    phases = recovery.from_peers(scenario.ranks)
    return replace(scenario, recovery=replace(phases, first_step=figures.FIRST_STEP.value - figures.REJOIN_STALL.value))


def repeat_only_the_sum(scenario: Scenario) -> Scenario:
    return replace(scenario, retry_s=figures.REPEAT_SUM.value)


def notice_by_links(scenario: Scenario) -> Scenario:
    return replace(
        scenario,
        notice={
            Shows.EXIT: Notice(after_s=figures.SEEN_EXIT.value, beside=True),
            Shows.SILENT: Notice(after_s=figures.SEEN_SILENT.value),
            Shows.STUCK: Notice(after_s=figures.SEEN_STUCK.value),
        },
    )


def new_ring(scenario: Scenario) -> Scenario:
    return replace(scenario, ring_s=figures.DECISION.value + figures.NEW_RING.value)


def warm_spares(scenario: Scenario) -> Scenario:
    warm = recovery.from_warm_spare(scenario.ranks)
    return replace(scenario, recovery=replace(warm, first_step=scenario.recovery.first_step))


def rejoin_beside(scenario: Scenario) -> Scenario:
    """What the first step needs is prepared before the replica reports, and nobody waits for its fetch."""
    was = scenario.recovery
    own = was if not was.first_step else replace(was, first_step=figures.FIRST_STEP.value)
    return replace(scenario, rejoin_s=figures.REJOIN.value, recovery=own)


@dataclass(frozen=True, slots=True)
class Rung:
    """One mechanism: what it is called, and what it does to a scenario."""

    name: str
    apply: Callable[[Scenario], Scenario]


LEFT_OUT = (
    Rung("failures at random", at_random),
    Rung("work done twice counts", count_lost),
    Rung("the rejoin's 100 s count", count_rejoin),
)
OURS = (
    Rung("rebuild one replica, phase by phase", rebuild_by_phases),
    Rung("repeat the sum, not the step", repeat_only_the_sum),
    Rung("notice by links, as measured", notice_by_links),
    Rung("new ring and decision in under 1 s", new_ring),
    Rung("warm spares", warm_spares),
    Rung("rejoin beside training", rejoin_beside),
)


def ours(job: Job) -> Scenario:
    """Everything on."""
    scenario = paper_fixed(job)
    for rung in (*LEFT_OUT, *OURS):
        scenario = rung.apply(scenario)
    return replace(scenario, name="keepstep")


# --- running it ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """ETTR over seeds."""

    mean: float
    low: float
    high: float
    deviation: float

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Spread":
        values = [outcome.ettr for outcome in outcomes]
        deviation = stdev(values) if len(values) > 1 else 0.0
        return cls(mean=fmean(values), low=min(values), high=max(values), deviation=deviation)


def run(scenario: Scenario, *, seed: int, seeds: int, days: float) -> list[Outcome]:
    """The scenario with `seeds` seeds, from `seed` on."""
    return [simulate(scenario, seed=s, seconds=days * figures.DAY) for s in range(seed, seed + seeds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the ladder. `formula`: the same by the paper's arithmetic; `alone`: this rung alone on the ground, in ETTR."""

    name: str
    ettr: Spread
    formula: float | None = None
    gain: float | None = None
    alone: float | None = None
    seconds_per_failure: float | None = None  # of all replicas together, not productive


def climb(job: Job, *, seed: int, seeds: int, days: float = DAYS) -> list[Row]:
    """All rows, the paper's first."""

    def measure(scenario: Scenario) -> tuple[Spread, float]:
        outcomes = run(scenario, seed=seed, seeds=seeds, days=days)
        wasted = sum((1 - o.ettr) * o.elapsed_s for o in outcomes) / max(1, sum(o.failures for o in outcomes))
        return Spread.of(outcomes), wasted

    mtbf, sync = job.between_failures_s, paper_sync(job).recovery.seconds
    rows = []
    whole = figures.SYNC_RECOVERY.value
    for scenario, formula in (
        (paper_sync(job), closed_form.sync_even(mtbf, sync)),
        (paper_replicas(job), closed_form.replicas_even(mtbf, whole, figures.STALL.value, job.replicas)),
        (
            paper_fixed(job),
            closed_form.replicas_even(
                mtbf,
                whole,
                figures.STALL.value - figures.POWER_PAUSE.value - figures.BUG_PAUSE.value,
                job.replicas,
            ),
        ),
    ):
        spread, wasted = measure(scenario)
        rows.append(Row(name=scenario.name, ettr=spread, formula=formula, seconds_per_failure=wasted))
    for name, scenario in (
        ("sync training, failures at random", at_random(paper_sync(job))),
        ("sync training, and work done twice counts", count_lost(at_random(paper_sync(job)))),
    ):
        spread, wasted = measure(scenario)
        rows.append(Row(name=name, ettr=spread, seconds_per_failure=wasted))
    scenario, last = paper_fixed(job), rows[2].ettr.mean
    for rung in LEFT_OUT:
        scenario = rung.apply(scenario)
        spread, wasted = measure(scenario)
        rows.append(Row(name="FT-HSDP: " + rung.name, ettr=spread, gain=spread.mean - last, seconds_per_failure=wasted))
        last = spread.mean
    ground, level = scenario, last
    for rung in OURS:
        scenario = rung.apply(scenario)
        spread, wasted = measure(scenario)
        alone = measure(rung.apply(ground))[0].mean - level
        rows.append(
            Row(
                name="+ " + rung.name,
                ettr=spread,
                gain=spread.mean - last,
                alone=alone,
                seconds_per_failure=wasted,
            )
        )
        last = spread.mean
    return rows
