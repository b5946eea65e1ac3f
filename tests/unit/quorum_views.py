"""Hand-made reports and views for the quorum's tests."""

from dataclasses import replace

from keepstep.protocol.ids import Incarnation, QuorumId, ReplicaId, Seq, Step, UnitId
from keepstep.protocol.messages import Decision, Kind, LedgerState, Member, Policy, Report, Role, StateName
from keepstep.protocol.quorum import SeenReport, View, Wait, decide

SECOND = 1_000_000_000
POLICY = Policy(num_replicas=3)
DATA = LedgerState(fingerprint="f", total=100)
NOW = 1000 * SECOND


def name(step: int, lineage: int) -> StateName:
    return StateName(step=Step(step), lineage=Seq(lineage))


def report(
    replica: int,
    answers: int = 0,
    state: StateName | None = None,
    *,
    life: str = "a",
    materialized: bool | None = None,
    ledger: LedgerState | None = DATA,
    held: tuple[int, ...] = (),
    broken: bool = False,
    finished: bool = False,
    leaving: bool = False,
    slow: bool = False,
    waits: bool = False,
    layout: str = "m",
) -> Report:
    return Report(
        replica_id=ReplicaId(replica),
        incarnation=Incarnation(f"{replica}{life}"),
        answers=Seq(answers),
        state=state,
        materialized=state is not None if materialized is None else materialized,
        ledger=ledger,
        held_units=tuple(UnitId(u) for u in held),
        broken=broken,
        finished=finished,
        leaving=leaving,
        slow=slow,
        waits=waits,
        layout_digest=layout,
    )


def view(
    *reports: Report,
    last: Decision | None = None,
    seen_at: int | dict[int, int] = NOW,
    dead: tuple[str, ...] = (),
    announced: tuple[int, ...] = (),
    stopping: bool = False,
) -> View:
    def at(replica: int) -> int:
        return seen_at if isinstance(seen_at, int) else seen_at[replica]

    return View(
        last=last,
        last_seen_at=NOW - SECOND,
        reports={r.replica_id: SeenReport(report=r, seen_at=at(r.replica_id)) for r in reports},
        dead=frozenset(Incarnation(d) for d in dead),
        announced=frozenset(ReplicaId(i) for i in announced),
        stopping=stopping,
    )


def decided(v: View, policy: Policy = POLICY, now: int = NOW) -> Decision:
    answer = decide(v, policy, now=now)
    assert isinstance(answer, Decision), answer
    return answer


def waits(v: View, policy: Policy = POLICY, now: int = NOW) -> Wait:
    answer = decide(v, policy, now=now)
    assert isinstance(answer, Wait), answer
    return answer


def waits_until(v: View, policy: Policy = POLICY) -> tuple[Wait, Decision]:
    """It waits until the nanosecond that it names, and decides then."""
    wait = waits(v, policy)
    assert wait.until is not None
    assert waits(v, policy, wait.until - 1).until == wait.until
    return wait, decided(v, policy, wait.until)


def roles(decision: Decision) -> dict[int, str]:
    return {m.replica_id: {Role.WORKER: "W", Role.CATCHING_UP: "C"}[m.role] for m in decision.members}


def units(decision: Decision) -> dict[int, tuple[int, ...]]:
    return {m.replica_id: m.units for m in decision.members if m.units}


def fetching(decision: Decision) -> set[int]:
    return {m.replica_id for m in decision.members if m.fetch}


def decision_7(kind: Kind = Kind.TRAIN, catching_up: tuple[int, ...] = ()) -> Decision:
    """Step 5 under decision 7: replica i trains unit 10 + i."""
    return Decision(
        seq=Seq(7),
        quorum_id=QuorumId(4),
        kind=kind,
        step=Step(5),
        base=Seq(6),
        ancestry=(name(4, 5), name(3, 3)),
        members=tuple(
            Member(
                replica_id=ReplicaId(i),
                incarnation=Incarnation(f"{i}a"),
                role=Role.CATCHING_UP if i in catching_up else Role.WORKER,
                units=(UnitId(10 + i),) if kind is Kind.TRAIN and i not in catching_up else (),
            )
            for i in range(3)
        ),
        ledger=replace(DATA, next_unit=UnitId(10)),
        num_replicas=3,
        reason="",
    )


L = decision_7()
START, OUTCOME = L.start, L.outcome
BEFORE = replace(DATA, next_unit=UnitId(10))
AFTER = replace(DATA, next_unit=UnitId(13))


def completed(replica: int, **more: object) -> Report:
    return report(replica, 7, OUTCOME, ledger=AFTER, **more)  # type: ignore[arg-type]  # passed through


def not_completed(replica: int, **more: object) -> Report:
    return report(replica, 7, START, ledger=BEFORE, **{"held": (10 + replica,), **more})  # type: ignore[arg-type]


def finished(replica: int, answers: int = 7, **more: object) -> Report:
    return report(replica, answers, OUTCOME, ledger=AFTER, finished=True, **more)  # type: ignore[arg-type]
