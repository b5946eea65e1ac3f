"""The leader's machine: report, decided, vote, commit, retry, superseded, catching up, the end."""

from dataclasses import replace

import pytest
from machines import LEDGER, C, W, decision, hello, me, member, state

from keepstep.protocol.errors import JobMismatch, LocalProtocolError
from keepstep.protocol.ids import QuorumId, Rank, ReplicaId, Seq
from keepstep.protocol.messages import (
    Abort,
    AllFetched,
    AllVoted,
    Fetched,
    Finish,
    Kind,
    Lags,
    Load,
    Loaded,
    RingBroken,
    Role,
    StartOver,
    Verdict,
    Vote,
)
from keepstep.protocol.step import Effect, LeaderMachine, Publish, Tell, TellDecided


def vote(rank: int, seq: int, *, yes: bool = True, caught_up: bool = True, broken: bool = False) -> Vote:
    return Vote(rank=Rank(rank), seq=Seq(seq), yes=yes, caught_up=caught_up, ring_broken=broken, suspect=ReplicaId(1))


def ready(**more: int) -> LeaderMachine:
    machine = LeaderMachine(me(**more))
    assert machine.on_message(hello(0)) == ()
    (publish,) = machine.on_message(hello(1))
    assert isinstance(publish, Publish)
    assert publish.report.state is None
    assert publish.report.ledger == LEDGER
    return machine


def verdicts(effects: tuple[Effect, ...]) -> list[tuple[int, bool]]:
    return [
        (e.message.seq, e.message.commit) for e in effects if isinstance(e, Tell) and isinstance(e.message, Verdict)
    ]


def report_of(effects: tuple[Effect, ...]) -> Publish:
    assert isinstance(effects[-1], Publish)
    return effects[-1]


def test_a_worker_commits_when_every_rank_votes_yes() -> None:
    machine = ready()
    first = decision(1, 0, 1, member(0, W, 0), member(1, C, fetch=True))
    assert machine.on_decision(first) == (TellDecided(decision=first),)
    assert machine.on_message(vote(0, 1)) == ()
    effects = machine.on_message(vote(1, 1))
    assert verdicts(effects) == [(1, True)]
    report = report_of(effects).report
    assert (report.state, report.materialized, report.answers) == (state(1, 1), True, 1)
    assert report.ledger is not None
    assert report.ledger.next_unit == 1
    assert report.held_units, "the forward pass of the next step has begun"


def test_one_no_is_a_retry_that_keeps_the_state_and_the_units() -> None:
    machine = ready()
    machine.on_decision(decision(1, 0, 1, member(0, W, 0), member(1, W, 1)))
    machine.on_message(vote(0, 1))
    effects = machine.on_message(vote(1, 1, yes=False, broken=True))
    assert verdicts(effects) == [(1, False)]
    report = report_of(effects).report
    assert (report.state, report.held_units, report.broken) == (state(0, 1), (0,), True)
    assert machine.on_message(vote(0, 1)) == (), "late votes change nothing"


@pytest.mark.parametrize("role", [W, C])
@pytest.mark.parametrize("caught_up", [True, False])
def test_votes_that_were_counted_on_their_way_mean_the_same(role: Role, caught_up: bool) -> None:
    """And a fetch that all have ended."""

    def started() -> LeaderMachine:
        machine = ready()
        machine.on_decision(decision(1, 5, 6, member(0, role, 0, fetch=role is C), member(1, W, 1), kind=Kind.TRAIN))
        return machine

    if role is W:
        one, all_at_once = ready(), ready()
        for machine in (one, all_at_once):
            machine.on_decision(decision(1, 0, 1, member(0, W, 0), member(1, W, 1)))
    else:
        one, all_at_once = started(), started()
        fetched = [Fetched(rank=Rank(rank), state=state(5, 6), since=Seq(1), ok=True) for rank in (0, 1)]
        assert one.on_message(fetched[0]) == ()
        for late in (Seq(0), Seq(2)):
            assert all_at_once.on_message(AllFetched(since=late)) == ()
        told = all_at_once.on_message(AllFetched(since=Seq(1)))
        assert told == one.on_message(fetched[1])
        assert told
        assert all_at_once.on_message(AllFetched(since=Seq(1))) == (), "once is enough"
    for late in (Seq(0), Seq(2)):
        assert all_at_once.on_message(AllVoted(seq=late, caught_up=True)) == ()
    assert one.on_message(vote(0, 1, caught_up=caught_up)) == ()
    effects = one.on_message(vote(1, 1))
    assert effects == all_at_once.on_message(AllVoted(seq=Seq(1), caught_up=caught_up))
    assert verdicts(effects) == [(1, True)]
    assert one.materialized == all_at_once.materialized == (role is W or caught_up)


