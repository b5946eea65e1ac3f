"""When the quorum waits, for whom and how long; and how a job ends."""

from dataclasses import replace

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
    finished,
    name,
    not_completed,
    report,
    roles,
    units,
    view,
    waits,
    waits_until,
)

from keepstep.protocol.ids import Incarnation, ReplicaId, Seq, Step, UnitId
from keepstep.protocol.messages import Kind
from keepstep.protocol.quorum import Halt, decide

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
    fresh = view(report(0, 7, life="b"), report(1, 7, life="b"), last=L, dead=("2a",))
    wait = waits(fresh)
    assert wait.until == NOW + POLICY.restore_wait_ns
    halt = decide(fresh, POLICY, now=wait.until)
    assert isinstance(halt, Halt)
    assert "no living replica holds a state" in halt.reason
    assert "no checkpoint" in halt.reason
    assert halt.misfits == frozenset()


def test_the_job_is_not_given_up_soon_while_a_holder_may_only_be_away() -> None:
    """Frozen, or cut off: nobody has seen it end. Those who end the job for it would be missing when it is back."""
    fresh = view(report(0, 7, life="b"), report(1, 7, life="b"), last=L)
    wait = waits(fresh, now=NOW + POLICY.restore_wait_ns)
    assert wait.until == NOW + POLICY.lost_wait_ns
    assert "waiting for replica 2, which nobody has seen end" in wait.reason
    assert isinstance(decide(fresh, POLICY, now=wait.until), Halt)


def test_nor_while_a_holder_lives_and_does_not_answer() -> None:
    """Its leader lives, and one of its other ranks is dead or cannot be heard: it may still end, or come back."""
    silent = view(report(0, 7, life="b"), report(1, 7), report(2, 6), last=L, dead=("0a",))
    wait = waits(silent, now=NOW + max(POLICY.restore_wait_ns, POLICY.straggler_ns))
    assert wait.until == NOW + POLICY.lost_wait_ns
    assert "waiting for replica 2, which nobody has seen end" in wait.reason
    assert isinstance(decide(silent, POLICY, now=wait.until), Halt)


def test_whoever_went_before_the_last_decision_is_waited_for_as_well() -> None:
    """Replica 2 was cut off, the others went on, and died."""
    last = decided(view(completed(0), completed(1), last=L))
    assert last.away == ((2, "2a"),)
    fresh = (report(0, 8, life="b"), report(1, 8, life="b"))
    wait = waits(view(*fresh, last=last, dead=("0a", "1a")), now=NOW + POLICY.restore_wait_ns)
    assert "waiting for replica 2, which nobody has seen end" in wait.reason
    end = decide(view(*fresh, last=last, dead=("0a", "1a", "2a")), POLICY, now=NOW + POLICY.restore_wait_ns)
    assert isinstance(end, Halt)


def test_nobody_is_away_who_is_dead_or_back_or_has_another_life() -> None:
    last = replace(L, away=((ReplicaId(3), Incarnation("3a")),))
    everybody = [completed(i) for i in range(3)]
    assert decided(view(*everybody, last=last)).away == ((3, "3a"),)
    assert decided(view(*everybody, last=last, dead=("3a",))).away == ()
    assert decided(view(*everybody, report(3, 7, life="b"), last=last)).away == ()
    assert decided(view(*everybody, report(3, 7), last=last)).away == ()


def test_the_job_is_not_given_up_while_somebody_alive_has_not_answered() -> None:
    """Decided without it, while it was cut off: it is back and holds a state, but has not said so yet. An end is for good."""
    seen = view(report(0, 7, life="b"), report(1, 6, START, life="b"), last=L, dead=("2a",))
    wait = waits(seen, now=NOW + POLICY.restore_wait_ns)
    assert wait.until == NOW + POLICY.straggler_ns
    assert "waiting for replica 1 to say what is held there" in wait.reason
    assert isinstance(decide(seen, POLICY, now=NOW + POLICY.straggler_ns), Halt)


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


# --- alive without progress ---


