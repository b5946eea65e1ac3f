"""One replica of *shadow ranks* in one process: the real store, leader and control tree, and ranks without a model.

A shadow rank says what a rank says (hello, votes, fetched, loaded) and hears and checks what it is told, with the code of a rank;
there is no thread, exchange or tensor. With `machines` it has the rank's state machine too, and every effect is carried out at
once. It is told by the process that started this one, through standard input, when its sums would be complete. What is seen is
written to standard output, one JSON object a line, with times of CLOCK_MONOTONIC, which all processes of a machine share.

    in:   {"vote": true | false}   {"check": 1}   {"usage": 1}     end of file: leave
    out:  reported, verdict, decided, checked, usage, failed

Ranks of one host live in one process of the tree, as its own ranks: what is the same for all of them is read once. With `sockets`
each has its own place and its own socket, and reads for itself.
"""

import asyncio
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keepstep.protocol import catch_up
from keepstep.protocol.catch_up import Apply, LoadState, RankMachine
from keepstep.protocol.errors import ConfigError, InvariantViolation
from keepstep.protocol.follow import for_ranks
from keepstep.protocol.ids import Incarnation, Rank, ReplicaId, Seq
from keepstep.protocol.messages import (
    Decided,
    Decision,
    Endpoint,
    Fetched,
    Hello,
    LedgerState,
    Load,
    Loaded,
    Member,
    Policy,
    Role,
    Said,
    Verdict,
    Vote,
)
from keepstep.protocol.step import StepSettings
from keepstep.runtime.decided import Announced, Changed, Committed, Continued, Heard, Inbox, News, heard_in, neighbours
from keepstep.runtime.etcd import EtcdStore, JobRecord
from keepstep.runtime.leader import LeaderShell
from keepstep.runtime.tree import ControlTree
from keepstep.runtime.tree_shape import TreeShape
from keepstep.runtime.upward import said_together, send_up
from keepstep.runtime.wire import decode_frame
from keepstep.version import __version__

LEDGER = LedgerState(fingerprint="shadow")
JOIN_S = 900.0
JOIN_AT_ONCE, VOTE_AT_ONCE = 128, 64  # ranks
CHECK_ALL = 2048  # ranks of a replica up to which each of them makes the protocol's message of what it heard
LOST = "the ring broke"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowSettings:
    """One replica's place in the job."""

    store: str
    job: str
    token: str
    replica: int
    replicas: int
    ranks: int
    ranks_per_host: int
    fan_out: int
    incarnation: str
    life: int
    listener: int  # descriptor, where rank 0's control tree is called
    port: int
    sockets: bool
    machines: bool


def policy_of(replicas: int) -> Policy:
    """Nobody is left out for being slow: all of them share two cores here."""
    long = 3_600_000_000_000
    return Policy(num_replicas=replicas, start_wait_ns=long, straggler_ns=long, member_grace_ns=long)


def endpoint_of(replica: int, rank: int, ranks_per_host: int) -> Endpoint:
    """Made up, so that a wrong neighbour shows."""
    host = rank // ranks_per_host
    return Endpoint(host=f"10.{replica}.{host >> 8}.{host & 255}", ftar_port=20000 + rank, state_port=40000 + rank)


