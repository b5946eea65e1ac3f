"""Which state is saved, by whom, and how a job goes on from one: the rules, from reports to decisions."""

from dataclasses import replace
from typing import Any

from machines import LEDGER, C, W, decision, hello, me, member, peers, state
from quorum_views import (
    BEFORE,
    DATA,
    NOW,
    OUTCOME,
    POLICY,
    L,
    completed,
    decided,
    fetching,
    name,
    report,
    roles,
    view,
    waits,
    waits_until,
)

from keepstep.protocol import checkpoints
from keepstep.protocol.catch_up import RankMachine, SaveState, StartFetch
from keepstep.protocol.deciding import Confirm, Decider, TryPublish
from keepstep.protocol.ids import Rank, ReplicaId, Seq, Step, UnitId
from keepstep.protocol.messages import Checkpoint, Decided, Fetched, Kind, Report, Saved
from keepstep.protocol.quorum import Halt, decide
from keepstep.protocol.sense import problem_of_decision, problem_of_report
from keepstep.protocol.step import LeaderMachine, Publish

OLD = Checkpoint(name="old", state=name(2, 2), ledger=replace(DATA, next_unit=UnitId(6)))
NEW = Checkpoint(name="new", state=name(3, 4), ledger=replace(DATA, next_unit=UnitId(9)))
SAVING = replace(POLICY, checkpoint_every=2)


def fresh(replica: int, found: Checkpoint | None = None, *, answers: int = 7, **more: Any) -> Report:
    return replace(report(replica, answers, life="b", **more), checkpoint=found)


# --- which state is saved, and by whom ---


def test_they_take_turns_and_the_slowest_has_none() -> None:
    def turns(slowest: int | None = None, every: int = 100) -> list[int | None]:
        workers = [ReplicaId(i) for i in range(3)]
        return [
            checkpoints.saver(Step(s), every, workers, None if slowest is None else ReplicaId(slowest))
            for s in (100, 200, 300, 400)
        ]

    assert turns() == [1, 2, 0, 1]
    assert turns(slowest=1) == [2, 0, 2, 0]
    assert turns(every=0) == [None] * 4
    assert checkpoints.saver(Step(100), 100, [ReplicaId(2)], ReplicaId(2)) == 2, "better the slowest than nobody"
    assert checkpoints.saver(Step(100), 100, []) is None
    assert checkpoints.saver(Step(0), 100, [ReplicaId(0)]) is None
    assert checkpoints.saver(Step(150), 100, [ReplicaId(0)]) is None


def test_the_base_of_every_second_step_is_saved_by_a_worker_that_has_nothing_else_to_save() -> None:
    following = decided(view(completed(0), completed(1), report(2, 7, life="b"), last=L), SAVING)
    assert (following.start, following.saver) == (OUTCOME, 1)
    assert decided(view(completed(0), completed(1), completed(2), last=L)).saver is None
    busy = decided(view(completed(0), replace(completed(1), saving=True), last=L, dead=("2a",)), SAVING)
    assert busy.saver == 0
    slow = decided(
        view(completed(0), completed(1), last=L, seen_at={0: NOW, 1: NOW + 51_000_000}, dead=("2a",)), SAVING
    )
    assert slow.saver == 0, "the answer of replica 1 came last"


def test_a_step_that_is_tried_again_is_saved_by_the_same_replica_as_long_as_it_lives() -> None:
    first = decided(view(completed(0), completed(1), completed(2), last=L), SAVING)
    held = [report(i, first.seq, first.start, ledger=replace(DATA, next_unit=UnitId(13))) for i in range(3)]
    assert first.saver is not None
    second = decided(view(*held, last=first), SAVING)
    assert second.saver == first.saver
    assert decided(view(*(replace(r, answers=second.seq) for r in held), last=second), SAVING).saver == first.saver
    others = [r for r in held if r.replica_id != first.saver]
    again = decided(view(*others, last=first, dead=(f"{first.saver}a",)), SAVING)
    assert again.saver in {r.replica_id for r in others}, "whoever should have saved it is dead"


def test_every_rank_of_the_saver_saves_and_its_leader_says_so_until_rank_0_is_done() -> None:
    leader, rank = LeaderMachine(me()), RankMachine(me(), Rank(0))
    for k in range(2):
        leader.on_message(hello(k))
    first = replace(decision(1, 0, 1, member(0, W, 0)), saver=ReplicaId(0))
    leader.on_decision(first)
    effects = rank.on_message(Decided(decision=first, peers=()))
    assert [e for e in effects if isinstance(e, SaveState)] == [SaveState(state=first.start, ledger=LEDGER)]
    assert leader._report()[-1].report.saving  # type: ignore[union-attr]
    leader.on_message(Saved(rank=Rank(0), state=state(9, 9), ok=True))
    assert leader._report()[-1].report.saving, "another one"  # type: ignore[union-attr]
    leader.on_message(Saved(rank=Rank(0), state=first.start, ok=False, reason="no space left on device"))
    assert not leader._report()[-1].report.saving  # type: ignore[union-attr]


# --- restoring ---