def test_a_slow_replica_is_done_without_while_others_wait_for_it() -> None:
    waiting = not_completed(0, waits=True)
    following = decided(view(waiting, not_completed(1, slow=True), not_completed(2), last=L))
    assert roles(following) == {0: "W", 2: "W"}
    assert units(following) == {0: (10,), 2: (12,)}, "they keep what they have computed, and its unit is trained later"
    assert "without replica 1 for now: alive, and no progress" in following.reason
    later = [report(i, 8, following.outcome, ledger=following.ledger) for i in (0, 2)]
    hanging = report(1, 8, START, ledger=BEFORE, slow=True)
    assert roles(decided(view(*later, hanging, last=following))) == {0: "W", 2: "W"}, "it could not load a state"
    back = report(1, 8, START, ledger=BEFORE)
    assert roles(decided(view(*later, back, last=following))) == {0: "W", 1: "C", 2: "W"}


def test_when_all_are_slow_nobody_is_late() -> None:
    everyone = {0: "W", 1: "W", 2: "W"}
    assert roles(decided(view(*(not_completed(i, slow=True) for i in range(3)), last=L))) == everyone
    one = [not_completed(0), not_completed(1, slow=True), not_completed(2)]
    assert roles(decided(view(*one, last=L))) == everyone, "the others compute, too"


def test_a_slow_replica_stays_if_it_is_needed() -> None:
    both = [not_completed(0, waits=True), not_completed(1, slow=True)]
    two = replace(POLICY, min_replicas=2)
    assert roles(decided(view(*both, last=L, dead=("2a",)), two)) == {0: "W", 1: "W"}
    assert roles(decided(view(*both, last=L, dead=("2a",)))) == {0: "W"}
    alone = view(not_completed(1, slow=True), report(0, 7, life="b"), last=L, dead=("0a", "2a"))
    assert roles(decided(alone)) == {0: "C", 1: "W"}, "nobody else holds the state"


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


def test_who_is_needed_to_go_on_training_stays_until_others_hold_the_state() -> None:
    two = replace(POLICY, min_replicas=2)
    both = [completed(0, leaving=True), completed(1, leaving=True), completed(2)]
    assert roles(decided(view(*both, last=L), two)) == {0: "W", 2: "W"}, "one of them can go"
    assert roles(decided(view(*both, last=L))) == {2: "W"}
    assert roles(decided(view(completed(1, leaving=True), completed(2), last=L, dead=("0a",)), two)) == {1: "W", 2: "W"}


def test_one_that_is_behind_and_is_to_leave_catches_up_first_where_the_job_cannot_train_without_it() -> None:
    two = replace(POLICY, min_replicas=2)
    behind = view(not_completed(0, leaving=True), completed(1), last=L, dead=("2a",))
    assert roles(decided(behind, two)) == {0: "C", 1: "W"}
    assert roles(decided(behind)) == {1: "W"}


def test_nobody_waits_for_a_replica_that_leaves() -> None:
    patient = replace(POLICY, join_wait_ns=SECOND)
    gone = report(1, 6, OUTCOME, leaving=True)  # decision 7 was made without it
    last = replace(L, members=tuple(m for m in L.members if m.replica_id != 1))
    assert roles(decided(view(completed(0), gone, completed(2), last=last), patient)) == {0: "W", 2: "W"}
    end = decided(view(finished(0), gone, finished(2), last=last))
    assert end.kind is Kind.END


def test_a_job_that_is_asked_to_stop_ends_at_a_boundary_that_all_have_reached() -> None:
    late = waits(view(completed(0), report(1, 6, START), completed(2), last=L, stopping=True))
    assert late.reason == "waiting for replica 1, alive, to answer decision 7"
    end = decided(view(completed(0), completed(1), completed(2), last=L, stopping=True))
    assert (end.kind, end.stopped, end.start, units(end)) == (Kind.END, True, OUTCOME, {})
    assert roles(end) == {0: "W", 1: "W", 2: "W"}
    complete = decided(view(*(finished(i) for i in range(3)), last=L, stopping=True))
    assert (complete.kind, complete.stopped) == (Kind.END, False), "there is nothing left to stop"


def test_a_job_that_is_asked_to_stop_before_it_began_does_not_begin() -> None:
    halt = decide(view(report(0), stopping=True), POLICY, now=NOW)
    assert halt == Halt(reason="the job was asked to stop before it began")


# --- the end ---


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
