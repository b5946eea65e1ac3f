"""How a rank gets its place in the control tree, and how strangers do not.

Every rank calls on rank 0. It admits its own children and sends the others on to their parents, whose addresses it has
learnt from their own calls. Both ends prove that they hold the job token:

    caller -> _Call: who I am, where my children find me, nonce
    server -> its own nonce, HMAC(token, "server", nonce, call)     a server without the token learns nothing
    caller -> HMAC(token, "client", nonce, call)
    server -> _Answer: come in, or go there, or a refusal in words

Strangers are refused: little is read of what they say, and if too many say nothing, the oldest of them has to make room. A rank
that had to, tries again. One asyncio loop. Fails: ConfigError with the refusal, or because the other end lacks the token.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from keepstep.protocol.errors import ConfigError, KeepstepError, ReplicaLost, Unauthorized
from keepstep.runtime.refusals import Refusals
from keepstep.runtime.tree_shape import TreeShape
from keepstep.runtime.tree_wire import Wire
from keepstep.runtime.wire import unpack

log = logging.getLogger("keepstep")

MAX_CALL = 4096  # bytes that a stranger may say at once
MAX_WELCOME = 1 << 20
MAX_STRANGERS = 64  # at once, beside as many as there are ranks that may call
GREET_S = 30.0
BACKLOG, AT_ONCE = 1024, 50  # connections that wait for us, and that are accepted in one go
AGAIN_S = 0.05

Address = tuple[str, Annotated[int, msgspec.Meta(ge=1, le=65535)]]


class _Call(msgspec.Struct, frozen=True):
    """The connecting rank introduces itself."""

    job: str
    incarnation: str
    rank: int
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]  # where its own children find it
    nonce: str
    group: int  # ranks on a host, as it was told
    fan_out: int


class _Answer(msgspec.Struct, frozen=True):
    """What the other end says once the caller has proved itself."""

    refusal: str = ""
    parent: Address | None = None  # go there instead
    welcome: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Who joins, and what both ends must have in common."""

    job: str
    incarnation: str
    rank: int
    shape: TreeShape
    token: bytes

    def mac(self, side: str, nonce: str, call: bytes) -> bytes:
        return hmac.new(self.token, f"tree/{side}/{nonce}/".encode() + call, hashlib.sha256).digest()


class Caller:
    """The connecting side."""

    def __init__(self, me: Membership) -> None:
        self._me = me

    async def join(self, leader: Address | None, port: int) -> tuple[bytes, Wire]:
        """Rank 0's welcome and the connection to our parent. `port`: of our own children, or 0. The caller bounds the time."""
        if leader is None:
            raise ConfigError("the address of the replica's rank 0 is not known: KEEPSTEP_LEADER is missing")
        at = leader
        while True:
            try:
                answer, wire = await self._call(at, port)
            except ReplicaLost as lost:  # it has made room for others, or has ended
                log.debug("%s", lost)
                await asyncio.sleep(AGAIN_S * (1 + secrets.randbelow(8)))  # in which the others get their turn
                continue
            if answer.parent is None:
                return answer.welcome, wire
            wire.close()
            at = answer.parent

    async def _call(self, at: Address, port: int) -> tuple[_Answer, Wire]:
        me, wire = self._me, await self._connect(at)
        nonce = secrets.token_hex(16)
        raw = msgspec.msgpack.encode(
            _Call(me.job, me.incarnation, me.rank, port, nonce, me.shape.group, me.shape.fan_out)
        )
        try:
            wire.send(raw)
            theirs, proof = unpack(await wire.receive(), tuple[str, bytes], "greeting")
            if not hmac.compare_digest(proof, me.mac("server", theirs, raw)):
                raise ConfigError(f"the control tree at {at[0]}:{at[1]} does not hold this job's token")
            wire.limit = MAX_WELCOME
            wire.send(me.mac("client", theirs, raw))
            answer = unpack(await wire.receive(), _Answer, "greeting")
        except OSError as error:
            wire.close()
            raise ReplicaLost(f"the control tree at {at[0]}:{at[1]} closed the connection: {error}") from None
        except BaseException:
            wire.close()
            raise
        if answer.refusal:
            wire.close()
            raise ConfigError(answer.refusal)
        return answer, wire

    async def _connect(self, at: Address) -> Wire:
        while True:
            try:
                _, wire = await asyncio.get_running_loop().create_connection(lambda: Wire(MAX_CALL), *at)
            except ConnectionRefusedError:
                await asyncio.sleep(0.05)  # rank 0 does not listen yet
            else:
                return wire


