"""Writes this rank's part of a state to persistent storage while training goes on, and reads it back (FT-HSDP section 5.6).

    save: copy the state while the next step is computed ──> agree ──> torch.distributed.checkpoint writes ──> sync, checksums
          ──> agree ──> rank 0 publishes (runtime.checkpoint_store) and removes old ones

The checkpointer is a reader of `TrainingState` like a peer that catches up: it copies the live tensors during forward and
backward, and training waits only for what is not copied yet when the optimizer overwrites it. Everything else happens in a
thread of its own, with a process group of its own, in the order in which decisions ask for it, the same on every rank.

The files are a usual distributed checkpoint: `torch.distributed.checkpoint.load({"model": model.state_dict()}, ...)` reads them,
on any number of ranks. What is not sharded and belongs to a rank (Adam's step counts) lies in one blob a rank.

Fails: a disk that is full, slow, read-only or gone costs the checkpoint, never a step; an event and the log say so, and the next
one is tried when it is due. What is read is checked first (`training.checkpoint_reader`); a damaged file makes the replica fall
back to an older checkpoint.
"""

import json
import logging
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from keepstep.ports import EventSink
from keepstep.protocol.errors import (
    CheckpointCorrupt,
    ConfigError,
    InvariantViolation,
    LocalProtocolError,
    TransferError,
)
from keepstep.protocol.ids import Incarnation
from keepstep.protocol.messages import Checkpoint, LedgerState, Reader, StateName
from keepstep.runtime.checkpoint_store import CheckpointStore, FileRow, Found, Part, TensorRow, rows_of
from keepstep.runtime.faults import Phase
from keepstep.runtime.memory import big_buffer
from keepstep.training.buckets import like, local
from keepstep.training.checkpoint_reader import METADATA, CheckedReader
from keepstep.training.join import Job
from keepstep.training.state import Layout, TrainingState, views
from keepstep.version import __version__

log = logging.getLogger("keepstep")

PIECE = 4 << 20
GROUP_TIMEOUT = timedelta(hours=6)  # a slow disk holds up the next checkpoint only
TRIES, PAUSE_S = 3, 1.0  # of a read that fails without a damaged file
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

FAILURES = (Exception, CheckpointException)
"""Whatever storage does to us. What torch raises is no Exception."""

Done = Callable[[bool, str], None]


@dataclass(frozen=True, slots=True)
class _Save:
    state: StateName
    ledger: LedgerState
    done: Done


