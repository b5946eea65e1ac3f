"""How long it takes until so many GPUs train again, phase by phase (FT-HSDP, Figure 2).

Communicator init grows with the GPUs as a power law through the paper's two points, 17 s at 16K and 200 s at 98K (exponent 1.38;
a straight line through them would be negative at 8K). The paper says of all other phases that they do not grow significantly.

Pure. Seconds.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import log

from keepstep.scale import figures

GPUS_16K = 16_384


class Phase(StrEnum):
    """What a replica that was lost is doing."""

    NOTICE = "not noticed yet"
    ALLOCATION = "allocation"
    START = "PyTorch start"
    HEALTH = "health check"
    INIT = "communicator init"
    LOAD = "checkpoint load"
    FETCH = "fetch from peers"
    FIRST_STEP = "first step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Seconds of each phase, in their order. `cold` is the allocation when the reserve is empty."""

    allocation: float = figures.WARM_ALLOCATION.value
    cold: float = figures.COLD_ALLOCATION.value
    start: float = figures.START.value
    health: float = figures.HEALTH_CHECK.value
    init: float = 0.0
    load: float = 0.0
    fetch: float = 0.0
    first_step: float = figures.FIRST_STEP.value

    def phases(self, *, cold: bool = False) -> tuple[tuple[Phase, float], ...]:
        return (
            (Phase.ALLOCATION, self.cold if cold else self.allocation),
            (Phase.START, self.start),
            (Phase.HEALTH, self.health),
            (Phase.INIT, self.init),
            (Phase.LOAD, self.load),
            (Phase.FETCH, self.fetch),
            (Phase.FIRST_STEP, self.first_step),
        )

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.phases())


def communicator_init(gpus: int) -> float:
    """Seconds for one communicator world of so many GPUs."""
    low, high = figures.INIT_16K.value, figures.INIT_98K.value
    exponent = log(high / low) / log(figures.GPUS.value / GPUS_16K)
    return low * float((gpus / GPUS_16K) ** exponent)


def from_checkpoint(gpus: int) -> Recovery:
    """All GPUs of a sync job at once, from storage, with a warm reserve."""
    return Recovery(init=communicator_init(gpus), load=figures.LOAD_CHECKPOINT.value)


def from_peers(gpus: int) -> Recovery:
    """One replica of so many GPUs; the state comes from the other replicas."""
    return Recovery(init=communicator_init(gpus), fetch=figures.FETCH.value)


def from_warm_spare(gpus: int) -> Recovery:
    """The same on processes that wait, checked, with torch imported, up to the rendezvous."""
    return replace(from_peers(gpus), allocation=figures.WARM_START.value, start=0.0, health=0.0)


def flat(seconds: float) -> Recovery:
    """A recovery of which only the whole is known."""
    return Recovery(allocation=seconds, cold=seconds, start=0.0, health=0.0, first_step=0.0)
