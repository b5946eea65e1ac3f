"""Mutants of the protocol: each breaks one rule, by a patch on the code that runs. The simulation must catch every one.

Each says in how many seeds, from 0, of worlds with every kind of fault, or only with those that are named. A mutant that
survives is a bug of the judge, or of a world too gentle to need the rule.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from keepstep.protocol import apart, catch_up, checkpoints, deciding, ledger, quorum, step, together
from keepstep.protocol.catch_up import GiveOrder, RankMachine
from keepstep.protocol.messages import Decision, Kind, LedgerState, Load, Loaded, Report, Role, StateName, Vote
from keepstep.protocol.step import LeaderMachine, Tell
from keepstep.protocol.together import Together

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """One broken rule."""

    apply: Callable[[Patch], None]
    within: int
    kinds: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.apply.__name__


MUTANTS: list[Mutant] = []


def mutant(within: int, *kinds: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append(Mutant(apply, within, kinds))
        return apply

    return add


# --- the quorum ------------------------------------------------------------------------------------------------


@mutant(5)
def stale_reports_count(patch: Patch) -> None:
    patch.setattr(quorum, "_answers", lambda report, last: True)


@mutant(400, "freeze", "crash", "hang main")
def holders_that_are_only_away_are_not_waited_for(patch: Patch) -> None:
    genuine = quorum.decide
    patch.setattr(
        quorum, "decide", lambda view, policy, *, now: genuine(view, replace(policy, lost_wait_ns=0), now=now)
    )


@mutant(500)
def lineage_is_not_compared(patch: Patch) -> None:
    patch.setattr(quorum, "_holds", lambda r, s: r.materialized and r.state is not None and r.state.step == s.step)


@mutant(30)
def an_incomplete_state_is_trusted(patch: Patch) -> None:
    patch.setattr(quorum, "_holds", lambda r, s: r.state == s)


@mutant(100, "cut off", "mute", "blind")
def nothing_is_revoked(patch: Patch) -> None:
    """Everything that was ever decided stays on the chain."""
    genuine, seen = quorum.chain, set[StateName]()

    def chain(last: Decision) -> list[StateName]:
        if last.seq == 1:
            seen.clear()
        seen.update(genuine(last))
        return sorted(seen, key=lambda s: (s.step, s.lineage), reverse=True)

    patch.setattr(quorum, "chain", chain)


@mutant(5)
def the_outcome_of_the_last_decision_is_ignored(patch: Patch) -> None:
    patch.setattr(quorum, "chain", lambda last: [last.start, *last.ancestry])


@mutant(50, "crash")
def the_oldest_state_wins(patch: Patch) -> None:
    genuine = quorum.chain
    patch.setattr(quorum, "chain", lambda last: list(reversed(genuine(last))))


@mutant(20)
def a_fetch_is_never_started_again(patch: Patch) -> None:
    genuine = quorum._member

    def member(report: Report, role: Role, start: StateName, units: Any) -> Any:
        built = genuine(report, role, start, units)
        return replace(built, fetch=built.fetch and report.state is None)

    patch.setattr(quorum, "_member", member)


@mutant(20)
def a_quorum_id_is_never_changed(patch: Patch) -> None:
    patch.setattr(quorum, "_ring_is_whole", lambda last, members, reports, start: True)


@mutant(40)
def a_broken_ring_is_kept(patch: Patch) -> None:
    def same_members(last: Decision, members: Any, reports: Any, start: StateName) -> bool:
        return [m.incarnation for m in members] == [m.incarnation for m in last.members]

    patch.setattr(quorum, "_ring_is_whole", same_members)


@mutant(5)
def replicas_that_catch_up_get_units(patch: Patch) -> None:
    genuine = quorum._member
    patch.setattr(quorum, "_member", lambda report, role, start, units: genuine(report, Role.WORKER, start, units))


@mutant(100)
def the_job_starts_again_when_nobody_holds_a_state(patch: Patch) -> None:
    patch.setattr(
        quorum,
        "_nobody_holds_a_state",
        lambda case, last, on_chain: quorum._from_initial_state(case, "nobody holds a state"),
    )


@mutant(60, "leave")
def whoever_is_asked_to_leave_may(patch: Patch) -> None:
    patch.setattr(quorum, "_staying", lambda holders, least: [r for r in holders if not r.leaving])


@mutant(60, "stop", "rot")
def a_job_is_stopped_without_its_state_being_saved(patch: Patch) -> None:
    def end(case: Any, last: Decision, plan: Any, reason: str) -> Decision:
        return replace(quorum._decision(case, plan, Kind.END, reason, {}), stopped=True)

    patch.setattr(quorum, "_stop", end)


@mutant(50, "crash")
def the_job_ends_while_somebody_catches_up(patch: Patch) -> None:
    genuine = quorum._finish
    patch.setattr(quorum, "_finish", lambda case, last, plan: genuine(case, last, replace(plan, others=[])))


@mutant(40)
def min_replicas_is_ignored(patch: Patch) -> None:
    genuine = quorum._train_or_gather

    def train(case: Any, plan: Any, reason: str) -> Any:
        return genuine(replace(case, policy=replace(case.policy, min_replicas=1)), plan, reason)

    patch.setattr(quorum, "_train_or_gather", train)


@mutant(150, "store error")
def a_decision_that_was_not_published_is_not_tried_again(patch: Patch) -> None:
    def on_published(self: deciding.Decider, *, now: int) -> tuple[()]:
        self._publishing = None
        return ()

    patch.setattr(deciding.Decider, "on_published", on_published)


@mutant(500)
def nobody_stands_aside(patch: Patch) -> None:
    patch.setattr(apart, "aside", lambda *_: {})


@mutant(500)
def complaints_are_forgotten_at_once(patch: Patch) -> None:
    genuine = apart.learn
    patch.setattr(apart, "learn", lambda last, *more, **done: genuine(replace(last, apart=()), *more, **done))


# --- the ledger ------------------------------------------------------------------------------------------------


@mutant(5)
def units_are_committed_when_they_are_assigned(patch: Patch) -> None:
    genuine = quorum._decision

    def decision(case: Any, plan: Any, kind: Any, reason: str, units: Any, **more: Any) -> Decision:
        made = genuine(case, plan, kind, reason, units, **more)
        assert made.ledger is not None
        return replace(made, ledger=ledger.commit(made.ledger, [u for m in made.members for u in m.units]))

    patch.setattr(quorum, "_decision", decision)


@mutant(30)
def units_given_back_are_forgotten(patch: Patch) -> None:
    genuine = ledger.commit

    def commit(was: LedgerState, units: Any) -> LedgerState:
        return replace(genuine(was, units), requeued=was.requeued)

    patch.setattr(ledger, "commit", commit)


@mutant(250)
def requeued_units_are_not_issued(patch: Patch) -> None:
    genuine = ledger.assign
    patch.setattr(quorum, "assign", lambda was, workers, most: genuine(replace(was, requeued=()), workers, most))


@mutant(5)
def only_our_own_units_are_committed(patch: Patch) -> None:
    def after_commit(decision: Decision, was: LedgerState) -> LedgerState:
        return ledger.commit(was, decision.workers[0].units)

    patch.setattr(step, "after_commit", after_commit)
    patch.setattr(catch_up, "after_commit", after_commit)


# --- a replica's step ------------------------------------------------------------------------------------------


@mutant(5)
def one_vote_is_enough(patch: Patch) -> None:
    def on_vote(self: LeaderMachine, vote: Vote) -> Any:
        if self.running is None or vote.seq != self.running.seq:
            return ()
        self._voted.add(vote.rank)
        self._broken = self._broken or vote.ring_broken
        return self._commit() if vote.yes else self._retry(vote)

    patch.setattr(LeaderMachine, "_on_vote", on_vote)


@mutant(20)
def a_no_counts_as_a_yes(patch: Patch) -> None:
    genuine = LeaderMachine._on_vote
    patch.setattr(
        LeaderMachine, "_on_vote", lambda self, vote: genuine(self, replace(vote, yes=True, ring_broken=False))
    )


@mutant(30)
def a_no_is_merged_with_the_yes_of_others(patch: Patch) -> None:
    genuine = together.merged
    patch.setattr(
        together,
        "merged",
        lambda said: genuine(replace(said, yes=True, ring_broken=False) if type(said) is Vote else said),
    )


@mutant(30)
def a_merged_vote_counts_for_a_rank_that_gave_none(patch: Patch) -> None:
    genuine = Together.say

    def say(self: Together, slot: int, *what: Any) -> Any:
        genuine(self, (slot + 1) % self.slots, *what)
        return genuine(self, slot, *what)

    patch.setattr(Together, "say", say)


@mutant(300)
def all_that_are_counted_have_caught_up(patch: Patch) -> None:
    genuine = Together.say
    patch.setattr(
        Together, "say", lambda self, slot, topic, number, agreed: genuine(self, slot, topic, number, agreed=True)
    )


@mutant(250, "slow tree", "freeze", "break ring")
def a_late_vote_counts_for_the_running_decision(patch: Patch) -> None:
    genuine = LeaderMachine._on_vote

    def on_vote(self: LeaderMachine, vote: Vote) -> Any:
        return genuine(self, replace(vote, seq=self.running.seq) if self.running is not None else vote)

    patch.setattr(LeaderMachine, "_on_vote", on_vote)


@mutant(30)
def a_superseded_step_may_still_be_completed(patch: Patch) -> None:
    """Revocation is dropped: the replica answers the new decision and goes on with the old one."""

    def superseded(self: LeaderMachine, decision: Decision) -> Any:
        return self._report()

    patch.setattr(LeaderMachine, "_superseded", superseded)


@mutant(300)
def a_state_is_complete_before_it_is_replayed(patch: Patch) -> None:
    genuine = LeaderMachine._on_vote
    patch.setattr(LeaderMachine, "_on_vote", lambda self, vote: genuine(self, replace(vote, caught_up=True)))


@mutant(5)
def one_rank_that_has_fetched_is_enough(patch: Patch) -> None:
    genuine = LeaderMachine._on_fetched

    def on_fetched(self: LeaderMachine, message: Any) -> Any:
        effects = genuine(self, message)
        if effects or not message.ok or message.state != self._fetching or self._load_told:
            return effects
        self._load_told = True
        return (Tell(message=Load(state=message.state)),)

    patch.setattr(LeaderMachine, "_on_fetched", on_fetched)


@mutant(100)
def one_rank_that_has_loaded_is_enough(patch: Patch) -> None:
    genuine = LeaderMachine._on_loaded

    def on_loaded(self: LeaderMachine, message: Loaded) -> Any:
        self._loaded |= set(range(self.settings.size))  # type: ignore[arg-type]
        return genuine(self, message)

    patch.setattr(LeaderMachine, "_on_loaded", on_loaded)


@mutant(300, "crash")
def the_state_from_before_a_fetch_is_forgotten(patch: Patch) -> None:
    genuine = LeaderMachine._restart_fetch

    def restart(self: LeaderMachine) -> Any:
        self._before_fetch = None
        return genuine(self)

    patch.setattr(LeaderMachine, "_restart_fetch", restart)


@mutant(20)
def nothing_is_reported_after_a_retry(patch: Patch) -> None:
    genuine = LeaderMachine._retry
    patch.setattr(LeaderMachine, "_retry", lambda self, vote: genuine(self, vote)[:1])


# --- a main thread that makes no progress ---------------------------------------------------------------------


@mutant(100, "hang main")
def a_slow_replica_is_always_waited_for(patch: Patch) -> None:
    patch.setattr(quorum, "_slow", lambda plan, least: frozenset())


@mutant(100, "hang main")
def nobody_says_that_it_waits_for_a_slow_replica(patch: Patch) -> None:
    patch.setattr(RankMachine, "on_computed", lambda self, attempt: None)


@mutant(100, "hang main")
def too_few_go_on_without_a_slow_replica(patch: Patch) -> None:
    genuine = quorum._slow
    patch.setattr(quorum, "_slow", lambda plan, least: genuine(plan, 0))


@mutant(50, "hang main")
def once_slow_is_slow_for_good(patch: Patch) -> None:
    genuine = LeaderMachine._on_lags
    patch.setattr(LeaderMachine, "_on_lags", lambda self, message: genuine(self, replace(message, slow=True)))


# --- a rank's step ---------------------------------------------------------------------------------------------


@mutant(250)
def the_replay_leaves_the_first_step_out(patch: Patch) -> None:
    genuine = RankMachine._on_load

    def on_load(self: RankMachine, message: Load) -> Any:
        if message.state == self._fetching and not self._loading:
            self._kept[:1] = []
        return genuine(self, message)

    patch.setattr(RankMachine, "_on_load", on_load)


@mutant(250)
def sums_are_not_kept_while_fetching(patch: Patch) -> None:
    genuine = RankMachine._on_verdict

    def on_verdict(self: RankMachine, verdict: Any) -> Any:
        effects = genuine(self, verdict)
        self._kept.clear()
        return effects

    patch.setattr(RankMachine, "_on_verdict", on_verdict)


@mutant(100)
def sums_of_a_given_up_fetch_are_replayed(patch: Patch) -> None:
    def forget(self: RankMachine) -> None:
        self._fetching, self._base_ledger, self._loading = None, None, False

    patch.setattr(RankMachine, "_forget_fetch", forget)


@mutant(20)
def a_retry_is_applied(patch: Patch) -> None:
    genuine = RankMachine._on_verdict
    patch.setattr(RankMachine, "_on_verdict", lambda self, verdict: genuine(self, replace(verdict, commit=True)))


@mutant(150, "cut off", "mute", "blind")
def gradients_of_another_state_are_exchanged(patch: Patch) -> None:
    genuine = RankMachine._work

    def work(self: RankMachine, decision: Decision, me: Any) -> Any:
        if self._attempt is not None and self._attempt.units == me.units:
            self._attempt = replace(self._attempt, start=decision.start)
        return genuine(self, decision, me)

    patch.setattr(RankMachine, "_work", work)
    genuine_catch_up = RankMachine._catch_up

    def keeps(self: RankMachine, decision: Decision, me: Any, peers: Any) -> Any:
        attempt = self._attempt
        effects = genuine_catch_up(self, decision, me, peers)
        self._attempt = attempt
        return effects

    patch.setattr(RankMachine, "_catch_up", keeps)


@mutant(50, "crash")
def gradients_of_other_units_are_exchanged(patch: Patch) -> None:
    genuine = RankMachine._work

    def work(self: RankMachine, decision: Decision, me: Any) -> Any:
        if self._attempt is not None and self._attempt.start == decision.start:
            self._attempt = replace(self._attempt, units=me.units)
        return genuine(self, decision, me)

    patch.setattr(RankMachine, "_work", work)


@mutant(5)
def a_replica_that_catches_up_does_not_exchange(patch: Patch) -> None:
    genuine = RankMachine._catch_up

    def silent(self: RankMachine, decision: Decision, me: Any, peers: Any) -> Any:
        return [e for e in genuine(self, decision, me, peers) if not isinstance(e, catch_up.BeginExchanges)]

    patch.setattr(RankMachine, "_catch_up", silent)


@mutant(60)
def a_fetched_state_gets_the_ledger_of_the_newest(patch: Patch) -> None:
    genuine = RankMachine._on_load

    def on_load(self: RankMachine, message: Load) -> Any:
        return tuple(
            GiveOrder(order=replace(e.order, ledger=self.ledger))
            if isinstance(e, GiveOrder) and isinstance(e.order, catch_up.LoadState) and self.ledger is not None
            else e
            for e in genuine(self, message)
        )

    patch.setattr(RankMachine, "_on_load", on_load)


@mutant(20)
def an_exchange_is_begun_under_the_decision_before(patch: Patch) -> None:
    genuine = RankMachine._begin

    def begin(self: RankMachine, decision: Decision, attempt: int | None) -> Any:
        made = genuine(self, decision, attempt)
        return replace(made, seq=max(1, decision.seq - 1)) if decision.seq % 7 == 0 else made

    patch.setattr(RankMachine, "_begin", begin)


# --- checkpoints -----------------------------------------------------------------------------------------------


@mutant(60, "crash all")
def the_oldest_checkpoint_is_restored(patch: Patch) -> None:
    patch.setattr(checkpoints, "newest", lambda found: min(found, key=checkpoints.age, default=None))
    genuine = LeaderMachine.on_checkpoints
    patch.setattr(LeaderMachine, "on_checkpoints", lambda self, found: genuine(self, tuple(reversed(found))))


@mutant(20, "crash all")
def a_restored_state_keeps_its_name(patch: Patch) -> None:
    genuine = quorum._decision

    def decision(case: Any, plan: Any, kind: Any, reason: str, units: Any, **more: Any) -> Decision:
        kept = plan if plan.restore is None else replace(plan, start=plan.restore.state)
        return genuine(case, kept, kind, reason, units, **more)

    patch.setattr(quorum, "_decision", decision)


@mutant(200, "crash", "crash all")
def a_checkpoint_is_restored_before_anything_else(patch: Patch) -> None:
    genuine = quorum._next

    def next_(case: Any, last: Decision) -> Any:
        wait = quorum._await_members(case, last)
        behind = not any(quorum._holds(r, last.outcome) for r in case.reports)
        restored = quorum._restore(case, "") if wait is None and behind and last.restore is None else None
        return restored or genuine(case, last)

    patch.setattr(quorum, "_next", next_)


@mutant(600, "crash all", "crash", "cut off", "mute")
def nobody_is_waited_for_before_a_restore(patch: Patch) -> None:
    genuine = quorum._nobody_holds_a_state

    def nobody(case: Any, last: Decision, on_chain: Any) -> Any:
        return quorum._restore(case, "") or genuine(case, last, on_chain)

    patch.setattr(quorum, "_nobody_holds_a_state", nobody)


@mutant(100, "crash all", "cut off")
def a_state_is_saved_when_it_is_committed(patch: Patch) -> None:
    """Before a decision has named it: it may be revoked, though nobody has decided so yet."""
    genuine = RankMachine._on_verdict

    def on_verdict(self: RankMachine, verdict: Any) -> Any:
        running = self.running
        effects = genuine(self, verdict)
        if verdict.commit and running is not None and running.saver == self.settings.replica_id:
            return (*effects, catch_up.SaveState(state=running.outcome, ledger=self.ledger))  # type: ignore[arg-type]
        return effects

    patch.setattr(RankMachine, "_on_verdict", on_verdict)


@mutant(30, "crash all")
def a_checkpoint_gets_the_ledger_of_the_next_state(patch: Patch) -> None:
    genuine = RankMachine._on_decided

    def on_decided(self: RankMachine, message: Any) -> Any:
        return tuple(
            replace(e, ledger=step.after_commit(message.decision, e.ledger)) if isinstance(e, catch_up.SaveState) else e
            for e in genuine(self, message)
        )

    patch.setattr(RankMachine, "_on_decided", on_decided)


@mutant(100, "crash all", "rot")
def a_checkpoint_that_cannot_be_read_is_tried_again_and_again(patch: Patch) -> None:
    genuine = LeaderMachine.on_checkpoints

    def on_checkpoints(self: LeaderMachine, found: Any) -> Any:
        self._unreadable.clear()
        return genuine(self, found)

    patch.setattr(LeaderMachine, "on_checkpoints", on_checkpoints)


@mutant(60, "crash all")
def a_replica_that_has_no_state_reports_no_checkpoint(patch: Patch) -> None:
    genuine = LeaderMachine.on_checkpoints
    patch.setattr(
        LeaderMachine, "on_checkpoints", lambda self, found: genuine(self, found if self.materialized else ())
    )
