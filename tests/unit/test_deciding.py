"""When a leader decides: at once, after a wait, and again when its own answer is lost."""

from dataclasses import replace

import pytest
from machines import LEDGER, decision

from keepstep.protocol import quorum
from keepstep.protocol.deciding import LOOK_AGAIN_NS, Confirm, Decider, Effect, Halted, TryPublish
from keepstep.protocol.ids import NO_DECISION, Incarnation, ReplicaId, Seq
from keepstep.protocol.messages import Decision, Policy, Report
from keepstep.protocol.quorum import SeenReport, View

POLICY = Policy(num_replicas=1)


def view(last: Decision | None, answers: int = NO_DECISION, *, seen_at: int = 0) -> View:
    report = Report(
        replica_id=ReplicaId(0), incarnation=Incarnation("a0"), answers=answers, state=last and last.outcome,
        materialized=last is not None, ledger=LEDGER,
    )  # type: ignore[arg-type]  # fmt: skip
    return View(last=last, last_seen_at=0, reports={ReplicaId(0): SeenReport(report=report, seen_at=seen_at)})


def look(decider: Decider, seen: View, revision: int, *, now: int, fresh: bool = False) -> tuple[Effect, ...]:
    """By the replica whose report is in the view."""
    return decider.on_view(seen, revision, now=now, mine=seen.reports[ReplicaId(0)].report, fresh=fresh)


def published(decider: Decider, seen: View, revision: int) -> Decision:
    (effect,) = look(decider, seen, revision, now=0)
    assert isinstance(effect, TryPublish)
    assert effect.revision == revision
    return effect.decision


def test_one_publication_at_a_time() -> None:
    decider = Decider(POLICY)
    assert published(decider, view(None), 0).seq == 1
    assert look(decider, view(None), 0, now=1) == ()
    assert decider.next_deadline() is None


def test_a_first_decision_that_is_lost_is_tried_again() -> None:
    """Nobody else may be there to change what this leader sees."""
    decider = Decider(POLICY)
    first = published(decider, view(None), 0)
    assert decider.on_published(now=7) == ()
    assert decider.next_deadline() == 7 + LOOK_AGAIN_NS
    assert decider.on_time(now=7 + LOOK_AGAIN_NS) == (TryPublish(decision=first, revision=0),)


def test_what_comes_while_a_publication_is_under_way_is_decided_on_when_it_ends() -> None:
    """The answer of the store may take longer than the whole step: its only leader has reported again by then."""
    decider = Decider(POLICY)
    first = published(decider, view(None), 0)
    assert look(decider, view(first, answers=1), 1, now=1) == ()
    (effect,) = decider.on_published(now=2)
    assert isinstance(effect, TryPublish)
    assert (effect.decision.seq, effect.revision) == (2, 1)


def test_a_wait_is_over_by_itself() -> None:
    decider = Decider(Policy(num_replicas=2, start_wait_ns=5))
    assert look(decider, view(None), 0, now=0) == ()
    assert "waiting for replica 1" in decider.waiting
    assert decider.next_deadline() == 5
    assert len(decider.on_time(now=5)) == 1
    assert decider.waiting == ""


def test_a_halt_counts_only_if_the_store_was_just_read_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else stops a leader that sees an old picture from ending the job for itself."""
    halt = quorum.Halt(reason="nothing is left")
    monkeypatch.setattr(quorum, "decide", lambda *_, now: halt)
    decider, seen = Decider(POLICY), view(decision(1, 0, 1))
    assert look(decider, seen, 1, now=1) == (Confirm(),)
    assert look(decider, seen, 1, now=2) == (), "asked already"
    assert decider.on_unconfirmed(now=3) == ()
    assert decider.next_deadline() == 3 + LOOK_AGAIN_NS
    assert decider.on_time(now=4) == (Confirm(),)
    assert look(decider, seen, 1, now=5, fresh=True) == (Halted(halt=halt),)


def test_a_halt_that_is_out_of_date_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[quorum.Wait | quorum.Halt] = [quorum.Halt(reason="nothing is left"), quorum.Wait(reason="it is back")]
    monkeypatch.setattr(quorum, "decide", lambda *_, now: answers.pop(0))
    decider, seen = Decider(POLICY), view(decision(1, 0, 1))
    assert look(decider, seen, 1, now=1) == (Confirm(),)
    assert look(decider, seen, 1, now=2, fresh=True) == ()
    assert decider.waiting == "it is back"


@pytest.mark.parametrize("shown", [None, "older"])
def test_a_leader_that_is_not_heard_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch, shown: str | None) -> None:
    """Its lease ran out while it was cut off: the state that nobody holds is its own."""
    halt = quorum.Halt(reason="nothing is left")
    monkeypatch.setattr(quorum, "decide", lambda *_, now: halt)
    decider, seen = Decider(POLICY), view(decision(1, 0, 1))
    mine = replace(seen.reports[ReplicaId(0)].report, answers=Seq(1))
    without = seen if shown else replace(seen, reports={})
    assert decider.on_view(without, 1, now=1, mine=mine, fresh=True) == ()
    assert decider.next_deadline() == 1 + LOOK_AGAIN_NS
    heard = replace(seen, reports={ReplicaId(0): SeenReport(report=mine, seen_at=2)})
    assert decider.on_view(heard, 1, now=2, mine=mine) == (Confirm(),)
    assert decider.on_view(heard, 1, now=3, mine=mine, fresh=True) == (Halted(halt=halt),)
