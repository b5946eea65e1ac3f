"""Gradients to buckets and back: what is exchanged, in which order, and when it starts.

Parameters are packed in reverse order of registration (backward reaches the last ones first) into flat buckets of one
dtype. Hooks copy each finished gradient into its bucket; a bucket is handed on as soon as it is full and all
earlier ones are, so that every replica exchanges in the same order and the exchanges overlap the rest of backward. Works on
plain parameters and on FSDP2's sharded ones alike: post-accumulate-grad hooks of a DTensor parameter fire after the
group's reduce-scatter, with this rank's shard of the gradient.

The exchange is out of place: `input` holds weight x local gradient until the step is committed, so that a retry under
another membership repeats only the exchange. `retain_gradients=False` is not offered: it would bring back the retrained step.

The last exchange is tiny: three float64 numbers that every WORKER adds up (weight, weight x loss, contributors). Dividing by
the summed weight makes the update an unbiased mean however many replicas took part (FT-HSDP section 5.5: who catches
up contributes zero).

Called from the main thread, except the buffers handed on, which the engine's threads use.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from keepstep.protocol.errors import ConfigError
from keepstep.training.exchange_buffers import FlatBuffer, exchange_buffer, wire_dtype_of

SCALARS = 3  # weight, weight * loss, contributors


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or the tensor itself. Shares memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def like(local_part: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """`local_part` wrapped the way `param` is (a DTensor with the same mesh and placements, or itself)."""
    if not isinstance(param, DTensor):
        return local_part
    return DTensor.from_local(
        local_part,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter's gradient lies: elements [lo, hi) of bucket `bucket`."""

    bucket: int
    lo: int
    hi: int


def plan(
    params: Sequence[tuple[torch.dtype, int]], bucket_bytes: int
) -> tuple[list[Slot], list[tuple[torch.dtype, int]]]:
    """Packs parameters, given as (dtype, number of local elements) in registration order, into buckets.

    Returns a slot for each parameter and (dtype, elements) for each bucket. A bucket closes when the next gradient would
    take it over `bucket_bytes`, or has another dtype; one larger than that gets its own.
    """
    slots: list[Slot | None] = [None] * len(params)
    buckets: list[tuple[torch.dtype, int]] = []
    for index in reversed(range(len(params))):
        dtype, count = params[index]
        if buckets and buckets[-1][0] == dtype and (buckets[-1][1] + count) * dtype.itemsize <= bucket_bytes:
            lo = buckets[-1][1]
            buckets[-1] = (dtype, lo + count)
        else:
            lo = 0
            buckets.append((dtype, count))
        slots[index] = Slot(len(buckets) - 1, lo, lo + count)
    return [s for s in slots if s is not None], buckets