def test_who_has_answered_a_decision_cannot_complete_it() -> None:
    machine = ready()
    machine.on_decision(decision(1, 0, 1, member(0, W, 0)))
    machine.on_message(vote(0, 1))
    effects = machine.on_decision(decision(2, 0, 1, member(1, W, 0)))
    assert verdicts(effects) == [(1, False)]
    assert report_of(effects).report.answers == 2
    assert machine.on_message(vote(1, 1)) == ()
    assert machine.state == state(0, 1)


def test_who_is_asked_to_leave_goes_when_a_decision_does_without_it() -> None:
    machine = ready()
    machine.on_decision(decision(1, 0, 1, member(0, W, 0), member(1, W, 1)))
    assert machine.on_asked(leave=True) == (), "not in the middle of a step"
    machine.on_message(vote(0, 1))
    report = report_of(machine.on_message(vote(1, 1))).report
    assert (report.state, report.leaving) == (state(1, 1), True)
    needed = decision(2, 1, 1, member(0, W, 2), quorum=2)
    assert machine.on_decision(needed) == (TellDecided(decision=needed),), "it is still needed"
    machine.on_message(vote(0, 2))
    assert report_of(machine.on_message(vote(1, 2))).report.leaving
    words = "replica 0 leaves the job, as it was asked to"
    assert machine.on_decision(decision(3, 2, 2, member(1, W, 3))) == (Tell(message=Finish(left=words)),)
    assert machine.over
    assert machine.on_asked(leave=False) == (), "too late"


def test_who_waits_for_a_decision_says_at_once_that_it_leaves_or_stays() -> None:
    machine = ready()
    machine.on_decision(decision(1, 0, 1, member(0, W, 0), member(1, W, 1)))
    machine.on_message(vote(0, 1))
    machine.on_message(vote(1, 1))
    leaves = report_of(machine.on_asked(leave=True)).report
    assert (leaves.answers, leaves.leaving) == (1, True)
    assert machine.on_asked(leave=True) == ()
    assert not report_of(machine.on_asked(leave=False)).report.leaving
    assert isinstance(machine.on_decision(decision(2, 1, 1, member(1, W, 2)))[-1], Publish), "it stays, and reports"


def test_who_holds_nothing_leaves_at_once() -> None:
    machine = ready()
    (tell,) = machine.on_asked(leave=True)
    assert tell == Tell(message=Finish(left="replica 0 leaves the job, as it was asked to"))
    assert machine.over


def test_a_step_that_runs_on_without_a_leaving_replica_is_given_up() -> None:
    machine = ready()
    machine.on_decision(decision(1, 0, 1, member(0, W, 0), member(1, W, 1)))
    machine.on_asked(leave=True)
    effects = machine.on_decision(decision(2, 0, 1, member(1, W, 1)))
    assert verdicts(effects) == [(1, False)]
    assert isinstance(effects[-1], Tell)
    assert isinstance(effects[-1].message, Finish)


def test_a_job_that_was_stopped_is_left_as_one_that_is_not_complete() -> None:
    machine = ready()
    end = replace(decision(1, 0, 1, member(0, W), kind=Kind.END), stopped=True)
    assert machine.on_decision(end) == (Tell(message=Finish(left="the job stops before step 0, as it was asked to")),)


def test_a_revoked_replica_catches_up() -> None:
    machine = ready()
    machine.on_decision(decision(1, 0, 1, member(0, W, 0), member(1, W, 1)))
    machine.on_message(vote(0, 1))
    machine.on_message(vote(1, 1))
    assert machine.state == state(1, 1)
    machine.on_decision(decision(2, 0, 1, member(1, W, 1), quorum=2))  # decided without us: 1 is revoked
    third = decision(3, 1, 2, member(1, W, 2), member(0, C, fetch=True), quorum=3)
    assert machine.on_decision(third) == (TellDecided(decision=third),)
    assert (machine.state, machine.materialized) == (state(1, 2), False)


def catching_up(**more: int) -> LeaderMachine:
    machine = ready(**more)
    machine.on_decision(decision(7, 5, 6, member(1, W, 5), member(0, C, fetch=True)))
    return machine


