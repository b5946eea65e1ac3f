"""What to choose for a job: replicas, spares, checkpoint interval, deadlines; and which assumption the answer hangs on.

    replicas     of those whose state fits into the GPUs, the fewest whose ETTR is as good as the best (within AS_GOOD)
    spares       so many hosts that a failure finds the reserve empty in 1 of 100 cases: broken hosts are Poisson distributed
    checkpoint   Young's interval for the losses that only a checkpoint can undo, but not before the last one is written
    deadlines    long enough that a healthy but slow step does not look like a failure

The first is simulated, over seeds; the others are formulas. Deterministic.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import exp, sqrt

from keepstep.protocol.errors import ConfigError
from keepstep.scale import closed_form, figures, ladder
from keepstep.scale.figures import KINDS, Shows
from keepstep.scale.ladder import Job, Spread
from keepstep.scale.scenario import Notice, Scenario, Slow

REPLICAS_MAX = 32  # FTAR is made for rings of up to 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What is known of the job and its machines. Seconds and bytes."""

    gpus: int = int(figures.GPUS.value)
    gpu_mtbf_s: float = figures.MTBF.value * figures.GPUS.value  # of one GPU
    step_s: float = figures.STEP.value
    state_bytes: float = figures.PARAMETERS.value * figures.STATE_BYTES_PER_PARAMETER.value
    memory_for_state: float = figures.MEMORY_FOR_STATE.value  # of each GPU
    gpus_per_host: int = int(figures.GPUS_PER_HOST.value)
    repair_s: float = figures.REPAIR.value
    job_mtbf_s: float = figures.JOB_MTBF.value
    checkpoint_write_s: float = figures.CHECKPOINT_WRITE.value

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_host < 1 or self.gpus % self.gpus_per_host:
            raise ConfigError(f"{self.gpus} GPUs are not a whole number of hosts of {self.gpus_per_host}")
        times = (self.gpu_mtbf_s, self.step_s, self.job_mtbf_s, self.memory_for_state)
        if min(times) <= 0 or min(self.state_bytes, self.repair_s, self.checkpoint_write_s) < 0:
            raise ConfigError("times between failures, the step and the memory must be positive")

    @property
    def mtbf_s(self) -> float:
        return self.gpu_mtbf_s / self.gpus

    def memory(self, replicas: int) -> float:
        """Bytes of state on each GPU."""
        return self.state_bytes * replicas / self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One number of replicas, and all that follows from it."""

    replicas: int
    ranks: int
    spares: int  # hosts
    checkpoint_steps: int
    memory: float
    fits: bool
    ettr: Spread
    ettr_of_all: float  # of all GPUs, those in reserve too


@dataclass(frozen=True, slots=True, kw_only=True)
class Swing:
    """ETTR if one assumption is other than thought."""

    what: str
    low: str
    high: str
    at_low: float
    at_high: float

    @property
    def size(self) -> float:
        return abs(self.at_high - self.at_low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All choices that were compared, the one that is recommended, and what it hangs on."""

    needs: Needs
    choices: tuple[Choice, ...]
    chosen: Choice
    swings: tuple[Swing, ...]
    progress_deadline_s: float


def make_plan(needs: Needs, *, seed: int, seeds: int, days: float, replicas: int | None = None) -> Plan:
    """`replicas`: what it must be; otherwise the recommended number."""
    counts = candidates(needs) if replicas is None else [replicas]
    choices = tuple(_choose(needs, count, seed=seed, seeds=seeds, days=days) for count in counts)
    able = [choice for choice in choices if choice.fits]
    if not able:
        least = needs.memory(min(counts))
        raise ConfigError(
            f"{min(counts)} replicas would put {least / 1e9:.1f} GB of state on each GPU, and there is room for "
            f"{needs.memory_for_state / 1e9:.1f}: take more GPUs, offload the optimizer, or say --memory-for-state"
        )
    best = max(choice.ettr.mean for choice in able)
    chosen = next(c for c in able if c.ettr.mean >= best - figures.AS_GOOD.value)
    swings = sensitivity(needs, chosen, seed=seed, seeds=seeds, days=days)
    return Plan(
        needs=needs,
        choices=choices,
        chosen=chosen,
        swings=tuple(swings),
        progress_deadline_s=progress_deadline(needs.step_s),
    )


