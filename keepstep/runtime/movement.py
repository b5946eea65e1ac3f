"""What moves the chunks of a ring: two threads in Python (`two_threads`), or one that runs in C (`native`).

Both speak the same protocol, so members may differ in it. The ring owns the queues and says when it is over; a movement tells
it of what is done and what has failed.
"""

import time
from dataclasses import dataclass, field
from typing import Protocol

from keepstep.ports import ExchangeBuffer
from keepstep.protocol.exchange import Exchange
from keepstep.protocol.ids import Seq


@dataclass(slots=True)
class Running:
    """One submitted bucket on its way around the ring."""

    seq: Seq
    number: int
    buffer: ExchangeBuffer
    progress: Exchange
    submitted: float = field(default_factory=time.monotonic)
    sides_done: int = 0
    checksums: dict[int, int] = field(default_factory=dict)  # of chunks that go on unchanged, by number of receive
    taken: bool = False  # by a movement that keeps what it does about it elsewhere


class Movement(Protocol):
    """Made with both links, under the ring's quorum_id."""

    @property
    def chunks_sent(self) -> int:
        """Since the ring was formed."""
        ...

    def run(self) -> None:
        """In the ring's own thread, until the ring is broken; tells both neighbours on good links. Raises what is fatal."""
        ...

    def interrupt(self) -> None:
        """Something was submitted, or the ring is broken: look around. Any thread."""
        ...

    def close(self) -> None:
        """Frees what it holds, once no thread of it runs any more."""
        ...
