"""The interfaces between the shells. Implementations live above (`training/`) or beside (`runtime/`).

No I/O, no torch: only shapes. Each interface says which thread calls it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from keepstep.protocol.messages import Checkpoint, LedgerState, Reader, StateName


@dataclass(frozen=True, slots=True)
class Addition:
    """An exchange buffer whose `reduce` is a plain addition of elements, which may be done without calling it.

    If `own` is another dtype than `travels`, `input` and `final` still have to be called.
    """

    travels: str  # dtypes by their names in torch: of what is received and sent
    own: str  # of our input
    input: int  # addresses
    output: int


class ExchangeBuffer(Protocol):
    """One bucket of one exchange, as bytes. Out of place: the input is never written, so that a retry can repeat it.

    All offsets are byte offsets, multiples of `itemsize`. Called from the engine's threads only.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def itemsize(self) -> int: ...

    @property
    def addition(self) -> Addition | None:
        """What must be known to do `reduce` without calling it; None if it is not a plain addition."""
        ...

    def input(self, lo: int, hi: int) -> memoryview:
        """The local contribution [lo, hi), read-only use."""
        ...

    def output(self, lo: int, hi: int) -> memoryview:
        """The writable result [lo, hi)."""
        ...

    def reduce(self, lo: int, hi: int, received: memoryview, into: memoryview | None = None) -> None:
        """output[lo:hi] = received + input[lo:hi], element by element, in this operand order; or `into` instead of output."""
        ...

    def final(self, lo: int, hi: int) -> None:
        """output[lo:hi] is the finished sum now, and won't change any more."""
        ...

    def done(self) -> None:
        """The exchange is complete here: the engine touches neither input nor output any more."""
        ...

    def copy_through(self, lo: int, hi: int) -> None:
        """output[lo:hi] = input[lo:hi]: a ring of one."""
        ...


class StateSource(Protocol):
    """Serves this rank's part of named states as one flat byte space. Called from the state server's threads.

    Both calls may block for a few seconds while the state is just being reached, and raise TimeoutError: ask again.
    """

    def manifest(self, state: StateName) -> bytes | None:
        """JSON that describes the byte space (at least `{"total": nbytes}`), or None if the state is not held."""
        ...

    def read(self, state: StateName, lo: int, hi: int) -> bytes | bytearray | None:
        """A copy of bytes [lo, hi), consistent with `manifest`, or None if the state is no longer held."""
        ...

    def done(self, reader: Reader) -> None:
        """That fetch is complete: nothing need be kept for it any more."""
        ...


class CheckpointStorage(Protocol):
    """Writes this rank's part of named states to persistent storage, and reads it back. All ranks are asked for the same."""

    @property
    def every(self) -> int:
        """A checkpoint is due so many steps after the one before; 0: never."""
        ...

    def find(self) -> tuple[Checkpoint, ...]:
        """The complete ones that fit this job, newest first; OSError if nobody can know. A thread that may wait for storage."""
        ...

    def save(self, state: StateName, ledger: LedgerState, done: Callable[[bool, str], None]) -> None:
        """Starts saving a state that is held or about to be; `done(ok, reason)` comes from a thread. Never blocks."""
        ...

    def load(self, checkpoint: Checkpoint) -> tuple[bytes, memoryview]:
        """The manifest and bytes of this rank's part, verified. Raises TransferError. A thread that may wait for storage."""
        ...

    def close(self, timeout: float) -> bool:
        """Ends within `timeout` seconds what is being saved; False: that still goes on. Main thread."""
        ...


class EventSink(Protocol):
    """Takes structured events. Never blocks, never raises into training. Any thread."""

    def emit(self, event: str, fields: Mapping[str, object]) -> None: ...

    def close(self) -> None: ...
