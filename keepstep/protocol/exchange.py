"""One exchange of one bucket, as the member sees it: what may be sent now, what credit to grant, when it is done.

Credits say "I am ready to take a chunk". A receiver grants them once its own bucket is there, at most `window` ahead of what it
has taken, so no bytes are ever stuck on their way to somebody who is still computing (FT-HSDP section 4.2; RDMA needs the
same rule). `Deadline` says how long no progress is normal.

Pure: counts only; the engine's two threads call disjoint parts of it (send side: `next_send`, `on_sent`; receive side: the
others) and share `received`, which only grows.
"""

from collections import deque

from keepstep.protocol.errors import LocalProtocolError
from keepstep.protocol.ring import Receive, Send, Shape, schedule


class Exchange:
    """The progress of one buffer around the ring."""

    def __init__(self, *, nbytes: int, itemsize: int, size: int, position: int, shape: Shape) -> None:
        self.sends, self.receives = schedule(nbytes, itemsize, size, position, shape)
        self.window = shape.window
        self.sent = 0
        self.received = 0
        self._granted = 0

    @property
    def sent_all(self) -> bool:
        return self.sent == len(self.sends)

    @property
    def received_all(self) -> bool:
        return self.received == len(self.receives)

    def next_send(self) -> Send | None:
        """The next chunk to send, if the bytes it carries are complete."""
        send = self.sends[self.sent]
        return send if send.after is None or send.after < self.received else None

    @property
    def next_forwards_this(self) -> bool:
        """Whether the next chunk to send is the one that is being received: its sum can go straight on."""
        return not self.sent_all and self.sends[self.sent].after == self.received

    def on_sent(self) -> None:
        if self.sent_all:
            raise LocalProtocolError("more chunks were sent than the exchange has")
        self.sent += 1

    def next_receive(self) -> Receive:
        """What the next chunk from the previous member must be."""
        return self.receives[self.received]

    def on_received(self) -> None:
        if self.received_all:
            raise LocalProtocolError("more chunks were received than the exchange has")
        self.received += 1

    def grant(self) -> int:
        """How many credits to send now: up to `window` chunks ahead of what is received, half a window at a time."""
        upto = min(self.received + self.window, len(self.receives))
        new = upto - self._granted
        if new < self.window // 2 and upto < len(self.receives):
            return 0
        self._granted = upto
        return new


class Deadline:
    """How long an exchange may make no progress: a multiple of the slowest of the recent steps, between two bounds (seconds)."""

    def __init__(self, *, floor: float, ceiling: float, multiple: float = 10.0, history: int = 16) -> None:
        if not 0 < floor <= ceiling:
            raise ValueError("the floor of a deadline must be positive and not above its ceiling")
        self.floor, self.ceiling, self.multiple = floor, ceiling, multiple
        self._recent: deque[float] = deque(maxlen=history)

    def observe(self, seconds: float) -> None:
        """A step took so long, from its first to its last exchange."""
        self._recent.append(seconds)

    @property
    def seconds(self) -> float:
        """The ceiling until there is experience."""
        if not self._recent:
            return self.ceiling
        return min(self.ceiling, max(self.floor, self.multiple * max(self._recent)))
