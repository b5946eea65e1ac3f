"""Rank 0's extra duties (FT-HSDP section 5.2): speaks for the replica in the quorum, and to its ranks.

A thin shell around `protocol.step.LeaderMachine` and `protocol.deciding.Decider`. Everything runs on the control loop, so the
machine needs no lock. Four tasks besides the callbacks:

  * the *teller* carries out Tell and TellDecided in order (`decided`; addresses come from the store, once per incarnation);
  * the *reporter* writes the newest report, retrying while the store is away: an older one that was not written is moot;
  * the *finder* looks for checkpoints while nothing is running: only then can they matter;
  * whoever sees a change of the store decides (`protocol.deciding`) and tries to publish; the compare-and-swap lets one win.

Fails: a machine that refuses (ConfigError, broken invariant), a Halt, a store that refuses us or has forgotten decisions, or a
bug in any callback end the rank through `on_fatal`; an unreachable store only makes the replica wait, and a log line says so.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, TypeVarTuple

from keepstep.protocol import deciding, quorum
from keepstep.protocol.deciding import Decider
from keepstep.protocol.errors import JobMismatch, NoProgress, NoStateLeft, ReplicaLost, StoreError
from keepstep.protocol.ids import NO_DECISION, Incarnation, Rank, ReplicaId
from keepstep.protocol.messages import (
    Checkpoint,
    Decision,
    Hello,
    Policy,
    Report,
    Upward,
    Verdict,
)
from keepstep.protocol.step import (
    Effect,
    LeaderMachine,
    Publish,
    StepSettings,
    Tell,
    TellDecided,
    layout_digest,
)
from keepstep.protocol.stuck import of_no_use
from keepstep.runtime.decided import Outbox, encode_down
from keepstep.runtime.endpoints import Endpoints
from keepstep.runtime.etcd import EtcdStore, JobRecord
from keepstep.runtime.etcd_view import StoreView
from keepstep.runtime.faults import Phase
from keepstep.runtime.threads import in_thread
from keepstep.runtime.tree import ControlTree

log = logging.getLogger("keepstep")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LINK_GRACE_S = (
    0.4  # a dead member's links tell sooner, and let an exchange end that can; only what they miss waits for this
)
OVERWRITTEN_S = 1.0  # the watch may be so late; then the store does not hold our newest report
FIND_S = 2.0  # how often checkpoints are looked for, when nothing is running
FIRST_FIND_S = 10.0  # how long a later life waits for the first look at them: the others may be training
WAIT_LOG_S = 10.0  # how often a wait is explained in the log

Emit = Callable[..., None]


class LeaderShell:
    """Create it on the control loop; `start` returns once the store is watched."""

    def __init__(
        self,
        settings: StepSettings,
        policy: Policy,
        store: EtcdStore,
        tree: ControlTree,
        *,
        record: Callable[[str], JobRecord],
        again: bool,
        find: Callable[[], tuple[Checkpoint, ...]] | None,
        host: str,
        emit: Emit,
        fault: Callable[[Phase, int | None], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """`again`: this replica has lived before, so the store must know the job. `find`: complete checkpoints; it may hang,
        or raise OSError. `host`: what its agent calls it; empty without one."""
        self.machine = LeaderMachine(settings)
        self.policy = policy
        self._store, self._tree = store, tree
        self._emit, self._fault, self._on_fatal = emit, fault, on_fatal
        self._record, self._again, self._find, self._host = record, again, find, host
        self._blind = False  # the storage of checkpoints does not answer
        self._hellos: dict[Rank, Hello] = {}
        self._view: StoreView | None = None
        self._tell: asyncio.Queue[Tell | TellDecided] = asyncio.Queue()
        self._report: Report | None = None
        self._report_written: Report | None = None
        self._report_wanted = asyncio.Event()
        self._outbox = Outbox(settings.replica_id)
        self._decider = Decider(policy)
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: tuple[str, float] = ("", 0.0)
        self._tasks: list[asyncio.Task[None]] = []
        self._overwritten = False  # the store shows another report than our newest: looked at again in a moment
        self._suspected: Decision | None = None  # some of its members may be gone
        self._closed = False

    async def start(self) -> None:
        """Watches the store; decisions and reports flow from now on."""
        self._tasks = [asyncio.create_task(self._guard(c)) for c in (self._teller(), self._reporter())]
        self._tasks.append(asyncio.create_task(self._guard(self._explain_waits())))
        await self._store.watch(lambda view: self._guarded(self._on_view, view))

    async def close(self) -> None:
        """Withdraws from the quorum."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._store.close()

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  (top of a task: end the rank with the reason)
            self._on_fatal(error)

    def _guarded(self, work: Callable[[*Ts], None], *args: *Ts) -> None:
        """Runs a callback. asyncio would only log its error, and the job would wait for this leader for ever."""
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001  (top of the callbacks: end the rank with the reason)
            self._on_fatal(error)

    def _later(self, delay: float, work: Callable[[*Ts], None], *args: *Ts) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay, self._guarded, work, *args)

    # --- inputs -----------------------------------------------------------------------------------------------

    def on_message(self, message: Upward) -> None:
        """A rank of this replica spoke (control loop)."""
        if isinstance(message, Hello):
            self._hellos[message.rank] = message
            if len(self._hellos) == self.machine.settings.size:
                self._tasks.append(asyncio.create_task(self._guard(self._enter())))
            return
        self._guarded(lambda: self._carry_out(self.machine.on_message(message)))

    async def _enter(self) -> None:
        """Every rank is ready: check that we fit the job, say where we listen, and report."""
        settings, ranks = (
            self.machine.settings,
            [self._hellos[Rank(r)] for r in range(self.machine.settings.size)],
        )
        record, endpoints = self._record(layout_digest(ranks)), tuple(hello.endpoint for hello in ranks)
        await self._persist(lambda: self._store.claim_job(record, known=self._again))
        await self._persist(lambda: self._store.put_endpoints(settings.replica_id, settings.incarnation, endpoints))
        if self._find is not None:
            first = asyncio.ensure_future(self._find_first(self._find))
            await asyncio.wait({first}, timeout=FIRST_FIND_S if self._again else None)
            self._tasks.append(asyncio.create_task(self._guard(self._finder(self._find, first))))
        for hello in ranks:
            self._carry_out(self.machine.on_message(hello))

    async def _finder(self, find: Callable[[], tuple[Checkpoint, ...]], first: "asyncio.Future[None]") -> None:
        await first
        while True:
            await asyncio.sleep(FIND_S)
            if self.machine.running is None and not self.machine.over:
                await self._find_checkpoints(find)

    async def _find_first(self, find: Callable[[], tuple[Checkpoint, ...]]) -> None:
        """Until it is known what there is. A job that took checkpoints it cannot see for none would begin anew beside them."""
        while not await self._find_checkpoints(find):  # noqa: ASYNC110  (nothing tells us when storage is back)
            await asyncio.sleep(FIND_S)

    async def _find_checkpoints(self, find: Callable[[], tuple[Checkpoint, ...]]) -> bool:
        """Whether the storage has answered."""
        try:
            found = await in_thread(find, "keepstep-find")
        except OSError as error:
            if not self._blind:
                log.warning("checkpoints cannot be looked for, trying again every %g s: %s", FIND_S, error)
            self._blind = True
            return False
        self._blind = False
        if not self._closed:
            self._carry_out(self.machine.on_checkpoints(found))
        return True

    def _on_view(self, view: StoreView) -> None:
        if self._closed:
            return
        if view.connected and self.machine.last_seen > (NO_DECISION if view.last is None else view.last.seq):
            # A new decision could get the number of one that somebody has completed: two histories. Nobody can tell any more.
            raise NoStateLeft(
                f"the store has lost the job's history: it knew decision {self.machine.last_seen}, and now "
                f"{'none' if view.last is None else view.last.seq}; was its data deleted, or an old copy brought back?"
            )
        me = self.machine.settings
        claim = view.roster.claims.get(me.replica_id)
        if claim is not None and claim.incarnation != me.incarnation:  # cut off for so long that we were replaced
            raise ReplicaLost("another life of this replica has been started: this one ends")
        if self._view is not None and self._view.connected is not view.connected:
            log.warning(
                "the store is back" if view.connected else "training waits for the store: nothing comes from it"
            )
        self._view = view
        if view.last is not None:
            self._carry_out(self.machine.on_decision(view.last))
        asked = view.requests.get(me.replica_id)
        leave = (asked is not None and asked.leave) or self._host in view.roster.drained
        self._carry_out(self.machine.on_asked(leave=leave))
        stuck = self.machine.stuck
        if stuck and (why := of_no_use(me.replica_id, me.incarnation, stuck, to_quorum_view(view))):
            self._on_fatal(NoProgress(why))
            return
        self._watch_members(view)
        self._watch_report(view)
        self._decide()

    def _watch_report(self, view: StoreView) -> None:
        """A write that was given up, or the last one of our life before, may be carried out late, over a newer one, and go with
        the lease that it was made under: nobody would ever hear from us again."""
        if not self._overwritten and self._is_overwritten(view):
            self._overwritten = True
            self._later(OVERWRITTEN_S, self._check_report)

    def _check_report(self) -> None:
        self._overwritten = False
        if self._view is not None and not self._closed and self._is_overwritten(self._view):
            self._report_written = None
            self._report_wanted.set()

    def _is_overwritten(self, view: StoreView) -> bool:
        shown, written = view.reports.get(self.machine.settings.replica_id), self._report_written
        if written is None or self._report is not written:
            return False
        return view.connected and (shown is None or shown[0] != written)

    def _watch_members(self, view: StoreView) -> None:
        """Members that the launcher saw die or whose lease ran out: if no link tells in a moment, the ring is broken by hand."""
        running = self.machine.running
        if running is None or not view.connected or running is self._suspected or not self._lost(running, view):
            return
        self._suspected = running
        self._later(LINK_GRACE_S, self._check_members, running)

    def _check_members(self, decision: Decision) -> None:
        self._suspected = None
        if self._view is not None and self._view.connected and not self._closed:
            self._carry_out(self.machine.on_members_lost(decision, self._lost(decision, self._view)))

    def _lost(self, decision: Decision, view: StoreView) -> frozenset[ReplicaId]:
        """The other members of a decision that are dead, or whose lease has run out. Ours may have too: we know better."""
        others = (m for m in decision.members if m.replica_id != self.machine.settings.replica_id)
        return frozenset(m.replica_id for m in others if m.incarnation in view.dead or m.replica_id not in view.reports)

    def _carry_out(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self._report = effect.report
                self._report_wanted.set()
            else:
                self._tell.put_nowait(effect)

    # --- telling the ranks ------------------------------------------------------------------------------------

    async def _teller(self) -> None:
        while True:
            effect = await self._tell.get()
            if isinstance(effect, TellDecided):
                await self._tell_decided(effect.decision)
            else:
                if isinstance(effect.message, Verdict) and not effect.message.commit:
                    self._emit("retry", seq=effect.message.seq, reason=effect.message.reason)
                self._tree.broadcast(encode_down(effect.message))

    async def _tell_decided(self, decision: Decision) -> None:
        self._emit(
            "decision",
            seq=decision.seq,
            quorum_id=decision.quorum_id,
            kind=decision.kind.value,
            step=decision.step,
            base=decision.base,
            reason=decision.reason,
            num_replicas=decision.num_replicas,
            saver=decision.saver,
            restore=None if decision.restore is None else decision.restore.name,
            members=[
                {
                    "replica": m.replica_id,
                    "incarnation": m.incarnation,
                    "role": m.role.value,
                    "units": list(m.units),
                }
                for m in decision.members
            ],
        )
        size = self.machine.settings.size
        tables: dict[tuple[ReplicaId, Incarnation], Endpoints] = {}
        for who in self._outbox.news(decision):
            table = await self._persist(lambda who=who: self._store.get_endpoints(*who, ranks=size))  # type: ignore[misc]
            assert table is not None
            tables[who] = table
        self._tree.scatter(*self._outbox.tell(decision, tables))

    # --- reporting --------------------------------------------------------------------------------------------

    async def _reporter(self) -> None:
        while True:
            await self._report_wanted.wait()
            self._report_wanted.clear()
            report = self._report
            if report is None or report is self._report_written:
                continue
            step = report.state.step if report.state else 0
            self._fault(Phase.BEFORE_REPORT, step)
            await self._persist(
                lambda report=report: self._store.put_report(report),  # type: ignore[misc]
                until=self._report_wanted.is_set,
            )
            if self._report_written is None:
                self._emit("reported", step=step)
            self._report_written = report
            self._fault(Phase.WAITING_DECISION, step)

    async def _persist(
        self, call: Callable[[], Coroutine[Any, Any, T]], until: Callable[[], bool] = lambda: False
    ) -> T | None:
        """Repeats a store call while the store is away, or until there is something newer to say."""
        said = False
        while True:
            try:
                return await call()
            except StoreError as error:
                if not said:
                    log.warning("training waits for the store: %s", error)
                    said = True
                await asyncio.sleep(0.1)  # a back-off, not a wait for a condition: nothing tells us when it is back
                if until():
                    return None

    # --- deciding ---------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        view = self._view
        if view is not None and not self._closed and not self.machine.over:
            answer = self._decider.on_view(
                to_quorum_view(view), view.revision, now=time.monotonic_ns(), mine=self._report
            )
            self._act(answer)

    def _act(self, effects: tuple[deciding.Effect, ...]) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for effect in effects:
            if isinstance(effect, deciding.TryPublish):
                self._tasks.append(asyncio.create_task(self._guard(self._publish(effect))))
            elif isinstance(effect, deciding.Confirm):
                self._tasks.append(asyncio.create_task(self._guard(self._confirm())))
            else:
                self._halted(effect.halt)
                return
        reason, due = self._decider.waiting, self._decider.next_deadline()
        if reason != self._waiting[0]:
            self._waiting = (reason, time.monotonic())
        if due is not None:
            self._timer = self._later(max(0.0, (due - time.monotonic_ns()) / 1e9) + 1e-4, self._on_time)

    def _on_time(self) -> None:
        if not self._closed and not self.machine.over:
            self._act(self._decider.on_time(now=time.monotonic_ns()))

    def _halted(self, halt: quorum.Halt) -> None:
        if not halt.misfits:
            self._on_fatal(NoStateLeft(halt.reason))
        elif self.machine.settings.replica_id in halt.misfits:
            self._on_fatal(JobMismatch(halt.reason))
        elif halt.reason != self._waiting[0]:
            log.warning("waiting for a replica that does not fit the job to leave: %s", halt.reason)
            self._waiting = (halt.reason, time.monotonic())

    async def _confirm(self) -> None:
        try:
            view = await self._store.read()
        except StoreError as error:
            log.warning("the job seems to be over, but the store cannot be asked: %s", error)
            await asyncio.sleep(0.1)
            if not self._closed and not self.machine.over:
                self._act(self._decider.on_unconfirmed(now=time.monotonic_ns()))
            return
        if not self._closed and view.last is not None:  # no watch brings again what has been read here
            self._carry_out(self.machine.on_decision(view.last))
        if not self._closed and not self.machine.over:
            self._view = view
            now = time.monotonic_ns()
            self._act(
                self._decider.on_view(to_quorum_view(view), view.revision, now=now, mine=self._report, fresh=True)
            )

    async def _publish(self, wanted: deciding.TryPublish) -> None:
        try:
            await self._store.publish(wanted.decision, wanted.revision)
        except StoreError as error:
            log.warning("decision %d could not be published: %s", wanted.decision.seq, error)
            await asyncio.sleep(0.1)
        self._tasks = [t for t in self._tasks if not t.done()]
        if not self._closed and not self.machine.over:
            self._act(self._decider.on_published(now=time.monotonic_ns()))

    async def _explain_waits(self) -> None:
        """A silent barrier of hours is the worst of bugs: say who is awaited, and why."""
        while True:
            await asyncio.sleep(WAIT_LOG_S)
            reason, since = self._waiting
            idle = self.machine.running is None
            if reason and idle and time.monotonic() - since > WAIT_LOG_S:
                log.warning("waiting for %.0f s: %s", time.monotonic() - since, reason)


def to_quorum_view(view: StoreView) -> quorum.View:
    """What `decide` sees of the store."""
    reports: Mapping[ReplicaId, quorum.SeenReport] = {
        replica_id: quorum.SeenReport(report=report, seen_at=seen_at)
        for replica_id, (report, seen_at) in view.reports.items()
    }
    return quorum.View(
        last=view.last,
        last_seen_at=view.last_seen_at,
        reports=reports,
        dead=view.dead,
        announced=view.announced,
        stopping=None in view.requests and view.requests[None].leave,
    )
