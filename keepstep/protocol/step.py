"""One replica's step, as its leader drives it: report -> decided -> vote -> commit | retry.

    hellos of all ranks ──> REPORTED ──decision with us──> RUNNING ──all votes yes──> commit ─┐
                               ^  ^                           │                               │
                               │  └──── decision without us ──┤ (superseded: give the step up;│
                               │                              │  asked to leave: leave)       │
                               │                              └──any vote no──> retry ────────┤
                               └───────────────── report again, answering that decision ──────┘

Consistency inside the replica is a two-phase commit (FT-HSDP section 5.3): a rank votes yes iff every bucket of the step
completed; only if all did does anyone touch the weights. Across replicas nothing is agreed: a replica that could not
complete what another one did finds itself off the newest state in the next decision and catches up.

Departs from the paper: a retry repeats the exchange, not the backward pass, because the local gradients are kept.

Invariants kept here:
  * a report answers one decision, and whoever has answered a decision can no longer complete it (`answers` only grows, and
    a verdict is only ever given for the decision that is running);
  * `state` and `ledger` change together, in `_commit`, and nowhere else but where a decision hands us a base.

Pure: takes events, returns ordered effects, keeps no clock. What fails here is a bug (`LocalProtocolError`); lost ranks
do not appear at all, since the launcher ends the whole replica.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keepstep.protocol import ledger as ledgers
from keepstep.protocol.errors import JobMismatch, LocalProtocolError
from keepstep.protocol.ids import NO_DECISION, Incarnation, QuorumId, Rank, ReplicaId, Seq, Step, UnitId
from keepstep.protocol.messages import (
    Abort,
    AllFetched,
    AllVoted,
    Checkpoint,
    Decision,
    Fetched,
    Finish,
    Hello,
    Kind,
    Lags,
    LedgerState,
    Load,
    Loaded,
    Member,
    Report,
    RingBroken,
    Role,
    Saved,
    StartOver,
    StateName,
    Upward,
    Verdict,
    Vote,
)
from keepstep.protocol.quorum import speculate

# --- effects, in the order in which they must be carried out ---------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Write the report to the store. A later one replaces an earlier one that is not written yet."""

    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Send to every rank of the replica."""

    message: Load | Verdict | StartOver | Abort | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class TellDecided:
    """Send the decision to every rank, each with the addresses of its own peers."""

    decision: Decision


Effect = Publish | Tell | TellDecided


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What a leader must know about the job."""

    replica_id: ReplicaId
    incarnation: Incarnation
    size: int  # ranks in the replica
    max_steps: int | None = None
    label: str = ""  # "building/zone/rack"
    max_pending: int = 16  # reduced gradients kept while a fetch is under way, in steps

    def finished(self, step: Step, ledger: LedgerState) -> bool:
        """Whether the state before `step` is the job's last."""
        return (self.max_steps is not None and step >= self.max_steps) or ledgers.complete(ledger)


def after_commit(decision: Decision, ledger: LedgerState) -> LedgerState:
    """The ledger of `decision.outcome`: the base's ledger plus the units of every WORKER.

    Whoever completes the exchange holds the gradients of all of them, so the ledger is a function of the decision alone.
    """
    return ledgers.commit(ledger, tuple(unit for m in decision.members for unit in m.units))


def layout_digest(hellos: Iterable[Hello]) -> str:
    """One digest for the replica, from its ranks in order: same-numbered ranks of two replicas must agree."""
    return hashlib.sha256("+".join(hello.layout_digest for hello in hellos).encode()).hexdigest()[:16]


