"""Who is in a process group, one membership after the other: meeting, forming the ring, failing, forming it anew.

Two ways to the same thing: `configure` meets in a torch store, as torchft's groups do; `reconfigure` is c10d's own contract, with
handles that the caller has exchanged. Either way the ring gets an id that is new, and links to members that stay are kept.

After the first failure everything fails at once with the same ExchangeError, until the ring is formed anew; the process lives on.
"""

import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed import Store, TCPStore, Work  # type: ignore[attr-defined]
from torch.futures import Future

from keepstep.protocol.errors import ConfigError, ExchangeError, RemoteProtocolError
from keepstep.protocol.ids import Incarnation, QuorumId, Rank, ReplicaId, Seq
from keepstep.protocol.messages import Endpoint, Peer
from keepstep.runtime.engine import Engine
from keepstep.runtime.engine_events import ENDLESS, EngineEvent, EngineSettings, RingBroken, RingReady, StepFailed
from keepstep.runtime.environment import read_token
from keepstep.runtime.handshake import Identity
from keepstep.runtime.wire import decode
from keepstep.training.point_to_point import PointToPoint

SEQ = Seq(1)
JOB = "ftar-process-group"


class Member(msgspec.Struct, frozen=True):
    """What a member tells the others through the store."""

    id: int
    life: str
    host: str
    port: int
    direct_port: int
    ring: int  # the last one that it was in
    settings: str
    name: str

    def __post_init__(self) -> None:
        for port in (self.port, self.direct_port):
            Endpoint(host=self.host, ftar_port=port, state_port=0)  # a ValueError if it is no place to connect to