class ShadowRank:
    """One rank. `on_down` and `vote` are what is measured."""

    __slots__ = ("caught_up", "decision", "heard", "inbox", "machine", "rank", "replica", "running", "tree")

    def __init__(self, replica: "ShadowReplica", rank: Rank, tree: ControlTree) -> None:
        self.replica, self.rank, self.tree = replica, rank, tree
        self.inbox = Inbox(replica.me.replica_id, replica.me.incarnation)
        self.machine = RankMachine(replica.me, rank) if replica.settings.machines else None
        self.running: Seq | None = None
        self.caught_up = False
        self.decision: Decision | None = None  # that we catch up in
        self.heard: Continued | News | None = None  # the last decision, as it was heard

    def on_decided(self, heard: Continued | News, record: bytes) -> None:
        if self.running is not None:
            raise InvariantViolation(f"rank {self.rank} heard {heard} while decision {self.running} ran")
        self.inbox.hear(heard, record)
        self.heard, self.running = heard, heard.seq
        if self.machine is not None:
            self._on_message(heard)
        elif not isinstance(heard, Continued):
            self._fetch(heard.seq)

    def on_other(self, heard: Heard) -> None:
        """Anything but a decision."""
        if isinstance(heard, Committed | Verdict):
            if heard.seq != self.running:
                raise InvariantViolation(f"rank {self.rank} heard {heard} while decision {self.running} ran")
            self.running = None
        if self.machine is not None:
            self._on_message(heard)
        elif isinstance(heard, Load):
            self.caught_up = True
            self.say(Loaded(rank=self.rank, state=heard.state))

    def _on_message(self, heard: Heard) -> None:
        message, machine = self.inbox.message(heard), self.machine
        assert machine is not None
        if isinstance(message, Decided):
            self.decision = message.decision
        self._carry_out(machine.on_message(message))

    def _fetch(self, seq: Seq) -> None:
        """Without a machine: what a rank that catches up says, if its fetch takes no time."""
        decision, me = self.replica.running(seq)
        if me.role is Role.WORKER:
            self.caught_up = True
        elif me.fetch:
            self.caught_up = False
            self.say(Fetched(rank=self.rank, state=decision.start, since=seq, ok=True))

    def vote(self, yes: bool) -> None:
        assert self.running is not None
        if self.machine is not None:
            machine, seq = self.machine, self.running
            self._carry_out(machine.on_step_done(seq) if yes else machine.on_step_failed(seq, None, LOST))
        elif yes:
            self.say(Vote(rank=self.rank, seq=self.running, yes=True, caught_up=self.caught_up))
        else:
            self.say(Vote(rank=self.rank, seq=self.running, yes=False, ring_broken=True, reason=LOST))

    def say(self, message: Said) -> None:
        send_up(self.tree, message)

    def _carry_out(self, effects: Sequence[catch_up.Effect]) -> None:
        machine = self.machine
        assert machine is not None
        for effect in effects:
            match effect:
                case catch_up.SendUp():
                    self.say(effect.message)
                case catch_up.StartFetch():
                    self._carry_out(machine.on_fetched(effect.state, None))
                case catch_up.GiveOrder(order=LoadState() as load):
                    self._carry_out(machine.on_held(load.state))
                case catch_up.GiveOrder(order=Apply() as apply):
                    self._carry_out(machine.on_held(apply.decision.outcome))
                case _:
                    pass  # engine, server, main thread: not here

    # --- after the clock was stopped --------------------------------------------------------------------------

    def problem(self, decision: Decision, heard: Heard | None, whole: bool) -> str:
        """Whether this rank has heard of `decision` as the others have, with its own neighbours; `whole`: makes the protocol's
        message of it, as a rank does."""
        if self.heard != heard:
            return "it heard something else"
        per_host = self.replica.settings.ranks_per_host
        for n in neighbours(decision, self.replica.me.replica_id):
            m = decision.members[n]
            if self.inbox.where(m.replica_id, m.incarnation) != endpoint_of(m.replica_id, self.rank, per_host):
                return f"it has another address of replica {m.replica_id}"
        if not whole:
            return ""
        assert self.heard is not None
        mine = self.decision if self.machine is not None else self.inbox.message(self.heard).decision  # type: ignore[union-attr]
        return "" if mine == decision else "its decision is another one"