def test_catching_up_is_live_when_all_ranks_have_fetched_and_replayed() -> None:
    machine = catching_up()
    machine.on_message(vote(0, 7, caught_up=False))
    report = report_of(machine.on_message(vote(1, 7, caught_up=False))).report
    assert (report.state, report.materialized) == (state(6, 7), False)
    machine.on_decision(decision(8, 6, 7, member(1, W, 6), member(0, C)))
    assert machine.on_message(Fetched(rank=Rank(0), state=state(5, 6), since=Seq(7), ok=True)) == ()
    assert machine.on_message(Fetched(rank=Rank(1), state=state(5, 6), since=Seq(7), ok=True)) == (
        Tell(message=Load(state=state(5, 6))),
    )
    machine.on_message(vote(0, 8, caught_up=True))
    assert not report_of(machine.on_message(vote(1, 8, caught_up=False))).report.materialized, "one rank still replays"
    machine.on_decision(decision(9, 7, 8, member(1, W, 7), member(0, C)))
    machine.on_message(vote(0, 9))
    assert report_of(machine.on_message(vote(1, 9))).report.materialized


def test_a_failed_fetch_starts_over_after_the_step_which_still_needs_our_zeros() -> None:
    machine = catching_up()
    assert (
        machine.on_message(Fetched(rank=Rank(1), state=state(5, 6), since=Seq(7), ok=False, reason="all sources gone"))
        == ()
    )
    machine.on_message(vote(0, 7))
    effects = machine.on_message(vote(1, 7))
    assert [type(e.message) for e in effects if isinstance(e, Tell)] == [Verdict, StartOver]
    assert report_of(effects).report.state is None


def test_what_is_still_being_loaded_is_offered_when_the_next_fetch_fails() -> None:
    """Load was told, so every rank's main thread gets there before anything else: nobody else may hold that state."""
    machine = catching_up()
    for rank in (0, 1):
        machine.on_message(Fetched(rank=Rank(rank), state=state(5, 6), since=Seq(7), ok=True))
    machine.on_message(vote(0, 7, yes=False, broken=True))
    machine.on_decision(decision(8, 6, 7, member(1, W, 6), member(0, C, fetch=True), quorum=2))
    gone = Fetched(rank=Rank(0), state=state(6, 7), since=Seq(8), ok=False, reason="its only source is gone")
    machine.on_message(gone)
    effects = machine.on_message(vote(1, 8, yes=False, broken=True))
    (over,) = (e.message for e in effects if isinstance(e, Tell) and isinstance(e.message, StartOver))
    report = report_of(effects).report
    assert over.state == state(5, 6)
    assert (report.state, report.materialized) == (state(5, 6), True)


def test_a_replica_whose_fetch_fails_still_offers_what_it_held_before() -> None:
    """The newest state may have died with its only holder: the job goes on from the older one, not from a checkpoint."""
    machine = ready()
    machine.on_decision(decision(1, 0, 1, member(0, W, 0), member(1, W, 1)))
    machine.on_message(vote(0, 1))
    assert report_of(machine.on_message(vote(1, 1))).report.state == state(1, 1)
    machine.on_decision(decision(2, 2, 9, member(0, C, fetch=True), member(1, W)))
    machine.on_message(
        Fetched(rank=Rank(0), state=state(2, 9), since=Seq(2), ok=False, reason="its only source is gone")
    )
    machine.on_message(vote(0, 2, caught_up=False))
    effects = machine.on_message(vote(1, 2, caught_up=False))
    (over,) = (e.message for e in effects if isinstance(e, Tell) and isinstance(e.message, StartOver))
    assert over.state == state(1, 1)
    report = report_of(effects).report
    assert (report.state, report.materialized, report.ledger) == (state(1, 1), True, machine.ledger)
    machine.on_decision(decision(3, 1, 1, member(0, W, 2)))
    machine.on_message(vote(0, 3))
    assert report_of(machine.on_message(vote(1, 3))).report.state == state(2, 3)


def fetch_fails_after_the_report() -> LeaderMachine:
    """Replica 1 dies: the step is retried and reported, and only then do we hear that it was the only source, too."""
    machine = catching_up()
    machine.on_message(Fetched(rank=Rank(0), state=state(5, 6), since=Seq(7), ok=True))
    pending = report_of(machine.on_message(vote(1, 7, yes=False, broken=True))).report
    assert (pending.state, pending.materialized) == (state(5, 6), False)
    effects = machine.on_message(
        Fetched(rank=Rank(1), state=state(5, 6), since=Seq(7), ok=False, reason="its only source is gone")
    )
    assert report_of(effects).report.state is None
    return machine


