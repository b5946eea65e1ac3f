"""`FTARProcessGroup`: the fault-tolerant all-reduce as a `torch.distributed.ProcessGroup`, for use outside keepstep.

    pg = keepstep.FTARProcessGroup()
    pg.configure("127.0.0.1:29500/quorum-1", "replica-0", rank=0, world_size=3)
    pg.allreduce([tensor], ReduceOp.SUM).wait()
    ...one dies: ExchangeError...
    pg.configure("127.0.0.1:29500/quorum-2", "replica-0", rank=0, world_size=2)

`configure` may be called any number of times, with other members and ranks: links to members that stay are kept. It has the
arguments of torchft's process groups, so it can stand in for them. Members meet in a torch store, under a prefix that is new
each time.

All members call the same operations in the same order. Operations are asynchronous, and may be issued from any thread. After the
first failure every operation fails at once with the same ExchangeError, which names the suspect, until the next `configure`; the
future of a failed operation is set too. The process lives on.

Not supported, and said so: other operations and reductions, sparse or complex tensors, tensors that are not contiguous or not on
the CPU.
"""

import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore, Work  # type: ignore[attr-defined]
from torch.futures import Future

from keepstep.protocol.errors import ConfigError, ExchangeError
from keepstep.protocol.ids import Incarnation, QuorumId, Rank, ReplicaId, Seq
from keepstep.protocol.messages import Endpoint, Peer
from keepstep.runtime.engine import Engine
from keepstep.runtime.handshake import Identity
from keepstep.runtime.ring import ENDLESS, EngineEvent, EngineSettings, RingBroken, RingReady, StepFailed
from keepstep.training.collectives import REDUCIBLE, Combine, as_bytes, in_place, together
from keepstep.training.exchange_buffers import raw
from keepstep.training.point_to_point import PointToPoint

SEQ = Seq(1)
JOB = "ftar-process-group"


class _Member(msgspec.Struct, frozen=True):
    """What a member tells the others through the store."""

    id: int
    life: str
    host: str
    port: int
    direct_port: int
    ring: int  # the last one that it was in
    settings: str
    name: str


class FTARWork(Work):
    """One operation under way."""

    def __init__(self, group: "FTARProcessGroup", tensors: Any) -> None:
        super().__init__()
        self._group, self._tensors = group, tensors
        self._future: Future[Any] = Future()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def _end(self, error: Exception | None) -> None:
        """Once; the first outcome counts. Any thread."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            self._ended.set()
        if error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises ExchangeError if the operation failed, or if it is not complete in time, which ends the whole group."""
        seconds = self._group.timeout_s if not timeout else timeout.total_seconds()
        if not self._ended.wait(seconds):
            self._group._fail(ExchangeError(f"an operation was not complete after {seconds:g} s"))
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> Any:
        return self._tensors

    def get_future(self) -> "Future[Any]":
        return self._future