class LeaderMachine:
    """Drives one life of one replica. Single-threaded: all calls come from the leader's control loop."""

    def __init__(self, settings: StepSettings) -> None:
        self.settings = settings
        self.state: StateName | None = None
        self.materialized = False
        self.ledger: LedgerState | None = None
        self.running: Decision | None = None
        self.over = False
        self.leaving = False  # we were asked to leave the job
        self._last_seen = NO_DECISION
        self._hellos: dict[Rank, Hello] = {}
        self._layout_digest = ""  # of all of them
        self._voted: set[Rank] = set()
        self._caught_up = True  # so have all that have voted
        self._fetching: StateName | None = None  # what was last told to fetch, unless we gave that up
        self._since = NO_DECISION  # by which decision
        self._fetched: set[Rank] = set()
        self._loaded: set[Rank] = set()  # ranks that hold `_loaded_state`
        self._loaded_state: StateName | None = None
        self._load_told = False
        self._before_fetch: tuple[StateName, LedgerState | None] | None = (
            None  # what the tensors hold until Load is told
        )
        self._start_over = ""
        self._pending = 0
        self._held_units: tuple[UnitId, ...] = ()
        self._quorum_id: QuorumId | None = None
        self._broken = False  # a link of ring `_quorum_id` failed
        self._cut_off: set[ReplicaId] = set()  # to or from these, at one of our ranks
        self._slow: dict[Rank, Lags] = {}  # their main threads make no progress
        self._waits = False  # the last decision failed when our gradients for it were complete
        self._saving: StateName | None = None  # our ranks are writing it to persistent storage
        self._saved: StateName | None = None  # the newest that they were told to write
        self._checkpoint: Checkpoint | None = None  # what we say we could restore from
        self._restoring: Checkpoint | None = None  # where `_fetching` comes from, if not from peers
        self._unreadable: set[str] = set()  # names of checkpoints that could not be loaded here

    @property
    def stuck(self) -> tuple[Lags, ...]:
        """Of ranks whose main threads are past the straggler policy."""
        return tuple(lags for lags in self._slow.values() if lags.stuck)

    @property
    def last_seen(self) -> Seq:
        """The newest decision that was read from the store."""
        return self._last_seen

    # --- what the quorum says ---------------------------------------------------------------------------------

    def on_decision(self, decision: Decision) -> tuple[Effect, ...]:
        """A decision was read from the store. Old ones (the store only moves forward) are ignored."""
        if self.over or decision.seq <= self._last_seen:
            return ()
        self._last_seen = decision.seq
        me = decision.member(self.settings.replica_id, self.settings.incarnation)
        if decision.kind is Kind.END:
            return self._end(decision, me)
        if not self._ready:
            return ()  # our first report will answer it
        if me is None:
            return self._superseded(decision)
        if self.running is not None:
            raise LocalProtocolError(
                f"decision {decision.seq} names us, but we have not answered decision {self.running.seq}"
            )
        return self._adopt(decision, me)

    def _superseded(self, decision: Decision) -> tuple[Effect, ...]:
        """The quorum went on without us: give up what was running, and answer the new decision."""
        effects: list[Effect] = []
        self._waits = False
        if self.running is not None and self.running.kind is Kind.TRAIN:
            effects.append(self._verdict(commit=False, reason=f"superseded by decision {decision.seq}"))
        self.running = None
        if self.leaving:
            self.over = True
            return (*effects, Tell(message=Finish(left=self._goodbye())))
        return (*effects, *self._after_verdict())

    def _adopt(self, decision: Decision, me: Member) -> tuple[Effect, ...]:
        if me.role is Role.WORKER and self.state is None:
            if decision.base != decision.seq:
                raise LocalProtocolError(f"decision {decision.seq} calls us a WORKER, but we hold no state")
            self.state, self.materialized = decision.start, True  # our initial state is the job's
            assert self.ledger is None or decision.ledger is None or self.ledger == decision.ledger
            self.ledger = decision.ledger or self._initial_ledger
        elif me.role is Role.WORKER and (self.state != decision.start or not self.materialized):
            raise LocalProtocolError(
                f"decision {decision.seq} calls us a WORKER of {decision.start}, we hold {self.state}"
            )
        elif me.role is Role.CATCHING_UP and me.fetch:
            if (self.materialized or self._load_told) and self.state is not None:
                self._before_fetch = (self.state, self.ledger)  # what is being loaded and replayed will be held, too
            self.state, self.materialized = decision.start, False
            self.ledger = decision.ledger or self._initial_ledger
            self._fetching, self._since = decision.start, decision.seq
            self._restoring = decision.restore
            self._fetched.clear()
            self._loaded_state = None
            self._load_told = False
            self._pending = 0
            self._start_over = ""
        elif me.role is Role.CATCHING_UP and self.state != decision.start:
            # Decided from a report that we have taken back since: the fetch it speaks of has failed. Zeros are all we can give.
            self._before_fetch = (self.state, self.ledger) if self.materialized and self.state is not None else None
            self.state, self.materialized = decision.start, False
            self.ledger = decision.ledger or self.ledger or self._initial_ledger
            self._start_over = "the fetch had failed before this was decided"
        self.running = decision
        self._quorum_id, self._broken, self._waits = decision.quorum_id, False, False
        self._cut_off.clear()
        self._voted.clear()
        self._caught_up = True
        self._held_units = me.units
        if decision.saver == me.replica_id and decision.start != self._saved:
            self._saving = self._saved = decision.start
        told = TellDecided(decision=decision)
        if decision.kind is Kind.GATHER and (self.materialized or self._start_over):
            self.running = None
            return (told, *self._after_verdict())  # nothing will come that this could wait for
        return (told,)

    def _end(self, decision: Decision, me: Member | None) -> tuple[Effect, ...]:
        self.over = True
        self.running = None
        if decision.stopped:
            finish = Finish(left=f"the job stops before step {decision.step}, as it was asked to")
        elif me is None and self.leaving:
            finish = Finish(left=self._goodbye())
        elif me is None:
            finish = Finish(error=f"the job has ended: {decision.reason}")
        else:
            finish = Finish()
        return (Tell(message=finish),)

    def _goodbye(self) -> str:
        return f"replica {self.settings.replica_id} leaves the job, as it was asked to"

    def on_asked(self, *, leave: bool) -> tuple[Effect, ...]:
        """Somebody wants this replica out of the job, or not any more. It goes when a decision does without it."""
        if self.over or leave is self.leaving:
            return ()
        self.leaving = leave
        return self._report() if self._ready and self.running is None else ()  # else the end of the step will say so

    def on_members_lost(self, decision: Decision, lost: frozenset[ReplicaId]) -> tuple[Effect, ...]:
        """These members of `decision` have been gone for a moment, says the store; their links should have told us.

        A link that nobody was using, or that was never made, cannot: break the ring instead of waiting for a deadline.
        """
        if not lost or self.running is not decision or decision.kind is not Kind.TRAIN:
            return ()
        suspect = min(lost)
        reason = f"replica {suspect} is gone, says the store"
        return (Tell(message=Abort(quorum_id=decision.quorum_id, suspect=suspect, reason=reason)),)

    # --- what our ranks say -----------------------------------------------------------------------------------

    def on_message(self, message: Upward) -> tuple[Effect, ...]:
        """A rank of this replica spoke. Messages about anything but the running decision are late: ignored."""
        if self.over:
            return ()
        match message:
            case Hello():
                return self._on_hello(message)
            case Vote():
                return self._on_vote(message)
            case AllVoted():
                return self._on_all_voted(message)
            case Fetched():
                return self._on_fetched(message)
            case AllFetched():
                return self._on_all_fetched(message)
            case Loaded():
                return self._on_loaded(message)
            case RingBroken():
                if message.quorum_id == self._quorum_id:
                    self._ring_failed(message)
                return ()
            case Saved():
                return self._on_saved(message)
            case Lags():
                return self._on_lags(message)

    def _on_hello(self, hello: Hello) -> tuple[Effect, ...]:
        if hello.rank in self._hellos:
            raise LocalProtocolError(f"rank {hello.rank} said hello twice")
        first = next(iter(self._hellos.values()), hello)
        for what, ours, theirs in (
            ("keepstep version", first.version, hello.version),
            ("data set or unit size", first.ledger.fingerprint, hello.ledger.fingerprint),
        ):
            if ours != theirs:
                raise JobMismatch(
                    f"ranks {first.rank} and {hello.rank} of replica {self.settings.replica_id} differ in their {what} "
                    f"({ours} and {theirs}): start every rank with the same script, arguments and installation"
                )
        self._hellos[hello.rank] = hello
        if not self._ready:
            return ()
        self._layout_digest = layout_digest(self._hellos[Rank(r)] for r in range(self.settings.size))
        return self._report()

    def _on_vote(self, vote: Vote) -> tuple[Effect, ...]:
        if self.running is None or vote.seq != self.running.seq:
            return ()
        self._voted.add(vote.rank)
        self._caught_up &= vote.caught_up
        if vote.ring_broken:
            self._ring_failed(vote)
        if not vote.yes:
            return self._retry(vote)
        return self._commit() if len(self._voted) == self.settings.size else ()

    def _on_all_voted(self, votes: AllVoted) -> tuple[Effect, ...]:
        if self.running is None or votes.seq != self.running.seq:
            return ()
        self._caught_up &= votes.caught_up
        return self._commit()

    def _ring_failed(self, message: Vote | RingBroken) -> None:
        self._broken = True
        if message.own_link and message.suspect is not None:
            self._cut_off.add(message.suspect)

    def _on_fetched(self, message: Fetched) -> tuple[Effect, ...]:
        current = (message.state, message.since) == (self._fetching, self._since)
        if not current or self._load_told or self._start_over:
            return ()
        if not message.ok:
            self._start_over = f"rank {message.rank} could not fetch the state: {message.reason}"
            if self._restoring is not None:
                self._unreadable.add(self._restoring.name)
                self._checkpoint = None  # until somebody looks again
            return self._restart_fetch() if self._not_training else ()
        self._fetched.add(message.rank)
        return self._load() if len(self._fetched) == self.settings.size else ()

    def _on_all_fetched(self, message: AllFetched) -> tuple[Effect, ...]:
        current = self._fetching is not None and message.since == self._since
        return self._load() if current and not self._load_told and not self._start_over else ()

    def _load(self) -> tuple[Effect, ...]:
        assert self._fetching is not None
        self._load_told = True
        self._before_fetch = None
        return (Tell(message=Load(state=self._fetching)),)

    def _on_loaded(self, message: Loaded) -> tuple[Effect, ...]:
        if self.materialized or message.state != self.state:
            return ()
        if message.state != self._loaded_state:
            self._loaded_state, self._loaded = message.state, set()
        self._loaded.add(message.rank)
        if len(self._loaded) < self.settings.size:
            return ()
        self.materialized = True
        if not self._not_training:
            return ()  # the end of the step, whatever it is, will say so
        self.running = None
        return self._report()

    def _on_saved(self, message: Saved) -> tuple[Effect, ...]:
        if message.state != self._saving:
            return ()
        self._saving = None
        return self._report() if self.running is None else ()  # the end of the job may wait for it

    def _on_lags(self, message: Lags) -> tuple[Effect, ...]:
        """A main thread makes no progress, or does again. If others may be waiting for us, the step is tried again, and the
        quorum sees who could go on."""
        before = bool(self._slow)
        said = self._slow.pop(message.rank, None)
        if message.slow:
            self._slow[message.rank] = said if said is not None and said.stuck else message
        running = self.running
        if running is None:
            return self._report() if self._ready and bool(self._slow) is not before else ()
        me = running.member(self.settings.replica_id, self.settings.incarnation)
        if not message.slow or running.kind is not Kind.TRAIN or me is None or me.role is not Role.WORKER:
            return ()
        reason = f"replica {self.settings.replica_id} rank {message.rank} is slow: {message.reason}"
        return (Tell(message=Abort(quorum_id=running.quorum_id, suspect=self.settings.replica_id, reason=reason)),)

    def on_checkpoints(self, found: Sequence[Checkpoint]) -> tuple[Effect, ...]:
        """These are complete and can be read, as far as one can see without reading them: newest first."""
        usable = next((c for c in found if c.name not in self._unreadable), None)
        if usable == self._checkpoint:
            return ()
        self._checkpoint = usable
        return self._report() if self._ready and self.running is None and not self.over else ()

    # --- the end of a step ------------------------------------------------------------------------------------

    def _commit(self) -> tuple[Effect, ...]:
        decision, ledger = self.running, self.ledger
        assert decision is not None
        assert ledger is not None
        me = decision.member(self.settings.replica_id, self.settings.incarnation)
        assert me is not None
        if me.role is Role.CATCHING_UP:
            self.materialized = self._load_told and self._caught_up
            self._pending = 0 if self.materialized else self._pending + 1
            if self._pending > self.settings.max_pending and not self._load_told:
                self._start_over = f"the fetch has outlasted {self._pending} steps"
        self.state = decision.outcome
        self.ledger = ledger if self._start_over else after_commit(decision, ledger)  # starting over takes both back
        self._held_units = ()
        if me.role is Role.WORKER and not self.settings.finished(self.state.step, self.ledger):
            self._held_units = speculate(decision, self.settings.replica_id)
        verdict = self._verdict(commit=True)
        self.running = None
        return (verdict, *self._after_verdict())

    def _retry(self, vote: Vote) -> tuple[Effect, ...]:
        self._waits = vote.computed
        verdict = self._verdict(commit=False, reason=f"rank {vote.rank}: {vote.reason}")
        self.running = None
        return (verdict, *self._after_verdict())

    def _after_verdict(self) -> tuple[Effect, ...]:
        return self._restart_fetch() if self._start_over else self._report()

    def _restart_fetch(self) -> tuple[Effect, ...]:
        """Back to what the tensors hold: the state from before the fetch, or none.

        The newest state may have died with its only holders; then the older one is what the job goes on from.
        """
        reason, self._start_over = self._start_over, ""
        before, self._before_fetch = self._before_fetch, None
        self.state, self.ledger = before if before is not None else (None, None)
        self.materialized = before is not None
        self.running = None
        self._fetching, self._load_told = None, False
        self._fetched.clear()
        self._held_units = ()
        return (Tell(message=StartOver(reason=reason, state=self.state)), *self._report())

    def _verdict(self, *, commit: bool, reason: str = "") -> Tell:
        assert self.running is not None
        return Tell(message=Verdict(seq=self.running.seq, commit=commit, reason=reason))

    # --- reports ----------------------------------------------------------------------------------------------

    @property
    def _ready(self) -> bool:
        return len(self._hellos) == self.settings.size

    @property
    def _not_training(self) -> bool:
        return self.running is None or self.running.kind is not Kind.TRAIN

    @property
    def _initial_ledger(self) -> LedgerState:
        return self._hellos[Rank(0)].ledger

    def _report(self) -> tuple[Effect, ...]:
        if self.leaving and self.state is None:  # nobody needs what we hold, and no decision has to do without us first
            self.over = True
            return (Tell(message=Finish(left=self._goodbye())),)
        ledger = self.ledger if self.state is not None else self._initial_ledger
        report = Report(
            replica_id=self.settings.replica_id,
            incarnation=self.settings.incarnation,
            answers=self._last_seen,
            state=self.state,
            materialized=self.materialized,
            ledger=ledger,
            held_units=self._held_units,
            broken=self._broken,
            cut_off=tuple(sorted(self._cut_off)),
            finished=self.state is not None and ledger is not None and self.settings.finished(self.state.step, ledger),
            leaving=self.leaving,
            layout_digest=self._layout_digest,
            label=self.settings.label,
            checkpoint=self._checkpoint,
            saving=self._saving is not None,
            slow=bool(self._slow),
            waits=self._waits,
        )
        return (Publish(report=report),)