def test_gathering_decided_from_a_report_that_was_taken_back_is_answered() -> None:
    """Nothing is being fetched any more: whoever waited for it would wait for ever."""
    machine = fetch_fails_after_the_report()
    report = report_of(machine.on_decision(decision(8, 5, 6, member(0, C), quorum=2, kind=Kind.GATHER))).report
    assert (report.answers, report.state, report.materialized) == (8, None, False)
    assert machine.running is None


def test_a_step_decided_from_a_report_that_was_taken_back_gets_our_zeros_and_nothing_else() -> None:
    machine = fetch_fails_after_the_report()
    machine.on_decision(decision(8, 5, 6, member(1, W, 5, life=1), member(0, C), quorum=2))
    assert machine.on_message(vote(0, 8, caught_up=False)) == ()
    effects = machine.on_message(vote(1, 8, caught_up=False))
    assert verdicts(effects) == [(8, True)]
    assert (report_of(effects).report.answers, report_of(effects).report.state) == (8, None)


def test_what_was_held_before_a_failed_fetch_outlives_a_late_decision_too() -> None:
    machine = ready()
    machine.on_decision(decision(1, 0, 1, member(0, W, 0)))
    machine.on_message(vote(0, 1))
    machine.on_message(vote(1, 1))
    machine.on_decision(decision(2, 2, 9, member(0, C, fetch=True), member(1, W)))
    machine.on_message(vote(1, 2, yes=False))
    machine.on_message(
        Fetched(rank=Rank(0), state=state(2, 9), since=Seq(2), ok=False, reason="its only source is gone")
    )
    assert machine.state == state(1, 1)
    report = report_of(machine.on_decision(decision(3, 2, 9, member(0, C), kind=Kind.GATHER))).report
    assert (report.state, report.materialized) == (state(1, 1), True)


def test_news_of_an_earlier_fetch_is_late() -> None:
    machine = fetch_fails_after_the_report()
    machine.on_decision(decision(8, 9, 8, member(1, W, 5, life=1), member(0, C, fetch=True), quorum=2))
    assert machine.on_message(Fetched(rank=Rank(0), state=state(5, 6), since=Seq(7), ok=False, reason="late")) == ()
    machine.on_message(vote(0, 8, caught_up=False))
    assert report_of(machine.on_message(vote(1, 8, caught_up=False))).report.state == state(10, 8), "it goes on"


def test_the_same_state_is_fetched_again_and_news_of_the_first_time_is_late() -> None:
    """Its first fetch ended just when a decision had made it start another one, of the same state."""
    machine = catching_up()
    machine.on_message(vote(0, 7, yes=False, broken=True))
    machine.on_decision(decision(8, 5, 6, member(1, W, 5), member(0, C, fetch=True), quorum=2))
    for rank in (0, 1):
        assert machine.on_message(Fetched(rank=Rank(rank), state=state(5, 6), since=Seq(7), ok=True)) == ()
    machine.on_message(Fetched(rank=Rank(0), state=state(5, 6), since=Seq(8), ok=True))
    told = machine.on_message(Fetched(rank=Rank(1), state=state(5, 6), since=Seq(8), ok=True))
    assert told == (Tell(message=Load(state=state(5, 6))),)


def test_once_the_load_is_told_there_is_no_way_back() -> None:
    machine = ready()
    machine.on_decision(decision(1, 0, 1, member(0, W, 0), member(1, W, 1)))
    machine.on_message(vote(0, 1))
    machine.on_message(vote(1, 1))
    machine.on_decision(decision(2, 2, 9, member(0, C, fetch=True), member(1, W)))
    for rank in (0, 1):
        machine.on_message(Fetched(rank=Rank(rank), state=state(2, 9), since=Seq(2), ok=True))
    machine.on_message(Fetched(rank=Rank(0), state=state(2, 9), since=Seq(2), ok=False, reason="late and wrong"))
    machine.on_message(vote(0, 2, caught_up=False))
    report = report_of(machine.on_message(vote(1, 2, caught_up=False))).report
    assert (report.state, report.materialized) == (state(3, 2), False)


def test_a_fetch_that_outlasts_the_bound_starts_over() -> None:
    machine = catching_up(max_pending=2)
    effects: tuple[Effect, ...] = ()
    for seq in (7, 8, 9):
        if seq > 7:
            machine.on_decision(decision(seq, seq - 2, seq - 1, member(1, W, seq), member(0, C)))
        machine.on_message(vote(0, seq, caught_up=False))
        effects = machine.on_message(vote(1, seq, caught_up=False))
    assert [type(e.message) for e in effects if isinstance(e, Tell)] == [Verdict, StartOver]


