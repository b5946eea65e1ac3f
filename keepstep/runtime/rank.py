"""Everything of a rank but its main thread: control tree, FTAR engine, state server and fetcher, around one machine.

The main thread owns the model. It talks to the rest through four calls (`next_order`, `submit`, `held`, `close`), and is
never waited for by the exchanges of a replica that catches up. All protocol state lives on the control loop, a thread of its
own that does nothing heavy; engine, server and fetcher threads hand their events over to it.

Fails: the first fatal error (from any thread) is raised in the main thread by the next call; the rank then exits non-zero
and its replica is rebuilt. Recoverable errors become votes of "no".
"""

import asyncio
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from keepstep.ports import CheckpointStorage, EventSink, ExchangeBuffer, StateSource
from keepstep.protocol import catch_up as rank_effects
from keepstep.protocol.catch_up import Apply, Begin, Leave, LoadState, Order, RankMachine, Train
from keepstep.protocol.errors import (
    InvariantViolation,
    LocalProtocolError,
    NoProgress,
    ReplicaLost,
    TransferError,
    exit_code,
)
from keepstep.protocol.ids import LEADER
from keepstep.protocol.messages import (
    Endpoint,
    Hello,
    LedgerState,
    Policy,
    Reader,
    Said,
    Saved,
    StateName,
    Verdict,
    Vote,
)
from keepstep.protocol.pace import PaceSettings
from keepstep.protocol.step import StepSettings
from keepstep.runtime.attempts import Attempts
from keepstep.runtime.decided import Inbox, heard_in
from keepstep.runtime.engine import Engine
from keepstep.runtime.engine_events import EngineSettings, RingBroken, RingReady, StepDone, StepFailed
from keepstep.runtime.environment import Environment
from keepstep.runtime.etcd import EtcdStore, JobRecord
from keepstep.runtime.faults import Faults, Phase
from keepstep.runtime.handshake import Identity
from keepstep.runtime.leader import LeaderShell
from keepstep.runtime.pace_file import PaceFile
from keepstep.runtime.pacing import Pacing
from keepstep.runtime.restore import Restore
from keepstep.runtime.state_fetcher import FetchedState, FetchHandle, StateFetcher
from keepstep.runtime.state_server import StateServer
from keepstep.runtime.tree import ControlTree
from keepstep.runtime.tree_shape import TreeShape
from keepstep.runtime.upward import said_together, send_up
from keepstep.runtime.wire import decode_frame

log = logging.getLogger("keepstep")
T = TypeVar("T")

CLOSE_S = 15.0  # for what every rank has to say at the end
SAVE_S = 60.0  # for a checkpoint that is being written when the job ends
FIRST_LOOK_S = (
    10.0  # for the store to answer a first life, whose address may be wrong; a later one waits as the others do
)
STUCK_GRACE_S = 1.0  # for the last events to be written: the main thread is known to hang
FATAL_GRACE_S = 10.0  # the main thread may hang in a collective of a dead replica: then the process ends without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """An order with what it needs: reduced buckets for Apply, fetched bytes for LoadState."""

    order: Order
    reduced: tuple[ExchangeBuffer, ...] = ()
    fetched: FetchedState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlane:
    """What `training` brings along once the model is built."""

    source: StateSource
    serve: Callable[[Mapping[Reader, StateName]], None]
    zero_contribution: Callable[[], list[ExchangeBuffer]]
    exchanges: int
    layout_digest: str
    ledger: LedgerState
    max_steps: int | None
    engine: EngineSettings
    checkpoints: CheckpointStorage | None = None