class ShadowReplica:
    """A replica's process: its leader and all its ranks."""

    def __init__(self, settings: ShadowSettings) -> None:
        self.settings = settings
        self.me = StepSettings(
            replica_id=ReplicaId(settings.replica), incarnation=Incarnation(settings.incarnation), size=settings.ranks
        )
        self.trees: list[ControlTree] = []
        self.ranks: list[ShadowRank] = []
        self.leader: LeaderShell | None = None
        self._heard, self._ended = 0, 0  # ranks that have heard of the newest decision, and of its verdict
        self._voted_at = 0
        self._cpu = (0.0, 0.0)  # of this process before the first and after the last vote, in seconds
        self._over = asyncio.Event()

    # --- what ranks hear --------------------------------------------------------------------------------------

    def on_decided(self, seq: Seq, ranks: int) -> None:
        self._heard += ranks
        if self._heard == len(self.ranks):
            self._heard, now, cpu = 0, time.monotonic_ns(), time.process_time()
            self._tell("decided", seq=seq, at=now, cpu=(cpu - self._cpu[0], cpu - self._cpu[1]))

    def running(self, seq: Seq) -> tuple[Decision, Member]:
        """Decision `seq`, and what we are in it. Asked of the leader: to make it of what was heard takes a rank of its own."""
        assert self.leader is not None
        decision = self.leader.machine.running
        me = None if decision is None else decision.member(self.me.replica_id, self.me.incarnation)
        if decision is None or me is None or decision.seq != seq:
            raise InvariantViolation(f"the ranks hear of decision {seq} while their leader runs {decision}")
        return decision, me

    def on_verdict(self, seq: Seq, ranks: int) -> None:
        self._ended += ranks
        if self._ended == len(self.ranks):
            self._ended = 0
            self._tell("verdict", seq=seq, at=time.monotonic_ns(), voted=self._voted_at)

    def _check(self) -> None:
        """Whether every rank has the decision that our leader runs, and its own neighbours."""
        assert self.leader is not None
        decision = self.leader.machine.running
        assert decision is not None
        told, heard = for_ranks(decision), self.ranks[0].heard
        every = 1 if len(self.ranks) <= CHECK_ALL else self.settings.ranks_per_host
        problems = {r.rank: r.problem(told, heard, r.rank % every == 0) for r in self.ranks}
        wrong = {rank: problem for rank, problem in problems.items() if problem}
        wrong |= {rank.rank: "it is not in this step" for rank in self.ranks if rank.running != decision.seq}
        self._tell("checked", seq=decision.seq, wrong=dict(list(wrong.items())[:3]), workers=len(decision.workers))

    # --- coming up --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        settings = self.settings
        store = await EtcdStore.open(settings.store, settings.job, lease_s=60.0)
        self._plant()
        await self.trees[0].start(JOIN_S)
        gate = asyncio.Semaphore(JOIN_AT_ONCE)
        await asyncio.gather(*(self._join(tree, gate) for tree in self.trees[1:]))
        self.leader = LeaderShell(
            self.me, policy_of(settings.replicas), store, self.trees[0], record=self._record, again=settings.life > 1,
            find=None,
            host="", emit=self._emit, fault=lambda *_: None, on_fatal=self._fail,
        )  # fmt: skip
        await self.leader.start()
        for rank in self.ranks:
            endpoint = endpoint_of(settings.replica, rank.rank, settings.ranks_per_host)
            rank.say(
                Hello(rank=rank.rank, endpoint=endpoint, layout_digest="shadow", ledger=LEDGER, version=__version__)
            )
        self._cpu = (time.process_time(), time.process_time())
        gc.collect()
        gc.freeze()  # thousands of ranks in one process: the collector would look at all of them every now and then
        try:
            await self._obey()
        finally:
            await self.leader.close()

    def _plant(self) -> None:
        """The processes of the tree, and the ranks that each of them holds."""
        settings = self.settings
        shape = TreeShape(size=settings.ranks, group=settings.ranks_per_host, fan_out=settings.fan_out)
        holds = 1 if settings.sockets else settings.ranks_per_host
        for first in range(0, settings.ranks, holds):
            ranks: list[ShadowRank] = []
            tree = ControlTree(
                rank=first, shape=shape, token=settings.token.encode(), job=settings.job,
                incarnation=settings.incarnation, host="127.0.0.1", leader_address=("127.0.0.1", settings.port),
                listen_fd=settings.listener if first == 0 else None, welcome=b"", on_down=self._for_all(ranks),
                on_up=self._on_up, on_together=self._on_together,
                on_lost=self._on_lost, holds=min(holds, settings.ranks - first),
            )  # fmt: skip
            ranks.extend(
                ShadowRank(self, Rank(rank), tree) for rank in range(first, min(first + holds, settings.ranks))
            )
            self.trees.append(tree)
            self.ranks.extend(ranks)

    async def _join(self, tree: ControlTree, gate: asyncio.Semaphore) -> None:
        async with gate:
            await tree.start(JOIN_S)

    def _for_all(self, ranks: Sequence[ShadowRank]) -> Callable[[bytes, bytes], None]:
        """What comes down for a process of the tree, read once and given to each of its ranks."""

        def on_down(common: bytes, records: bytes) -> None:
            heard = heard_in(common)
            if isinstance(heard, Continued | Announced | Changed):
                width = len(records) // len(ranks)
                for n, rank in enumerate(ranks):
                    rank.on_decided(heard, records[n * width : (n + 1) * width] if width else b"")
                self.on_decided(heard.seq, len(ranks))
                return
            for rank in ranks:
                rank.on_other(heard)
            if isinstance(heard, Committed | Verdict):
                self.on_verdict(heard.seq, len(ranks))

        return on_down

    def _record(self, layout: str) -> JobRecord:
        settings = self.settings
        return JobRecord(
            version=__version__, num_replicas=settings.replicas, ranks_per_replica=settings.ranks,
            data_fingerprint=LEDGER.fingerprint, layout_digest=layout,
            token_check=EtcdStore.token_check(settings.job, settings.token.encode()),
        )  # fmt: skip

    def _emit(self, event: str, **_: object) -> None:
        if event == "reported":
            self._tell("reported")

    def _on_up(self, rank: int, payload: bytes) -> None:
        assert self.leader is not None
        self.leader.on_message(decode_frame(payload))  # type: ignore[arg-type]

    def _on_together(self, topic: int, number: int, agreed: bool) -> None:
        assert self.leader is not None
        self.leader.on_message(said_together(topic, number, agreed))

    def _on_lost(self, rank: int, reason: str) -> None:
        self._fail(ConfigError(f"the control link to rank {rank} is lost: {reason}"))

    def _fail(self, error: BaseException) -> None:
        self._tell("failed", reason=f"{type(error).__name__}: {error}")
        self._over.set()

    # --- what it is told --------------------------------------------------------------------------------------

    async def _obey(self) -> None:
        orders = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        over = asyncio.ensure_future(self._over.wait())
        while True:
            line = asyncio.ensure_future(orders.readline())
            await asyncio.wait({line, over}, return_when=asyncio.FIRST_COMPLETED)
            if not line.done() or not line.result():
                line.cancel()
                over.cancel()
                return
            order = json.loads(line.result())
            if "vote" in order:
                await self._vote(order["vote"])
            elif "check" in order:
                self._check()
            else:
                self._usage()

    async def _vote(self, yes: bool) -> None:
        """The clock runs from the last yes, or from the first no: that one ends the step, maybe before others have voted."""
        began = time.process_time()
        self._voted_at, self._cpu = time.monotonic_ns(), (began, began)
        for n, rank in enumerate(self.ranks):
            if rank.running is None:
                break  # a no of one of the first has come back already
            rank.vote(yes)
            if n % VOTE_AT_ONCE == VOTE_AT_ONCE - 1:
                await asyncio.sleep(0)
        if yes:
            self._voted_at, self._cpu = time.monotonic_ns(), (began, time.process_time())

    def _usage(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        sent = sum(tree.sent_bytes for tree in self.trees)
        self._tell("usage", cpu_s=used.ru_utime + used.ru_stime, rss=resident, sent=sent)

    def _tell(self, event: str, **fields: object) -> None:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


def main() -> None:
    """`python -m keepstep.scale.shadow_ranks SETTINGS`: the process of one replica."""
    settings = ShadowSettings(**json.loads(sys.argv[1]))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    cores = sorted(os.sched_getaffinity(0))  # a replica stays on one, or the kernel may pack them all on the same
    os.sched_setaffinity(0, {cores[settings.replica % len(cores)]})
    asyncio.run(ShadowReplica(settings).run())


if __name__ == "__main__":
    main()
