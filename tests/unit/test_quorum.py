"""Each rule of the quorum section of docs/protocol.md, one case at a time."""

from dataclasses import replace

import pytest

from keepstep.protocol.ids import Incarnation, QuorumId, ReplicaId, Seq, Step, UnitId
from keepstep.protocol.ledger import commit
from keepstep.protocol.messages import Decision, Kind, LedgerState, Member, Policy, Report, Role, StateName
from keepstep.protocol.quorum import Halt, SeenReport, View, Wait, chain, decide, speculate

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
        layout_digest=layout,
    )


def view(
    *reports: Report,
    last: Decision | None = None,
    seen_at: int | dict[int, int] = NOW,
    dead: tuple[str, ...] = (),
    announced: tuple[int, ...] = (),
) -> View:
    def at(replica: int) -> int:
        return seen_at if isinstance(seen_at, int) else seen_at[replica]

    return View(
        last=last,
        last_seen_at=NOW - SECOND,
        reports={r.replica_id: SeenReport(report=r, seen_at=at(r.replica_id)) for r in reports},
        dead=frozenset(Incarnation(d) for d in dead),
        announced=frozenset(ReplicaId(i) for i in announced),
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


# --- the first decision ---


def test_the_job_starts_from_the_lowest_replicas_initial_state() -> None:
    first = decided(view(report(2), report(0), report(1)))
    assert (first.seq, first.quorum_id, first.kind, first.start) == (1, 1, Kind.TRAIN, name(0, 1))
    assert roles(first) == {0: "W", 1: "C", 2: "C"}
    assert fetching(first) == {1, 2}
    assert units(first) == {0: (0,)}
    assert first.ledger == DATA
    assert "initial state of replica 0" in first.reason


def test_the_first_decision_waits_for_all_replicas_for_start_wait() -> None:
    wait, first = waits_until(view(report(0), report(2), seen_at={0: NOW - SECOND, 2: NOW}))
    assert "replica 1" in wait.reason
    assert wait.until == NOW - SECOND + POLICY.start_wait_ns
    assert roles(first) == {0: "W", 2: "C"}


def test_the_first_decision_waits_for_min_replicas_without_end() -> None:
    policy = replace(POLICY, min_replicas=2)
    wait = waits(view(report(1)), policy, NOW + 10 * POLICY.start_wait_ns)
    assert wait.until is None
    assert "1 of at least 2" in wait.reason
    assert "replicas 0 and 2" in wait.reason


def test_with_min_replicas_the_others_fetch_before_anyone_trains() -> None:
    policy = replace(POLICY, min_replicas=2)
    gather = decided(view(report(0), report(1), report(2)), policy)
    assert (gather.kind, roles(gather), units(gather)) == (Kind.GATHER, {0: "W", 1: "C", 2: "C"}, {})
    held = [report(i, 1, gather.start) for i in range(3)]
    train = decided(view(*held, last=gather), policy)
    assert (train.kind, train.start) == (Kind.TRAIN, gather.start)
    assert units(train) == {0: (0,), 1: (1,), 2: (2,)}


def test_different_data_is_refused_at_the_start() -> None:
    answer = decide(view(report(0), report(1, ledger=replace(DATA, fingerprint="g"))), POLICY, now=NOW)
    assert isinstance(answer, Halt)
    assert "replicas 0 and 1 have different data sets" in answer.reason
    assert answer.misfits == {0, 1}


def test_different_models_are_refused_at_the_start() -> None:
    answer = decide(view(report(0), report(1), report(2, layout="n")), POLICY, now=NOW)
    assert isinstance(answer, Halt)
    assert "replicas 0 and 2 have different models" in answer.reason


# --- the chain ---


def test_chain_is_newest_first() -> None:
    assert chain(L) == [OUTCOME, START, name(4, 5), name(3, 3)]
    assert chain(decision_7(Kind.GATHER)) == [START, name(4, 5), name(3, 3)]


def test_everybody_completed_so_the_next_step_follows_on_the_same_ring() -> None:
    following = decided(view(*(completed(i) for i in range(3)), last=L))
    assert (following.seq, following.quorum_id, following.start) == (8, 4, OUTCOME)
    assert roles(following) == {0: "W", 1: "W", 2: "W"}
    assert units(following) == {0: (13,), 1: (14,), 2: (15,)}
    assert following.ancestry == (START, name(4, 5), name(3, 3))
    assert following.reason == "step 6 follows decision 7, held by replicas 0, 1 and 2"


def test_who_did_not_complete_catches_up() -> None:
    following = decided(view(completed(0), not_completed(1), completed(2), last=L))
    assert roles(following) == {0: "W", 1: "C", 2: "W"}
    assert fetching(following) == {1}
    assert following.quorum_id == 8
    assert following.members[1].has == START
    assert "replica 1 catches up (it is behind)" in following.reason


def test_nobody_completed_so_the_step_is_tried_again_on_the_same_units() -> None:
    again = decided(view(not_completed(0), not_completed(2), last=L, dead=("1a",)))
    assert again.start == START
    assert again.quorum_id == 8
    assert units(again) == {0: (10,), 2: (12,)}
    assert "tried again" in again.reason
    assert "without replica 1" in again.reason
    assert again.ancestry == (name(4, 5), name(3, 3))


def test_a_revoked_state_is_off_the_chain() -> None:
    """Replica 1 completed decision 7, was cut off, and comes back after the others have tried the step again."""
    again = decided(view(not_completed(0), not_completed(2), last=L))
    done = [report(i, 8, again.outcome, ledger=replace(AFTER, requeued=(UnitId(11),))) for i in (0, 2)]
    back = decided(view(*done, report(1, 8, OUTCOME, ledger=AFTER), last=again))
    assert back.start == again.outcome
    assert roles(back) == {0: "W", 1: "C", 2: "W"}
    assert fetching(back) == {1}
    assert "replica 1 catches up (its state was revoked)" in back.reason
    assert units(back) == {0: (11,), 2: (13,)}


def test_a_later_step_off_the_chain_does_not_win() -> None:
    following = decided(view(completed(0), report(1, 7, name(9, 99)), completed(2), last=L))
    assert following.start == OUTCOME
    assert roles(following)[1] == "C"


def test_the_newer_holders_died_so_the_job_goes_back_to_what_is_alive() -> None:
    older = report(2, 7, name(3, 3), ledger=DATA)
    back = decided(view(report(0, 7, life="b"), older, last=L, dead=("1a",)))
    assert back.start == name(3, 3)
    assert back.ancestry == ()
    assert "back to step 3" in back.reason
    assert "held by replica 2" in back.reason


def test_only_answers_to_the_last_decision_count() -> None:
    stale = report(1, 6, START, ledger=BEFORE)
    following = decided(view(completed(0), completed(2), stale, last=L), now=NOW + POLICY.straggler_ns)
    assert roles(following) == {0: "W", 2: "W"}


def test_a_state_that_is_still_being_fetched_is_not_held() -> None:
    pending = completed(1, materialized=False)
    following = decided(view(completed(0), pending, completed(2), last=L))
    assert roles(following)[1] == "C"
    assert fetching(following) == set()
    assert following.quorum_id == 4
    assert following.members[1].has is None
    assert "its fetch goes on" in following.reason
    only_pending = view(pending, last=decision_7(catching_up=(1,)), dead=("0a", "2a"))
    assert decided(only_pending).workers == ()


def test_ancestry_is_bounded() -> None:
    following = decided(view(*(completed(i) for i in range(3)), last=L), replace(POLICY, ancestry_max=2))
    assert following.ancestry == (START, name(4, 5))


# --- waiting ---


def test_waits_without_end_while_every_member_computes() -> None:
    """A decision takes as long as the step takes; a newcomer's answer does not start the stragglers' clock."""
    computing = [report(i, 6, START, ledger=BEFORE) for i in range(3)]
    assert waits(view(*computing, last=L), now=NOW + 10**15).until is None
    joined = view(report(0, 7, life="b"), *computing[1:], last=L)
    assert waits(joined, now=NOW + 10**15).until is None


def test_waits_for_a_living_worker_until_the_straggler_deadline() -> None:
    late = report(1, 6, START, ledger=BEFORE)
    wait, following = waits_until(view(completed(0), late, completed(2), last=L))
    assert wait.until == NOW + POLICY.straggler_ns
    assert "replica 1" in wait.reason
    assert roles(following) == {0: "W", 2: "W"}


def test_does_not_wait_for_the_dead_or_the_gone() -> None:
    late = report(1, 6, START, ledger=BEFORE)
    assert roles(decided(view(completed(0), late, completed(2), last=L, dead=("1a",)))) == {0: "W", 2: "W"}
    assert roles(decided(view(completed(0), completed(2), last=L))) == {0: "W", 2: "W"}
    restarted = report(1, 7, life="b")
    assert roles(decided(view(completed(0), restarted, completed(2), last=L))) == {0: "W", 1: "C", 2: "W"}


def test_waits_for_a_catching_up_member_for_the_grace_only() -> None:
    last = decision_7(catching_up=(1,))
    late = report(1, 6, START, materialized=False, ledger=BEFORE)
    seen = {0: NOW - 10, 1: NOW - SECOND, 2: NOW}
    wait, following = waits_until(view(completed(0), late, completed(2), last=last, seen_at=seen))
    assert wait.until == NOW - 10 + POLICY.member_grace_ns
    assert roles(following) == {0: "W", 2: "W"}


def test_if_all_workers_died_a_catching_up_member_is_the_last_hope() -> None:
    last = decision_7(catching_up=(1, 2))
    late = report(1, 6, START, materialized=False, ledger=BEFORE)
    answered = report(2, 7, START, materialized=False, ledger=BEFORE)
    assert waits(view(late, answered, last=last, dead=("0a",))).until == NOW + POLICY.straggler_ns


def test_waits_for_announced_replicas_for_join_wait() -> None:
    v = view(completed(0), completed(2), last=L, announced=(1,))
    assert roles(decided(v)) == {0: "W", 2: "W"}
    wait, _ = waits_until(v, replace(POLICY, join_wait_ns=5 * SECOND))
    assert wait.until == NOW + 5 * SECOND
    assert "replica 1 to join" in wait.reason


def test_too_few_workers_let_the_others_fetch_and_wait() -> None:
    policy = replace(POLICY, min_replicas=2)
    wait = waits(view(completed(0), last=L, dead=("1a", "2a")), policy)
    assert wait.until is None
    assert "1 of at least 2" in wait.reason
    gather = decided(view(completed(0), report(1, 7, life="b"), last=L, dead=("2a",)), policy)
    assert (gather.kind, fetching(gather), gather.start) == (Kind.GATHER, {1}, OUTCOME)
    trained = decided(
        view(*(report(i, 8, OUTCOME, ledger=AFTER, life=x) for i, x in ((0, "a"), (1, "b"))), last=gather), policy
    )
    assert (trained.kind, units(trained)) == (Kind.TRAIN, {0: (13,), 1: (14,)})


# --- nobody holds a state ---


def test_a_partition_must_not_roll_the_job_back_and_then_it_halts() -> None:
    fresh = view(report(0, 7, life="b"), report(1, 7, life="b"), last=L)
    wait = waits(fresh)
    assert wait.until == NOW + POLICY.restore_wait_ns
    halt = decide(fresh, POLICY, now=wait.until)
    assert isinstance(halt, Halt)
    assert "no living replica holds a state" in halt.reason
    assert "no checkpoint" in halt.reason
    assert halt.misfits == frozenset()


def test_lost_in_step_0_the_job_starts_again() -> None:
    last = replace(L, step=Step(0), base=Seq(7), ancestry=())
    lost = report(0, 7, name(1, 3), ledger=BEFORE)  # revoked long ago: no initial state to offer
    wait, again = waits_until(view(lost, report(1, 7, life="b"), report(2, 7, life="b"), last=last))
    assert wait.until == NOW + POLICY.restore_wait_ns
    assert again.start == name(0, 8)
    assert roles(again) == {0: "C", 1: "W", 2: "C"}
    assert again.ancestry == ()
    assert "starts again" in again.reason
    assert waits(view(lost, last=last), now=NOW + POLICY.restore_wait_ns).until is None


def test_a_fetch_that_may_still_end_well_is_given_its_chance() -> None:
    last = decision_7(catching_up=(1,))
    pending = report(1, 7, START, materialized=False, ledger=BEFORE)
    gather = decided(view(pending, report(0, 7, life="b"), last=last, dead=("0a", "2a")))
    assert (gather.kind, gather.start, roles(gather), fetching(gather)) == (Kind.GATHER, START, {1: "C"}, set())
    loaded = decided(view(report(1, 8, START, ledger=BEFORE), report(0, 8, life="b"), last=gather))
    assert roles(loaded) == {0: "C", 1: "W"}
    # holders that are merely cut off may come back: wait for them first
    cut_off = view(pending, last=last)
    assert waits_until(cut_off)[0].until == NOW + POLICY.restore_wait_ns


# --- the ring ---


def test_a_broken_link_makes_a_new_ring() -> None:
    following = decided(view(completed(0), completed(1, broken=True), completed(2), last=L))
    assert (following.start, following.quorum_id) == (OUTCOME, 8)


def test_a_new_life_makes_a_new_ring() -> None:
    reborn = report(1, 7, life="b")
    assert decided(view(completed(0), reborn, completed(2), last=L)).quorum_id == 8


def test_a_step_tried_again_gets_a_new_ring_even_with_the_same_members() -> None:
    assert decided(view(*(not_completed(i) for i in range(3)), last=L)).quorum_id == 8


def test_ring_order_follows_topology() -> None:
    zones = {ReplicaId(0): "b/z1/r", ReplicaId(1): "b/z2/r", ReplicaId(2): "b/z1/r"}
    following = decided(view(*(completed(i) for i in range(3)), last=L), replace(POLICY, zones=zones))
    assert [m.replica_id for m in following.members] == [0, 2, 1]
    assert following.quorum_id == 8
    assert units(following) == {0: (13,), 2: (14,), 1: (15,)}


# --- units ---


def test_held_units_are_kept_then_the_requeued_ones_go_out() -> None:
    ledger = replace(AFTER, requeued=(UnitId(11),))
    reports = [report(i, 7, OUTCOME, ledger=ledger, held=h) for i, h in enumerate([(14,), (14,), ()])]
    assert units(decided(view(*reports, last=L))) == {0: (14,), 1: (11,), 2: (13,)}


@pytest.mark.parametrize("per_worker", [1, 2])
@pytest.mark.parametrize("total", [100, 15, 14, 13])
def test_speculation_is_what_the_next_decision_assigns(per_worker: int, total: int) -> None:
    """Also near the end of the data, and whether or not the reports already hold what was speculated."""
    policy = replace(POLICY, units_per_worker=per_worker)
    ledger = replace(DATA, total=total)
    last = replace(
        L,
        ledger=replace(ledger, next_unit=UnitId(13 - 3 * per_worker)),
        members=tuple(
            replace(m, units=tuple(UnitId(13 - 3 * per_worker + per_worker * i + k) for k in range(per_worker)))
            for i, m in enumerate(L.members)
        ),
    )
    assert last.ledger is not None
    after = commit(last.ledger, [u for m in last.members for u in m.units])
    guess = {i: speculate(last, ReplicaId(i)) for i in range(3)}
    for holding in (False, True):
        reports = [
            report(i, 7, OUTCOME, ledger=after, held=guess[i] if holding else (), finished=total == 13)
            for i in range(3)
        ]
        assert units(decided(view(*reports, last=last), policy)) == {i: u for i, u in guess.items() if u}


def test_speculation_is_kept_when_a_replica_has_caught_up() -> None:
    last = replace(decision_7(catching_up=(0,)), ledger=replace(DATA, next_unit=UnitId(11)))
    after = replace(DATA, next_unit=UnitId(13))
    assert speculate(last, ReplicaId(0)) == ()
    held = {i: speculate(last, ReplicaId(i)) for i in range(3)}
    reports = [report(i, 7, OUTCOME, ledger=after, held=held[i]) for i in range(3)]
    assert units(decided(view(*reports, last=last))) == {0: (15,), 1: (13,), 2: (14,)}


def test_nothing_to_speculate_on_without_training() -> None:
    assert speculate(decision_7(Kind.GATHER), ReplicaId(0)) == ()


def test_a_stream_without_its_owner_does_not_train_empty_steps() -> None:
    ledger = LedgerState(policy="stream", fingerprint="f", total=6, cursors=(2, 1, 2))
    reports = [report(i, 7, OUTCOME, ledger=ledger) for i in (0, 2)]
    wait = waits(view(*reports, last=L, dead=("1a",)))
    assert "no unit is left for replicas 0 and 2" in wait.reason
    reborn = report(1, 7, life="b", ledger=replace(ledger, cursors=(0, 0, 0)))
    gather = decided(view(*reports, reborn, last=L, dead=("1a",)))
    assert (gather.kind, fetching(gather)) == (Kind.GATHER, {1})


# --- leaving ---


def test_a_leaving_replica_is_no_member() -> None:
    following = decided(view(completed(0), completed(1, leaving=True), completed(2), last=L))
    assert roles(following) == {0: "W", 2: "W"}
    assert (
        decided(view(completed(0), report(1, 7, life="b", leaving=True), completed(2), last=L)).members[-1].replica_id
        == 2
    )


def test_the_only_holder_stays_until_another_one_holds_the_state() -> None:
    following = decided(view(completed(0, leaving=True), report(1, 7, life="b"), last=L, dead=("2a",)))
    assert roles(following) == {0: "W", 1: "C"}
    ledger = replace(AFTER, next_unit=UnitId(14))
    done = [
        report(0, 8, following.outcome, ledger=ledger, leaving=True),
        report(1, 8, following.outcome, ledger=ledger, life="b"),
    ]
    assert roles(decided(view(*done, last=following))) == {1: "W"}


# --- the end ---


def finished(replica: int, answers: int = 7, **more: object) -> Report:
    return report(replica, answers, OUTCOME, ledger=AFTER, finished=True, **more)  # type: ignore[arg-type]


def test_the_job_ends_when_all_hold_the_final_state() -> None:
    end = decided(view(*(finished(i) for i in range(3)), last=L))
    assert (end.kind, end.start, units(end)) == (Kind.END, OUTCOME, {})
    over = waits(view(*(finished(i, 8) for i in range(3)), last=end))
    assert (over.reason, over.until) == ("the job has ended", None)


def test_who_lacks_the_final_state_fetches_it_first() -> None:
    gather = decided(view(finished(0), not_completed(1), finished(2), last=L))
    assert (gather.kind, gather.start, roles(gather)) == (Kind.GATHER, OUTCOME, {0: "W", 1: "C", 2: "W"})
    assert fetching(gather) == {1}
    at_once = [finished(0, 8), finished(2, 8)]
    loading = waits(view(*at_once, report(1, 7, START, ledger=BEFORE), last=gather), now=NOW + 10**15)
    assert loading.until is None
    assert "replica 1 to fetch" in loading.reason
    again = waits(view(*at_once, finished(1, 8, materialized=False), last=gather))
    assert "replica 1 to fetch" in again.reason
    assert decided(view(*at_once, finished(1, 8), last=gather)).kind is Kind.END


def test_a_gather_is_decided_again_when_somebody_has_joined_or_lost_its_fetch() -> None:
    gather = decided(view(finished(0), not_completed(1), last=L, dead=("2a",)))
    joined = decided(view(finished(0, 8), finished(1, 8, materialized=False), report(2, 8, life="b"), last=gather))
    assert (joined.kind, fetching(joined)) == (Kind.GATHER, {2})
    lost = decided(view(finished(0, 8), report(1, 8), last=gather))
    assert (lost.kind, fetching(lost)) == (Kind.GATHER, {1})


def test_the_end_waits_for_announced_replicas_for_finish_wait() -> None:
    wait, end = waits_until(view(finished(0), finished(2), last=L, announced=(1,)))
    assert wait.until == NOW + POLICY.finish_wait_ns
    assert "replica 1" in wait.reason
    assert end.kind is Kind.END


# --- who does not fit ---


def test_a_newcomer_with_other_data_or_model_is_named_alone() -> None:
    for odd in (report(1, 7, life="b", layout="n"), report(1, 7, life="b", ledger=replace(DATA, total=7))):
        answer = decide(view(completed(0), odd, completed(2), last=L), POLICY, now=NOW)
        assert isinstance(answer, Halt)
        assert answer.misfits == {1}
        assert "replicas 0 and 1" in answer.reason


def test_one_name_with_two_ledgers_is_a_bug() -> None:
    answer = decide(view(completed(0), report(1, 7, OUTCOME, ledger=BEFORE), completed(2), last=L), POLICY, now=NOW)
    assert isinstance(answer, Halt)
    assert "bug" in answer.reason
