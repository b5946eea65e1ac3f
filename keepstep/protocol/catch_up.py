"""One rank's share of a step, and how a recovering one comes back (FT-HSDP sections 5.3 and 5.5).

A rank has a *main thread*, which owns the model and runs the user's code, and everything else, which must never wait for
it. This machine stands between them. To the main thread it gives *orders*, in an order that is the same on every rank of
the replica (the main threads meet in collectives, so they must do the same things in the same order):

    Begin     the tensors that the process was born with are this state, of step 0
    Train     compute these units from the state that is held
    Apply     a step is committed: take its reduced gradients through the optimizer
    LoadState the base has been fetched by every rank: load it
    Leave     stop, with or without an error

Catching up, in the words of the paper's figure 6: the decision says state s is the base. Fetch s from the WORKERs; meanwhile
the exchanges go on with zeros in our name, without the main thread, so *the ring never waits for the fetch*. Each
committed step's reduced gradients are kept; when every rank has fetched, load s, replay those steps, and go on live.

    decided(fetch) ──> FETCHING ──Load from leader──> REPLAYING ──held == start of the step──> live (the vote says so)
         ^                │ commits: keep the gradients     │ commits: apply in order
         └── StartOver ───┴─────────────────────────────────┘

Invariants: an attempt's gradients are exchanged only under a decision that starts from the attempt's state and gives this
replica exactly the attempt's units; orders for a step are given once; pure, no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.protocol.errors import InvariantViolation
from keepstep.protocol.ids import NO_DECISION, QuorumId, Rank, ReplicaId, Seq, UnitId
from keepstep.protocol.messages import (
    Abort,
    Checkpoint,
    Decided,
    Decision,
    Downward,
    Fetched,
    Finish,
    Kind,
    LedgerState,
    Load,
    Loaded,
    Member,
    Peer,
    Reader,
    RingBroken,
    Role,
    Said,
    StartOver,
    StateName,
    Verdict,
    Vote,
)
from keepstep.protocol.quorum import speculate
from keepstep.protocol.step import StepSettings, after_commit

# --- orders to the main thread ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The job starts from this process's initial state, which is called `state` from now on: others may read it."""

    state: StateName


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Compute the gradients of `units` from state `start`. `attempt` names this computation in what follows."""

    attempt: int
    start: StateName
    units: tuple[UnitId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """`decision` is committed; its reduced gradients are complete. The result is state `decision.outcome`."""

    decision: Decision
    ledger: LedgerState  # of the outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """Load `state` from the fetched bytes."""

    state: StateName
    ledger: LedgerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Leave the training loop: the job is complete, or has failed (`error`), or this was asked for (`left`)."""

    error: str = ""
    left: str = ""


Order = Begin | Train | Apply | LoadState | Leave

# --- other effects ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveOrder:
    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigureRing:
    quorum_id: QuorumId
    peers: tuple[Peer, ...]
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakRing:
    """A member is gone: what runs on this ring fails now."""

    quorum_id: QuorumId
    suspect: ReplicaId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginExchanges:
    """Exchange under decision `seq`: the buckets of `attempt`, or zeros in fresh buffers (attempt None)."""

    seq: Seq
    quorum_id: QuorumId
    attempt: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFetch:
    """Fetch this rank's part of `state` from the same rank of `sources`, or from a checkpoint. Replaces a running fetch."""

    state: StateName
    sources: tuple[Peer, ...]
    since: Seq  # the decision that says so
    restore: Checkpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelFetch:
    """Forget a running or finished fetch and every kept reduced gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Who may be fetching which state from us: these must stay readable (copy before write)."""

    readers: Mapping[Reader, StateName]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """Write this rank's part of `state` to persistent storage. It is held, or will be reached before it is overwritten."""

    state: StateName
    ledger: LedgerState


@dataclass(frozen=True, slots=True, kw_only=True)
class SendUp:
    message: Said


Effect = GiveOrder | ConfigureRing | BreakRing | BeginExchanges | StartFetch | CancelFetch | Serve | SaveState | SendUp


class Serving:
    """Who may still be reading which of our states, judged from the decisions alone.

    A member that starts a fetch reads the decision's base until a later decision shows it as a WORKER, starting another
    fetch, or gone.
    """

    def __init__(self) -> None:
        self._readers: dict[Reader, StateName] = {}

    def on_decision(self, decision: Decision, *, we_hold_it: bool) -> dict[Reader, StateName]:
        """The readers from now on; their states must be kept readable."""
        still = {m.incarnation for m in decision.members if m.role is Role.CATCHING_UP and not m.fetch}
        readers = {reader: state for reader, state in self._readers.items() if reader.incarnation in still}
        if we_hold_it:
            new = (m for m in decision.members if m.role is Role.CATCHING_UP and m.fetch)
            readers.update({Reader(incarnation=m.incarnation, since=decision.seq): decision.start for m in new})
        self._readers = readers
        return dict(readers)


