"""The control tree inside a replica: small messages from rank 0 to every rank and back (FT-HSDP section 5.3).

Rank k's parent is rank (k-1) // fan_out. It uses connections of its own: a collective that hangs cannot hang control. To join,
every rank calls on rank 0, which admits its own children and sends the others on to their parents, whose addresses it has
learnt the same way. Both ends prove that they hold the job token; the bytes are not encrypted. Strangers are refused: little is
read of what they say, and if too many say nothing, the oldest of them has to make room. A rank that had to, tries again.

Each link ticks once a second. A peer whose connection ends, or that says nothing for `SILENT_TICKS` ticks of ours, is *lost*:
a replica with a lost rank is of no use, so the callback ends this process. Counting our own ticks instead of reading a clock
keeps a process that was itself stopped for a while from blaming everybody.

One asyncio loop; nothing blocks. Callbacks run on the loop. Down messages keep their order, and so do those of one rank up.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from keepstep.protocol.errors import ConfigError, KeepstepError, RemoteProtocolError, ReplicaLost, Unauthorized
from keepstep.runtime.refusals import Refusals
from keepstep.runtime.wire import unpack

log = logging.getLogger("keepstep")

TICK_S = 1.0
SILENT_TICKS = 10
MAX_FRAME = 64 << 20
MAX_CALL = 4096  # bytes that a stranger may say at once
MAX_WELCOME = 1 << 20
MAX_STRANGERS = 64  # at once, beside as many as there are ranks that may call
GREET_S = 30.0
BACKLOG, AT_ONCE = 1024, 50  # connections that wait for us, and that are accepted in one go
AGAIN_S = 0.05
_LENGTH = struct.Struct("<I")

Address = tuple[str, Annotated[int, msgspec.Meta(ge=1, le=65535)]]


class _Call(msgspec.Struct, frozen=True):
    """The connecting rank introduces itself."""

    job: str
    incarnation: str
    rank: int
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]  # where its own children find it
    nonce: str


class _Answer(msgspec.Struct, frozen=True):
    """What the other end says once the caller has proved itself."""

    refusal: str = ""
    parent: Address | None = None  # go there instead
    welcome: bytes = b""


class _Down(msgspec.Struct, frozen=True, tag="down"):
    common: bytes
    own: dict[int, bytes]  # of the ranks in the subtree


class _Up(msgspec.Struct, frozen=True, tag="up"):
    rank: int
    payload: bytes


class _Tick(msgspec.Struct, frozen=True, tag="tick"):
    pass


_Frame = _Down | _Up | _Tick
_FRAME: type[_Frame] = _Frame  # type: ignore[assignment]  # of a union: msgspec takes it like a class
_TICK = msgspec.msgpack.encode(_Tick())


def parent_of(rank: int, fan_out: int) -> int:
    """Rank 0 has none: -1."""
    return -1 if rank == 0 else (rank - 1) // fan_out


def children_of(rank: int, size: int, fan_out: int) -> range:
    return range(min(size, rank * fan_out + 1), min(size, rank * fan_out + fan_out + 1))


def subtree_of(rank: int, size: int, fan_out: int) -> set[int]:
    """The rank and everybody below it."""
    found, front = {rank}, [rank]
    while front:
        front = [child for node in front for child in children_of(node, size, fan_out)]
        found.update(front)
    return found


@dataclass(slots=True)
class _Link:
    """One connection of the tree; a child's may not be there yet."""

    writer: asyncio.StreamWriter | None = None
    waiting: list[bytes] = field(default_factory=list)  # frames for a child that has not connected yet
    silent: int = 0