def test_the_last_step_is_reported_as_finished_and_nothing_more_is_begun() -> None:
    machine = ready(max_steps=1)
    machine.on_decision(decision(1, 0, 1, member(0, W, 0)))
    machine.on_message(vote(0, 1))
    report = report_of(machine.on_message(vote(1, 1))).report
    assert (report.finished, report.held_units) == (True, ())


def test_gathering_and_the_end() -> None:
    machine = ready(max_steps=1)
    machine.on_decision(decision(4, 1, 3, member(1, W), member(0, C, fetch=True), kind=Kind.GATHER))
    for rank in (0, 1):
        machine.on_message(Fetched(rank=Rank(rank), state=state(1, 3), since=Seq(4), ok=True))
    machine.on_message(Loaded(rank=Rank(0), state=state(1, 3)))
    report = report_of(machine.on_message(Loaded(rank=Rank(1), state=state(1, 3)))).report
    assert (report.answers, report.state, report.materialized, report.finished) == (4, state(1, 3), True, True)
    end = decision(5, 1, 3, member(1, W), member(0, W), kind=Kind.END)
    assert machine.on_decision(end) == (Tell(message=Finish()),)
    assert machine.on_decision(decision(6, 1, 3, member(0, W))) == ()


def test_a_job_that_ended_while_we_were_away() -> None:
    machine = LeaderMachine(me())
    (tell,) = machine.on_decision(decision(5, 1, 3, member(1, W), kind=Kind.END))
    assert isinstance(tell, Tell)
    assert isinstance(tell.message, Finish)
    assert "ended" in tell.message.error


def test_a_ring_that_broke_while_idle_is_reported() -> None:
    machine = ready()
    machine.on_decision(decision(1, 0, 1, member(0, W, 0), member(1, W, 1), quorum=1))
    machine.on_message(RingBroken(rank=Rank(1), quorum_id=QuorumId(9), suspect=None, reason="an older ring"))
    machine.on_message(vote(0, 1))
    assert not report_of(machine.on_message(vote(1, 1))).report.broken
    machine.on_message(RingBroken(rank=Rank(1), quorum_id=QuorumId(1), suspect=None, reason="ours"))
    machine.on_decision(decision(2, 1, 1, member(0, W, 2), member(1, W, 3), quorum=1))
    machine.on_message(RingBroken(rank=Rank(1), quorum_id=QuorumId(1), suspect=None, reason="ours"))
    machine.on_message(vote(0, 2))
    assert report_of(machine.on_message(vote(1, 2))).report.broken


def test_only_what_failed_at_our_own_links_is_a_complaint_and_only_of_this_ring() -> None:
    machine = ready()
    machine.on_decision(decision(1, 0, 1, member(0, W, 0), member(1, W, 1), member(2, W, 2), quorum=1))
    ring, told = QuorumId(1), ReplicaId(2)
    machine.on_message(RingBroken(rank=Rank(0), quorum_id=QuorumId(9), suspect=told, reason="older", own_link=True))
    machine.on_message(RingBroken(rank=Rank(0), quorum_id=ring, suspect=told, reason="told"))
    machine.on_message(RingBroken(rank=Rank(0), quorum_id=ring, suspect=None, reason="nobody", own_link=True))
    failed = replace(vote(1, 1, yes=False, broken=True), own_link=True)
    report = report_of(machine.on_message(failed)).report
    assert report.broken
    assert report.cut_off == (1,)
    machine.on_decision(decision(2, 0, 1, member(0, W, 0), member(1, W, 1), quorum=2))
    assert report_of(machine.on_message(vote(1, 2, yes=False))).report.cut_off == ()


def test_ranks_that_differ_are_named() -> None:
    machine = LeaderMachine(me())
    machine.on_message(hello(0))
    with pytest.raises(JobMismatch, match="ranks 0 and 1 of replica 0 differ in their keepstep version"):
        machine.on_message(hello(1, version="2"))


def test_the_impossible_is_refused_and_changes_nothing() -> None:
    machine = ready()
    machine.on_decision(decision(1, 0, 1, member(0, W, 0)))
    with pytest.raises(LocalProtocolError, match="we have not answered decision 1"):
        machine.on_decision(decision(2, 0, 1, member(0, W, 0)))
    assert machine.state == state(0, 1)


