"""The step loop that a user's script runs.

    for step in training:
        loss = compute_loss(model, step.batch)
        step.backward(loss)
        step.commit()

The loop carries out the orders of `protocol.catch_up.RankMachine`, on the main thread and in order: Train yields a step to the
script; Apply takes reduced gradients through the optimizer (our own step's, or one to replay); LoadState brings in a fetched
state. A replica that catches up stays inside the iterator and yields nothing.

    before_write ─> gradients (weighted mean) ─> clip ─> optimizer with the learning rate scaled for the healthy replicas
                 ─> scheduler ─> after_write: "these tensors hold state n+1"

Random numbers: torch's generator is seeded from (seed, unit, rank) before every step, so that dropout repeats when a unit is
computed again, and a killed and resumed run equals an unbroken one bit for bit.

Source: FT-HSDP sections 5.1, 5.3, 5.5. Departs from the paper: a retried step reuses the local gradients.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from keepstep.protocol import ledger as ledgers
from keepstep.protocol.catch_up import Apply, Begin, Leave, LoadState, Train
from keepstep.protocol.errors import ConfigError, InvariantViolation, JobOver, Left
from keepstep.protocol.learning_rate import factor
from keepstep.protocol.messages import Decision, LedgerState
from keepstep.runtime.engine_events import EngineSettings
from keepstep.runtime.faults import Phase
from keepstep.runtime.memory import keep_freed_memory
from keepstep.runtime.phases import CKPT_BLOCKING, DATA_WAIT, DISCARDED, WAIT, Phases
from keepstep.runtime.rank import DataPlane, Given
from keepstep.training.buckets import Buckets
from keepstep.training.checkpoint import make_checkpointer
from keepstep.training.data import MapDataset, Units, step_seed
from keepstep.training.join import Job
from keepstep.training.offload import PIECE_BYTES, Offload
from keepstep.training.progress import Progress
from keepstep.training.state import Stateful, TrainingState

log = logging.getLogger("keepstep")


class Step:
    """One attempt at one optimizer update, as the script sees it."""

    def __init__(self, training: "Training", order: Train) -> None:
        self._training, self.order = training, order
        self.number: int = order.start.step
        self.units: tuple[int, ...] = order.units
        self._pieces: list[tuple[Any, float]] = []
        self._factor = 1.0
        self._weighted_loss = 0.0
        self.closed = False
        self.committed = False
        self.loss: float | None = None
        """After commit: the job-wide mean loss of the step, the same on every replica."""
        self.members: tuple[int, ...] = ()
        """After commit: the replicas that took part, in ring order."""

    def __repr__(self) -> str:
        return f"Step({self.number}, units {list(self.units)}, {'committed' if self.committed else 'open'})"

    @property
    def batch(self) -> Any:
        """This rank's share of the unit, collated. With accumulate > 1, iterate over `micro_batches` instead."""
        if len(self._load()) > 1:
            raise ConfigError("with accumulate > 1, iterate over step.micro_batches instead of reading step.batch")
        self._factor = self._pieces[0][1]
        return self._pieces[0][0]

    @property
    def micro_batches(self) -> Iterator[Any]:
        """The share in up to `accumulate` pieces; run one forward and backward for each."""
        pieces = self._load()
        for index, (batch, scale) in enumerate(pieces):
            self._factor = scale
            self._training._arm(last=index == len(pieces) - 1)
            yield batch

    def _load(self) -> list[tuple[Any, float]]:
        if not self._pieces:
            with self._training.phases.during(DATA_WAIT):
                self._pieces = self._training.units.batches(self.order.units, self._training.accumulate)
        return self._pieces

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, where `loss` is the mean over the batch at hand.

        Scales the loss so that micro-batches and unevenly divided short units count by their number of samples. For a whole
        batch of a full unit the scale is 1 and `loss.backward()` does the same.
        """
        self._weighted_loss += float(loss.detach()) * self._factor
        (loss if self._factor == 1.0 else loss * self._factor).backward()  # type: ignore[no-untyped-call]

    def commit(self, loss: torch.Tensor | float | None = None) -> bool:
        """Ends the step: waits for the exchange and the vote, then the optimizer has run and True is returned.

        Retries under changed membership happen inside. False: this computation is not needed (another replica trained its
        units, or this one fell behind); the loop goes on with what is. `loss` (a mean over this rank's batch) is only for the
        logs, and known already if `backward` was used.
        """
        if self.closed:
            raise ConfigError(f"step {self.number} was committed already: call step.commit() once")
        self.closed = True
        mean = self._weighted_loss if loss is None or self._weighted_loss else float(loss)
        return self._training._commit(self, mean)


def check_sharding(model: torch.nn.Module, size: int) -> None:
    """Every parameter must be sharded over exactly the replica's ranks, or whole if there is one. Raises ConfigError."""
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            if p.device_mesh.size() != size:
                raise ConfigError(
                    f"parameter {name} is sharded over a mesh of {p.device_mesh.size()}, but the replica has {size} ranks: "
                    "the mesh must be job.mesh"
                )
        elif size > 1:
            raise ConfigError(
                f"parameter {name} is not sharded, but the replica has {size} ranks: use fully_shard(model, mesh=job.mesh), or "
                "--ranks-per-replica 1"
            )


class Training:
    """Drives one rank's model through the job's steps.

    Args:
        job: from `keepstep.join()`.
        model: a module; plain, or sharded with `fully_shard(model, mesh=job.mesh)`, with its weights on their device.
        optimizer: over the model's parameters. It must be deterministic: replicas stay equal bit for bit.
        data: a map-style data set, the same on every rank.
        unit_size: samples that a replica trains in one step; a multiple of its ranks.
        epochs, max_steps: the end of the job, whichever comes first. None: no such bound.
        scheduler: stepped once a committed step.
        max_grad_norm: clips the exchanged gradients.
        lr_policy: "sqrt", "linear" or "none": the learning rate of steps that fewer replicas trained.
        accumulate: backward passes a step, over `step.micro_batches`.
        extra: more objects whose JSON state_dict belongs to the replicated state.
        data_policy: "pool" (any replica trains any unit) or "stream" (each replica owns every R-th).
        wire_dtype: in which gradients travel between replicas. None: as they are, 16-bit ones as float32, so that they are added
            up in float32; torch.bfloat16 or torch.float16 halve the bytes, and round at each replica.
        engine: settings of the exchange; the same for every replica.
        offload_optimizer: keep the optimizer's state in host memory, and bring it to the device for its step, piece by piece. The
            bits stay the same. offload_bytes: of a piece; two of them are on the device at a time.
        state_copy_bytes_max: host memory for copies of a state that a peer, or a checkpoint, is still reading.
        log_every: steps between two lines of the log that say how training goes; one replica writes them. 0: none.
        tokens_per_sample: for the log's `tps`, tokens a second of the whole job. None: it says `sps`, samples a second.
        checkpoint_dir: a directory that all replicas share. A job that finds complete checkpoints of its own in it goes on from
            the newest. None: what `keepstep run --checkpoint-dir` says; without one, no checkpoints.
        checkpoint_every, keep_checkpoints: steps between two, and how many are kept. None: what `keepstep run` says (100, 3).
    """

    def __init__(
        self,
        job: Job,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        data: MapDataset,
        unit_size: int,
        seed: int = 0,
        epochs: int | None = 1,
        max_steps: int | None = None,
        shuffle: bool = True,
        scheduler: Any = None,
        max_grad_norm: float | None = None,
        lr_policy: str = "sqrt",
        accumulate: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
        data_name: str = "",
        data_policy: str = "pool",
        bucket_bytes: int = 25 << 20,
        extra: Mapping[str, Stateful] | None = None,
        offload_optimizer: bool = False,
        offload_bytes: int = PIECE_BYTES,
        state_copy_bytes_max: int = 1 << 62,
        wire_dtype: torch.dtype | None = None,
        engine: EngineSettings | None = None,
        log_every: int = 10,
        tokens_per_sample: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep_checkpoints: int | None = None,
    ) -> None:
        if job.has_training:
            raise ConfigError("this job has a keepstep.Training already: one a process")
        if lr_policy not in ("sqrt", "linear", "none"):
            raise ConfigError(f'lr_policy must be "sqrt", "linear" or "none", got {lr_policy!r}')
        if accumulate < 1 or (max_steps is not None and max_steps < 1) or bucket_bytes < 1:
            raise ConfigError("accumulate, max_steps and bucket_bytes must be at least 1")
        if log_every < 0 or (tokens_per_sample is not None and tokens_per_sample < 1):
            raise ConfigError("log_every must be at least 0, and tokens_per_sample at least 1")
        keep_freed_memory()
        self.job, self.model, self.optimizer, self.scheduler = job, model, optimizer, scheduler
        self.max_grad_norm, self.lr_policy, self.accumulate = max_grad_norm, lr_policy, accumulate
        self.seed = seed
        self.units = Units(
            data,
            unit_size=unit_size,
            rank=job.rank,
            size=job.size,
            seed=seed,
            epochs=epochs,
            shuffle=shuffle,
            policy=data_policy,
            num_replicas=job.num_replicas,
            collate=collate,
            name=data_name,
        )
        check_sharding(model, job.size)
        settings = engine or EngineSettings()
        self.buckets = Buckets(list(model.named_parameters()), bucket_bytes=bucket_bytes, wire_dtype=wire_dtype)
        self.buckets.on_first_gradient = lambda: self.job.runtime.fault(Phase.BACKWARD)
        parts = dict(extra or {})
        if scheduler is not None:
            parts["scheduler"] = scheduler
        self.state = TrainingState(model, optimizer, extra=parts, copy_bytes_max=state_copy_bytes_max)
        self.offload = Offload(optimizer, piece_bytes=offload_bytes) if offload_optimizer else None
        self.ledger: LedgerState = self.units.ledger
        self.next_step = 0
        self.grad_norm: float | None = None
        self._open: Step | None = None
        self._given: Given | None = None
        self._ended = False
        self._committed_at = time.monotonic()
        self._began_at = self._committed_at  # the open step
        self.phases = Phases()
        self._progress = Progress(job.runtime.incarnation, every=log_every, tokens_per_sample=tokens_per_sample)
        self._buffer_versions: list[int] = []
        self.checkpointer = make_checkpointer(
            job, self.state, self.ledger, checkpoint_dir, every=checkpoint_every, keep=keep_checkpoints
        )
        job.has_training = True
        job.runtime.attach(
            DataPlane(
                source=self.state,
                serve=self.state.serve,
                zero_contribution=lambda: list(self.buckets.zero_contribution()),
                exchanges=self.buckets.count,
                layout_digest=self.buckets.layout_digest() + settings.digest,
                ledger=self.units.ledger,
                max_steps=max_steps,
                engine=settings,
                checkpoints=self.checkpointer,
            )
        )

    # --- the loop ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        while (step := self.begin()) is not None:
            yield step

    def begin(self) -> Step | None:
        """The next step to train, or None at the end of the job. For scripts that own their loop."""
        if self._open is not None and not self._open.closed:
            raise ConfigError(f"step {self._open.number} was not committed: call step.commit() in every step")
        while not self._ended:
            given = self._next()
            match given.order:
                case Begin():
                    self.state.after_write(given.order.state)
                case Train():
                    return self._start(given.order)
                case Apply():
                    self.job.runtime.fault(Phase.REPLAYING, given.order.decision.step)
                    self._apply(given, own=None)
                case LoadState():
                    self._load(given)
                case Leave():
                    self._leave(given.order)
        return None

    def _next(self) -> Given:
        given, self._given = self._given, None
        if given is None:
            with self.phases.during(WAIT):
                given = self.job.runtime.next_order()
        return given

    def _start(self, order: Train) -> Step:
        torch.manual_seed(step_seed(self.seed, order.units, self.job.rank))
        runtime, attempt = self.job.runtime, order.attempt
        self.buckets.start(self.units.weight(order.units), lambda i, buffer: runtime.submit(attempt, i, buffer))
        self._arm(last=True)
        self._buffer_versions = [b._version for b in self.model.buffers()]
        self._open, self._began_at = Step(self, order), time.monotonic()
        runtime.fault(Phase.FORWARD, order.start.step)
        return self._open

    def _arm(self, *, last: bool) -> None:
        self.buckets.arm(last)
        if self.accumulate > 1 and isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)  # FSDP2: reduce-scatter only with the last backward

    def _commit(self, step: Step, loss: float) -> bool:
        if [b._version for b in self.model.buffers()] != self._buffer_versions:
            raise ConfigError(
                "a buffer of the model changed during forward or backward (batch norm statistics?): replicas would drift "
                "apart; keepstep does not support such modules yet, use layer, group or RMS norm"
            )
        self.buckets.finish(loss)
        computed = time.monotonic()
        given = self._next()
        if not isinstance(given.order, Apply):
            self._given = given
            self.phases.note(DISCARDED, self._began_at, computed)
            return False
        decision = given.order.decision
        me = decision.member(self.job.env.replica_id, self.job.runtime.incarnation)
        own = step.order.start == decision.start and me is not None and me.units == step.units
        if not own:
            self.phases.note(DISCARDED, self._began_at, computed)
        self._apply(given, own=step if own else None)
        return step.committed

    # --- carrying out orders ----------------------------------------------------------------------------------

    def _apply(self, given: Given, own: Step | None) -> None:
        order = given.order
        assert isinstance(order, Apply)
        decision = order.decision
        if self.state.live != decision.start:
            raise InvariantViolation(f"decision {decision.seq} starts from {decision.start}, we hold {self.state.live}")
        started, saving = time.monotonic(), self.state.kept
        copied = self.state.before_write()
        copy_s = time.monotonic() - started
        if saving:
            self.phases.note(CKPT_BLOCKING, started, started + copy_s)
        weight, loss = self.buckets.to_gradients([buffer.target for buffer in given.reduced])  # type: ignore[attr-defined]
        if weight:
            self._optimize(decision)
        self.optimizer.zero_grad(set_to_none=True)
        self.ledger, self.next_step = order.ledger, decision.step + 1
        self.state.after_write(decision.outcome)
        self.job.runtime.held(decision.outcome)
        if own is not None:
            own.committed, own.loss = True, loss
            own.members = tuple(m.replica_id for m in decision.members)
        self._emit_commit(decision, loss, weight, copied, copy_s)

    def _optimize(self, decision: Decision) -> None:
        if self.max_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            self.grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        scale = factor(self.lr_policy, len(decision.workers), decision.num_replicas)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * scale if scale != 1.0 else rate
        self.job.runtime.fault(Phase.OPTIMIZER_STEP, decision.step)
        if self.offload is None:
            self.optimizer.step()
        else:
            self._step_offloaded(self.offload, decision)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if self.scheduler is not None:
            self.scheduler.step()

    def _step_offloaded(self, offload: Offload, decision: Decision) -> None:
        first = not offload.pieces
        offload.step(on_piece=lambda: self.job.runtime.fault(Phase.OFFLOADING, decision.step))
        if first:
            held, most = offload.host_bytes, offload.device_bytes_max
            log.info("optimizer offloaded: %d bytes of state in host memory, at most %d on the device", held, most)
            self.job.runtime.emit("offload", host_bytes=held, device_bytes_max=most, pieces=offload.pieces)

    def _load(self, given: Given) -> None:
        order = given.order
        assert isinstance(order, LoadState)
        assert given.fetched is not None
        self.job.runtime.fault(Phase.LOADING_STATE, order.state.step)
        self.state.before_write()
        self.state.load(given.fetched.manifest, given.fetched.data)
        self.optimizer.zero_grad(set_to_none=True)
        self.ledger, self.next_step = order.ledger, order.state.step
        self.state.after_write(order.state)
        self.job.runtime.held(order.state)
        self.job.runtime.emit("materialized", step=order.state.step, lineage=order.state.lineage)

    def _leave(self, order: Leave) -> None:
        self._ended = self.job.finished = True
        if order.error:
            raise JobOver(order.error)
        if order.left:
            self._depart(order.left)
        digest = self.digest()
        self.job.runtime.emit(
            "final",
            digest=digest,
            step=self.next_step,
            units_committed=ledgers.committed_count(self.ledger),
            units_total=self.units.ledger.total,
        )
        log.info("the job is complete: %d steps, state digest %s", self.next_step, digest)

    def log(self, **values: float) -> None:
        """Numbers to show in the next line of the log, such as `training.log(accuracy=0.7)`. Call it on every rank or on some."""
        self._progress.note({name: float(value) for name, value in values.items()})

    def _depart(self, words: str) -> NoReturn:
        """At a step boundary, on every rank. If the whole job stops, the last decision has named this state as its base, and all
        WORKERs hold it: what is to be kept of it is written here, before the script ends."""
        held = self.state.live is not None  # else it was still catching up
        self.job.runtime.emit("left", step=self.next_step, reason=words, digest=self.digest() if held else None)
        raise Left(words)

    def digest(self) -> str:
        """Names the replica's state: equal on two replicas iff all their ranks hold the same bits. A collective."""
        mine = torch.tensor([self.state.digest() >> 1], dtype=torch.int64)
        parts = [torch.zeros_like(mine) for _ in range(self.job.size)]
        dist.all_gather(parts, mine, group=self.job.mesh.get_group())
        text = ",".join(str(int(p)) for p in parts) + str(self.ledger)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _emit_commit(self, decision: Decision, loss: float, weight: float, copied: int, copy_s: float) -> None:
        now, phases = time.monotonic(), self.phases.take()
        took, self._committed_at = now - self._committed_at, now
        if not self.job.is_leader:
            return
        me = decision.member(self.job.env.replica_id, self.job.runtime.incarnation)
        samples = weight * self.units.unit_size
        line = self._progress.on_commit(
            decision, loss=loss if weight else None, samples=samples, took_s=took, phases=phases
        )
        if line is not None:
            log.info(line)
        self.job.runtime.emit(
            "commit",
            step=decision.step,
            seq=decision.seq,
            quorum_id=decision.quorum_id,
            loss=loss if weight else None,
            samples=round(samples),
            members=len(decision.members),
            workers=len(decision.workers),
            step_time_s=took,
            role=me.role.value if me is not None else None,
            copied_bytes=copied,
            copy_s=copy_s,
            phases=phases,
        )
