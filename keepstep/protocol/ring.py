"""The ring schedule: which bytes a member sends and receives, in which order, and in which order they are added up.

Source: FT-HSDP section 4 (FTAR); ring reduce-scatter, then ring all-gather. Bandwidth-optimal, two neighbours only.

A buffer is cut into *rounds* of at most S x C x N bytes (S = chunk_bytes, C = window, N = size). A round is cut into N segments,
one a member, and a segment into chunks of at most S bytes. In a round member p handles, counting segments modulo N:

    sends     p, p-1, ..., p+2 | p+1, p, ..., p+3        N-1 of reduce-scatter, then N-1 of all-gather
    receives  p-1, p-2, ..., p+1 | p, p-1, ..., p+2

so every send but the first of a round forwards exactly what the receive before it completed, chunk by chunk. That is all the
pipelining there is to decide: a send is ready once its receive is done.

Segment s starts at member s, and each next member adds its own input on the right:

    ((x[s] + x[s+1]) + x[s+2]) + ... + x[s+N-1]

The finished segment then travels on unchanged: all members end with the same bits. Pure; it cannot fail for valid arguments.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from keepstep.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """How buffers are cut. All members must use the same."""

    chunk_bytes: int
    window: int  # C: chunks in flight on a link

    def __post_init__(self) -> None:
        if self.chunk_bytes < 16 or self.chunk_bytes % 16 or self.window < 1:
            raise ConfigError("chunk_bytes must be a positive multiple of 16 and window at least 1")


@dataclass(frozen=True, slots=True)
class Send:
    """Bytes [lo, hi) go to the next member: of our input, or of the output once receive number `after` is done."""

    lo: int
    hi: int
    after: int | None  # None: our own input, ready at once


@dataclass(frozen=True, slots=True)
class Receive:
    """Bytes [lo, hi) come from the previous member: to be added to our input (`reduce`), or the finished sum.

    `final`: after it the output holds the sum. A sum that is not final only has to reach the next member.
    """

    lo: int
    hi: int
    reduce: bool
    final: bool


def rounds(nbytes: int, itemsize: int, size: int, shape: Shape) -> Iterator[tuple[int, int]]:
    """The rounds of a buffer, as byte ranges of whole elements."""
    most = shape.chunk_bytes * shape.window * size // itemsize * itemsize
    for lo in range(0, nbytes, most):
        yield lo, min(lo + most, nbytes)


def segment(lo: int, hi: int, itemsize: int, size: int, index: int) -> tuple[int, int]:
    """Segment `index` (modulo size) of the round [lo, hi). Segments differ by at most one element; some may be empty."""
    index, elements = index % size, (hi - lo) // itemsize
    return lo + elements * index // size * itemsize, lo + elements * (index + 1) // size * itemsize


def chunks(lo: int, hi: int, itemsize: int, shape: Shape) -> Iterator[tuple[int, int]]:
    """A segment in chunks of at most chunk_bytes, whole elements."""
    most = shape.chunk_bytes // itemsize * itemsize
    for at in range(lo, hi, most):
        yield at, min(at + most, hi)


@lru_cache(maxsize=256)  # a job exchanges the same few sizes in every step
def schedule(
    nbytes: int, itemsize: int, size: int, position: int, shape: Shape
) -> tuple[tuple[Send, ...], tuple[Receive, ...]]:
    """Everything that member `position` sends and receives for one buffer, each in the order of the wire."""
    sends: list[Send] = []
    receives: list[Receive] = []
    for lo, hi in rounds(nbytes, itemsize, size, shape):
        ready: list[int | None] = []  # for the chunks of the next send: the receives that complete them
        for hop in range(2 * (size - 1)):
            outgoing = chunks(*segment(lo, hi, itemsize, size, position - hop), itemsize, shape)
            for number, (a, b) in enumerate(outgoing):
                sends.append(Send(a, b, None if hop == 0 else ready[number]))
            ready = []
            for a, b in chunks(*segment(lo, hi, itemsize, size, position - hop - 1), itemsize, shape):
                ready.append(len(receives))
                receives.append(Receive(a, b, reduce=hop < size - 1, final=hop >= size - 2))
    return tuple(sends), tuple(receives)


def reduction_order(size: int, index: int) -> tuple[int, ...]:
    """The members whose inputs are added up for segment `index`, from left to right."""
    return tuple((index + hop) % size for hop in range(size))
