"""Each rule of the quorum section of docs/protocol.md, one case at a time."""

from dataclasses import replace

import pytest
from quorum_views import (
    AFTER,
    BEFORE,
    DATA,
    NOW,
    OUTCOME,
    POLICY,
    SECOND,
    START,
    L,
    completed,
    decided,
    decision_7,
    fetching,
    name,
    not_completed,
    report,
    roles,
    units,
    view,
    waits,
    waits_until,
)

from keepstep.protocol.ids import ReplicaId, UnitId
from keepstep.protocol.ledger import commit
from keepstep.protocol.messages import Kind, LedgerState
from keepstep.protocol.quorum import Halt, chain, decide, speculate

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
    assert "its fetch goes on" in following.reason
    only_pending = view(pending, last=decision_7(catching_up=(1,)), dead=("0a", "2a"))
    assert decided(only_pending).workers == ()


def test_ancestry_is_bounded() -> None:
    following = decided(view(*(completed(i) for i in range(3)), last=L), replace(POLICY, ancestry_max=2))
    assert following.ancestry == (START, name(4, 5))


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


def test_replicas_say_themselves_where_they_stand() -> None:
    """A replica that comes up on another host stands elsewhere; who says nothing stands where the policy says."""
    labels, zones = ["b/z1/r", "", "b/z1/r"], {ReplicaId(0): "b/z9/r", ReplicaId(1): "b/z2/r"}
    reports = [replace(completed(i), label=label) for i, label in enumerate(labels)]
    following = decided(view(*reports, last=L), replace(POLICY, zones=zones))
    assert [m.replica_id for m in following.members] == [0, 2, 1]


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
