"""The control tree inside a replica: small messages from rank 0 to every rank and back (FT-HSDP section 5.3).

Its shape is one of hosts (`tree_shape`). It uses connections of its own: a collective that hangs cannot hang control. To join,
every rank calls on rank 0, which admits its own children and sends the others on to their parents, whose addresses it has
learnt the same way (`tree_joining`). Both ends prove that they hold the job token; the bytes are not encrypted.

    down        common bytes for all, and a record of `width` bytes for each rank below, in their order: a slice for each child
    up          one rank's message
    once        the same, but only the first one with its key goes on
    together    a topic and a number that everybody below has said (`protocol.together`)

Each link ticks. A peer whose connection ends, or that says nothing for `SILENT_TICKS` ticks of ours, is *lost*: a replica
with a lost rank is of no use, so the callback ends this process. Counting our own ticks instead of reading a clock keeps a
process that was itself stopped for a while from blaming everybody.

One asyncio loop; nothing blocks. Callbacks run on the loop. Down messages keep their order, and so do those of one rank up.
A process may hold several ranks of a host, the first and those after it; on a cluster it holds one.
"""

import asyncio
import contextlib
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from keepstep.protocol.errors import ConfigError, RemoteProtocolError
from keepstep.protocol.together import Once, Together
from keepstep.runtime.tree_joining import Address, Caller, Doorkeeper, Membership
from keepstep.runtime.tree_shape import TreeShape
from keepstep.runtime.tree_wire import Wire, framed

TICK_S = 2.5
SILENT_TICKS = 4
MAX_FRAME = 64 << 20
DOWN, UP, ONCE, TOGETHER, TICK = b"d", b"u", b"o", b"t", b"."
_DOWN = struct.Struct("<HI")  # width of a record, length of the common bytes
_COMMON = 1 + _DOWN.size  # where the common bytes begin
_UP = struct.Struct("<I")  # rank
_ONCE = struct.Struct("<IB")  # rank, length of the key
_TOGETHER = struct.Struct("<?BQ")  # whether all agree, topic, number


@dataclass(slots=True)
class _Link:
    """One connection of the tree; a child's may not be there yet."""

    below: range = range(0)  # a child: the ranks that are reached over it
    wire: Wire | None = None
    waiting: list[bytes] = field(default_factory=list)  # frames for a child that has not connected yet
    silent: int = 0
    said: bool = False  # something, since the last tick


