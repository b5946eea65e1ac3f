"""When a leader decides: whenever what it sees changes, when a wait is over, and again when an answer of its own is lost.

    on_view ──> decide ──> Wait(until) ──> on_time ──> decide ...
                  │
                  └──> TryPublish ──> on_published ──> decide at once if the store moved on, else in a moment

A decision made from an old view is harmless: the compare-and-swap refuses it. A Halt is acted on without one, and for good; and a
decision to restore a checkpoint gives up what a report may hold that has not been seen yet. So these two count only if
everything has just been read for them:

    decide ──> Halt or restore ──> Confirm ──> on_view(fresh) ──> decide ──> Halted, TryPublish, or whatever is right by now

At most one publication is under way. Which decision wins is told by the store only: `on_published` says that the call has ended,
not how, since a call that failed may have been carried out.

Invariant: nothing seen is forgotten: a change that comes while a publication is under way is decided on when that ends, so
that a job of one leader cannot stand still. Pure; time is an argument (ns, this leader's monotonic clock).
"""

from dataclasses import dataclass, replace

from keepstep.protocol import quorum
from keepstep.protocol.ids import NO_DECISION, Incarnation, Seq
from keepstep.protocol.messages import Decision, Policy, Report

LOOK_AGAIN_NS = 50_000_000
"""The watch brings what won; until then a second try can only lose. After this, look whether the call failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TryPublish:
    """Compare-and-swap `decision` on the decision key's `revision`; then `on_published`."""

    decision: Decision
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """Read everything from the store, then `on_view` with `fresh`; or `on_unconfirmed`, if it cannot be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halted:
    """The job cannot go on as it is."""

    halt: quorum.Halt


Effect = TryPublish | Confirm | Halted


class Decider:
    """One leader's part in deciding. Single-threaded."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.waiting = ""  # why there is no decision yet
        self._seen: tuple[quorum.View, int] | None = None  # and the revision of its decision
        self._mine: Report | None = None
        self._publishing: Seq | None = None
        self._due: int | None = None
        self._confirming = False
        self._lives: frozenset[Incarnation] = frozenset()  # who had a report and was not known to be dead
        self._lost_at = 0

    def next_deadline(self) -> int | None:
        """When to call `on_time`, unless something else happens before."""
        return self._due

    def on_view(
        self, view: quorum.View, revision: int, *, now: int, mine: Report | None, fresh: bool = False
    ) -> tuple[Effect, ...]:
        """The store shows something new. `revision`: of the decision's key, 0 without one. `mine`: our newest report. `fresh`:
        the answer to Confirm."""
        lives = frozenset(s.report.incarnation for s in view.reports.values()) - view.dead
        if self._lives - lives:
            self._lost_at = now
        self._lives = lives
        self._seen = replace(view, lost_at=self._lost_at), revision
        self._mine = mine
        self._confirming = self._confirming and not fresh
        return self._decide(now, fresh)

    def on_unconfirmed(self, *, now: int) -> tuple[Effect, ...]:
        """The store could not be read: try again in a moment."""
        self._confirming, self._due = False, now + LOOK_AGAIN_NS
        return ()

    def on_time(self, *, now: int) -> tuple[Effect, ...]:
        """`next_deadline` has come."""
        return self._decide(now)

    def on_published(self, *, now: int) -> tuple[Effect, ...]:
        """The call of the last TryPublish has ended, well or not."""
        assert self._seen is not None
        seq, self._publishing = self._publishing, None
        last = self._seen[0].last
        if seq is not None and (last.seq if last is not None else NO_DECISION) < seq:
            self._due = now + LOOK_AGAIN_NS
            return ()
        return self._decide(now)

    def _decide(self, now: int, fresh: bool = False) -> tuple[Effect, ...]:
        if self._seen is None or self._publishing is not None:
            return ()
        self._due = None
        view, revision = self._seen
        answer = quorum.decide(view, self.policy, now=now)
        final = isinstance(answer, quorum.Halt) or (isinstance(answer, Decision) and answer.restore is not None)
        if final and not (isinstance(answer, quorum.Halt) and answer.misfits) and not self._is_heard(view):
            self.waiting, self._due = "the store does not show our own report", now + LOOK_AGAIN_NS
            return ()
        if final and not fresh:
            asked, self._confirming = self._confirming, True
            return () if asked else (Confirm(),)
        if isinstance(answer, quorum.Halt):
            return (Halted(halt=answer),)
        if isinstance(answer, Decision):
            self._publishing, self.waiting = answer.seq, ""
            return (TryPublish(decision=answer, revision=revision),)
        self.waiting, self._due = answer.reason, answer.until
        return ()

    def _is_heard(self, view: quorum.View) -> bool:
        """Whether the view has our newest report. Without it, the state that nobody holds may be our own."""
        mine = self._mine
        return mine is not None and (seen := view.reports.get(mine.replica_id)) is not None and seen.report == mine