class Buckets:
    """The gradients of one model, as exchanges 0..n-1 of a step; exchange n-1 holds the scalars."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        bucket_bytes: int,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.named = [(name, p) for name, p in named if p.requires_grad]
        if not self.named:
            raise ConfigError("the model has no parameter that requires a gradient: nothing to train")
        for name, p in self.named:
            if local(p).device.type != "cpu":
                raise ConfigError(f"parameter {name} is on {local(p).device}: only CPU tensors are supported so far")
            if not p.dtype.is_floating_point:
                raise ConfigError(f"parameter {name} is {p.dtype}: only floating-point gradients can be exchanged")
        self.slots, self.shapes = plan([(p.dtype, local(p).numel()) for _, p in self.named], bucket_bytes)
        self.shapes.append((torch.float64, SCALARS))
        self.inputs = [torch.zeros(n, dtype=dtype) for dtype, n in self.shapes]
        self.outputs = [torch.zeros(n, dtype=dtype) for dtype, n in self.shapes]
        self._zeros = [torch.zeros(n, dtype=dtype) for dtype, n in self.shapes]
        self._wire = wire_dtype
        self._work = [
            torch.zeros(n if self._travels(dtype) != dtype else 0, dtype=self._travels(dtype))
            for dtype, n in self.shapes
        ]
        self._unfilled = [0] * len(self.shapes)
        self._filled: list[bool] = []
        self._next = 0
        self._armed = False
        self._weight = 0.0
        self._submit: Callable[[int, FlatBuffer], None] | None = None
        self.on_first_gradient: Callable[[], None] = lambda: None
        for index, (_, p) in enumerate(self.named):
            p.register_post_accumulate_grad_hook(lambda _p, index=index: self._on_gradient(index))  # type: ignore[no-untyped-call]

    @property
    def count(self) -> int:
        """Number of exchanges in a step."""
        return len(self.shapes)

    def _travels(self, dtype: torch.dtype) -> torch.dtype:
        return wire_dtype_of(dtype, self._wire)

    def layout_digest(self) -> str:
        """Names, shapes, dtypes and bucket borders: same-numbered ranks must agree on all of them."""
        text = [f"{n}:{tuple(p.shape)}:{tuple(local(p).shape)}:{p.dtype}" for n, p in self.named]
        text += [f"{dtype}:{self._travels(dtype)}:{count}" for dtype, count in self.shapes]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    def zero_contribution(self) -> list[FlatBuffer]:
        """(0, 0): inputs shared and never written, outputs fresh, since the main thread may still read older ones."""
        return [exchange_buffer(zero, torch.empty_like(zero), self._wire) for zero in self._zeros]

    # --- one attempt --------------------------------------------------------------------------------------------

    def start(self, weight: float, submit: Callable[[int, FlatBuffer], None]) -> None:
        """A new computation begins: `submit(exchange, buffer)` is called for each bucket as it fills."""
        for _, p in self.named:
            p.grad = None
        self._weight, self._submit = weight, submit
        self._filled = [False] * len(self.named)
        self._unfilled = [0] * len(self.shapes)
        for slot in self.slots:
            self._unfilled[slot.bucket] += 1
        self._next = 0
        self._armed = True

    def arm(self, on: bool) -> None:
        """Off during all but the last of several accumulated backward passes."""
        self._armed = on

    def finish(self, loss: float) -> None:
        """Backward is over: parameters without a gradient contribute zero; hand on what is left, then the scalars."""
        assert self._submit is not None
        for index, (_, p) in enumerate(self.named):
            if not self._filled[index]:
                self._fill(index, p.grad)
        self._hand_on()
        self.inputs[-1].copy_(torch.tensor([self._weight, self._weight * loss, 1.0], dtype=torch.float64))
        submit, self._submit = self._submit, None
        self._next = len(self.shapes)
        submit(len(self.shapes) - 1, self._buffer(len(self.shapes) - 1))

    def _on_gradient(self, index: int) -> None:
        if self._submit is None or not self._armed:
            return  # accumulating, or a backward pass of the user's own outside of a step
        if self._filled[index]:
            name = self.named[index][0]
            raise ConfigError(
                f"parameter {name} got a second gradient in one step: for several backward passes a step, pass "
                "accumulate=N to keepstep.Training and iterate over step.micro_batches"
            )
        self.on_first_gradient()
        self._fill(index, self.named[index][1].grad)
        self._hand_on()

    def _fill(self, index: int, grad: torch.Tensor | None) -> None:
        slot, param = self.slots[index], self.named[index][1]
        target = self.inputs[slot.bucket][slot.lo : slot.hi]
        if grad is None:
            target.zero_()
        else:
            target.copy_(local(grad).reshape(-1))
            if self._weight != 1.0:
                target.mul_(self._weight)
        param.grad = None
        self._filled[index] = True
        self._unfilled[slot.bucket] -= 1

    def _hand_on(self) -> None:
        assert self._submit is not None
        while self._next < len(self.shapes) - 1 and self._unfilled[self._next] == 0:
            self._submit(self._next, self._buffer(self._next))
            self._next += 1

    def _buffer(self, exchange: int) -> FlatBuffer:
        return exchange_buffer(self.inputs[exchange], self.outputs[exchange], self._wire, self._work[exchange])

    # --- the result ---------------------------------------------------------------------------------------------

    def to_gradients(self, reduced: Sequence[torch.Tensor]) -> tuple[float, float]:
        """Sets every parameter's `.grad` to the weighted mean; returns (summed weight, mean loss).

        The gradients are views into `reduced`, which is divided in place. With a summed weight of zero (no WORKER had a unit)
        the gradients are zero.
        """
        weight, weighted_loss, _ = (float(x) for x in reduced[-1])
        for flat in reduced[:-1]:
            if weight not in (0.0, 1.0):
                flat.div_(weight)
        for (_, p), slot in zip(self.named, self.slots, strict=True):
            part = reduced[slot.bucket][slot.lo : slot.hi].view(local(p).shape)
            p.grad = like(part, p)
        return weight, (weighted_loss / weight if weight else float("nan"))
