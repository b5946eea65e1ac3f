"""Hand-made decisions and hellos for the machines' tests."""

from keepstep.protocol.ids import Incarnation, QuorumId, Rank, ReplicaId, Seq, Step, UnitId
from keepstep.protocol.messages import (
    Decision,
    Endpoint,
    Hello,
    Kind,
    LedgerState,
    Member,
    Peer,
    Role,
    StateName,
)
from keepstep.protocol.step import StepSettings

LEDGER = LedgerState(fingerprint="data", total=100)
W, C = Role.WORKER, Role.CATCHING_UP


def me(size: int = 2, **more: int) -> StepSettings:
    return StepSettings(replica_id=ReplicaId(0), incarnation=Incarnation("a0"), size=size, **more)


def hello(rank: int, **more: object) -> Hello:
    fields = {"layout_digest": "l", "ledger": LEDGER, "version": "1", **more}
    return Hello(rank=Rank(rank), endpoint=Endpoint(host="127.0.0.1", ftar_port=1, state_port=2), **fields)  # type: ignore[arg-type]


def member(replica: int, role: Role, *units: int, fetch: bool = False, life: int = 0) -> Member:
    name = Incarnation("abcdefgh"[replica] + str(life))
    return Member(
        replica_id=ReplicaId(replica), incarnation=name, role=role, units=tuple(UnitId(u) for u in units), fetch=fetch
    )


def decision(
    seq: int,
    step: int,
    base: int,
    *members: Member,
    quorum: int = 1,
    kind: Kind = Kind.TRAIN,
    ledger: LedgerState = LEDGER,
) -> Decision:
    return Decision(
        seq=Seq(seq),
        quorum_id=QuorumId(quorum),
        kind=kind,
        step=Step(step),
        base=Seq(base),
        ancestry=(),
        members=members,
        ledger=ledger,
        num_replicas=3,
        reason="a test",
    )


def state(step: int, lineage: int) -> StateName:
    return StateName(step=Step(step), lineage=Seq(lineage))


def peers(of: Decision) -> tuple[Peer, ...]:
    return tuple(
        Peer(
            replica_id=m.replica_id,
            incarnation=m.incarnation,
            endpoint=Endpoint(host="127.0.0.1", ftar_port=10 + m.replica_id, state_port=20 + m.replica_id),
        )
        for m in of.members
    )
