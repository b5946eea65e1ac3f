"""`keepstep.Training` in a shadow run: the same, on a stand-in for the script's model.

    forward, backward   on shapes only; once the shapes of a step have been seen, they are not worked out again (`Seen`)
    time                the gradients of a step come spread over `step_s`, as a backward pass of that length brings them
    the batch           really read; its bits go into the stand-ins' gradients and, by a `batch` event, to `shadow.verify`
    collectives         those without values move nothing; after each backward the ranks of a replica meet, and compare which ones
                        they have called. A rank that never comes is missed there, as it would be in NCCL.

Fails: as `keepstep.Training`. ConfigError for what has no replacement.
"""

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from keepstep.protocol.errors import InvariantViolation
from keepstep.runtime.engine_events import EngineSettings
from keepstep.runtime.links import LinkSettings
from keepstep.shadow.settings import ShadowSettings
from keepstep.shadow.shapes import META, ShapesOnly
from keepstep.shadow.stand_in import StandIn
from keepstep.training import training as real
from keepstep.training.join import Job
from keepstep.training.offload import PIECE_BYTES
from keepstep.training.training import Step, check_sharding

FORWARD = 1 / 3  # of a step's time; backward takes twice as long
CHUNK_BYTES_MIN = 4096
NO_BACKWARD = -1  # torch's number of the backward pass that runs, if none does
COMPUTE_NICE = 19  # for the main thread: what computes would not take this machine's processors


