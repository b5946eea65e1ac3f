"""Collectives of a process group as exchanges of the FTAR ring: each is a sum around the ring, in place.

A reduction is the exchange itself. A broadcast is the sum of the root's bytes and zeros, an all-gather the sum of buffers that
are zero but for one's own part: bit-exact, whatever the bytes mean. That costs up to twice the bytes of a dedicated schedule,
for operations that are rare beside all-reduce.

In place means that a failed exchange has destroyed its input, as with any other backend.
"""

from collections.abc import Callable, Sequence

import torch

from keepstep.training.exchange_buffers import Combine, FlatBuffer, WireBuffer, wire_dtype_of

REDUCIBLE = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
SMALL = 1 << 20  # bytes: smaller tensors of one call travel together


class InPlace(FlatBuffer):
    """`ports.ExchangeBuffer` that combines one tensor with the others' by `combine(incoming, own, out=...)`."""

    def __init__(self, flat: torch.Tensor, combine: Combine, done: Callable[[], None]) -> None:
        super().__init__(flat, flat, combine)
        self.done = done  # type: ignore[method-assign]

    def copy_through(self, lo: int, hi: int) -> None:
        pass


class WideInPlace(WireBuffer):
    """The same for 16-bit sums, which travel as float32."""

    def __init__(self, flat: torch.Tensor, done: Callable[[], None]) -> None:
        super().__init__(flat, flat, wire_dtype_of(flat.dtype))
        self.done = done  # type: ignore[method-assign]


def in_place(flat: torch.Tensor, combine: Combine, done: Callable[[], None]) -> FlatBuffer:
    """`done` is called from an engine thread when the result is there."""
    if combine is torch.add and wire_dtype_of(flat.dtype) != flat.dtype:
        return WideInPlace(flat, done)
    return InPlace(flat, combine, done)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, sharing memory."""
    return tensor.detach().view(-1).view(torch.uint8)


def together(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Which tensors travel in one exchange: runs of small ones of one dtype."""
    groups: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if groups and size <= room and groups[-1][0].dtype == tensor.dtype:
            groups[-1].append(tensor)
            room -= size
        else:
            groups.append([tensor])
            room = max(0, SMALL - size)
    return groups
