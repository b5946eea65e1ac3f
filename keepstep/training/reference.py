"""A whole run again, in one process: the same units with the same memberships must give the same bits.

Takes the decisions that a run recorded and nothing else of it. Gradients of each WORKER's units are computed one after the
other, cut into the shards of the K ranks as FSDP2 does, added in the order in which the ring adds (`protocol.ring`), and
given to an optimizer over those shards. No sockets, no threads, no quorum: what is checked shares only the arithmetic.

Used by the tests and by anyone who wants to check a run of a deterministic model. Gradient clipping is supported for K = 1.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.learning_rate import factor
from keepstep.protocol.ring import reduction_order, rounds, segment
from keepstep.runtime.engine_events import EngineSettings
from keepstep.training.buckets import plan
from keepstep.training.data import Units, step_seed
from keepstep.training.exchange_buffers import wire_dtype_of

Compute = Callable[[torch.nn.Module, Any], torch.Tensor]
"""(model, batch) -> mean loss, as the script computes it."""


class Reference:
    """Replays recorded decisions on one model.

    `make_model` builds the unsharded model with its initial weights, `make_optimizer` an optimizer (and scheduler or None) over
    a list of parameters, `make_units(rank)` the data as that rank sees it; all three as the script does.
    """

    def __init__(
        self,
        *,
        make_model: Callable[[], torch.nn.Module],
        make_optimizer: Callable[[list[torch.nn.Parameter]], tuple[torch.optim.Optimizer, Any]],
        make_units: Callable[[int], Units],
        compute: Compute,
        ranks: int,
        bucket_bytes: int,
        engine: EngineSettings,
        seed: int = 0,
        lr_policy: str = "sqrt",
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        if max_grad_norm is not None and ranks > 1:
            raise ConfigError("the reference clips gradients for one rank a replica only")
        self.model = make_model()
        self.ranks, self.engine, self.seed, self.accumulate = ranks, engine, seed, accumulate
        self.wire_dtype = wire_dtype
        self.compute, self.lr_policy, self.max_grad_norm = compute, lr_policy, max_grad_norm
        self.units = [make_units(rank) for rank in range(ranks)]
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.shards = [[torch.nn.Parameter(_shard(p, ranks, r).clone()) for p in self.params] for r in range(ranks)]
        self.optimizers = [make_optimizer(shards) for shards in self.shards]
        self.plans = [plan([(p.dtype, p.numel()) for p in shards], bucket_bytes) for shards in self.shards]

    def run(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Trains every committed decision, in order, as the event log records them."""
        for decision in decisions:
            self.step(decision)

    def step(self, decision: Mapping[str, Any]) -> None:
        """One committed step."""
        members = decision["members"]
        contributions = [self._contribution(m["units"]) for m in members]
        weight = sum(self.units[0].weight(m["units"]) for m in members if m["units"])
        healthy = sum(m["role"] == "worker" for m in members)
        scale = factor(self.lr_policy, healthy, int(decision["num_replicas"]))
        for rank in range(self.ranks):
            self._update(rank, [c[rank] for c in contributions], weight, scale)
        with torch.no_grad():
            for index, p in enumerate(self.params):
                p.copy_(torch.cat([self.shards[r][index] for r in range(self.ranks)]).view_as(p))

    def _contribution(self, units: Sequence[int]) -> list[list[torch.Tensor]]:
        """One member's buckets, for each rank: weight x mean gradient, or zeros without units."""
        flat = [[torch.zeros(count, dtype=dtype) for dtype, count in buckets] for _, buckets in self.plans]
        if not units:
            return flat
        sums = [torch.zeros_like(p) for p in self.params]
        for rank in range(self.ranks):
            torch.manual_seed(step_seed(self.seed, units, rank))
            self.model.zero_grad(set_to_none=True)
            for batch, scale in self.units[rank].batches(units, self.accumulate):  # type: ignore[arg-type]
                loss = self.compute(self.model, batch)
                (loss if scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]
            for total, p in zip(sums, self.params, strict=True):
                if p.grad is not None:
                    total.add_(p.grad)
        weight = self.units[0].weight(units)  # type: ignore[arg-type]
        for rank, (slots, _) in enumerate(self.plans):
            for total, slot in zip(sums, slots, strict=True):
                part = _shard(total / self.ranks if self.ranks > 1 else total, self.ranks, rank)
                flat[rank][slot.bucket][slot.lo : slot.hi] = part.reshape(-1)
                if weight != 1.0:
                    flat[rank][slot.bucket][slot.lo : slot.hi].mul_(weight)
        return flat

    def _update(self, rank: int, contributions: Sequence[list[torch.Tensor]], weight: float, scale: float) -> None:
        slots, buckets = self.plans[rank]
        reduced = [ring_sum([c[b] for c in contributions], self.engine, self.wire_dtype) for b in range(len(buckets))]
        for flat in reduced:
            if weight not in (0.0, 1.0):
                flat.div_(weight)
        for p, slot in zip(self.shards[rank], slots, strict=True):
            p.grad = reduced[slot.bucket][slot.lo : slot.hi].view_as(p)
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.shards[rank], self.max_grad_norm)
        optimizer, scheduler = self.optimizers[rank]
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * scale if scale != 1.0 else rate
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if scheduler is not None:
            scheduler.step()


def _shard(tensor: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """The part of a parameter that FSDP2 gives to `rank`: the rank-th chunk of dimension 0, possibly empty."""
    chunks = torch.chunk(tensor.detach(), ranks, dim=0)
    return chunks[rank] if rank < len(chunks) else tensor.detach()[:0]


def ring_sum(
    inputs: Sequence[torch.Tensor], settings: EngineSettings, wire_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The sum of one bucket over the members, added up in the order and rounded in the places in which the ring does."""
    size, dtype = len(inputs), inputs[0].dtype
    travels = wire_dtype_of(dtype, wire_dtype)
    total = torch.empty_like(inputs[0], dtype=travels)
    for lo, hi in rounds(total.numel() * travels.itemsize, travels.itemsize, size, settings.shape):
        for index in range(size):
            a, b = (x // travels.itemsize for x in segment(lo, hi, travels.itemsize, size, index))
            first, *others = reduction_order(size, index)
            part = inputs[first][a:b].to(travels)
            for member in others:
                own = inputs[member][a:b]
                part = part + own if travels == dtype else (part.float() + own.float()).to(travels)
            total[a:b] = part
    return total.to(dtype)