class Checkpointer:
    """Implements `ports.CheckpointStorage` over a live training state. Created by the main thread of every rank."""

    def __init__(
        self,
        state: TrainingState,
        ledger: LedgerState,
        *,
        root: Path,
        every: int,
        keep: int,
        rank: int,
        size: int,
        life: Incarnation,
        events: EventSink,
        fault: Callable[[str], None] = lambda what: None,
    ) -> None:
        """`ledger`: of the initial state. A collective: it makes a process group."""
        self.every, self._state, self._rank, self._size, self._life = every, state, rank, size, life
        self._initial, self._events, self._fault = ledger, events, fault
        self._store = CheckpointStore(root, keep=keep)
        self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if size > 1 else None
        self._like: dict[str, torch.Tensor] = {f"model/{n}": p for n, p in state.model.named_parameters()}
        for g, group in enumerate(state.optimizer.param_groups):
            self._like |= {f"optimizer/{g}/{i}": p for i, p in enumerate(group["params"])}
        self._queue: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        self._closed = False
        self._found: dict[str, Found] = {}
        self._thread = threading.Thread(target=self._work, name="keepstep-checkpoint", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Ends what is being written if it takes longer than `timeout` seconds; False: it goes on regardless."""
        self._queue.put(None)
        self._thread.join(timeout)
        self._closed = True
        return not self._thread.is_alive()

    # --- finding ----------------------------------------------------------------------------------------------

    def find(self) -> tuple[Checkpoint, ...]:
        """Complete checkpoints of this job that can be read here, newest first. Any thread; reads the directory.

        Raises OSError where the storage does: that is another answer than none.
        """
        found = [each for each in self._store.found() if not self._misfit(each)]
        self._found = {each.checkpoint.name: each for each in found}
        return tuple([each.checkpoint for each in found])

    def check_newest(self) -> None:
        """Refuses to begin beside checkpoints of another job. Raises ConfigError. Main thread, before training."""
        try:
            found = self._store.found()
        except OSError:
            return  # the leader says so, and waits
        problem = self._misfit(found[0]) if found else ""
        if not problem:
            for each in found[:1]:
                problem = self._misfit_of_model(each)
        if problem:
            raise ConfigError(
                f"checkpoint {found[0].path} does not fit this job: {problem}; choose another checkpoint_dir to begin anew"
            )

    def _misfit(self, found: Found) -> str:
        """What keeps a checkpoint from being restored here, in words; the model is compared when it is loaded."""
        theirs, ours, ranks = found.checkpoint.ledger, self._initial, len(found.manifest.parts)
        if (theirs.policy, theirs.fingerprint, theirs.total) != (ours.policy, ours.fingerprint, ours.total):
            return "it was trained with another data set, unit size, seed, number of epochs or version of keepstep"
        if len(theirs.cursors) != len(ours.cursors):
            return f'its {len(theirs.cursors)} streams of data need as many replicas (data_policy="pool" does not)'
        if ranks != self._size and any(
            self._is_own(row) and row.shape != () for row in found.manifest.parts[0].tensors
        ):
            return f"its optimizer keeps tensors of each of its {ranks} ranks, so it needs --ranks-per-replica {ranks}"
        return ""

    def _misfit_of_model(self, found: Found) -> str:
        try:
            layout = self._layout_of(found)
            self._state.check(layout, layout.total)
        except (InvariantViolation, ValueError, IndexError) as error:
            return f"it is of another model or optimizer ({error})"
        return ""

    def _is_own(self, row: TensorRow) -> bool:
        """Neither sharded nor part of the model: each rank has its own."""
        return not row.sharded and row.path.startswith("optimizer/")

    # --- saving -----------------------------------------------------------------------------------------------

    def save(self, state: StateName, ledger: LedgerState, done: Done) -> None:
        """Saves `state`, which is held, or will be reached before it is overwritten.

        Returns at once; `done(ok, reason)` comes from a thread. Every rank of the replica is asked for the same states in the
        same order. Control loop.
        """
        self._state.keep(self._reader(state), state)
        self._queue.put(_Save(state, ledger, done))

    def _reader(self, state: StateName) -> Reader:
        return Reader(incarnation=Incarnation(f"checkpoint of {self._life}"), since=state.lineage)

    def _work(self) -> None:
        while (order := self._queue.get()) is not None:
            started = time.monotonic()
            try:
                row = self._save(order)
            except FAILURES as error:  # whatever storage does to us, training goes on without this checkpoint
                reason = _in_words(error)
                log.warning("state %d is not saved, training goes on: %s", order.state.step, reason)
                fields = {"step": order.state.step, "lineage": order.state.lineage, "reason": reason}
                self._events.emit("checkpoint_failed", fields)
                order.done(False, reason)
            else:
                seconds = time.monotonic() - started
                if self._rank == 0:
                    self._events.emit("checkpoint", {**row, "seconds": seconds})
                order.done(True, "")

    def _save(self, order: _Save) -> dict[str, object]:
        reader, state = self._reader(order.state), order.state
        staging = self._store.staging(state, self._life)
        copy: tuple[Layout, memoryview] | None = None
        try:
            try:
                copy = self._copy(state)
            finally:
                self._state.keep(reader, None)
                self._agree(copy is not None, "another rank of this replica could not copy the state")
            layout, data = copy
            self._fault("saving")
            self._write(staging, layout, data)
            part: Part | None = None
            try:
                part = self._part(staging, layout)
                self._store.write_part(staging, self._rank, part)
            finally:
                self._agree(part is not None, "another rank of this replica could not write its part")
            if self._rank != 0:
                return {}
            self._fault("publishing")
            found = self._store.publish(staging, self._size, version=__version__, state=state, ledger=order.ledger)
        except BaseException:
            if self._rank == 0:
                self._store.discard(staging)
            raise
        size = sum(row.size for part in found.manifest.parts for row in part.files)
        return {
            "step": state.step,
            "lineage": state.lineage,
            "name": found.checkpoint.name,
            "bytes": size,
            "removed": self._prune(),
        }

    def _prune(self) -> list[str]:
        try:
            return self._store.prune()
        except OSError as error:
            log.warning("old checkpoints cannot be removed: %s", error)
            return []

    def _agree(self, ok: bool, otherwise: str) -> None:
        """All ranks of the replica go on, or none does."""
        if self._group is None:
            return
        flag = torch.tensor([int(ok)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        if ok and not flag.item():
            raise CheckpointCorrupt(otherwise)

    def _copy(self, state: StateName) -> tuple[Layout, memoryview]:
        """The layout and bytes of `state`, while the main thread computes the step that will overwrite it."""
        while True:
            try:
                manifest = self._state.manifest(state)
                break
            except TimeoutError:
                if self._closed:
                    raise
        if manifest is None:
            raise LocalProtocolError(f"state {state.step} is not held any more: is state_copy_bytes_max too small?")
        layout = Layout.from_json(manifest)
        data = big_buffer(layout.total)
        for lo in range(0, layout.total, PIECE):
            if not self._state.copy_into(data, state, lo, min(lo + PIECE, layout.total)):
                raise LocalProtocolError(f"state {state.step} is not held any more: is state_copy_bytes_max too small?")
        return layout, data

    def _write(self, staging: Path, layout: Layout, data: memoryview) -> None:
        tensors = self._tensors(layout, data, self._rank if self._size > 1 else None)
        writer = FileSystemWriter(staging, single_file_per_rank=True, sync_files=True)
        save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)

    def _tensors(self, layout: Layout, data: memoryview, rank: int | None) -> dict[str, Any]:
        """What torch saves or loads: sharded tensors with their global shapes, and those that `rank` alone has in one blob.

        None: of a replica of one rank, which needs none.
        """
        parts, tensors, own = views(layout, data), {}, []
        for entry in layout.entries:
            if rank is not None and not entry.sharded and entry.path.startswith("optimizer/"):
                own.append(parts[entry.path].reshape(-1).view(torch.uint8))
                continue
            param = self._param(entry.path)
            wrapped = like(parts[entry.path], param) if entry.sharded and param is not None else parts[entry.path]
            tensors[entry.path.replace("/", ".")] = wrapped
        if own:
            tensors[f"own.{rank}"] = torch.cat(own)
        return tensors

    def _param(self, path: str) -> torch.Tensor | None:
        """The parameter that a tensor of the state is, or belongs to."""
        return self._like.get(path) if path.startswith("model/") else self._like.get(path.rsplit("/", 1)[0])

    def _part(self, staging: Path, layout: Layout) -> Part:
        names = [n for n in os.listdir(staging) if n.startswith(f"__{self._rank}_")]
        files: tuple[FileRow, ...] = rows_of(staging, [*names, METADATA] if self._rank == 0 else names)
        rows = []
        for entry in layout.entries:
            param = self._param(entry.path)
            shape = tuple(param.shape) if entry.sharded and param is not None else entry.shape
            row = TensorRow(path=entry.path, dtype=entry.dtype, shape=shape, sharded=entry.sharded)
            if self._rank == 0 or self._is_own(row):
                rows.append(row)
        return Part(files=files, tensors=tuple(rows), values=json.dumps(layout.values))

    # --- restoring --------------------------------------------------------------------------------------------

    def load(self, checkpoint: Checkpoint) -> tuple[bytes, memoryview]:
        """This rank's part: the manifest and bytes that `TrainingState.load` takes. Raises TransferError. Not the main thread."""
        for attempt in range(TRIES):
            try:
                return self._load(checkpoint)
            except FAILURES as error:  # whatever it is, the replica tries an older checkpoint
                reason = f"checkpoint {checkpoint.name} cannot be read: {_in_words(error)}"
                if not isinstance(_cause(error), OSError) or attempt == TRIES - 1:
                    raise TransferError(reason) from None
                log.warning("%s; trying again", reason)
                time.sleep(PAUSE_S)  # a back-off: nothing tells us when the storage is back
        raise AssertionError("the last attempt has raised")

    def _load(self, checkpoint: Checkpoint) -> tuple[bytes, memoryview]:
        if checkpoint.name not in self._found:
            self.find()
        found = self._found.get(checkpoint.name)
        if found is None or found.checkpoint != checkpoint:
            raise CheckpointCorrupt("it is not here, or is another one of that name")
        layout = self._layout_of(found)
        data = big_buffer(layout.total)
        ranks = len(found.manifest.parts)
        source = None if ranks == 1 else self._rank if self._rank < ranks else 0
        tensors = self._tensors(layout, data, source)
        load(tensors, storage_reader=CheckedReader(found), no_dist=True)
        blob, at, parts = tensors.get(f"own.{source}"), 0, views(layout, data)
        for entry in layout.entries if blob is not None else ():
            if not entry.sharded and entry.path.startswith("optimizer/"):
                flat = parts[entry.path].reshape(-1).view(torch.uint8)
                flat.copy_(blob[at : at + flat.numel()])  # type: ignore[index]  # there are entries only with a blob
                at += flat.numel()
        return layout.to_json(), data

    def _layout_of(self, found: Found) -> Layout:
        """Where this rank's part of it lies, sharded as the model is here. Raises InvariantViolation, ValueError."""
        parts = found.manifest.parts
        mine = parts[self._rank if self._rank < len(parts) else 0]
        own = {row.path: row for row in mine.tensors if self._is_own(row)}
        rows = [own.get(row.path, row) for row in parts[0].tensors]
        values = json.loads(mine.values)
        if not isinstance(values, dict):
            raise InvariantViolation("its values are none")
        return Layout.of([self._local_row(row) for row in rows], values)

    def _local_row(self, row: TensorRow) -> tuple[str, str, tuple[int, ...], bool]:
        param = self._param(row.path)
        if not row.sharded:
            return row.path, row.dtype, row.shape, False
        if param is None or not isinstance(param, DTensor) or tuple(param.shape) != row.shape:
            raise InvariantViolation(f"it holds {row.path} of shape {row.shape}, sharded, and this job does not")
        return row.path, row.dtype, tuple(local(param).shape), True


def _cause(error: BaseException) -> BaseException:
    """The first error inside what torch makes of it."""
    if not isinstance(error, CheckpointException) or not error.failures:
        return error
    return _cause(next(iter(error.failures.values()))[0])


def _in_words(error: BaseException) -> str:
    cause = _cause(error)
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__


def make_checkpointer(
    job: Job,
    state: TrainingState,
    ledger: LedgerState,
    root: str | os.PathLike[str] | None,
    *,
    every: int | None,
    keep: int | None,
) -> Checkpointer | None:
    """What a job's `Training` was asked for, or its environment; None: no checkpoints. Raises ConfigError. A collective."""
    env = job.env
    path = Path(root) if root is not None else env.checkpoint_dir
    every = env.checkpoint_every if every is None else every
    keep = env.keep_checkpoints if keep is None else keep
    if path is None:
        return None
    if every < 1 or keep < 1:
        raise ConfigError(f"checkpoint_every and keep_checkpoints must be at least 1, got {every} and {keep}")
    if job.is_leader:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if env.life == 1:  # somebody can still correct the setting; later, saving fails and says so
                why = error.strerror
                raise ConfigError(f"checkpoint_dir {path} cannot be made ({why}): choose another one") from None
            log.warning("checkpoints cannot be written to %s: %s", path, error)
    made = Checkpointer(
        state,
        ledger,
        root=path,
        every=every,
        keep=keep,
        rank=job.rank,
        size=job.size,
        life=job.runtime.incarnation,
        events=job.runtime.events,
        fault=lambda what: job.runtime.fault(Phase(what)),
    )
    made.check_newest()
    return made