class ShadowTraining(real.Training):
    """Takes the place of `keepstep.training.training.Training`."""

    mode: ShapesOnly
    settings: ShadowSettings

    def __init__(
        self,
        job: Job,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        bucket_bytes: int = 25 << 20,
        offload_bytes: int = PIECE_BYTES,
        engine: EngineSettings | None = None,
        **more: Any,
    ) -> None:
        self.mode, self.settings = ShadowTraining.mode, ShadowSettings.from_env(os.environ)
        check_sharding(model, job.size)
        self.script_model, fraction = model, self.settings.state_fraction
        self.stand_in = StandIn(model, optimizer, mesh=job.mesh, bucket_bytes=bucket_bytes, fraction=fraction)
        engine, patience = engine or EngineSettings(), self.settings.patience
        # Those that catch up work their first step out when the others have done theirs: that is no lack of progress.
        floor_s = engine.progress_floor_s if patience == 1 else engine.progress_ceiling_s
        chunk = max(CHUNK_BYTES_MIN, int(engine.chunk_bytes * fraction) // 64 * 64)
        super().__init__(
            job,
            self.stand_in,
            optimizer,
            bucket_bytes=1,  # each stand-in is a bucket
            offload_bytes=max(1, int(offload_bytes * fraction)),
            engine=dataclasses.replace(
                engine,
                chunk_bytes=min(chunk, engine.chunk_bytes),
                progress_floor_s=floor_s * patience,
                progress_ceiling_s=engine.progress_ceiling_s * patience,
                link=_patient(engine.link, patience),
            ),
            **more,
        )
        self._batch_digest = 0
        self._read_batches, self.units.batches = self.units.batches, self._batches  # type: ignore[method-assign]
        total = sum(p.numel() for p in self.stand_in.members)
        self._shares = [p.numel() / total for p in self.stand_in.members]
        self._done = 0.0
        self._hooks = list(self.stand_in.hooks(self._on_gradient))
        self.seen = Seen(self)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPUTE_NICE)

    # --- a step -----------------------------------------------------------------------------------------------

    def _start(self, order: Any) -> Step:
        self.stand_in.start()
        self._batch_digest, self._done = 0, 0.0
        step = super()._start(order)
        self.seen.start()
        return step

    def _arm(self, *, last: bool) -> None:
        super()._arm(last=last)
        self._done = 0.0
        if self.accumulate > 1 and isinstance(self.script_model, FSDPModule):
            self.script_model.set_requires_gradient_sync(last)

    def _batches(self, units: Any, pieces: int) -> Any:
        """What the loader gives, as it is; and the bits of it."""
        batches = self._read_batches(units, pieces)
        hasher = xxhash.xxh3_64()
        for leaf in tree_flatten([batch for batch, _ in batches])[0]:
            hasher.update(_bits(leaf))
        self._batch_digest = hasher.intdigest()
        epoch = [unit // -(-self.units.length // self.units.unit_size) for unit in units]
        self.job.runtime.emit("batch", units=list(units), epoch=epoch, digest=hasher.hexdigest())
        return batches

    def _on_gradient(self, index: int) -> None:
        """The gradient of the script's parameter `index` is there: by autograd, or as it was when these shapes were seen."""
        self._done += self._shares[index]
        self._pace(FORWARD + (1 - FORWARD) * min(1.0, self._done))
        self.seen.note(index)
        with _disable_current_modes():
            self.stand_in.arrived(index, self._constant(index))

    def _pace(self, part: float) -> None:
        """Waits until `part` of the step's time has passed."""
        left = self._began_at + part * self.settings.step_s - time.monotonic()
        if left > 0:
            time.sleep(left)

    def _constant(self, index: int) -> float:
        return ((self._batch_digest >> 16) % 1009 - 504) / 1009 + self.job.rank / 8192 + index / 4096

    def _commit(self, step: Step, loss: float) -> bool:
        self.seen.finish()
        with _disable_current_modes():
            self.stand_in.finish(self._constant(0))
            self._meet()
            return super()._commit(step, loss)

    def _meet(self) -> None:
        """All ranks of the replica have come through backward, and have called the same collectives."""
        if self.job.size == 1:
            return
        mine = self.mode.calls.digest()
        low_and_high = torch.tensor([mine, -mine])
        dist.all_reduce(low_and_high, op=dist.ReduceOp.MIN, group=self.job.mesh.get_group())
        if int(low_and_high[0]) != -int(low_and_high[1]):
            raise InvariantViolation(
                f"the ranks of this replica have called different collectives: rank {self.job.rank} has called "
                f"{self.mode.calls.count} in all; on devices this hangs"
            )

    def _apply(self, given: Any, own: Step | None) -> None:
        with _disable_current_modes():
            super()._apply(given, own)

    def _load(self, given: Any) -> None:
        with _disable_current_modes():
            super()._load(given)


def _patient(link: LinkSettings, times: float) -> LinkSettings:
    return dataclasses.replace(
        link,
        silent_floor_s=link.silent_floor_s * times,
        silent_s=link.silent_s * times,
        connect_s=link.connect_s * times,
        user_timeout_s=link.user_timeout_s * times,
    )


def _bits(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if leaf.numel() else b""
    return repr(leaf).encode()


class _Replay(torch.autograd.Function):
    """Outputs as they were when these shapes were seen; backward brings the gradients in the order of then."""

    @staticmethod
    def forward(ctx: Any, seen: "Seen", record: "Record", anchor: torch.Tensor, *templates: torch.Tensor) -> Any:
        ctx.seen, ctx.record, ctx.inputs = seen, record, len(templates)
        return tuple(torch.empty_like(t) for t in templates)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.seen.replay(ctx.record)
        return (None, None, None, *[None] * ctx.inputs)


@dataclasses.dataclass(slots=True)
class Record:
    """One forward and backward pass: what came out, the order of the gradients, and which collectives were called."""

    output: Any = None
    order: list[int] = dataclasses.field(default_factory=list)
    forward: list[str] = dataclasses.field(default_factory=list)
    backward: list[str] = dataclasses.field(default_factory=list)
    complete: bool = False


class Seen:
    """Passes whose shapes are known: they are not worked out again.

    What can be replayed is one call of the whole model for each backward pass. A script that calls it otherwise, or only parts of
    it, is traced in every step.
    """

    def __init__(self, training: ShadowTraining) -> None:
        self._training, self._calls = training, training.mode.calls
        self._model = training.script_model
        self._records: dict[Any, Record] = {}
        self._now: Record | None = None  # being recorded
        self._inside = False  # the model's forward runs
        self._anchor = torch.empty((), device=META, requires_grad=True)
        self._call: Callable[..., Any] = self._model._call_impl
        self._calls.on_call = self._note_call
        self._model._compiled_call_impl = self  # torch's own place for what runs instead of forward and its hooks

    def start(self) -> None:
        """A computation begins; one that was given up is not to be replayed."""
        self._now = None

    def finish(self) -> None:
        """Backward is over."""
        if self._now is not None:
            self._now.complete = bool(self._now.order)
        self._now = None

    def note(self, index: int) -> None:
        """Autograd has brought the gradient of the script's parameter `index`."""
        if self._now is not None:
            self._now.order.append(index)

    def _note_call(self, words: str) -> None:
        if self._now is None:
            return
        if self._inside:
            self._now.forward.append(words)
        elif torch._C._current_graph_task_id() != NO_BACKWARD:
            self._now.backward.append(words)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._inside or not torch.is_grad_enabled() or not self._model.training:
            return self._call(*args, **kwargs)
        leaves, shape = tree_flatten((args, kwargs))
        key = (shape, tuple(_signature(leaf) for leaf in leaves), self._training.buckets._armed)
        record = self._records.get(key)
        if record is not None and record.complete and self._now is None:
            return self._replayed(record)
        several = self._now is not None and not self._now.order  # a forward pass whose backward has not come yet
        self.finish()
        self._now = Record()
        self._inside = True
        try:
            output = self._call(*args, **kwargs)
        finally:
            self._inside = False
        self._now.output = tree_map_only(torch.Tensor, _template, output)
        if several:
            self._now = None
        else:
            self._records[key] = self._now
        return output

    def _replayed(self, record: Record) -> Any:
        for words in record.forward:
            self._calls.note(words)
        leaves, shape = tree_flatten(record.output)
        places = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.dtype.is_floating_point]
        given = _Replay.apply(self, record, self._anchor, *[leaves[i] for i in places])  # type: ignore[no-untyped-call]
        for i, tensor in zip(places, given, strict=True):
            leaves[i] = tensor
        return tree_unflatten(leaves, shape)

    def replay(self, record: Record) -> None:
        """In autograd's backward."""
        for words in record.backward:
            self._calls.note(words)
        for index in record.order:
            self._training._on_gradient(index)


def _template(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor.detach())


def _signature(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