def candidates(needs: Needs) -> list[int]:
    """Numbers of replicas that the hosts can be divided into."""
    hosts = needs.gpus // needs.gpus_per_host
    return [count for count in range(1, REPLICAS_MAX + 1) if hosts % count == 0]


def scenario(needs: Needs, replicas: int) -> Scenario:
    """keepstep with everything on, on these machines."""
    job = Job(gpus=needs.gpus, replicas=replicas, step_s=needs.step_s, mtbf_s=needs.mtbf_s)
    mine = ladder.ours(job)
    deadline = Notice(after_s=progress_deadline(needs.step_s))
    return replace(
        mine,
        notice={**mine.notice, Shows.STUCK: deadline},
        spares=spares(needs),
        repair_s=needs.repair_s,
        checkpoint_every_s=checkpoint_steps(needs, mine) * needs.step_s,
        checkpoint_write_s=needs.checkpoint_write_s,
        checkpoint_block_s=figures.CHECKPOINT_BLOCK.value * needs.step_s,
        restore_s=figures.LOAD_CHECKPOINT.value,
        job_mtbf_s=needs.job_mtbf_s,
    )


def spares(needs: Needs) -> int:
    """The fewest hosts of which, at a random moment, all are used up with probability EMPTY_RESERVE at most."""
    share = sum(k.count for k in KINDS if k.new_host) / sum(k.count for k in KINDS)
    broken = share * needs.repair_s / needs.mtbf_s  # hosts in repair, on average
    count, term, below = 0, exp(-broken), 0.0
    if not term:  # so many that the distribution is a normal one
        return round(broken + 2.326 * sqrt(broken))
    while 1 - below > figures.EMPTY_RESERVE.value:
        below += term
        count += 1
        term *= broken / count
    return count


def checkpoint_steps(needs: Needs, mine: Scenario) -> int:
    """Between two checkpoints."""
    up = exp(-mine.recovery.seconds / (needs.mtbf_s * mine.replicas))
    nobody_left = (1 - up) ** (mine.replicas - 1) / needs.mtbf_s  # a second: one is lost while all others are
    interval = closed_form.best_checkpoint_interval(
        figures.CHECKPOINT_BLOCK.value * needs.step_s, 1 / (nobody_left + 1 / needs.job_mtbf_s)
    )
    return max(1, round(max(interval, needs.checkpoint_write_s) / needs.step_s))


def progress_deadline(step_s: float) -> float:
    """Seconds without progress after which a peer that answers is given up."""
    return min(figures.SEEN_STUCK.value, max(figures.PROGRESS_FLOOR.value, figures.TAIL.value * step_s))


def _choose(needs: Needs, replicas: int, *, seed: int, seeds: int, days: float) -> Choice:
    mine = scenario(needs, replicas)
    ettr = Spread.of(ladder.run(mine, seed=seed, seeds=seeds, days=days))
    reserve = mine.spares or 0
    memory = needs.memory(replicas)
    return Choice(
        replicas=replicas,
        ranks=mine.ranks,
        spares=reserve,
        checkpoint_steps=round(mine.checkpoint_every_s / needs.step_s),
        memory=memory,
        fits=memory <= needs.memory_for_state,
        ettr=ettr,
        ettr_of_all=ettr.mean * needs.gpus / (needs.gpus + reserve * needs.gpus_per_host),
    )


# --- what it hangs on ------------------------------------------------------------------------------------------------

Change = Callable[[Scenario], Scenario]


