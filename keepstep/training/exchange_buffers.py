"""What the ring exchanges: flat CPU tensors as bytes (`ports.ExchangeBuffer`), in the dtype in which they travel.

`FlatBuffer` travels as it is. `WireBuffer` travels in another dtype: 16-bit gradients as float32 by default, so that they are
added up in float32 and rounded once; or anything in 16 bits (`wire_dtype`), which halves the bytes where the link is the limit.
Then each member adds in float32 and rounds what it sends on, so the error grows with the number of members.

All members end with the same bits: the finished sum travels on unchanged, and each converts it in the same way. The input is
never written. Called from the engine's threads.
"""

from collections.abc import Callable

import torch

from keepstep.ports import Addition
from keepstep.protocol.errors import ConfigError

Combine = Callable[..., torch.Tensor]


def raw(flat: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(bytearray())  # type: ignore[arg-type]


def wire_dtype_of(dtype: torch.dtype, wire_dtype: torch.dtype | None = None) -> torch.dtype:
    """In which dtype a bucket of `dtype` travels; `wire_dtype` is the user's wish, None: the one that loses nothing."""
    if wire_dtype is None:
        return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    if wire_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(f"wire_dtype must be torch.bfloat16, torch.float16 or torch.float32, got {wire_dtype}")
    return wire_dtype if dtype.is_floating_point and dtype.itemsize <= 4 else dtype


def exchange_buffer(
    source: torch.Tensor, target: torch.Tensor, wire_dtype: torch.dtype | None = None, work: torch.Tensor | None = None
) -> "FlatBuffer":
    """The sum of `source` over the members, into `target`. `work`: as many elements of the wire's dtype, used again."""
    travels = wire_dtype_of(source.dtype, wire_dtype)
    return FlatBuffer(source, target) if travels == source.dtype else WireBuffer(source, target, travels, work)


class FlatBuffer:
    """`ports.ExchangeBuffer` over two flat CPU tensors of one dtype, combined by `combine(incoming, own, out=...)`."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, combine: Combine = torch.add) -> None:
        self.source, self.target, self._combine = source, target, combine
        self.itemsize = source.element_size()
        self.nbytes = source.numel() * self.itemsize
        self._in, self._out = raw(source), raw(target)

    @property
    def addition(self) -> Addition | None:
        """What the native movement must know to add by itself."""
        if self._combine is not torch.add:
            return None
        return _addition(self.source.dtype, self.source, self.target)

    def input(self, lo: int, hi: int) -> memoryview:
        return self._in[lo:hi]

    def output(self, lo: int, hi: int) -> memoryview:
        return self._out[lo:hi]

    def reduce(self, lo: int, hi: int, received: memoryview, into: memoryview | None = None) -> None:
        a, b, dtype = lo // self.itemsize, hi // self.itemsize, self.source.dtype
        incoming = torch.frombuffer(received, dtype=dtype, count=b - a)
        target = self.target[a:b] if into is None else torch.frombuffer(into, dtype=dtype, count=b - a)
        self._combine(incoming, self.source[a:b], out=target)

    def copy_through(self, lo: int, hi: int) -> None:
        a, b = lo // self.itemsize, hi // self.itemsize
        self.target[a:b].copy_(self.source[a:b])

    def final(self, lo: int, hi: int) -> None:
        pass

    def done(self) -> None:
        pass


class WireBuffer(FlatBuffer):
    """The same for a dtype that is not the wire's. Sums are formed in `work`, and converted when they are final."""

    def __init__(
        self, source: torch.Tensor, target: torch.Tensor, travels: torch.dtype, work: torch.Tensor | None = None
    ) -> None:
        self.work = torch.empty(source.numel(), dtype=travels) if work is None else work
        super().__init__(source, target)
        self.itemsize = self.work.element_size()
        self.nbytes = self.work.numel() * self.itemsize
        self._out = raw(self.work)

    @property
    def addition(self) -> Addition | None:
        return _addition(self.work.dtype, self.source, self.work)

    def input(self, lo: int, hi: int) -> memoryview:
        """Converted into the place of the sum, which comes there later than this has reached the next member."""
        self.copy_through(lo, hi)
        return self._out[lo:hi]

    def reduce(self, lo: int, hi: int, received: memoryview, into: memoryview | None = None) -> None:
        a, b, travels = lo // self.itemsize, hi // self.itemsize, self.work.dtype
        incoming = torch.frombuffer(received, dtype=travels, count=b - a)
        target = self.work[a:b] if into is None else torch.frombuffer(into, dtype=travels, count=b - a)
        target.copy_(wire_add(incoming, self.source[a:b]))

    def copy_through(self, lo: int, hi: int) -> None:
        a, b = lo // self.itemsize, hi // self.itemsize
        self.work[a:b].copy_(self.source[a:b])

    def final(self, lo: int, hi: int) -> None:
        a, b = lo // self.itemsize, hi // self.itemsize
        self.target[a:b].copy_(self.work[a:b])


def _addition(travels: torch.dtype, source: torch.Tensor, output: torch.Tensor) -> Addition:
    names = [str(dtype).removeprefix("torch.") for dtype in (travels, source.dtype)]
    return Addition(travels=names[0], own=names[1], input=source.data_ptr(), output=output.data_ptr())


def wire_add(incoming: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """incoming + own in float32. Converted first: a mixed addition is 8x slower."""
    return incoming.to(torch.float32).add_(own.to(torch.float32))
