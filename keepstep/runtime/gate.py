"""Between a port and an HTTP server: what strangers may cost.

Whoever connects gets a challenge of its own, and has to make the server call `proved` for its connection, within `PROVE_S`
seconds and `MAX_REQUEST` bytes; the same number of bytes holds for each request after that. If too many connections have proved
nothing, the oldest of them has to make room. One asyncio loop.
"""

import asyncio
import secrets

from keepstep.runtime.refusals import Refusals

PROVE_S = 10.0
MAX_REQUEST = 16 << 10  # bytes, headers and all
MAX_STRANGERS = 64
BACKLOG, AT_ONCE = 1024, 50  # connections that wait for us, and that asyncio accepts before it looks at any of them


class Gate(asyncio.Protocol):
    """One connection. Everything goes to the server's protocol, as long as there is not too much of it."""

    def __init__(self, inner: asyncio.Protocol, doorway: "Doorway") -> None:
        self._inner, self._doorway = inner, doorway
        self.challenge, self.asked = secrets.token_hex(16), 0
        self._bytes = 0
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def proved(self) -> None:
        """Whoever is there holds the token: it has asked one thing more, and may stay."""
        self.asked, self._bytes = self.asked + 1, 0
        if self._timer is not None:
            self._timer.cancel()
            self._doorway.strangers.pop(self, None)

    def turn_out(self, why: str) -> None:
        """Ends the connection."""
        if self._transport is not None and not self._transport.is_closing():
            name = self._transport.get_extra_info("peername")
            self._doorway.refusals.note(name[0] if name else "somebody who is gone", why, why)
            self._transport.abort()

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._doorway.entered(self, transport)
        self._timer = asyncio.get_running_loop().call_later(PROVE_S, self.turn_out, "it has proved nothing in time")
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._bytes > MAX_REQUEST:
            self.turn_out(f"a request of more than {MAX_REQUEST} bytes")
        elif self._transport is not None and not self._transport.is_closing():
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._doorway.left(self, self._transport)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class Doorway:
    """All gates of one port."""

    def __init__(self, what: str) -> None:
        self.refusals = Refusals(what)
        self.strangers: dict[Gate, None] = {}  # oldest first
        self._gates: dict[asyncio.BaseTransport, Gate] = {}

    def entered(self, gate: Gate, transport: asyncio.BaseTransport) -> None:
        if len(self.strangers) >= MAX_STRANGERS:
            oldest = next(iter(self.strangers))
            del self.strangers[oldest]
            oldest.turn_out("too many others have proved nothing either")
        self.strangers[gate] = None
        self._gates[transport] = gate

    def left(self, gate: Gate, transport: asyncio.BaseTransport | None) -> None:
        self.strangers.pop(gate, None)
        if transport is not None:
            self._gates.pop(transport, None)

    def of(self, transport: asyncio.BaseTransport | None) -> Gate | None:
        """The gate through which a request came; None: its connection is gone."""
        return None if transport is None else self._gates.get(transport)
