"""One connection of the control tree: messages with their length before them, read without a task or a copy too many.

First the two ends greet each other (`receive`, one message at a time), then every message goes to `on_frame`. Nothing that is
longer than `limit` is taken, and nothing is read on while a message of the greeting waits to be received. One asyncio loop.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from keepstep.protocol.errors import RemoteProtocolError

LENGTH = struct.Struct("<I")
READ_AT_ONCE = 1 << 18
_scratch: "WeakKeyDictionary[asyncio.AbstractEventLoop, bytearray]" = WeakKeyDictionary()


def framed(message: bytes) -> bytes:
    """As it is sent: whoever sends it to many does this once."""
    return LENGTH.pack(len(message)) + message


class Wire(asyncio.BufferedProtocol):
    """Both ends. `limit`: bytes in a message."""

    def __init__(self, limit: int, on_made: "Callable[[Wire], None] | None" = None) -> None:
        self.limit = limit
        self.transport: asyncio.Transport | None = None
        self._on_made = on_made
        self._on_frame: Callable[[bytes], None] | None = None
        self._on_end: Callable[[str], None] | None = None
        loop = asyncio.get_running_loop()
        if loop not in _scratch:
            _scratch[loop] = bytearray(READ_AT_ONCE)
        self._view = memoryview(_scratch[loop])  # of all wires of the loop: what is in it is taken out at once
        self._rest = bytearray()  # the beginning of a message
        self._greeting: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._end = ""  # why it is over
        self._nonsense = False  # because of what it sent

    def send(self, message: bytes) -> None:
        self.send_frame(framed(message))

    def send_frame(self, frame: bytes) -> None:
        if self.transport is not None:
            self.transport.write(frame)

    async def receive(self) -> bytes:
        """The next message of the greeting. Raises ConnectionResetError once it is over, RemoteProtocolError for nonsense."""
        while not self._greeting:
            if self._end:
                raise RemoteProtocolError(self._end) if self._nonsense else ConnectionResetError(self._end)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message = self._greeting.popleft()
        if not self._greeting and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()
        return message

    def hand_over(self, on_frame: Callable[[bytes], None], on_end: Callable[[str], None], limit: int) -> None:
        """The greeting is over: everything from now on goes to these two."""
        self._on_frame, self._on_end, self.limit = on_frame, on_end, limit
        early = list(self._greeting)
        self._greeting.clear()
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()
        for message in early:
            on_frame(message)
        if self._end:
            on_end(self._end)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    @property
    def unsent(self) -> int:
        """Bytes that the kernel has not taken yet."""
        gone = self.transport is None or self.transport.is_closing()
        return 0 if gone or self.transport is None else self.transport.get_write_buffer_size()

    @property
    def peer(self) -> str | None:
        """The host at the other end, if there is still one."""
        name = self.transport.get_extra_info("peername") if self.transport is not None else None
        return name[0] if name else None

    # --- asyncio.BufferedProtocol -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._on_made is not None:
            self._on_made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        data: Any = self._view[:nbytes]
        if self._rest:
            self._rest += data
            data = memoryview(bytes(self._rest))
        at, end = 0, len(data)
        while end - at >= LENGTH.size:
            stop = at + LENGTH.size + LENGTH.unpack_from(data, at)[0]
            if stop - at - LENGTH.size > self.limit:
                self._refuse(f"a control message of {stop - at - LENGTH.size} bytes: this is not keepstep")
                return
            if stop > end:
                break
            message = bytes(data[at + LENGTH.size : stop])
            at = stop
            if self._on_frame is None:
                self._greet(message)
                continue
            try:
                self._on_frame(message)
            except RemoteProtocolError as error:
                self._refuse(str(error))
                return
        if at < end or self._rest:
            self._rest = bytearray(data[at:])

    def eof_received(self) -> None:
        self._over("it closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        self._over(f"it closed the connection ({exc})" if exc is not None else "it closed the connection")

    def _refuse(self, why: str) -> None:
        self._nonsense = True
        self._over(why if self._on_frame is None else f"it sent something that is not a control message: {why}")
        self.abort()

    def _greet(self, message: bytes) -> None:
        self._greeting.append(message)
        if self.transport is not None:
            self.transport.pause_reading()
        self._wake()

    def _over(self, why: str) -> None:
        if self._end:
            return
        self._end = why
        self._wake()
        if self._on_end is not None:
            self._on_end(why)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
