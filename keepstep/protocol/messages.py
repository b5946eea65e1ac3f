"""What the parts say to each other. Frozen values: validated once, compared by content, safe to share.

Three conversations (FT-HSDP section 5):

* leaders with the store: `Report` up, `Decision` down (4.1 of the design: the quorum);
* a leader with its replica's ranks over the control tree: `Decided`, `Load`, `Verdict`, `Finish` down, `Hello`, `Vote`,
  `Fetched` up (two-phase commit);
* `LedgerState` and `Endpoint` ride along in them.

Standard library only: the wire encoding (msgspec) works on these dataclasses from outside.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from keepstep.protocol.ids import FIRST_UNIT, Incarnation, QuorumId, Rank, ReplicaId, Seq, Step, UnitId


class Role(StrEnum):
    """What a member does in a step."""

    WORKER = "worker"  # holds the state: trains the step
    CATCHING_UP = "catching_up"  # fetches the state, contributes zero gradients


class Kind(StrEnum):
    """What a decision is for."""

    TRAIN = "train"  # train `step` from the base state
    GATHER = "gather"  # training is over: no exchange, members that lack the final state fetch it
    END = "end"  # every live replica holds the final state: leave


@dataclass(frozen=True, slots=True, kw_only=True)
class StateName:
    """Names a state exactly: whoever holds this name holds the same bits (invariant I1).

    `lineage` is the seq of the decision under which step-1 was committed; for the initial state (step 0) it is the
    seq of the decision that made it the base.
    """

    step: Step
    lineage: Seq


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One fetch of a state. A replica that starts over reads everything again, so it is another reader then."""

    incarnation: Incarnation
    since: Seq  # the decision that told it to fetch


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """Which units are committed, as of one state. Part of the replicated state; see `protocol/ledger.py`.

    pool:   committed = {u < next_unit} minus requeued.
    stream: unit u belongs to stream u % len(cursors); committed = {u : u // len(cursors) < cursors[u % len(cursors)]}.
    """

    policy: str = "pool"
    fingerprint: str = ""  # of the data: seed, length, unit size, ...; two ledgers of one job never differ in it
    total: int | None = None  # number of units in the job; None: endless
    next_unit: UnitId = FIRST_UNIT
    requeued: tuple[UnitId, ...] = ()
    cursors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete state on persistent storage. `state` is what it was called when it was saved; restored, it gets a new name."""

    name: str  # of its directory
    state: StateName
    ledger: LedgerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a leader tells the quorum. Answers exactly one decision: `answers` = seq of the last one it has seen.

    A process without a state reports `state=None, materialized=False`. A replica that catches up reports the state it
    will hold once its fetch and replay are done, with `materialized=False`.
    """

    replica_id: ReplicaId
    incarnation: Incarnation
    answers: Seq
    state: StateName | None
    materialized: bool
    ledger: LedgerState | None  # of `state`; None without a state
    held_units: tuple[UnitId, ...] = ()  # begun for step `state.step`; their local gradients exist or are being made
    broken: bool = False  # a link of our ring failed under decision `answers`
    cut_off: tuple[ReplicaId, ...] = ()  # neighbours in that ring to or from whom our own link failed
    finished: bool = False  # `state` is the job's last (all units committed, or max_steps)
    leaving: bool = False  # was asked to leave: wants out at this step boundary
    layout_digest: str = ""  # of the buckets: names, shapes, dtypes
    label: str = ""  # "building/zone/rack", for the ring order
    checkpoint: Checkpoint | None = None  # the newest complete one that can be reached from here
    saving: bool = False  # a checkpoint is still being written here
    slow: bool = False  # a main thread lives and makes no progress (see `protocol/pace.py`)
    waits: bool = False  # decision `answers` failed, and our gradients for it are complete: we wait for whose are not


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One replica's place in a decision. Members stand in ring order."""

    replica_id: ReplicaId
    incarnation: Incarnation
    role: Role
    units: tuple[UnitId, ...] = ()
    fetch: bool = (
        False  # CATCHING_UP only: True = get the base, from WORKERs or files; False = what is under way goes on
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Two lives between which the last rings failed, although both could say so (see `protocol/apart.py`)."""

    lives: tuple[Incarnation, Incarnation]  # sorted
    failures: int  # in a row
    until: Seq  # they do not stand in one ring before this decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the quorum answers. Published by one compare-and-swap; everybody reads the same.

    `ancestry` holds the names of the states behind the base, newest first, some tens of them.
    """

    seq: Seq
    quorum_id: QuorumId
    kind: Kind
    step: Step
    base: Seq  # lineage of the state it starts from: StateName(step, base)
    ancestry: tuple[StateName, ...]
    members: tuple[Member, ...]
    ledger: LedgerState | None  # of the base; None only for a step 0 that starts from a process's initial state
    num_replicas: int  # what the job was configured with: t of the learning-rate policies
    reason: str
    apart: tuple[Apart, ...] = ()  # who could not exchange with whom of late
    away: tuple[tuple[ReplicaId, Incarnation], ...] = ()  # were members, went, and nobody has seen them end
    saver: ReplicaId | None = None  # this WORKER writes the base to persistent storage, once
    restore: Checkpoint | None = (
        None  # GATHER only: nobody alive holds a state, so the members load this one as the base
    )
    stopped: bool = False  # END only: the job was asked to stop, and is not complete

    @property
    def start(self) -> StateName:
        """The state every WORKER holds when it begins."""
        return StateName(step=self.step, lineage=self.base)

    @property
    def outcome(self) -> StateName:
        """The state of whoever completes it."""
        return StateName(step=Step(self.step + 1), lineage=self.seq)

    @property
    def workers(self) -> tuple[Member, ...]:
        return tuple(m for m in self.members if m.role is Role.WORKER)

    def member(self, replica_id: ReplicaId, incarnation: Incarnation) -> Member | None:
        """This life of the replica in the decision, or None."""
        for m in self.members:
            if m.replica_id == replica_id and m.incarnation == incarnation:
                return m
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where one rank listens."""

    host: str
    ftar_port: int
    state_port: int

    def __post_init__(self) -> None:
        if not (0 <= self.ftar_port < 65536 and 0 <= self.state_port < 65536):
            raise ValueError(f"ports lie between 0 and 65535, not {self.ftar_port} or {self.state_port}")
        if not self.host.isascii() or not self.host.isprintable() or " " in self.host:
            raise ValueError("a host is a name or an address")
        self.host.encode("idna")  # a ValueError too, where `connect` would raise it


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The same rank in another replica, as a rank needs to know it: one per member, in the decision's order."""

    replica_id: ReplicaId
    incarnation: Incarnation
    endpoint: Endpoint


# --- the store, operators -> leaders and launchers ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What somebody wants of a replica, or of the whole job. It stands until the next one about the same."""

    request_id: str  # tells a request from one before that asked for the same
    leave: bool  # False: come back
    by: str  # who asked, for people


# --- control tree, leader -> ranks -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decision that this replica takes part in, with the addresses of this rank's peers in member order."""

    decision: Decision
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Every rank has fetched `state`: load it and replay what has been committed since."""

    state: StateName


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The end of the two-phase commit of decision `seq`."""

    seq: Seq
    commit: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOver:
    """Drop the fetch and everything pending. `state`: what the tensors still hold; None: behave as a fresh process."""

    reason: str
    state: StateName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The store says that a member of ring `quorum_id` is gone: break the ring, if no link has noticed yet."""

    quorum_id: QuorumId
    suspect: ReplicaId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Leave the training loop. `error` non-empty: raise it. `left` non-empty: it was asked for, and the job is not complete."""

    error: str = ""
    left: str = ""


Downward = Decided | Load | Verdict | StartOver | Abort | Finish


# --- control tree, ranks -> leader -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A rank is ready to take part. Sent once, after the model and data are built."""

    rank: Rank
    endpoint: Endpoint
    layout_digest: str
    ledger: LedgerState  # the ledger of the initial state
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """First phase: yes iff every bucket of the step completed under decision `seq`."""

    rank: Rank
    seq: Seq
    yes: bool
    caught_up: bool = True  # CATCHING_UP: the base is loaded and everything before this step replayed
    ring_broken: bool = False
    suspect: ReplicaId | None = None
    own_link: bool = False  # our own link to or from the suspect failed; else we were told, or it has closed it
    computed: bool = False  # no: but this rank's gradients are complete
    reason: str = ""

    def __post_init__(self) -> None:
        if self.yes and self.ring_broken:
            raise ValueError("a yes says that the ring has held")  # so that votes of yes can be counted together


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """This rank's part of `state` is in memory and verified (ok), or cannot be had from anyone (not ok)."""

    rank: Rank
    state: StateName
    since: Seq  # the decision that told it to fetch: another one may name the same state again
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingBroken:
    """A ring link failed while no exchange needed it. Lets the leader act before the next bucket is due."""

    rank: Rank
    quorum_id: QuorumId
    suspect: ReplicaId | None
    reason: str
    own_link: bool = False  # as in a Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A rank that catches up holds this state now. The fetch is over when all ranks hold the one that their leader reports."""

    rank: Rank
    state: StateName


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Rank 0 has published the checkpoint of `state`, or it is given up (not ok): no rank of the replica writes it any more."""

    rank: Rank
    state: StateName
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lags:
    """This rank's main thread is slow, or not any more; `stuck`: beyond what the straggler policy allows."""

    rank: Rank
    slow: bool
    stuck: bool = False
    waits: bool = False  # it is in a collective: another rank may have the cause
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllVoted:
    """A yes of every rank under decision `seq`, counted on its way. `caught_up`: of all of them."""

    seq: Seq
    caught_up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AllFetched:
    """A `Fetched`, ok, of every rank, for the fetch that decision `since` told them to begin."""

    since: Seq


Said = Hello | Vote | Fetched | RingBroken | Loaded | Saved | Lags
"""What a rank says."""

Upward = Said | AllVoted | AllFetched
"""What a leader hears."""


# --- settings of the quorum ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The waiting rules of `quorum.decide`. All times in nanoseconds of one decider's monotonic clock."""

    num_replicas: int
    min_replicas: int = 1
    start_wait_ns: int = 60_000_000_000  # first decision: wait so long for all replicas to report
    straggler_ns: int = 60_000_000_000  # then go on without a live WORKER that does not answer
    member_grace_ns: int = 200_000_000  # a CATCHING_UP member's answer comes within milliseconds: do not drop it
    join_wait_ns: int = 0  # wait for announced replicas
    restore_wait_ns: int = 10_000_000_000
    lost_wait_ns: int = 600_000_000_000  # for the last that held a state, if nobody has seen them end; then all is lost
    finish_wait_ns: int = 30_000_000_000  # at the end: wait so long for announced replicas
    save_wait_ns: int = 1_800_000_000_000  # when the job is stopped: for its last state to be saved
    ancestry_max: int = 32
    units_per_worker: int = 1
    checkpoint_every: int = 0  # steps; 0: never
    zones: dict[ReplicaId, str] = field(default_factory=dict)  # labels of replicas whose reports have none

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.num_replicas:
            raise ValueError(f"min_replicas must be in 1..{self.num_replicas}, got {self.min_replicas}")