class ControlTree:
    """One rank's place in the tree. `start` on the loop; then `broadcast`, `scatter` (rank 0), `send_up` (all)."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        fan_out: int,
        token: bytes,
        job: str,
        incarnation: str,
        host: str,
        leader_address: Address | None,
        listen_fd: int | None,
        welcome: bytes,
        on_down: Callable[[bytes, bytes | None], None],
        on_up: Callable[[int, bytes], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        self.rank, self.size, self.fan_out = rank, size, fan_out
        self._token, self._job, self._incarnation, self._host = token, job, incarnation, host
        self._leader_address, self._listen_fd, self._welcome = leader_address, listen_fd, welcome
        self._on_down, self._on_up, self._on_lost = on_down, on_up, on_lost
        self._children = {child: _Link() for child in children_of(rank, size, fan_out)}
        self._below = {child: subtree_of(child, size, fan_out) for child in self._children}
        self._parent = _Link()
        self._addresses: dict[int, asyncio.Future[Address]] = {}  # rank 0: of those that have children
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[
            asyncio.StreamWriter, None
        ] = {}  # who has connected and not proved itself yet; oldest first
        self._strangers_max = MAX_STRANGERS + (size if rank == 0 else len(self._children))
        self._refusals = Refusals("a control connection")
        self._closed = False

    async def start(self, timeout: float) -> bytes:
        """Connects to the parent; returns rank 0's welcome. Raises ConfigError if that takes longer than `timeout` seconds."""
        if self._children or self.rank == 0:
            await self._listen()
        if self.rank != 0:
            try:
                await asyncio.wait_for(self._join(), timeout)
            except TimeoutError:
                raise ConfigError(
                    f"rank {self.rank} could not join its replica's control tree at {self._leader_address} in {timeout:.0f} s: "
                    "is rank 0 alive?"
                ) from None
        self._spawn(self._tick())
        return self._welcome

    async def broadcast(self, common: bytes) -> None:
        """Rank 0 to everybody, itself included."""
        await self.scatter(common, {})

    async def scatter(self, common: bytes, own: Mapping[int, bytes]) -> None:
        """Rank 0 to everybody: the common bytes, and to each rank its own."""
        await self._down(_Down(common, dict(own)))

    async def send_up(self, payload: bytes) -> None:
        """To rank 0 (which may be ourselves)."""
        await self._up(_Up(self.rank, payload))

    async def close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in (*self._children.values(), self._parent):
            if link.writer is not None:
                with contextlib.suppress(OSError, TimeoutError):  # it may be gone already
                    await asyncio.wait_for(link.writer.drain(), 1.0)
                link.writer.close()

    # --- messages ---------------------------------------------------------------------------------------------

    async def _down(self, frame: _Down) -> None:
        for child, link in self._children.items():
            own = {r: b for r, b in frame.own.items() if r in self._below[child]}
            await self._write(link, msgspec.msgpack.encode(_Down(frame.common, own)))
        self._on_down(frame.common, frame.own.get(self.rank))

    async def _up(self, frame: _Up) -> None:
        if self.rank == 0:
            self._on_up(frame.rank, frame.payload)
        else:
            await self._write(self._parent, msgspec.msgpack.encode(frame))

    async def _write(self, link: _Link, data: bytes) -> None:
        if link.writer is None:
            link.waiting.append(data)
            return
        link.writer.write(_LENGTH.pack(len(data)) + data)
        with contextlib.suppress(OSError):  # the reader of this link tells that it is lost
            await link.writer.drain()

    async def _read(self, peer: int, link: _Link, reader: asyncio.StreamReader) -> None:
        """Everything that comes over one link, until it is lost."""
        reason = "it closed the connection"
        try:
            while True:
                frame = unpack(await _receive(reader, MAX_FRAME), _FRAME, "frame")
                link.silent = 0
                if isinstance(frame, _Down):
                    await self._down(frame)
                elif isinstance(frame, _Up):
                    await self._up(frame)
        except (asyncio.IncompleteReadError, OSError) as error:
            reason = f"{reason} ({error})" if isinstance(error, OSError) else reason
        except RemoteProtocolError as error:
            reason = f"it sent something that is not a control message: {error}"
        self._lose(peer, link, reason)

    def _lose(self, peer: int, link: _Link, reason: str) -> None:
        if self._closed or link.writer is None:
            return
        link.writer.close()
        link.writer = None
        self._on_lost(peer, reason)

    async def _tick(self) -> None:
        links = {**self._children, parent_of(self.rank, self.fan_out): self._parent}
        while True:
            await asyncio.sleep(TICK_S)
            for peer, link in links.items():
                if link.writer is None:
                    continue
                link.silent += 1
                if link.silent > SILENT_TICKS:
                    self._lose(peer, link, f"it has been silent for {SILENT_TICKS * TICK_S:.0f} s")
                else:
                    await self._write(link, _TICK)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- joining ----------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        if self._listen_fd is not None:
            listener = socket.socket(fileno=self._listen_fd)
        else:
            at = self._leader_address if self.rank == 0 and self._leader_address else (self._host, 0)
            listener = socket.create_server(at, family=socket.AF_INET6 if ":" in at[0] else socket.AF_INET)
        listener.setblocking(False)
        self._server = await asyncio.start_server(self._called, sock=listener, backlog=AT_ONCE)
        listener.listen(BACKLOG)  # the kernel may hold more for us than asyncio takes before it looks at any of them

    async def _join(self) -> None:
        at = self._leader_address
        if at is None:
            raise ConfigError("the address of the replica's rank 0 is not known: KEEPSTEP_LEADER is missing")
        while True:
            try:
                answer, reader, writer = await self._call(at)
            except ReplicaLost as lost:  # it has made room for others, or has ended; `start` bounds the whole
                log.debug("%s", lost)
                await asyncio.sleep(
                    AGAIN_S * (1 + secrets.randbelow(8))
                )  # a back-off, in which the others get their turn
                continue
            if answer.parent is None:
                break
            writer.close()
            at = answer.parent
        self._welcome = answer.welcome
        self._parent.writer = writer
        self._spawn(self._read(parent_of(self.rank, self.fan_out), self._parent, reader))

    async def _call(self, at: Address) -> tuple[_Answer, asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self._connect(at)
        port = self._server.sockets[0].getsockname()[1] if self._server is not None else 0
        nonce = secrets.token_hex(16)
        raw = msgspec.msgpack.encode(_Call(self._job, self._incarnation, self.rank, port, nonce))
        try:
            _send(writer, raw)
            theirs, proof = unpack(await _receive(reader, MAX_CALL), tuple[str, bytes], "greeting")
            if not hmac.compare_digest(proof, self._mac("server", theirs, raw)):
                raise ConfigError(f"the control tree at {at[0]}:{at[1]} does not hold this job's token")
            _send(writer, self._mac("client", theirs, raw))
            answer = unpack(await _receive(reader, MAX_WELCOME), _Answer, "greeting")
        except (asyncio.IncompleteReadError, OSError) as error:
            writer.close()
            raise ReplicaLost(f"the control tree at {at[0]}:{at[1]} closed the connection: {error}") from None
        except KeepstepError:
            writer.close()
            raise
        if answer.refusal:
            writer.close()
            raise ConfigError(answer.refusal)
        return answer, reader, writer

    async def _connect(self, at: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_connection(*at)
            except ConnectionRefusedError:
                await asyncio.sleep(0.05)  # rank 0 does not listen yet; `start` bounds the whole

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody has connected (the server's callback)."""
        where = writer.get_extra_info("peername")
        if len(self._strangers) >= self._strangers_max:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            try:
                call = await asyncio.wait_for(self._authenticate(reader, writer), GREET_S)
            finally:
                made_room = writer not in self._strangers
                self._strangers.pop(writer, None)
            if made_room:  # what it had said until then was right, but the connection is over
                raise ConnectionAbortedError("too many others called at the same time")
            answer = await self._place(call, where)
            _send(writer, msgspec.msgpack.encode(answer))
        except (KeepstepError, asyncio.IncompleteReadError, OSError, TimeoutError) as error:
            self._refusals.note(
                where[0] if where else "somebody who is gone", str(error) or "it took too long", _kind(error)
            )
            writer.transport.abort()
            return
        if answer.parent is not None or answer.refusal:
            return  # it closes the connection itself
        link = self._children[call.rank]
        link.writer = writer
        for data in link.waiting:
            _send(writer, data)
        link.waiting.clear()
        self._spawn(self._read(call.rank, link, reader))

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Call:
        raw = await _receive(reader, MAX_CALL)
        call = unpack(raw, _Call, "greeting")
        nonce = secrets.token_hex(16)
        _send(writer, msgspec.msgpack.encode((nonce, self._mac("server", nonce, raw))))
        proof = await _receive(reader, MAX_CALL)
        if not hmac.compare_digest(proof, self._mac("client", nonce, raw)):
            raise Unauthorized("the caller does not hold the job token")
        return call

    async def _place(self, call: _Call, where: Any) -> _Answer:
        """Ours, somebody else's, or nobody's."""
        if (call.job, call.incarnation) != (self._job, self._incarnation) or not 0 < call.rank < self.size:
            return _Answer(refusal=f"rank {call.rank} of job {call.job} does not belong to this life of the replica")
        if self.rank == 0 and call.port and not self._address_of(call.rank).done():
            self._address_of(call.rank).set_result((where[0], call.port))
        if call.rank in self._children:
            if self._children[call.rank].writer is not None:
                return _Answer(
                    refusal=f"there is a rank {call.rank} in this replica already: give every rank its own RANK"
                )
            return _Answer(welcome=self._welcome)
        if self.rank != 0:
            return _Answer(
                refusal=f"rank {call.rank} is not a child of rank {self.rank}: is KEEPSTEP_FAN_OUT the same everywhere?"
            )
        return _Answer(parent=await self._address_of(parent_of(call.rank, self.fan_out)))

    def _address_of(self, rank: int) -> "asyncio.Future[Address]":
        return self._addresses.setdefault(rank, asyncio.get_running_loop().create_future())

    def _mac(self, side: str, nonce: str, call: bytes) -> bytes:
        return hmac.new(self._token, f"tree/{side}/{nonce}/".encode() + call, hashlib.sha256).digest()


def _kind(error: BaseException) -> str:
    """Of a refusal. Connections end in many ways, and it is all one."""
    return "end" if isinstance(error, asyncio.IncompleteReadError | OSError) else type(error).__name__


def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(_LENGTH.pack(len(data)) + data)


async def _receive(reader: asyncio.StreamReader, limit: int) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > limit:
        raise RemoteProtocolError(f"a control message of {length} bytes: this is not keepstep")
    return await reader.readexactly(length)