class FTARProcessGroup(dist.ProcessGroup):
    """See the module.

    Args:
        timeout: of an operation, and of `configure`.
        token: members with another one are refused. Default: the environment's KEEPSTEP_TOKEN, or none.
        host: the address where other members reach this one. Default: that of the interface towards the store.
        settings: of the engine; the same for all members.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        *,
        token: str | None = None,
        host: str | None = None,
        settings: EngineSettings | None = None,
    ) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._timeout, self._host = timeout, host
        self._settings = settings or EngineSettings()
        secret = os.environ.get("KEEPSTEP_TOKEN", "") if token is None else token
        self._me = Identity(
            job=JOB,
            token=secret.encode(),
            replica_id=ReplicaId(secrets.randbits(31)),  # ranks change, links stay
            incarnation=Incarnation(secrets.token_hex(8)),
            rank=Rank(0),
            layout_digest=self._settings.digest,
        )
        self._lock = threading.RLock()
        self._engine: Engine | None = None
        self._direct: PointToPoint | None = None
        self._store: tuple[str, Store] | None = None
        self._rank, self._world = 0, 1
        self._names: dict[int, str] = {}
        self._ring = QuorumId(0)
        self._ready = threading.Event()
        self._error: Exception | None = None
        self._count = 0  # of exchanges in this ring
        self._running: set[FTARWork] = set()
        self._group_label: str | None = None

    # --- members ----------------------------------------------------------------------------------------------

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Forms the group anew: `world_size` members meet at `store_addr` ("host:port/prefix", a new prefix each time).

        Blocks until the ring is ready. Raises ExchangeError (somebody did not come; call it again), ConfigError.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be between 0 and world_size - 1, got rank {rank} of {world_size}")
        with self._lock:
            self._end_all(ExchangeError("the process group was configured anew"))
            self._error = ExchangeError("the process group is being configured")
        engine, direct, host = self._start(store_addr)
        mine = _Member(
            id=self._me.replica_id,
            life=self._me.incarnation,
            host=host,
            port=engine.port,
            direct_port=direct.port,
            ring=self._ring,
            settings=self._settings.digest,
            name=replica_id,
        )
        members = self._meet(store_addr, quorum_id, rank, world_size, mine)
        for other, member in enumerate(members):
            if member.settings != mine.settings:
                raise ConfigError(f"rank {other} and this one have different EngineSettings: use the same everywhere")
        ring = QuorumId(max(member.ring for member in members) + 1)
        with self._lock:
            self._rank, self._world, self._ring = rank, world_size, ring
            self._names = {member.id: f"rank {i} ({member.name})" for i, member in enumerate(members)}
            self._error, self._count = None, 0
            self._ready.clear()
        direct.configure(ring, [_peer(member, member.direct_port) for member in members])
        engine.configure(ring, [_peer(member, member.port) for member in members], rank)
        engine.begin(SEQ, ring, ENDLESS)
        if not self._ready.wait(self.timeout_s):
            self._fail(ExchangeError(f"the ring was not ready in {self.timeout_s:g} s", phase="connect"))
        if self._error is not None:
            raise self._error

    def _start(self, store_addr: str) -> tuple[Engine, PointToPoint, str]:
        if self._engine is None or self._direct is None or self._host is None:
            self._host = self._host or _address_towards(store_addr)
            self._engine = Engine(self._me, host=self._host, settings=self._settings, on_event=self._on_event)
            self.set_timeout(self._timeout)
            self._direct = PointToPoint(self._me, self._host, self._settings.link)
        return self._engine, self._direct, self._host

    def _meet(self, store_addr: str, quorum_id: int | None, rank: int, world: int, mine: _Member) -> list[_Member]:
        where, _, prefix = store_addr.partition("/")
        keys = [f"{prefix}/ftar/{quorum_id}/{world}/{r}" for r in range(world)]
        try:
            if self._store is None or self._store[0] != where:
                host, _, port = where.rpartition(":")
                client = TCPStore(
                    host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=self._timeout
                )
                self._store = where, client
            store = self._store[1]
            store.set(keys[rank], msgspec.json.encode(mine).decode())
            store.wait(keys, self._timeout)
            return [msgspec.json.decode(store.get(key), type=_Member) for key in keys]
        except (RuntimeError, ValueError, msgspec.DecodeError) as error:  # torch's DistError is a RuntimeError
            self._store = None
            failed = ExchangeError(f"the members did not meet at {store_addr}: {error}", phase="connect")
            self._fail(failed)
            raise failed from error

    def _on_event(self, event: EngineEvent) -> None:
        """From the engine's threads."""
        match event:
            case RingReady(quorum_id=ring):
                if ring == self._ring:
                    self._ready.set()
            case RingBroken(quorum_id=ring) | StepFailed(quorum_id=ring):
                if ring == self._ring:
                    phase = event.phase if isinstance(event, StepFailed) else "idle"
                    who, reason = event.suspect, event.reason
                    for member, name in self._names.items():
                        reason = reason.replace(f"replica {member}", name)
                    ranks = {member: rank for rank, member in enumerate(self._names)}
                    suspect = None if who is None else ReplicaId(ranks.get(who, -1))
                    self._fail(ExchangeError(reason, suspect=suspect, phase=phase))
                    self._ready.set()

    def _fail(self, error: Exception) -> None:
        """The first failure is that of every later operation."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._end_all(self._error)
            engine, ring = self._engine, self._ring
        if engine is not None:
            engine.abort(ring, self._me.replica_id, str(error))

    def _end_all(self, error: Exception) -> None:
        with self._lock:
            running, self._running = self._running, set()
        for work in running:
            work._end(error)

    def abort(self) -> None:
        """What runs fails now, here and at the others."""
        self._fail(ExchangeError("the process group was aborted"))
        if self._direct is not None:
            self._direct.reset()

    def shutdown(self) -> None:
        """Ends threads and connections. The group can be configured again."""
        self._end_all(ExchangeError("the process group was shut down"))
        with self._lock:
            engine, direct, self._engine, self._direct = self._engine, self._direct, None, None
            self._store = None
            self._error = ExchangeError("the process group was shut down")
        if engine is not None:
            engine.close()
        if direct is not None:
            direct.close()

    def errored(self) -> Exception | None:
        """The failure that made this group need another `configure`, or None."""
        return self._error

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._engine is not None:
            self._engine.expect_progress_within(self.timeout_s)

    @property
    def timeout_s(self) -> float:
        return self._timeout.total_seconds()

    def size(self) -> int:
        return self._world

    def rank(self) -> int:
        return self._rank

    getSize, getRank = size, rank  # what C++ asks for

    def getBackendName(self) -> str:
        return "keepstep-ftar"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        if self._group_label is None:
            raise ValueError("this process group has no name: it is not registered")
        return self._group_label

    def _set_group_name(self, name: str) -> None:
        self._group_label = name

    # --- operations -------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = dist.ReduceOp.SUM) -> FTARWork:  # type: ignore[override]
        """In place. `opts`: AllreduceOptions or a bare ReduceOp; SUM, AVG, MAX or MIN."""
        tensors = _list(tensors)
        op = getattr(opts, "reduceOp", opts)
        combine, average = self._combine(op), op == dist.ReduceOp.AVG
        for tensor in tensors:
            self._check(tensor)
            if tensor.dtype not in REDUCIBLE:
                raise self._unsupported(f"reductions of {tensor.dtype}")
            if average and not tensor.dtype.is_floating_point:
                raise self._unsupported(f"the average of {tensor.dtype}")
        groups, after = together(tensors), []
        flats = [group[0].detach().view(-1) if len(group) == 1 else _pack(group) for group in groups]

        def finish() -> None:
            for flat, group in zip(flats, groups, strict=True):
                if average:
                    flat.div_(self._world)
                if len(group) > 1:
                    _unpack(flat, group)

        after.append(finish)
        return self._exchange(flats, combine, tensors, after)

    def allreduce_coalesced(self, tensors: Any, opts: Any = dist.ReduceOp.SUM) -> FTARWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = 0) -> FTARWork:  # type: ignore[override]
        """In place. `opts`: BroadcastOptions or the root's rank."""
        tensors = _list(tensors)
        root = getattr(opts, "rootRank", opts)
        for tensor in tensors:
            self._check(tensor)
            if root != self._rank:
                tensor.detach().zero_()
        return self._exchange([as_bytes(t) for t in tensors], torch.add, tensors, [])

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> FTARWork:
        return self.broadcast([tensor], root)

    def barrier(self, opts: Any = None) -> FTARWork:
        return self._exchange([torch.zeros(1, dtype=torch.uint8)], torch.add, None, [])

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> FTARWork:
        """`output_tensors`: a list of `size` tensors for each input."""
        gathered, after = [], []
        for outputs, tensor in zip(output_tensors, input_tensors, strict=True):
            for each in (*outputs, tensor):
                self._check(each)
            if len(outputs) != self._world or any(o.nbytes != tensor.nbytes for o in outputs):
                raise ConfigError(f"allgather needs {self._world} outputs of the size of the input")
            whole = torch.zeros(self._world * tensor.nbytes, dtype=torch.uint8)
            self._part(whole, tensor).copy_(as_bytes(tensor))
            gathered.append(whole)
            after.append(lambda outputs=outputs, whole=whole: _unpack(whole, [as_bytes(o) for o in outputs]))
        return self._exchange(gathered, torch.add, output_tensors, after)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> FTARWork:
        wholes = []
        for output, tensor in zip(outputs, inputs, strict=True):
            for each in (output, tensor):
                self._check(each)
            if output.nbytes != self._world * tensor.nbytes:
                raise ConfigError(f"allgather needs an output of {self._world} times the size of the input")
            own, whole = as_bytes(tensor).clone(), as_bytes(output)
            whole.zero_()
            self._part(whole, tensor).copy_(own)
            wholes.append(whole)
        return self._exchange(wholes, torch.add, outputs, [])

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> FTARWork:
        return self.allgather_into_tensor_coalesced([output], [tensor])

    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> FTARWork:
        return self._point_to_point(_list(tensors), dst_rank, tag, sending=True)

    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> FTARWork:
        return self._point_to_point(_list(tensors), src_rank, tag, sending=False)

    def _refuse(name: str) -> Callable[..., FTARWork]:  # type: ignore[misc]
        def refused(self: "FTARProcessGroup", *args: Any, **kwargs: Any) -> FTARWork:
            raise self._unsupported(name)

        return refused

    alltoall = _refuse("alltoall")
    alltoall_base = _refuse("alltoall_base")
    gather = _refuse("gather")
    reduce = _refuse("reduce")
    reduce_scatter = _refuse("reduce_scatter")
    reduce_scatter_tensor_coalesced = _refuse("reduce_scatter_tensor_coalesced")
    _reduce_scatter_base = _refuse("reduce_scatter_tensor")
    scatter = _refuse("scatter")

    # --- how they run -----------------------------------------------------------------------------------------

    def _exchange(
        self, flats: list[torch.Tensor], combine: Combine, result: Any, after: Sequence[Callable[[], None]]
    ) -> FTARWork:
        work = FTARWork(self, result)
        left = [len(flats)]

        def done() -> None:  # from the engine's threads
            with self._lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                for step in after:
                    step()
                with self._lock:
                    self._running.discard(work)
                work._end(None)

        buffers = [in_place(flat, combine, done) for flat in flats]
        with self._lock:
            error, engine = self._error, self._engine
            if error is None and engine is None:
                error = ConfigError("the process group has no members yet: call configure() first")
            if error is None and engine is not None:
                self._running.add(work)
                for buffer in buffers:
                    engine.submit(SEQ, self._count, buffer)
                    self._count += 1
        if error is not None:
            work._end(error)
        elif not flats:
            work._end(None)
        return work

    def _point_to_point(self, tensors: list[torch.Tensor], rank: int, tag: int, *, sending: bool) -> FTARWork:
        for tensor in tensors:
            self._check(tensor)
        work = FTARWork(self, tensors)
        with self._lock:
            error, direct = self._error, self._direct
            if error is None and direct is None:
                error = ConfigError("the process group has no members yet: call configure() first")
            if error is None and not (0 <= rank < self._world and rank != self._rank):
                error = ConfigError(f"rank {rank} is not another member of this group of {self._world}")
            if error is None:
                self._running.add(work)
        if error is not None or direct is None:
            work._end(error)
            return work
        start = direct.send if sending else direct.receive
        parts = [start(rank, tag, raw(as_bytes(t)), self.timeout_s) for t in tensors]

        def ended(_: Any) -> None:
            if all(part.done() for part in parts):
                errors = [part.exception() for part in parts if not part.cancelled() and part.exception()]
                cancelled = any(part.cancelled() for part in parts)
                with self._lock:
                    self._running.discard(work)
                failure = errors[0] if errors else ExchangeError("it was cancelled") if cancelled else None
                work._end(failure)  # type: ignore[arg-type]

        for part in parts:
            part.add_done_callback(ended)
        return work

    def _part(self, whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return whole[self._rank * tensor.nbytes : (self._rank + 1) * tensor.nbytes]

    def _combine(self, op: Any) -> Combine:
        for known, combine in (
            (dist.ReduceOp.SUM, torch.add),
            (dist.ReduceOp.AVG, torch.add),
            (dist.ReduceOp.MAX, torch.maximum),
            (dist.ReduceOp.MIN, torch.minimum),
        ):
            if op == known:
                return combine
        raise self._unsupported(str(op))

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise self._unsupported(f"tensors on {tensor.device}")
        if tensor.layout != torch.strided or tensor.is_complex():
            raise self._unsupported("sparse or complex tensors")
        if not tensor.is_contiguous():
            raise ConfigError("the tensor is not contiguous: pass tensor.contiguous()")

    def _unsupported(self, what: str) -> RuntimeError:
        return RuntimeError(f"FTARProcessGroup does not support {what}")


def _list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def _unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for part, tensor in zip(torch.split(flat, [t.numel() for t in tensors]), tensors, strict=True):
        tensor.detach().copy_(part.view_as(tensor))


def _peer(member: _Member, port: int) -> Peer:
    endpoint = Endpoint(host=member.host, ftar_port=port, state_port=0)
    return Peer(replica_id=ReplicaId(member.id), incarnation=Incarnation(member.life), endpoint=endpoint)


def _address_towards(store_addr: str) -> str:
    """Our address on the interface that leads to the store. Sends nothing."""
    host, _, port = store_addr.partition("/")[0].rpartition(":")
    family, kind, _, _, to = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(to)
        return str(sock.getsockname()[0])