def test_nobody_holds_a_state_so_the_newest_checkpoint_is_loaded_by_all_who_reach_it() -> None:
    seen = view(fresh(0, OLD), fresh(1, NEW), fresh(2, NEW), last=L)
    wait, restored = waits_until(seen)
    assert wait.until == NOW + POLICY.restore_wait_ns
    assert (restored.kind, restored.restore, restored.ledger) == (Kind.GATHER, NEW, NEW.ledger)
    assert (restored.start, restored.ancestry) == (name(3, 8), ()), "a new name, and no way back"
    assert (roles(restored), fetching(restored)) == ({1: "C", 2: "C"}, {1, 2})
    assert "checkpoint new" in restored.reason
    loaded = [report(i, 8, restored.start, ledger=NEW.ledger, life="b") for i in (1, 2)]
    following = decided(view(*loaded, fresh(0, NEW, answers=8), last=restored), SAVING)
    assert (following.kind, following.start, roles(following)) == (Kind.TRAIN, restored.start, {0: "C", 1: "W", 2: "W"})
    assert decided(view(*loaded, last=restored), replace(SAVING, checkpoint_every=3)).saver is None, "just read"


def test_the_job_never_goes_to_disk_while_a_living_replica_holds_a_state_of_the_chain() -> None:
    old = report(0, 7, name(3, 3), ledger=replace(DATA, next_unit=UnitId(5)))
    back = decided(view(replace(old, checkpoint=NEW), fresh(1, NEW), last=L, dead=("2a",)))
    assert (back.restore, back.start) == (None, name(3, 3))


def test_a_silent_replica_is_waited_for_and_one_that_was_lost_just_now() -> None:
    silent = view(fresh(0, NEW), report(1, 6, OUTCOME, life="b"), last=L)
    assert waits(silent).until == NOW + POLICY.straggler_ns
    lost = replace(view(fresh(0, NEW), last=L), lost_at=NOW + 7)
    assert waits_until(lost)[0].until == NOW + 7 + POLICY.restore_wait_ns


def test_replicas_that_are_coming_are_waited_for_so_that_they_train_from_the_first_step_on() -> None:
    seen = view(fresh(0, NEW), fresh(1, NEW), last=L, announced=(2,))
    wait = waits(seen, now=NOW + POLICY.restore_wait_ns)
    assert wait.until == NOW + POLICY.start_wait_ns
    assert "waiting for replica 2" in wait.reason
    assert roles(decided(seen, now=NOW + POLICY.start_wait_ns)) == {0: "C", 1: "C"}


def test_a_job_with_an_empty_store_begins_above_every_name_of_the_checkpoint() -> None:
    start = decided(view(*(fresh(i, NEW, answers=0) for i in range(3))))
    assert (start.seq, start.start, start.quorum_id) == (5, name(3, 5), 5)
    assert (start.restore, fetching(start)) == (NEW, {0, 1, 2})
    newer = Checkpoint(name="newer", state=name(3, 9), ledger=NEW.ledger)
    assert decided(view(*(fresh(i, newer, answers=0) for i in range(3)))).seq == 10


def test_a_checkpoint_of_other_data_restores_nothing() -> None:
    other = replace(NEW, ledger=replace(NEW.ledger, fingerprint="g"))
    answer = decide(view(fresh(0, other), fresh(1, NEW), last=L), POLICY, now=NOW + POLICY.start_wait_ns)
    assert not isinstance(answer, Halt)
    assert answer.restore == NEW  # type: ignore[union-attr]


def test_a_restore_counts_only_if_the_store_was_just_read_for_it() -> None:
    decider, seen = Decider(replace(POLICY, num_replicas=1)), view(fresh(0, NEW, answers=0))
    assert decider.on_view(seen, 0, now=NOW, mine=seen.reports[ReplicaId(0)].report) == (Confirm(),)
    (effect,) = decider.on_view(seen, 0, now=NOW, mine=seen.reports[ReplicaId(0)].report, fresh=True)
    assert isinstance(effect, TryPublish)
    assert effect.decision.restore == NEW


def test_whoever_sees_a_report_go_waits_anew() -> None:
    decider = Decider(POLICY)
    decider.on_view(view(fresh(0, NEW), fresh(1, NEW), last=L), 1, now=NOW + 5, mine=None)
    decider.on_view(view(fresh(0, NEW), last=L), 1, now=NOW + 9, mine=None)
    assert decider.next_deadline() == NOW + 9 + POLICY.restore_wait_ns