def test_a_member_that_the_store_calls_gone_breaks_the_ring_of_the_running_decision_only() -> None:
    machine = ready()
    first = decision(1, 0, 1, member(0, W, 0), member(1, W, 1))
    machine.on_decision(first)
    gone = frozenset({ReplicaId(1)})
    (tell,) = machine.on_members_lost(first, gone)
    assert isinstance(tell, Tell)
    assert tell.message == Abort(
        quorum_id=first.quorum_id, suspect=ReplicaId(1), reason="replica 1 is gone, says the store"
    )
    assert machine.on_members_lost(first, frozenset()) == ()
    machine.on_message(vote(0, 1))
    machine.on_message(vote(1, 1))
    assert machine.on_members_lost(first, gone) == (), "it was committed meanwhile"


def test_a_state_that_is_loaded_counts_though_its_step_fails() -> None:
    """The only other holder may die next: then this replica must be known to hold the state."""
    machine = catching_up()
    for rank in (0, 1):
        machine.on_message(Fetched(rank=Rank(rank), state=state(5, 6), since=Seq(7), ok=True))
    assert machine.on_message(Loaded(rank=Rank(0), state=state(5, 6))) == ()
    assert machine.on_message(Loaded(rank=Rank(1), state=state(5, 6))) == (), "the step under way goes on"
    report = report_of(machine.on_message(vote(0, 7, yes=False))).report
    assert (report.state, report.materialized) == (state(5, 6), True)


def test_ranks_that_have_loaded_different_states_have_not_loaded_one() -> None:
    machine = catching_up()
    for rank in (0, 1):
        machine.on_message(Fetched(rank=Rank(rank), state=state(5, 6), since=Seq(7), ok=True))
    machine.on_message(Loaded(rank=Rank(0), state=state(5, 6)))
    machine.on_message(vote(0, 7, caught_up=True))
    machine.on_message(vote(1, 7, caught_up=False))
    assert machine.on_message(Loaded(rank=Rank(1), state=state(5, 6))) == ()
    assert machine.on_message(Loaded(rank=Rank(1), state=state(6, 7))) == ()
    report = report_of(machine.on_message(Loaded(rank=Rank(0), state=state(6, 7)))).report
    assert (report.state, report.materialized) == (state(6, 7), True)


# --- a main thread that makes no progress ---


def lags(rank: int, *, slow: bool = True) -> Lags:
    return Lags(rank=Rank(rank), slow=slow, reason="5.0 s for a step")


def test_a_slow_worker_has_the_step_tried_again_and_says_that_it_is_slow() -> None:
    machine = ready()
    first = decision(1, 0, 1, member(0, W, 0), member(1, W, 1))
    machine.on_decision(first)
    (tell,) = machine.on_message(lags(1))
    assert isinstance(tell, Tell)
    assert isinstance(tell.message, Abort)
    assert (tell.message.quorum_id, tell.message.suspect) == (first.quorum_id, 0)
    assert tell.message.reason == "replica 0 rank 1 is slow: 5.0 s for a step"
    report = report_of(machine.on_message(vote(0, 1, yes=False, broken=True))).report
    assert (report.slow, report.waits, report.held_units) == (True, False, (0,))
    assert machine.on_message(lags(1)) == (), "said already, and no decision is running"
    assert not report_of(machine.on_message(lags(1, slow=False))).report.slow


def test_it_is_slow_until_its_last_rank_is_not() -> None:
    machine = ready()
    assert report_of(machine.on_message(lags(0))).report.slow
    assert machine.on_message(lags(1)) == ()
    assert machine.on_message(lags(0, slow=False)) == ()
    assert not report_of(machine.on_message(lags(1, slow=False))).report.slow


def test_whoever_had_computed_says_that_it_waits_until_the_next_decision() -> None:
    machine = ready()
    machine.on_decision(decision(1, 0, 1, member(0, W, 0), member(1, W, 1)))
    report = report_of(machine.on_message(replace(vote(0, 1, yes=False), computed=True))).report
    assert report.waits
    machine.on_decision(decision(2, 0, 1, member(0, W, 0)))
    assert not report_of(machine.on_message(vote(0, 2, yes=False))).report.waits


def test_nobody_waits_for_one_that_catches_up() -> None:
    machine = catching_up()
    assert machine.on_message(lags(0)) == ()
    assert report_of(machine.on_message(vote(0, 7, yes=False))).report.slow