class RankRuntime:
    """One rank's shells. Created, started and closed by the main thread."""

    def __init__(self, env: Environment, *, events: EventSink, faults: Faults) -> None:
        if env.incarnation is None:
            raise LocalProtocolError("a rank needs the incarnation of its replica before it can join")
        self.env, self.events, self.faults = env, events, faults
        self.incarnation = env.incarnation
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="keepstep-control", daemon=True)
        self._orders: queue.SimpleQueue[Given | None] = queue.SimpleQueue()
        self._fatal: BaseException | None = None
        self._closing = False
        self._tree: ControlTree | None = None
        self._store: EtcdStore | None = None
        self._leader: LeaderShell | None = None
        self._early: list[tuple[int, bytes]] = []  # from ranks that were ready before the leader's main thread
        self._inbox = Inbox(env.replica_id, env.incarnation)
        self._machine: RankMachine | None = None
        self._plane: DataPlane | None = None
        self._engine: Engine | None = None
        self._server: StateServer | None = None
        self._fetcher: StateFetcher | None = None
        self._fetch: FetchHandle | Restore | None = None
        self._fetched: FetchedState | None = None
        self._fetch_current: object | None = None  # tells the results of the newest fetch from those of others
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempts = Attempts()
        self._pacing: Pacing | None = None
        self._pace_file = PaceFile.for_rank(env)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Runs a coroutine on the control loop and waits for it (main thread)."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    # --- coming up (main thread) ------------------------------------------------------------------------------

    def connect(self, make_welcome: Callable[[], bytes], *, timeout: float = 300.0) -> bytes:
        """Joins the control tree (rank 0 first reaches the store); returns the leader's welcome to all its ranks."""
        self._thread.start()
        return self._call(self._connect(make_welcome, timeout))

    async def _connect(self, make_welcome: Callable[[], bytes], timeout: float) -> bytes:
        env = self.env
        welcome = b""
        if env.rank == LEADER:
            patience = timeout if env.life > 1 else FIRST_LOOK_S
            self._store = await EtcdStore.open(env.store, env.job, lease_s=env.lease_s, timeout=patience)
            welcome = make_welcome()
        self._tree = ControlTree(
            rank=env.rank,
            shape=TreeShape(size=env.world_size, group=env.ranks_per_host, fan_out=env.fan_out),
            token=env.token,
            job=env.job,
            incarnation=self.incarnation,
            host=env.host,
            leader_address=env.leader_address,
            listen_fd=env.leader_fd,
            welcome=welcome,
            on_down=self._on_down,
            on_up=self._on_up,
            on_together=self._on_together,
            on_lost=self._on_lost,
        )
        return await self._tree.start(timeout)

    def attach(self, plane: DataPlane) -> None:
        """The model is built: start the data plane and say hello."""
        env = self.env
        self._plane = plane
        settings = StepSettings(
            replica_id=env.replica_id,
            incarnation=self.incarnation,
            size=env.world_size,
            max_steps=plane.max_steps,
            label=env.label,
        )
        self._machine = RankMachine(settings, env.rank)
        identity = Identity(
            job=env.job,
            token=env.token,
            replica_id=env.replica_id,
            incarnation=self.incarnation,
            rank=env.rank,
            layout_digest=plane.layout_digest,
        )
        self._engine = Engine(
            identity,
            host=env.host,
            settings=plane.engine,
            on_event=self._from_engine,
            fault=self._in_exchange if self.faults else None,
        )
        part = f"{env.job}/rank {env.rank} of {env.world_size}"
        self._server = StateServer(plane.source, host=env.host, part=part, token=env.token, fault=self._serving)
        self._server.start()
        self._fetcher = StateFetcher(part=part, token=env.token, fault=self._fetching)
        endpoint = Endpoint(host=env.host, ftar_port=self._engine.port, state_port=self._server.port)
        hello = Hello(
            rank=env.rank,
            endpoint=endpoint,
            layout_digest=plane.layout_digest,
            ledger=plane.ledger,
            version=env.version,
        )
        self.emit("attached", cpu_s=time.process_time())
        self.fault(Phase.BEFORE_HELLO, 0)
        self._call(self._say_hello(hello, settings))

    async def _say_hello(self, hello: Hello, settings: StepSettings) -> None:
        env, tree, plane = self.env, self._tree, self._plane
        assert tree is not None
        assert plane is not None
        self._pacing = Pacing(
            PaceSettings(
                floor_ns=int(env.slow_floor_s * 1e9),
                ceiling_ns=int(env.slow_ceiling_s * 1e9),
                straggler_ns=int(env.straggler_s * 1e9),
            ),
            env.rank,
            kept=self._pace_file,
            say=lambda lags: self._spawn(self._send_up(lags)),
            emit=self.emit,
        )
        if env.rank == LEADER:
            assert self._store is not None
            self.emit("settings", **env.waits_s)
            policy = Policy(
                num_replicas=env.num_replicas,
                min_replicas=env.min_replicas,
                start_wait_ns=int(env.start_wait_s * 1e9),
                straggler_ns=int(env.straggler_s * 1e9),
                join_wait_ns=int(env.join_wait_s * 1e9),
                checkpoint_every=0 if plane.checkpoints is None else plane.checkpoints.every,
            )
            self._leader = LeaderShell(
                settings,
                policy,
                self._store,
                tree,
                record=lambda layout: JobRecord(
                    version=env.version,
                    num_replicas=env.num_replicas,
                    ranks_per_replica=env.world_size,
                    data_fingerprint=hello.ledger.fingerprint,
                    layout_digest=layout,
                    token_check=EtcdStore.token_check(env.job, env.token),
                ),
                again=env.life > 1,
                find=None if plane.checkpoints is None else plane.checkpoints.find,
                host=env.agent,
                emit=self.emit,
                fault=self.fault,
                on_fatal=self._fail,
            )
            await self._leader.start()
            for rank, payload in self._early:
                self._on_up(rank, payload)
            self._early.clear()
        send_up(tree, hello)

    # --- the main thread's calls ------------------------------------------------------------------------------

    def next_order(self) -> Given:
        """Waits for what to do next. Raises the first fatal error of any part."""
        self._check()
        given = self._orders.get()
        self._check()
        assert given is not None
        return given

    def submit(self, attempt: int, exchange: int, buffer: ExchangeBuffer) -> None:
        """A bucket of `attempt` is full. Goes out at once if a decision already wants it; else it is kept."""
        engine, plane = self._engine, self._plane
        assert engine is not None
        assert plane is not None
        self._attempts.submit(engine, attempt, exchange, buffer)
        if exchange == plane.exchanges - 1:
            self.loop.call_soon_threadsafe(self._on_computed, attempt)
            self.fault(Phase.AFTER_LAST_BUCKET)

    def held(self, state: StateName) -> None:
        """The main thread has carried out an Apply or LoadState: its tensors hold `state`."""
        self.loop.call_soon_threadsafe(self._on_held, state)

    def close(self) -> None:
        """Stops every thread; bounded in time. Main thread."""
        self._close_checkpoints()
        self._closing = True
        if self._plane is not None:
            self._plane.serve({})
        try:
            self._call(self._close(), timeout=CLOSE_S)
        finally:
            for part in (self._engine, self._fetcher):
                if part is not None:
                    part.close()
            if self._server is not None:
                self._server.stop()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5.0)
            if not self._thread.is_alive():
                self.loop.close()

    def _close_checkpoints(self) -> None:
        """Waits for a checkpoint that is being written, if the job has ended well."""
        storage = self._plane.checkpoints if self._plane is not None else None
        finished = self._machine is not None and self._machine.left and self._fatal is None
        if storage is not None and not storage.close(SAVE_S if finished else 0.0) and finished:
            log.warning("a checkpoint is still being written after %.0f s: it is given up", SAVE_S)

    async def _close(self) -> None:
        if self._leader is not None:
            await self._leader.close()
        elif self._store is not None:
            await self._store.close()
        if self._tree is not None:
            await self._tree.close()

    @property
    def fatal(self) -> BaseException | None:
        """The first fatal error of any part, if there was one."""
        return self._fatal

    def _check(self) -> None:
        if self._fatal is not None:
            raise self._fatal

    # --- faults and events (any thread) -----------------------------------------------------------------------

    def fault(self, phase: Phase, step: int | None = None) -> None:
        """An injection point; nothing happens unless a fault was asked for."""
        if not self.faults:
            return
        running = self._machine.running if self._machine is not None else None
        role = None
        if running is not None:
            me = running.member(self.env.replica_id, self.incarnation)
            role = me.role.value if me is not None else None
            step = running.step if step is None else step
        self.faults.point(phase, step=step, role=role)

    def _serving(self, _what: str) -> None:
        self.fault(Phase.SERVING_STATE)

    def _fetching(self, _what: str) -> None:
        self.fault(Phase.FETCHING_STATE)

    def _in_exchange(self, _what: str, _exchange: int) -> None:
        self.fault(Phase.IN_EXCHANGE)

    def emit(self, event: str, **fields: object) -> None:
        self.events.emit(event, fields)

    def _fail(self, error: BaseException) -> None:
        """Remembers the first fatal error and wakes the main thread. Any thread."""
        if self._closing:
            return
        if self._fatal is None:
            self._fatal = error
            log.error("%s: %s", type(error).__name__, error)
            grace_s = STUCK_GRACE_S if isinstance(error, NoProgress) else FATAL_GRACE_S
            watchdog = threading.Timer(grace_s, _exit_hard, args=(error,))
            watchdog.daemon = True
            watchdog.start()
        self._orders.put(None)

    # --- control loop: messages in ----------------------------------------------------------------------------

    def _on_down(self, common: bytes, record: bytes) -> None:
        heard = heard_in(common)
        self._inbox.hear(heard, record)
        message = self._inbox.message(heard)
        if isinstance(message, Verdict) and not message.commit:
            self._attempts.drop(message.seq)
        self._run(lambda machine: machine.on_message(message))

    def _on_up(self, rank: int, payload: bytes) -> None:
        if self._leader is None:
            self._early.append((rank, payload))
            return
        self._leader.on_message(decode_frame(payload))  # type: ignore[arg-type]

    def _on_together(self, topic: int, number: int, agreed: bool) -> None:
        assert self._leader is not None, "nobody votes before all have said hello"
        self._leader.on_message(said_together(topic, number, agreed))

    def _on_lost(self, rank: int, reason: str) -> None:
        if not self._closing and not (self._machine is not None and self._machine.left):
            self._fail(ReplicaLost(f"the control link to rank {rank} of this replica is lost: {reason}"))

    def _on_computed(self, attempt: int) -> None:
        if self._machine is not None and self._pacing is not None:
            self._machine.on_computed(attempt)
            self._pacing.on_done()

    def _on_held(self, state: StateName) -> None:
        if self._pacing is not None:
            self._pacing.on_done()
        self._run(lambda machine: machine.on_held(state))

    def _from_engine(self, event: object) -> None:
        try:
            self.loop.call_soon_threadsafe(self._on_engine, event)
        except RuntimeError:
            if not self._closing:
                raise

    def _on_engine(self, event: object) -> None:
        match event:
            case StepDone():
                self._run(lambda machine: machine.on_step_done(event.seq))
            case StepFailed():
                if event.fatal:
                    self._fail(InvariantViolation(f"FTAR: {event.reason}"))
                    return
                log.warning("step attempt %d failed: %s", event.seq, event.reason)
                failed = event
                self._run(
                    lambda machine: machine.on_step_failed(
                        failed.seq, failed.suspect, failed.reason, own_link=failed.own_link
                    )
                )
            case RingBroken():
                broken = event
                self._run(
                    lambda machine: machine.on_ring_broken(
                        broken.quorum_id, broken.suspect, broken.reason, own_link=broken.own_link
                    )
                )
            case RingReady():
                self.emit("ring", quorum_id=event.quorum_id)

    def _run(self, step: Callable[[RankMachine], tuple[rank_effects.Effect, ...]]) -> None:
        machine = self._machine
        if machine is None or self._closing:
            return
        try:
            for effect in step(machine):
                self._carry_out(effect)
        except Exception as error:  # noqa: BLE001  (top of the control loop: the rank ends with the reason)
            self._fail(error)

    # --- control loop: effects out ----------------------------------------------------------------------------

    def _carry_out(self, effect: rank_effects.Effect) -> None:
        engine, plane, tree = self._engine, self._plane, self._tree
        assert engine is not None
        assert plane is not None
        assert tree is not None
        match effect:
            case rank_effects.GiveOrder():
                self._give(effect.order)
            case rank_effects.ConfigureRing():
                engine.configure(effect.quorum_id, effect.peers, effect.position)
            case rank_effects.BreakRing():
                engine.abort(effect.quorum_id, effect.suspect, effect.reason)
            case rank_effects.BeginExchanges():
                self._begin(effect)
            case rank_effects.StartFetch():
                self._start_fetch(effect)
            case rank_effects.CancelFetch():
                self._cancel_fetch()
            case rank_effects.Serve():
                plane.serve(effect.readers)
            case rank_effects.SaveState():
                self._save(effect.state, effect.ledger)
            case rank_effects.SendUp():
                self._spawn(self._send_up(effect.message))

    async def _send_up(self, message: Said) -> None:
        assert self._tree is not None
        if isinstance(message, Vote):
            self.fault(Phase.BEFORE_VOTE)
        send_up(self._tree, message)
        if isinstance(message, Vote):
            self.fault(Phase.BETWEEN_VOTE_AND_COMMIT)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert error is not None
            self._fail(error)

    def _begin(self, effect: rank_effects.BeginExchanges) -> None:
        engine, plane = self._engine, self._plane
        assert engine is not None
        assert plane is not None
        engine.begin(effect.seq, effect.quorum_id, plane.exchanges)
        if effect.attempt is None:
            self._attempts.run_zeros(engine, effect.seq, tuple(plane.zero_contribution()))
        else:
            self._attempts.run(engine, effect.seq, effect.attempt)

    def _give(self, order: Order) -> None:
        assert self._pacing is not None
        if isinstance(order, Leave):
            self._pacing.close()
        elif not isinstance(order, Begin):
            self._pacing.on_order(trains=isinstance(order, Train))
        if isinstance(order, Apply):
            self._orders.put(Given(order=order, reduced=self._attempts.take(order.decision.seq)))
        elif isinstance(order, LoadState):
            fetched, self._fetched = self._fetched, None
            assert fetched is not None
            self._orders.put(Given(order=order, fetched=fetched))
        else:
            self._orders.put(Given(order=order))

    def _save(self, state: StateName, ledger: LedgerState) -> None:
        plane = self._plane
        assert plane is not None

        def done(ok: bool, reason: str) -> None:
            saved = Saved(rank=self.env.rank, state=state, ok=ok, reason=reason)
            if self.env.rank == LEADER and not self._closing:
                self.loop.call_soon_threadsafe(lambda: self._spawn(self._send_up(saved)))

        if plane.checkpoints is None:
            done(False, "this rank has no checkpoint_dir")
        else:
            plane.checkpoints.save(state, ledger, done)

    def _start_fetch(self, effect: rank_effects.StartFetch) -> None:
        assert self._fetcher is not None
        assert self._plane is not None
        state, started, current = effect.state, time.monotonic(), object()
        sources = [(p.replica_id, p.endpoint.host, p.endpoint.state_port) for p in effect.sources]

        def done(result: FetchedState | TransferError) -> None:
            self.loop.call_soon_threadsafe(self._on_fetch_done, current, state, result, time.monotonic() - started)

        self._fetch_current = current
        if effect.restore is not None:
            storage = self._plane.checkpoints
            if storage is None:
                done(TransferError("this rank has no checkpoint_dir"))
            else:
                point = lambda: self.fault(Phase.RESTORING, state.step)  # noqa: E731  (one line, used once)
                self._fetch = Restore(storage, effect.restore, state, done, point)
            return
        us = Reader(incarnation=self.incarnation, since=effect.since)
        throttle = self.env.fetch_throttle
        self._fetch = self._fetcher.fetch(state, sources, done, reader=us, throttle_bytes_per_s=throttle)

    def _on_fetch_done(
        self, fetch: object, state: StateName, result: FetchedState | TransferError, seconds: float
    ) -> None:
        if fetch is not self._fetch_current:
            return  # it was replaced or cancelled while this was on its way
        if isinstance(result, FetchedState):
            self._fetched = result
            self.emit(
                "fetch",
                step=state.step,
                lineage=state.lineage,
                seconds=seconds,
                bytes=len(result.data),
                sources=dict(result.bytes_from),
            )
        else:
            self.emit("fetch_failed", step=state.step, lineage=state.lineage, reason=str(result))
        failure = None if isinstance(result, FetchedState) else str(result)
        self._run(lambda machine: machine.on_fetched(state, failure))

    def _cancel_fetch(self) -> None:
        if self._fetch is not None:
            self._fetch.cancel()
        self._fetch = self._fetched = self._fetch_current = None
        running = self._machine.running if self._machine is not None else None
        self._attempts.drop_all_but(running.seq if running is not None else None)


def _exit_hard(error: BaseException) -> None:
    """The main thread did not pick the fatal error up: it hangs somewhere that only the end of the process ends."""
    log.error("ending the process: the main thread does not react")
    print(f"keepstep: {error}", file=sys.stderr, flush=True)  # last, where the launcher looks for the cause
    os._exit(exit_code(error))