def test_a_checkpoint_that_cannot_be_loaded_is_not_offered_again() -> None:
    leader, rank = LeaderMachine(me()), RankMachine(me(), Rank(0))
    assert leader.on_checkpoints((NEW, OLD)) == ()
    leader.on_message(hello(0))
    (said,) = leader.on_message(hello(1))
    assert isinstance(said, Publish)
    assert said.report.checkpoint == NEW
    restore = replace(decision(5, 3, 5, member(0, C, fetch=True), kind=Kind.GATHER, ledger=NEW.ledger), restore=NEW)
    leader.on_decision(restore)
    effects = rank.on_message(Decided(decision=restore, peers=peers(restore)))
    assert StartFetch(state=restore.start, sources=(), since=restore.seq, restore=NEW) in effects
    failed = leader.on_message(
        Fetched(rank=Rank(1), state=restore.start, since=restore.seq, ok=False, reason="a checksum is wrong")
    )
    assert isinstance(failed[-1], Publish)
    assert (failed[-1].report.state, failed[-1].report.checkpoint) == (None, None)
    (again,) = leader.on_checkpoints((NEW, OLD))
    assert isinstance(again, Publish)
    assert again.report.checkpoint == OLD
    assert leader.on_checkpoints((NEW, OLD)) == (), "nothing new to say"


# --- what is believed ---


def test_reports_and_decisions_about_checkpoints_must_make_sense() -> None:
    assert problem_of_report(fresh(0, NEW)) == ""
    assert "absurd" in problem_of_report(fresh(0, replace(NEW, state=name(3, -4))))
    assert "of its checkpoint" in problem_of_report(fresh(0, replace(NEW, ledger=replace(DATA, total=-1))))
    _, restored = waits_until(view(fresh(0, NEW), last=L))
    assert problem_of_decision(restored) == ""
    assert "something else" in problem_of_decision(replace(restored, ledger=BEFORE))
    assert "something else" in problem_of_decision(replace(restored, kind=Kind.TRAIN))
    assert "absurd" in problem_of_decision(replace(restored, restore=replace(NEW, state=name(1 << 63, 1))))
    assert "no member" in problem_of_decision(replace(L, saver=ReplicaId(9)))
    assert problem_of_decision(replace(L, saver=ReplicaId(1), seq=Seq(7))) == ""


# --- the last one ---


def test_a_job_that_is_asked_to_stop_ends_when_its_state_is_saved() -> None:
    seen = view(completed(0), completed(1), completed(2), last=L, stopping=True)
    gather = decided(seen, SAVING)
    assert (gather.kind, gather.start, roles(gather)) == (Kind.GATHER, OUTCOME, {0: "W", 1: "W", 2: "W"})
    assert gather.saver is not None
    held = [report(i, gather.seq, OUTCOME, ledger=gather.ledger) for i in range(3)]
    saving = [replace(r, saving=r.replica_id == gather.saver) for r in held]
    wait, end = waits_until(view(*saving, last=gather, stopping=True), SAVING)
    assert wait.reason.endswith(f"waiting for replica {gather.saver} to save it")
    assert (end.kind, end.stopped, wait.until) == (Kind.END, True, NOW + SAVING.save_wait_ns), "storage does not answer"
    through = decided(view(*held, last=gather, stopping=True), SAVING)
    assert (through.kind, through.stopped, through.start) == (Kind.END, True, OUTCOME)
    rest = [r for r in saving if r.replica_id != gather.saver]
    again = decided(view(*rest, last=gather, dead=(f"{gather.saver}a",), stopping=True), SAVING)
    assert again.kind is Kind.GATHER
    assert again.saver in {r.replica_id for r in rest}, "whoever should have saved it is dead"
    reborn = report(gather.saver, gather.seq, life="b")
    again = decided(view(*rest, reborn, last=gather, stopping=True), SAVING)
    assert again.kind is Kind.GATHER, "its next life has saved nothing"
    assert again.saver in {r.replica_id for r in rest}


def test_who_still_saves_an_older_state_is_waited_for() -> None:
    """Nobody is there to save the last one: no decision follows another until somebody is, or for too long."""
    busy = [replace(completed(i), saving=True) for i in range(3)]
    wait, end = waits_until(view(*busy, last=L, stopping=True), SAVING)
    assert wait.reason.endswith("waiting for replicas 0, 1 and 2 to save older states")
    assert (end.kind, end.stopped, wait.until) == (Kind.END, True, NOW + SAVING.save_wait_ns)
    free = decided(view(busy[0], completed(1), busy[2], last=L, stopping=True), SAVING)
    assert (free.kind, free.saver) == (Kind.GATHER, 1)


def test_without_checkpoints_it_ends_at_once() -> None:
    end = decided(view(completed(0), completed(1), completed(2), last=L, stopping=True))
    assert (end.kind, end.stopped, end.start) == (Kind.END, True, OUTCOME)


def test_the_leader_says_when_what_the_end_waits_for_is_saved() -> None:
    leader = LeaderMachine(me())
    for k in range(2):
        leader.on_message(hello(k))
    leader.on_decision(decision(1, 0, 1, member(0, W, 0)))
    gather = replace(decision(2, 0, 1, member(0, W), kind=Kind.GATHER), saver=ReplicaId(0))
    leader.running = None
    publish = leader.on_decision(gather)[-1]
    assert publish.report.saving  # type: ignore[union-attr]
    (publish,) = leader.on_message(Saved(rank=Rank(0), state=gather.start, ok=True))
    assert not publish.report.saving  # type: ignore[union-attr]
    leader.on_decision(replace(gather, seq=Seq(3)))
    assert not leader._report()[-1].report.saving, "it was told so before"  # type: ignore[union-attr]
