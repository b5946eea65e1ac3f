"""What the FTAR engine is told, and what it tells: settings and events. See `runtime.engine`."""

from dataclasses import dataclass, field

from keepstep.protocol.ids import QuorumId, ReplicaId, Seq
from keepstep.protocol.ring import Shape
from keepstep.runtime.links import LinkSettings

ENDLESS = 1 << 62  # exchanges, for a step that is never done: each buffer is told by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What may be tuned. All members of a job must agree on `digest`. Times in seconds."""

    chunk_bytes: int = 1 << 20
    window: int = 8
    progress_floor_s: float = 10.0  # alive, but no progress: 10 x the slowest of the recent steps, between these two
    progress_ceiling_s: float = 60.0
    switch_interval_s: float = 0.0005  # of the interpreter: a busy main thread holds the data plane up for as long
    native: bool = True  # move chunks in C where that has been built; otherwise in Python
    link: LinkSettings = field(default_factory=LinkSettings)

    @property
    def shape(self) -> Shape:
        return Shape(self.chunk_bytes, self.window)

    @property
    def digest(self) -> str:
        """What all members must agree on, since it is how they cut and stamp the bytes."""
        return f"/{self.chunk_bytes}/{self.window}"


@dataclass(frozen=True, slots=True)
class StepDone:
    """Every exchange of decision `seq` is complete: the outputs hold the sums."""

    seq: Seq


@dataclass(frozen=True, slots=True)
class StepFailed:
    """Decision `seq` cannot be completed on this ring. Not fatal: a new ring can repeat it."""

    seq: Seq
    quorum_id: QuorumId
    exchange: int
    suspect: ReplicaId | None
    phase: str
    reason: str
    fatal: bool
    own_link: bool = False  # our own link to or from the suspect failed; else we were told, or it has closed it


@dataclass(frozen=True, slots=True)
class RingReady:
    """Both neighbours are connected; `kept` of the two links were there before."""

    quorum_id: QuorumId
    kept: int = 0


@dataclass(frozen=True, slots=True)
class RingBroken:
    """A link failed while no exchange was running."""

    quorum_id: QuorumId
    suspect: ReplicaId | None
    reason: str
    own_link: bool = False


EngineEvent = StepDone | StepFailed | RingReady | RingBroken