class Doorkeeper:
    """The accepting side: one port."""

    def __init__(
        self,
        me: Membership,
        at: tuple[str, int],
        listen_fd: int | None,
        *,
        children: Callable[[int], bool | None],
        enter: Callable[[int, Wire], None],
    ) -> None:
        """`children`: whether a rank is a child that is still to come; None: not ours. `enter`: here it is."""
        self._me, self._at, self._listen_fd = me, at, listen_fd
        self._children, self._enter = children, enter
        self.welcome = b""
        self._addresses: dict[int, asyncio.Future[Address]] = {}  # rank 0: of those that have children
        self._server: asyncio.Server | None = None
        self._greetings: set[asyncio.Task[None]] = set()
        self.strangers: dict[Wire, None] = {}  # who has connected and not proved itself yet; oldest first
        self.strangers_max = MAX_STRANGERS + me.shape.size
        self._refusals = Refusals("a control connection")

    async def open(self, welcome: bytes) -> None:
        self.welcome = welcome
        if self._listen_fd is not None:
            listener = socket.socket(fileno=self._listen_fd)
        else:
            family = socket.AF_INET6 if ":" in self._at[0] else socket.AF_INET
            listener = socket.create_server(self._at, family=family)
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Wire(MAX_CALL, self._connected), sock=listener, backlog=AT_ONCE)
        listener.listen(BACKLOG)  # the kernel may hold more for us than asyncio takes before it looks at any of them

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._greetings):
            task.cancel()

    def _connected(self, wire: Wire) -> None:
        task = asyncio.get_running_loop().create_task(self.greet(wire))
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    async def greet(self, wire: Wire) -> None:
        """Somebody has connected: it enters, is sent on, or is hung up on."""
        where = wire.peer
        if len(self.strangers) >= self.strangers_max:
            oldest = next(iter(self.strangers))
            del self.strangers[oldest]
            oldest.abort()
        self.strangers[wire] = None
        try:
            try:
                async with asyncio.timeout(GREET_S):
                    call = await self._authenticate(wire)
            finally:
                made_room = wire not in self.strangers
                self.strangers.pop(wire, None)
            if made_room:  # what it had said until then was right, but the connection is over
                raise ConnectionAbortedError("too many others called at the same time")
            answer = await self._place(call, where)
        except (KeepstepError, OSError, TimeoutError) as error:
            self._refusals.note(where or "somebody who is gone", str(error) or "it took too long", _kind(error))
            wire.abort()
            return
        except asyncio.CancelledError:
            wire.abort()
            raise
        wire.send(msgspec.msgpack.encode(answer))
        if answer.parent is None and not answer.refusal:  # else it closes the connection itself
            self._enter(call.rank, wire)

    async def _authenticate(self, wire: Wire) -> _Call:
        raw = await wire.receive()
        call = unpack(raw, _Call, "greeting")
        nonce = secrets.token_hex(16)
        wire.send(msgspec.msgpack.encode((nonce, self._me.mac("server", nonce, raw))))
        proof = await wire.receive()
        if not hmac.compare_digest(proof, self._me.mac("client", nonce, raw)):
            raise Unauthorized("the caller does not hold the job token")
        return call

    async def _place(self, call: _Call, where: str | None) -> _Answer:
        """Ours, somebody else's, or nobody's."""
        me, shape = self._me, self._me.shape
        if (call.job, call.incarnation) != (me.job, me.incarnation) or not 0 < call.rank < shape.size:
            return _Answer(refusal=f"rank {call.rank} of job {call.job} does not belong to this life of the replica")
        if (call.group, call.fan_out) != (shape.group, shape.fan_out):
            return _Answer(
                refusal=f"rank {call.rank} was told of {call.group} ranks on a host and a fan-out of {call.fan_out}, rank "
                f"{me.rank} of {shape.group} and {shape.fan_out}: set KEEPSTEP_RANKS_PER_HOST (1 always fits) and "
                "KEEPSTEP_FAN_OUT to the same everywhere"
            )
        if me.rank == 0 and call.port and where is not None and not self._address_of(call.rank).done():
            self._address_of(call.rank).set_result((where, call.port))
        missing = self._children(call.rank)
        if missing:
            return _Answer(welcome=self.welcome)
        if missing is not None:
            return _Answer(refusal=f"there is a rank {call.rank} in this replica already: give every rank its own RANK")
        if me.rank != 0:
            return _Answer(refusal=f"rank {call.rank} is not a child of rank {me.rank}")
        return _Answer(parent=await self._address_of(shape.place(call.rank)[0]))

    def _address_of(self, rank: int) -> "asyncio.Future[Address]":
        return self._addresses.setdefault(rank, asyncio.get_running_loop().create_future())


def _kind(error: BaseException) -> str:
    """Of a refusal. Connections end in many ways, and it is all one."""
    return "end" if isinstance(error, OSError) else type(error).__name__
