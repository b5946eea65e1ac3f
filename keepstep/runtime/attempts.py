"""Which buckets belong to which decision: between the main thread that fills them and the control loop that wants them.

The main thread computes *attempts* (numbered computations of a replica's units); the control loop runs *decisions*. A bucket goes
to the engine as soon as it is full and a decision wants its attempt, in whichever order that comes. The same attempt
may be exchanged again under a later decision; a decision that wants none gets zeros. Inputs are never written, so all of
that needs no copy. One lock; nothing under it waits.
"""

import threading
from typing import Protocol

from keepstep.ports import ExchangeBuffer
from keepstep.protocol.ids import Seq


class Engine(Protocol):
    """What takes the buckets: `runtime.engine.Engine`, or a simulated one."""

    def submit(self, seq: Seq, exchange: int, buffer: ExchangeBuffer) -> None: ...


class Attempts:
    """The buckets of the newest attempt, and the results of what was exchanged without one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: tuple[Seq, int] | None = None  # the running decision, and the attempt whose buckets it takes
        self._attempt = 0
        self._buffers: dict[int, ExchangeBuffer] = {}  # of `_attempt`, by exchange
        self._zeros: dict[Seq, tuple[ExchangeBuffer, ...]] = {}  # what decisions without an attempt of ours exchange

    def submit(self, engine: Engine, attempt: int, exchange: int, buffer: ExchangeBuffer) -> None:
        """A bucket of `attempt` is full (main thread)."""
        with self._lock:
            if attempt < self._attempt:
                return
            if attempt > self._attempt:
                self._buffers, self._attempt = {}, attempt
            self._buffers[exchange] = buffer
            if self._wanted is not None and self._wanted[1] == attempt:
                engine.submit(self._wanted[0], exchange, buffer)

    def run(self, engine: Engine, seq: Seq, attempt: int) -> None:
        """Decision `seq` exchanges `attempt`: what is full already goes out now, the rest as it fills."""
        with self._lock:
            self._wanted = (seq, attempt)
            if self._attempt == attempt:
                for exchange, buffer in sorted(self._buffers.items()):
                    engine.submit(seq, exchange, buffer)

    def run_zeros(self, engine: Engine, seq: Seq, zeros: tuple[ExchangeBuffer, ...]) -> None:
        """Decision `seq` gets zeros from us; their outputs are kept, to be applied or replayed."""
        with self._lock:
            self._wanted = None
            self._zeros[seq] = zeros
        for exchange, buffer in enumerate(zeros):
            engine.submit(seq, exchange, buffer)

    def take(self, seq: Seq) -> tuple[ExchangeBuffer, ...]:
        """The sums of committed decision `seq`."""
        with self._lock:
            zeros = self._zeros.pop(seq, None)
            self._wanted = None
            return zeros if zeros is not None else tuple(buffer for _, buffer in sorted(self._buffers.items()))

    def drop(self, seq: Seq) -> None:
        """Decision `seq` is not committed."""
        with self._lock:
            self._wanted = None
            self._zeros.pop(seq, None)

    def drop_all_but(self, seq: Seq | None) -> None:
        """Nothing will be replayed any more."""
        with self._lock:
            self._zeros = {kept: zeros for kept, zeros in self._zeros.items() if kept == seq}
