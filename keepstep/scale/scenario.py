"""What is simulated: a job, what fails in it, and what its failures cost. Frozen data, and nothing else.

A job of one replica is a sync job: whoever fails, all start again from the newest checkpoint. With more, the others *stall* until
they have noticed and formed a new ring, and go on without the replica that was lost; it comes back at the end of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from keepstep.protocol.errors import ConfigError
from keepstep.scale import figures
from keepstep.scale.figures import Kind, Shows
from keepstep.scale.recovery import Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """How long a failure stays unnoticed. `beside`: while the others still compute; else from when they wait for it."""

    after_s: float
    beside: bool = False


AT_ONCE: Mapping[Shows, Notice] = dict.fromkeys(Shows, Notice(after_s=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A rank that is not dead but slow: everybody waits for it in each step until it is found and replaced."""

    mtbf_s: float
    factor: float
    found_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Times in seconds. What is not said costs nothing and never happens."""

    name: str
    replicas: int
    ranks: int  # GPUs of a replica
    step_s: float
    mtbf_s: float  # between two failures of all GPUs
    arrivals: Literal["even", "random"] = "random"  # a clock's, as in the paper's arithmetic; or Poisson's
    kinds: tuple[Kind, ...] = figures.KINDS
    notice: Mapping[Shows, Notice] = field(default_factory=lambda: AT_ONCE)
    ring_s: float = 0.0  # from noticed to a new ring
    pause_s: float = 0.0  # what else they stand still for
    retry_s: float = 0.0  # what of the failed step they do again
    rejoin_s: float = 0.0  # all wait when a replica comes back
    recovery: Recovery
    while_down: Literal["again", "ignored"] = "again"  # a failure of a replica that is being rebuilt
    spare_the_last: bool = False  # nothing happens to the only replica that trains: for tests of real jobs
    restore_s: float = 0.0  # reading a checkpoint when no replica is left, if `recovery` does not say it
    spares: int | None = None  # hosts in reserve; None: never empty
    repair_s: float = figures.REPAIR.value
    checkpoint_every_s: float = inf  # of training
    checkpoint_write_s: float = 0.0
    checkpoint_block_s: float = 0.0
    count_lost: bool = True  # what is computed twice is not productive; the paper's arithmetic leaves that out
    job_mtbf_s: float = inf  # between two stops of all replicas at once
    slow: Slow | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.ranks < 1:
            raise ConfigError("a job has at least one replica of one rank")
        if not (self.step_s > 0 and self.mtbf_s > 0 and self.checkpoint_every_s > 0 and self.job_mtbf_s > 0):
            raise ConfigError("the time of a step, between failures and between checkpoints must be positive")

    @property
    def gpus(self) -> int:
        return self.replicas * self.ranks
