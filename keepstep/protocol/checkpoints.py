"""Which state is written to persistent storage, by whom, and which one is read back (FT-HSDP section 5.6; docs/protocol.md).

A state is saved only once a decision has named it as its base: then it is on the chain, and every WORKER holds it. One of them
writes it, while all train the next step. Which one does not matter for correctness, only for speed.

Lineages grow within a history, and a restored history begins above the lineage of the checkpoint that it comes from
(`quorum.decide`). So of two checkpoints the one with the higher lineage was decided later, even where the steps say otherwise:
the other one may have been revoked.
"""

from collections.abc import Iterable, Sequence

from keepstep.protocol.ids import ReplicaId, Step
from keepstep.protocol.messages import Checkpoint

SLOWER_NS = 50_000_000
"""A WORKER that answers so much later than all others is slow."""


def age(checkpoint: Checkpoint) -> tuple[int, int, str]:
    """Sorts checkpoints: the newest is the largest."""
    return checkpoint.state.lineage, checkpoint.state.step, checkpoint.name


def newest(found: Iterable[Checkpoint]) -> Checkpoint | None:
    """The one to restore from."""
    return max(found, key=age, default=None)


def saver(step: Step, every: int, idle: Sequence[ReplicaId], slowest: ReplicaId | None = None) -> ReplicaId | None:
    """Who of the `idle` WORKERs writes the state before `step`; None: it is not due, or nobody can.

    Not the slowest, if there is another one, since writing makes a replica slower; otherwise they take turns.
    """
    if every < 1 or step == 0 or step % every:
        return None
    able = sorted(set(idle) - {slowest}) or sorted(idle)
    return able[step // every % len(able)] if able else None