class FTARWork(Work):
    """One operation under way."""

    def __init__(self, group: "Membership", tensors: Any) -> None:
        super().__init__()
        self._group, self._tensors = group, tensors
        self._source: Future[Any] = Future()
        # What `set_exception` does is known to Python only, and DDP's C++ would take the exception for a tensor and crash.
        self._future: Future[Any] = self._source.then(self._outcome)
        self._ended, self._over = threading.Event(), False
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def _end(self, error: Exception | None) -> None:
        """Once; the first outcome counts. Any thread."""
        with self._lock:
            if self._over:
                return
            self._over, self._error = True, error
        self._source.set_result(None)  # before `wait` returns: who has waited finds the future complete
        self._ended.set()

    def _outcome(self, _: Any) -> Any:
        if self._error is not None:
            raise self._error
        return self._tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises ExchangeError if the operation failed, or if it is not complete in time, which ends the whole group."""
        seconds = self._group.timeout_s if not timeout else timeout.total_seconds()
        if not self._future.done() and not self._ended.wait(seconds):  # done already: called from one of its callbacks
            self._group._fail(ExchangeError(f"an operation was not complete after {seconds:g} s"))
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> Any:
        return self._tensors

    def get_future(self) -> "Future[Any]":
        return self._future


class Membership(dist.ProcessGroup):
    """The part of `FTARProcessGroup` that is not an operation.

    Args:
        timeout: of an operation, and of `configure`.
        token: members with another one are refused. Default: KEEPSTEP_TOKEN or KEEPSTEP_TOKEN_FILE; on loopback, none.
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
        self._token = token
        self._me = Identity(
            job=JOB,
            token=b"",  # until it is needed
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
        self._uuids: set[int] = set()
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
        self._forget_ring()
        self._start(lambda: _address_towards(store_addr))
        members = self._meet(store_addr, quorum_id, rank, world_size, self._myself(replica_id))
        self._form(QuorumId(max(member.ring for member in members) + 1), members, rank, self.timeout_s)

    @property
    def supports_reconfigure(self) -> bool:
        """c10d's own contract (torch 2.14 and later): handles are exchanged by whoever calls, no store is needed."""
        return True

    def get_reconfigure_handle(self) -> str:
        """What the other members need to reach this one."""
        self._start(_address_towards_the_world)
        return msgspec.json.encode(self._myself("")).decode()

    def reconfigure(self, opts: Any) -> FTARWork:
        """Forms the group of `opts.handles`: a list in the order of ranks, or a set. `opts.uuid` must be new. Asynchronous."""
        handles = opts.handles if isinstance(opts.handles, list | tuple) else sorted(opts.handles)
        try:
            members = [decode(os.fsencode(handle), Member) for handle in handles]
        except RemoteProtocolError as error:
            raise ConfigError(f"a reconfigure handle is not one of an FTARProcessGroup: {error}") from None
        mine = [rank for rank, member in enumerate(members) if member.life == self._me.incarnation]
        if len(mine) != 1:
            raise ConfigError("the handles must have this process's own exactly once")
        with self._lock:
            if opts.uuid in self._uuids:
                raise RuntimeError(f"uuid {opts.uuid} was already used: pass a new one each time")  # as c10d does
            self._uuids.add(opts.uuid)
        limit_s = opts.timeout.total_seconds() if getattr(opts, "timeout", None) else self.timeout_s
        self._forget_ring()
        work = FTARWork(self, None)

        def form() -> None:
            try:
                self._form(QuorumId(opts.uuid % (1 << 64)), members, mine[0], limit_s)
            except (ExchangeError, ConfigError) as error:
                work._end(error)
            else:
                work._end(None)

        threading.Thread(target=form, name="keepstep-reconfigure", daemon=True).start()
        return work

    def _forget_ring(self) -> None:
        with self._lock:
            self._end_all(ExchangeError("the process group was configured anew"))
            self._error = ExchangeError("the process group is being configured")

    def _form(self, ring: QuorumId, members: Sequence[Member], rank: int, limit_s: float) -> None:
        engine, direct = self._engine, self._direct
        assert engine is not None
        assert direct is not None
        for other, member in enumerate(members):
            if member.settings != self._settings.digest:
                raise ConfigError(f"rank {other} and this one have different EngineSettings: use the same everywhere")
        ready = threading.Event()
        with self._lock:
            self._rank, self._world, self._ring, self._ready = rank, len(members), ring, ready
            self._names = {m.id: f"rank {i}" + f" ({m.name})" * bool(m.name) for i, m in enumerate(members)}
            self._error, self._count = None, 0
        direct.configure(ring, [_peer(member, member.direct_port) for member in members])
        engine.configure(ring, [_peer(member, member.port) for member in members], rank)
        engine.begin(SEQ, ring, ENDLESS)
        if not ready.wait(limit_s):
            self._fail(ExchangeError(f"the ring was not ready in {limit_s:g} s", phase="connect"))
        if self._error is not None and self._ring == ring:
            raise self._error

    def _myself(self, name: str) -> Member:
        assert self._engine is not None
        assert self._direct is not None
        return Member(
            id=self._me.replica_id,
            life=self._me.incarnation,
            host=self._host or "",
            port=self._engine.port,
            direct_port=self._direct.port,
            ring=self._ring,
            settings=self._settings.digest,
            name=name,
        )

    def _start(self, address: Callable[[], str]) -> None:
        if self._engine is None:
            self._host = self._host or address()
            self._me = replace(self._me, token=_secret(self._token, self._host))
            self._engine = Engine(
                self._me, host=self._host, settings=self._settings, on_event=self._on_event, ordered=False
            )
            self.set_timeout(self._timeout)
            self._direct = PointToPoint(self._me, self._host, self._settings.link)

    def _meet(self, store_addr: str, quorum_id: int | None, rank: int, world: int, mine: Member) -> list[Member]:
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
            return [decode(store.get(key), Member) for key in keys]
        except (RuntimeError, ValueError, RemoteProtocolError) as error:  # torch's DistError is a RuntimeError
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


def _secret(token: str | None, host: str) -> bytes:
    if token is not None:
        return token.encode()
    here = host.startswith("127.") or host == "::1"
    if here and not (os.environ.get("KEEPSTEP_TOKEN") or os.environ.get("KEEPSTEP_TOKEN_FILE")):
        return b""  # only this machine's processes can connect
    return read_token(os.environ)


def _peer(member: Member, port: int) -> Peer:
    endpoint = Endpoint(host=member.host, ftar_port=port, state_port=0)
    return Peer(replica_id=ReplicaId(member.id), incarnation=Incarnation(member.life), endpoint=endpoint)


def _address_towards_the_world() -> str:
    try:
        return _address_towards("192.0.2.1:9/")  # an address that nobody has: the default route's interface
    except OSError:
        return "127.0.0.1"


def _address_towards(store_addr: str) -> str:
    """Our address on the interface that leads to the store. Sends nothing."""
    host, _, port = store_addr.partition("/")[0].rpartition(":")
    family, kind, _, _, to = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(to)
        return str(sock.getsockname()[0])