def sensitivity(needs: Needs, chosen: Choice, *, seed: int, seeds: int, days: float) -> list[Swing]:
    """One assumption at a time, halved and doubled or set to what else has been seen; the largest swing first."""
    base = scenario(needs, chosen.replicas)

    def ettr(change: Change) -> float:
        return Spread.of(ladder.run(change(base), seed=seed, seeds=seeds, days=days)).mean

    swings = [
        Swing(what=what, low=low, high=high, at_low=ettr(at_low), at_high=ettr(at_high))
        for what, (low, at_low), (high, at_high) in _changes(base)
    ]
    return sorted(swings, key=lambda swing: -swing.size)


def _changes(base: Scenario) -> list[tuple[str, tuple[str, Change], tuple[str, Change]]]:
    def both(what: str, change: Callable[[float], Change]) -> tuple[str, tuple[str, Change], tuple[str, Change]]:
        return what, ("half", change(0.5)), ("double", change(2.0))

    def phase(name: str) -> Callable[[float], Change]:
        def scaled(x: float) -> Change:
            return lambda s: replace(s, recovery=replace(s.recovery, **{name: x * getattr(s.recovery, name)}))

        return scaled

    def field(name: str) -> Callable[[float], Change]:
        return lambda x: lambda s: replace(s, **{name: x * getattr(s, name)})

    def mix(shows: Shows) -> Callable[[float], Change]:
        def scaled(x: float) -> Change:
            kinds = tuple(replace(k, count=round(k.count * (x if k.shows is shows else 1))) for k in base.kinds)
            return lambda s: replace(s, kinds=kinds)

        return scaled

    def noticed(shows: Shows, after_s: float) -> Change:
        later: Mapping[Shows, Notice] = {**base.notice, shows: replace(base.notice[shows], after_s=after_s)}
        return lambda s: replace(s, notice=later)

    def same(s: Scenario) -> Scenario:
        return s

    paper = figures
    start = paper.WARM_ALLOCATION.value + paper.START.value + paper.HEALTH_CHECK.value
    slow = Slow(mtbf_s=figures.DAY, factor=1.25, found_after_s=figures.HOUR)
    return [
        both("time between failures", field("mtbf_s")),
        both("share of failures that hang (NCCL watchdog)", mix(Shows.STUCK)),
        both("share of failures without a word", mix(Shows.SILENT)),
        both("communicator init", phase("init")),
        both("first step", phase("first_step")),
        both("fetch from peers", phase("fetch")),
        both("repeating the sums", field("retry_s")),
        both("repair of a host, spares as planned", field("repair_s")),
        both("cold allocation", phase("cold")),
        both("time between stops of the whole job", field("job_mtbf_s")),
        both("writing a checkpoint", field("checkpoint_write_s")),
        both("checkpoint interval", field("checkpoint_every_s")),
        (
            "stall when a replica comes back",
            (f"{base.rejoin_s:g} s", same),
            ("the paper's 100 s", lambda s: replace(s, rejoin_s=paper.REJOIN_STALL.value)),
        ),
        (
            "a dead process is seen",
            (f"after {base.notice[Shows.EXIT].after_s:g} s", same),
            ("after 10 s", noticed(Shows.EXIT, 10.0)),
        ),
        (
            "a hang is given up",
            (f"after {base.notice[Shows.STUCK].after_s:g} s", same),
            ("after 10 min", noticed(Shows.STUCK, 600.0)),
        ),
        (
            "decision and new ring",
            (f"{base.ring_s:.1f} s", same),
            ("9 s, the paper's first", lambda s: replace(s, ring_s=9.0)),
        ),
        (
            "warm spares",
            (f"{base.recovery.allocation:g} s", same),
            (f"none: {start:g} s", lambda s: replace(s, recovery=replace(s.recovery, allocation=start))),
        ),
        (
            "power smoother",
            ("rides it out", same),
            ("45 s at each failure", lambda s: replace(s, pause_s=paper.POWER_PAUSE.value)),
        ),
        (
            "slow ranks",
            ("none", same),
            ("one a day, 25% slower, for an hour", lambda s: replace(s, slow=slow)),
        ),
    ]
