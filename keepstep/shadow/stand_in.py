"""The model that keepstep trains in place of the script's, whose tensors have no values: small, real, and of the same structure.

One parameter for each bucket of gradients (`training.buckets.plan` of the script's own model), with a stated fraction of its
elements: so a step has as many exchanges as it would have, and what is exchanged, fetched, served, copied and saved is that
fraction of the true bytes. The script's own optimizer runs on the stand-ins, so its state has the true structure too. All of
`keepstep.training` works on them unchanged.

A stand-in's gradient comes when the last gradient of its bucket would have: a function of the bits of the batch, the rank and the
state. So states of two replicas are equal at the end only if both have trained the same history, unit by unit.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from keepstep.protocol.errors import ConfigError
from keepstep.shadow.shapes import META
from keepstep.training.buckets import local, plan

make_parameter = torch.nn.Parameter.__new__  # before `shadow.device` replaces it: stand-ins have values


@dataclass(slots=True)
class Bucket:
    """Some parameters of the script's model, by their index, and what stands in for them."""

    members: list[int]
    parameter: torch.nn.Parameter
    waiting: set[int] = field(default_factory=set)  # whose gradient has not come in this step


class StandIn(torch.nn.Module):
    """What `keepstep.Training` takes for the model. `members`: the script's parameters that are trained, as a flat list."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: DeviceMesh,
        bucket_bytes: int,
        fraction: float,
    ) -> None:
        super().__init__()
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for name, p in model.named_parameters():
            if local(p).device != META:
                raise ConfigError(
                    f"parameter {name} holds values, which a shadow run does not know how to replace: make it with nn.Parameter"
                )
        self.members = [p for _, p in named]
        self._mesh = mesh if any(isinstance(p, DTensor) for p in self.members) else None
        self._fraction = fraction
        groups = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
        slots, _ = plan([(p.dtype, local(p).numel()) for p in self.members], bucket_bytes)
        found: dict[tuple[int, int], list[int]] = {}
        for index, (slot, p) in enumerate(zip(slots, self.members, strict=True)):
            found.setdefault((slot.bucket, groups.get(id(p), -1)), []).append(index)
        self.buckets: list[Bucket] = []
        order = sorted(found, reverse=True)  # registered last, exchanged first
        for key in order:
            parameter = self._parameter([self.members[i] for i in found[key]])
            self.register_parameter(f"bucket{key[0]}_{key[1] + 1}", parameter)
            self.buckets.append(Bucket(found[key], parameter))
        self.bucket_of = {i: bucket for bucket in self.buckets for i in bucket.members}
        self._stand_in_for_the_rest(model)
        for g, group in enumerate(optimizer.param_groups):
            group["params"] = [b.parameter for b, key in zip(self.buckets, order, strict=True) if key[1] == g]
        if optimizer.state:
            raise ConfigError("the optimizer has a state already: a shadow run must see it before its first step")

    def _parameter(self, members: Sequence[torch.nn.Parameter]) -> torch.nn.Parameter:
        ranks = 1 if self._mesh is None else self._mesh.size()
        count = self._scaled(sum(-(-p.numel() // ranks) for p in members))
        values = torch.linspace(-1.0, 1.0, count).to(members[0].dtype)
        if self._mesh is not None:
            return make_parameter(
                torch.nn.Parameter,
                DTensor.from_local(
                    values, self._mesh, [Shard(0)], run_check=False, shape=torch.Size([ranks * count]), stride=(1,)
                ),
                True,
            )
        return make_parameter(torch.nn.Parameter, values, True)

    def _scaled(self, elements: int) -> int:
        return max(1, math.ceil(elements * self._fraction))

    def _stand_in_for_the_rest(self, model: torch.nn.Module) -> None:
        """Buffers and frozen parameters: part of the state, never of an exchange."""
        counts: dict[torch.dtype, int] = {}
        rest = [*model.buffers(), *(p for p in model.parameters() if not p.requires_grad)]
        for tensor in rest:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + local(tensor).numel()
        for dtype, count in counts.items():
            self.register_buffer(
                f"rest_{str(dtype).removeprefix('torch.')}", torch.zeros(self._scaled(count), dtype=dtype)
            )

    # --- gradients --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new computation begins."""
        for bucket in self.buckets:
            bucket.waiting = set(bucket.members)

    def arrived(self, index: int, constant: float) -> None:
        """The gradient of member `index` would be there now. The last one of a bucket brings the stand-in's."""
        bucket = self.bucket_of[index]
        bucket.waiting.discard(index)
        if not bucket.waiting:
            bucket.waiting = set(bucket.members)  # of the next of several backward passes
            _give(bucket.parameter, constant)

    def finish(self, constant: float) -> None:
        """Backward is over: a bucket of which only some parameters were used has a gradient too."""
        for bucket in self.buckets:
            if len(bucket.waiting) < len(bucket.members):
                _give(bucket.parameter, constant)

    def hooks(self, on_gradient: Callable[[int], None]) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """`on_gradient(index)` when autograd has accumulated the gradient of a member."""
        for index, p in enumerate(self.members):

            def hook(param: torch.Tensor, index: int = index) -> None:
                param.grad = None
                on_gradient(index)

            yield p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _give(parameter: torch.nn.Parameter, constant: float) -> None:
    """Accumulates a gradient, as autograd does, and runs the hooks that wait for it."""
    with torch.no_grad():
        gradient = parameter.detach() * 0.01 + constant
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)