class RankMachine:
    """One rank in one life. Single-threaded: all calls come from the rank's control loop."""

    def __init__(self, settings: StepSettings, rank: Rank) -> None:
        self.settings = settings
        self.rank = rank
        self.held: StateName | None = None  # what the main thread has reached
        self._touched = False  # the tensors are not the ones the process was born with
        self.running: Decision | None = None
        self.ledger: LedgerState | None = None  # of the base of `running`, then of its outcome
        self._attempt: Train | None = None
        self._attempts = 0
        self._computed = 0  # the newest attempt whose gradients are complete
        self._quorum_id: QuorumId | None = None
        self._serving = Serving()
        self._fetching: StateName | None = None
        self._since = NO_DECISION  # the decision that told us to
        self._base_ledger: LedgerState | None = None  # of `_fetching`
        self._loading = False  # Load was told: commits become orders at once
        self._behind = False  # the leader doesn't count on our state yet: tell it what we have reached
        self._saved: StateName | None = None  # the newest that we were told to save
        self._kept: list[Apply] = []  # committed while fetching, to be replayed
        self.left = False

    # --- from the leader --------------------------------------------------------------------------------------

    def on_message(self, message: Downward) -> tuple[Effect, ...]:
        if self.left:
            return ()
        match message:
            case Decided():
                return self._on_decided(message)
            case Verdict():
                return self._on_verdict(message)
            case Load():
                return self._on_load(message)
            case StartOver():
                self._attempt = None
                self._forget_fetch()
                self.held = message.state
                return (CancelFetch(),)
            case Abort():
                if message.quorum_id != self._quorum_id:
                    return ()
                return (BreakRing(quorum_id=message.quorum_id, suspect=message.suspect, reason=message.reason),)
            case Finish():
                self.left = True
                return (GiveOrder(order=Leave(error=message.error, left=message.left)),)

    def _on_decided(self, message: Decided) -> tuple[Effect, ...]:
        decision = message.decision
        me = decision.member(self.settings.replica_id, self.settings.incarnation)
        assert me is not None, "the leader only passes on decisions that name this replica"
        self.running = decision
        self.ledger = decision.ledger if decision.ledger is not None else self.ledger
        effects: list[Effect] = []
        if decision.kind is Kind.TRAIN and decision.quorum_id != self._quorum_id:
            self._quorum_id = decision.quorum_id
            position = decision.members.index(me)
            effects.append(ConfigureRing(quorum_id=decision.quorum_id, peers=message.peers, position=position))
        if me.role is Role.WORKER and self.held is None:
            if self._touched:
                raise InvariantViolation(
                    "the job would start from this process's initial state, which it no longer has"
                )
            self.held = decision.start  # the job starts from our initial state
            effects.append(GiveOrder(order=Begin(state=decision.start)))
        effects.append(Serve(readers=self._serving.on_decision(decision, we_hold_it=me.role is Role.WORKER)))
        if me.role is Role.WORKER:
            self._behind = False
            if decision.saver == me.replica_id and decision.start != self._saved and self.ledger is not None:
                self._saved = decision.start
                effects.append(SaveState(state=decision.start, ledger=self.ledger))
            effects += self._work(decision, me)
        else:
            effects += self._catch_up(decision, me, message.peers)
        return tuple(effects)

    def _work(self, decision: Decision, me: Member) -> Sequence[Effect]:
        if decision.kind is not Kind.TRAIN:
            return ()
        attempt = self._attempt
        if attempt is not None and (attempt.start, attempt.units) == (decision.start, me.units):
            return (self._begin(decision, attempt.attempt),)
        self._attempt = None
        if not me.units:
            return (self._begin(decision, None),)
        order = self._train(decision.start, me.units)
        return (self._begin(decision, order.attempt), GiveOrder(order=order))

    def _catch_up(self, decision: Decision, me: Member, peers: tuple[Peer, ...]) -> Sequence[Effect]:
        effects: list[Effect] = []
        self._attempt = None
        if me.fetch:
            self._forget_fetch()
            self.held, self._behind = None, True
            self._fetching, self._base_ledger, self._since = decision.start, self.ledger, decision.seq
            sources = tuple(
                peer for peer, member in zip(peers, decision.members, strict=True) if member.role is Role.WORKER
            )
            fetch = StartFetch(state=decision.start, sources=sources, since=decision.seq, restore=decision.restore)
            effects += [CancelFetch(), fetch]
        if decision.kind is Kind.TRAIN:
            effects.append(self._begin(decision, None))
        else:
            effects += self._tell_loaded()
        return effects

    def _on_verdict(self, verdict: Verdict) -> tuple[Effect, ...]:
        decision = self.running
        if decision is None or decision.seq != verdict.seq:
            return ()
        self.running = None
        if not verdict.commit:
            return ()  # the attempt, if any, stays: the next decision may exchange it again
        assert self.ledger is not None
        me = decision.member(self.settings.replica_id, self.settings.incarnation)
        assert me is not None
        self.ledger = after_commit(decision, self.ledger)
        self._attempt = None
        apply = Apply(decision=decision, ledger=self.ledger)
        if me.role is Role.CATCHING_UP and not self._loading:
            self._kept.append(apply)
            return ()
        effects: list[Effect] = [GiveOrder(order=apply)]
        start = decision.outcome
        if me.role is Role.WORKER and not self.settings.finished(start.step, self.ledger):
            units = speculate(decision, self.settings.replica_id)
            if units:  # the forward pass starts while report and decision travel
                effects.append(GiveOrder(order=self._train(start, units)))
        return tuple(effects)

    def _on_load(self, message: Load) -> tuple[Effect, ...]:
        if message.state != self._fetching or self._loading:
            return ()
        assert self._base_ledger is not None
        self._loading = True
        orders: list[Order] = [LoadState(state=message.state, ledger=self._base_ledger), *self._kept]
        self._kept.clear()
        return tuple(GiveOrder(order=order) for order in orders)

    # --- from the engine and the fetcher ----------------------------------------------------------------------

    def on_step_done(self, seq: Seq) -> tuple[Effect, ...]:
        """Every exchange of decision `seq` is complete here."""
        if self.running is None or self.running.seq != seq:
            return ()
        caught_up = self.held == self.running.start
        return (SendUp(message=Vote(rank=self.rank, seq=seq, yes=True, caught_up=caught_up)),)

    def on_step_failed(
        self, seq: Seq, suspect: ReplicaId | None, reason: str, *, own_link: bool = False
    ) -> tuple[Effect, ...]:
        """An exchange of decision `seq` failed; the ring is broken. `own_link`: here, at our link to or from the suspect."""
        if self.running is None or self.running.seq != seq:
            return ()
        vote = Vote(
            rank=self.rank,
            seq=seq,
            yes=False,
            ring_broken=True,
            suspect=suspect,
            own_link=own_link,
            computed=self._has_computed(self.running),
            reason=reason,
        )
        return (SendUp(message=vote),)

    def _has_computed(self, decision: Decision) -> bool:
        """Our part of a decision's sum is there. At the end of the data a WORKER may have no units: then it only waits."""
        if self._attempt is not None:
            return self._attempt.attempt == self._computed
        me = decision.member(self.settings.replica_id, self.settings.incarnation)
        return me is not None and me.role is Role.WORKER

    def on_ring_broken(
        self, quorum_id: QuorumId, suspect: ReplicaId | None, reason: str, *, own_link: bool = False
    ) -> tuple[Effect, ...]:
        """A link failed while nothing was exchanged."""
        if quorum_id != self._quorum_id:
            return ()
        broken = RingBroken(rank=self.rank, quorum_id=quorum_id, suspect=suspect, reason=reason, own_link=own_link)
        return (SendUp(message=broken),)

    def on_fetched(self, state: StateName, failure: str | None) -> tuple[Effect, ...]:
        """This rank's bytes of `state` are here, or no source is left."""
        if state != self._fetching:
            return ()
        done = Fetched(rank=self.rank, state=state, since=self._since, ok=failure is None, reason=failure or "")
        return (SendUp(message=done),)

    # --- from the main thread ---------------------------------------------------------------------------------

    def on_computed(self, attempt: int) -> None:
        """The main thread has filled every bucket of an attempt."""
        self._computed = attempt

    def on_held(self, state: StateName) -> tuple[Effect, ...]:
        """The main thread has carried out an Apply or a LoadState."""
        self._touched = True
        if self._fetching is None and self.held is None:
            return ()  # we were told to start over meanwhile
        self.held = state
        return tuple(self._tell_loaded())

    # --- small parts ------------------------------------------------------------------------------------------

    def _train(self, start: StateName, units: tuple[UnitId, ...]) -> Train:
        self._attempts += 1
        self._attempt = Train(attempt=self._attempts, start=start, units=units)
        return self._attempt

    def _begin(self, decision: Decision, attempt: int | None) -> BeginExchanges:
        return BeginExchanges(seq=decision.seq, quorum_id=decision.quorum_id, attempt=attempt)

    def _tell_loaded(self) -> Sequence[Effect]:
        if not self._behind or not self._loading or self.held is None:
            return ()
        return (SendUp(message=Loaded(rank=self.rank, state=self.held)),)

    def _forget_fetch(self) -> None:
        self._fetching, self._base_ledger, self._loading = None, None, False
        self._kept.clear()