class ControlTree:
    """One process's place in the tree. `start` on the loop; then `broadcast`, `scatter` (rank 0), `send_up` and so on (all)."""

    def __init__(
        self,
        *,
        rank: int,
        shape: TreeShape,
        token: bytes,
        job: str,
        incarnation: str,
        host: str,
        leader_address: Address | None,
        listen_fd: int | None,
        welcome: bytes,
        on_down: Callable[[bytes, bytes], None],
        on_up: Callable[[int, bytes], None],
        on_together: Callable[[int, int, bool], None],
        on_lost: Callable[[int, str], None],
        holds: int = 1,
    ) -> None:
        """`on_down` gets the common bytes and the records of the `holds` ranks from `rank` on, one after the other. `on_up` and
        `on_together`: rank 0 only."""
        self.rank, self.shape, self.holds = rank, shape, holds
        self.sent_bytes = 0
        self._leader_address = leader_address
        self._on_down, self._on_up, self._on_together, self._on_lost = on_down, on_up, on_together, on_lost
        self._parent_rank, self._below = shape.place(rank)
        self._children = {run.start: _Link(run) for run in shape.children(self._below, holds)}
        self._parent = _Link()
        self._together, self._once = Together(holds + len(self._children)), Once()
        member = Membership(job=job, incarnation=incarnation, rank=rank, shape=shape, token=token)
        self._caller = Caller(member)
        self._doorkeeper: Doorkeeper | None = None
        if self._children or rank == 0:
            at = leader_address if rank == 0 and leader_address else (host, 0)
            self._doorkeeper = Doorkeeper(member, at, listen_fd, children=self._missing, enter=self._enter)
        self._welcome = welcome
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self, timeout: float) -> bytes:
        """Connects to the parent; returns rank 0's welcome. Raises ConfigError if that takes longer than `timeout` seconds."""
        if self._doorkeeper is not None:
            await self._doorkeeper.open(self._welcome)
        if self.rank != 0:
            port = self._doorkeeper.port if self._doorkeeper is not None else 0
            try:
                self._welcome, wire = await asyncio.wait_for(self._caller.join(self._leader_address, port), timeout)
            except TimeoutError:
                raise ConfigError(
                    f"rank {self.rank} could not join its replica's control tree at {self._leader_address} in {timeout:.0f} s: "
                    "is rank 0 alive?"
                ) from None
            if self._doorkeeper is not None:
                self._doorkeeper.welcome = self._welcome
            self._use(self._parent_rank, self._parent, wire, self._heard_from_above)
        self._spawn(self._tick())
        return self._welcome

    async def close(self) -> None:
        self._closed = True
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        wires = [link.wire for link in (*self._children.values(), self._parent) if link.wire is not None]
        with contextlib.suppress(TimeoutError):  # the other end may be gone or stuck already
            async with asyncio.timeout(1.0):
                while any(wire.unsent for wire in wires):  # noqa: ASYNC110  (transports tell nobody)
                    await asyncio.sleep(0.01)
        for wire in wires:
            wire.close()

    # --- messages ---------------------------------------------------------------------------------------------

    def broadcast(self, common: bytes) -> None:
        """Rank 0 to everybody, itself included."""
        self.scatter(common, b"", 0)

    def scatter(self, common: bytes, records: bytes, width: int) -> None:
        """Rank 0 to everybody: the common bytes, and to rank r its own `width` bytes at r * width of `records`."""
        head = DOWN + _DOWN.pack(width, len(common)) + common
        self._down(head + records, len(head), width)

    def send_up(self, payload: bytes, *, rank: int | None = None) -> None:
        """To rank 0 (which may be ourselves)."""
        rank = self.rank if rank is None else rank
        if self.rank == 0:
            self._on_up(rank, payload)
        else:
            self._write(self._parent, UP + _UP.pack(rank) + payload)

    def send_once(self, key: bytes, payload: bytes, *, rank: int | None = None) -> None:
        """The same, unless somebody's with this key (of at most 255 bytes) has passed here, or passes on the way, before."""
        self._go_once(self.rank if rank is None else rank, key, payload)

    def say_together(self, topic: int, number: int, agreed: bool, *, rank: int | None = None) -> None:
        """Rank 0 hears of it when all ranks have said it, and whether all of them agreed."""
        self._say(self.rank if rank is None else rank, topic, number, agreed)

    def _down(self, message: bytes, at: int, width: int) -> None:
        """`message` is the same for everybody up to `at`, where the records begin."""
        if not width and self._children:
            frame = framed(message)
            for link in self._children.values():
                self._write_frame(link, frame)
        elif self._children:
            head, records = message[:at], memoryview(message)[at:]
            for link in self._children.values():
                below = link.below
                self._write(link, head + records[(below.start - self.rank) * width : (below.stop - self.rank) * width])
        self._on_down(message[_COMMON:at], message[at : at + self.holds * width])

    def _go_once(self, rank: int, key: bytes, payload: bytes) -> None:
        if not self._once.is_first(key):
            return
        if self.rank == 0:
            self._on_up(rank, payload)
        else:
            self._write(self._parent, ONCE + _ONCE.pack(rank, len(key)) + key + payload)

    def _say(self, slot: int, topic: int, number: int, agreed: bool) -> None:
        result = self._together.say(slot, topic, number, agreed)
        if result is None:
            return
        if self.rank == 0:
            self._on_together(topic, number, result)
        else:
            self._write(self._parent, TOGETHER + _TOGETHER.pack(result, topic, number))

    def _heard_from_above(self, message: bytes) -> None:
        self._parent.silent = 0
        kind = message[:1]
        if kind == DOWN:
            if len(message) < _COMMON:
                raise RemoteProtocolError("malformed frame: it is too short")
            width, length = _DOWN.unpack_from(message, 1)
            at, ranks = _COMMON + length, len(self._below)
            if len(message) != at + width * ranks:
                raise RemoteProtocolError(f"malformed frame: {len(message)} bytes for {ranks} ranks")
            self._down(message, at, width)
        elif kind != TICK:
            raise RemoteProtocolError(f"malformed frame: its kind is {kind!r}")

    def _heard_from_below(self, child: int, message: bytes) -> None:
        link = self._children[child]
        link.silent = 0
        kind, body = message[:1], message[1:]
        if kind == TICK:
            return
        if kind == TOGETHER and len(body) == _TOGETHER.size:
            agreed, topic, number = _TOGETHER.unpack(body)
            self._say(child, topic, number, agreed)
            return
        try:
            if kind == UP:
                (rank,) = _UP.unpack_from(body)
            elif kind == ONCE:
                rank, length = _ONCE.unpack_from(body)
            else:
                raise RemoteProtocolError(f"malformed frame: its kind is {kind!r}")
        except struct.error as error:
            raise RemoteProtocolError(f"malformed frame: {error}") from None
        if rank not in link.below:
            raise RemoteProtocolError(f"malformed frame: rank {rank} is not below rank {child}")
        if kind == ONCE:
            at = _ONCE.size + length
            self._go_once(rank, body[_ONCE.size : at], body[at:])
        elif self.rank == 0:
            self._on_up(rank, body[_UP.size :])
        else:
            self._write(self._parent, message)

    # --- links ------------------------------------------------------------------------------------------------

    def _write(self, link: _Link, message: bytes) -> None:
        self._write_frame(link, framed(message))

    def _write_frame(self, link: _Link, frame: bytes) -> None:
        self.sent_bytes += len(frame)
        link.said = True
        if link.wire is None:
            link.waiting.append(frame)
        else:
            link.wire.send_frame(frame)

    def _missing(self, child: int) -> bool | None:
        """Whether this child is still to come; None: it is not ours."""
        link = self._children.get(child)
        return None if link is None else link.wire is None

    def _enter(self, child: int, wire: Wire) -> None:
        link = self._children[child]
        self._use(child, link, wire, lambda message: self._heard_from_below(child, message))
        for frame in link.waiting:
            wire.send_frame(frame)
        link.waiting.clear()

    def _use(self, peer: int, link: _Link, wire: Wire, hear: Callable[[bytes], None]) -> None:
        link.wire = wire
        wire.hand_over(hear, lambda reason: self._lose(peer, link, reason), MAX_FRAME)

    def _lose(self, peer: int, link: _Link, reason: str) -> None:
        if self._closed or link.wire is None:
            return
        link.wire.close()
        link.wire = None
        self._on_lost(peer, reason)

    async def _tick(self) -> None:
        links = {**self._children, self._parent_rank: self._parent}
        while True:
            await asyncio.sleep(TICK_S)
            for peer, link in links.items():
                if link.wire is None:
                    continue
                link.silent += 1
                if link.silent > SILENT_TICKS:
                    self._lose(peer, link, f"it has been silent for {SILENT_TICKS * TICK_S:.0f} s")
                elif not link.said:
                    self._write(link, TICK)
                link.said = False

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
