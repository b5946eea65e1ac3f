"""This rank's part of the training state, as one flat byte space that peers can read while training goes on.

The state is the model's parameters and buffers, the optimizer's state and settings, the scheduler's, and whatever the user
adds. Tensors are laid out one after the other (64-byte aligned); everything else travels as JSON in the manifest. There is
no pickle.

*Copy before write*: peers read straight from the live tensors for as long as they hold the wanted state. Just before the
optimizer overwrites it, what its reader has not read yet is copied aside, and it goes on with the copy. Several readers have
each read something else, so then all of it is copied. If that would take more than `copy_bytes_max`, the state is let go and
its readers start over from a newer one. A reader that has everything, from here or from others, says so: nothing is copied.

Threads: the state server's threads call `manifest` and `read`; the main thread calls `before_write`, `after_write`, `load`;
the control loop calls `serve`. One condition variable guards the names; tensor bytes are copied under it, a piece at a time.

Departs from the paper: there a source must not change its state while it is read (section 5.6).
"""

import ctypes
import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from keepstep.protocol.errors import ConfigError, InvariantViolation
from keepstep.protocol.messages import Reader, StateName
from keepstep.protocol.rangeset import RangeSet
from keepstep.runtime.memory import Spares
from keepstep.training.buckets import like, local

ALIGN = 64
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


class Stateful(Protocol):
    """Anything whose state is JSON: schedulers, counters."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in the byte space."""

    path: str
    dtype: str
    shape: tuple[int, ...]  # of this rank's part
    lo: int
    hi: int
    sharded: bool  # wrap it like its parameter when loading


@dataclass(frozen=True, slots=True)
class Layout:
    """A moment's byte space: which tensor lies where, and the values beside them."""

    entries: tuple[Entry, ...]
    values: dict[str, Any]
    total: int

    def to_json(self) -> bytes:
        rows = [[e.path, e.dtype, list(e.shape), e.lo, e.hi, e.sharded] for e in self.entries]
        return json.dumps({"total": self.total, "tensors": rows, "values": self.values}).encode()

    @staticmethod
    def of(parts: Iterable[tuple[str, str, tuple[int, ...], bool]], values: dict[str, Any]) -> "Layout":
        """Gives each (path, dtype, shape, sharded) its place. Raises InvariantViolation for a dtype that does not exist."""
        entries, at = [], 0
        for path, dtype, shape, sharded in parts:
            if dtype not in _DTYPES:
                raise InvariantViolation(f"a state holds tensors of {dtype}, which this torch does not have")
            size = math.prod(shape) * _DTYPES[dtype].itemsize
            entries.append(Entry(path, dtype, shape, at, at + size, sharded))
            at += -(-size // ALIGN) * ALIGN
        return Layout(tuple(entries), values, at)

    @staticmethod
    def from_json(text: bytes) -> "Layout":
        """Raises InvariantViolation unless every tensor has its place."""
        try:
            raw = json.loads(text)
            entries = tuple(Entry(str(p), str(d), tuple(s), lo, hi, bool(sh)) for p, d, s, lo, hi, sh in raw["tensors"])
            layout = Layout(entries, dict(raw["values"]), raw["total"])
            wrong = next((e for e in entries if not _fits(e, layout.total)), None)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvariantViolation(f"the manifest of a state is not what it should be: {error!r}") from None
        if wrong is not None or len({e.path for e in entries}) != len(entries):
            raise InvariantViolation(f"the manifest of a state has a tensor that cannot be, or one twice: {wrong}")
        return layout


def _fits(entry: Entry, total: int) -> bool:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None or not all(isinstance(n, int) and n >= 0 for n in (*entry.shape, entry.lo, entry.hi, total)):
        return False
    return (
        entry.lo % ALIGN == 0 and entry.hi - entry.lo == math.prod(entry.shape) * dtype.itemsize and entry.hi <= total
    )


def views(layout: Layout, data: memoryview) -> dict[str, torch.Tensor]:
    """The tensors of a layout in its bytes, by path. They share memory with `data`, which must be writable."""
    flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    return {e.path: flat[e.lo : e.hi].view(_DTYPES[e.dtype]).reshape(e.shape) for e in layout.entries}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part in row-major order; shares memory when it is contiguous."""
    return local(tensor).detach().contiguous().reshape(-1)


def _raw(flat: torch.Tensor) -> Any:
    """The bytes of a flat tensor as a buffer, valid as long as the tensor.

    Not `tensor.numpy()`: that marks the storage as not resizable for ever, and FSDP2 frees parameters by resizing.
    """
    return (ctypes.c_ubyte * (flat.numel() * flat.element_size())).from_address(flat.data_ptr())


class _Frozen:
    """What was copied aside of a state that has been overwritten since."""

    def __init__(self, layout: Layout, buffer: memoryview) -> None:
        self.layout, self.buffer = layout, buffer
        self.data = np.frombuffer(buffer, np.uint8)
        self.valid = RangeSet()


class TrainingState:
    """Implements `ports.StateSource` over a live model and optimizer."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        extra: Mapping[str, Stateful] | None = None,
        copy_bytes_max: int = 1 << 62,
        wait_s: float = 2.0,
    ) -> None:
        self.model, self.optimizer, self.extra = model, optimizer, dict(extra or {})
        self.copy_bytes_max, self.wait_s = copy_bytes_max, wait_s
        self._changed = threading.Condition()
        self._live: StateName | None = None
        self._layout: tuple[Layout, list[torch.Tensor]] | None = None
        self._read = RangeSet()  # of the live state, since its readers were last others
        self._readers: dict[Reader, StateName] = {}
        self._kept: dict[Reader, StateName] = {}  # those of `_readers` that are in this process
        self._done: set[Reader] = set()  # they have all that they wanted, and decisions still name them
        self._frozen: dict[StateName, _Frozen] = {}
        self._reached = -1  # the newest step whose state the tensors have held
        self._spares = Spares()
        self._writes = 0
        self._let_go: set[StateName] = set()  # wanted, but a copy would have been too large
        self._closed = False
        self.to_layout()  # an unsupported state must be refused at the start, not at the first failure

    # --- layout -----------------------------------------------------------------------------------------------

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in self.model.named_parameters():
            yield f"model/{name}", p
        for name, b in self.model.named_buffers():
            yield f"model/{name}", b
        for g, group in enumerate(self.optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                state = self.optimizer.state.get(p, {})
                for key in sorted(state):
                    if isinstance(state[key], torch.Tensor):
                        yield f"optimizer/{g}/{i}/{key}", state[key]

    def _values(self) -> dict[str, Any]:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        plain = {
            f"{g}/{i}/{key}": value
            for g, group in enumerate(self.optimizer.param_groups)
            for i, p in enumerate(group["params"])
            for key, value in self.optimizer.state.get(p, {}).items()
            if not isinstance(value, torch.Tensor)
        }
        values = {"groups": groups, "optimizer": plain}
        values["extra"] = {name: part.state_dict() for name, part in self.extra.items()}
        try:
            json.dumps(values)
        except TypeError as error:
            raise ConfigError(
                f"the state of the optimizer, scheduler or extra parts holds something that is neither a tensor nor JSON "
                f"({error}): keepstep sends no pickles between hosts; keep such values out of state_dict()"
            ) from None
        return values

    def to_layout(self) -> tuple[Layout, list[torch.Tensor]]:
        """The byte space of the live tensors, right now."""
        named = list(self._tensors())
        parts = [(path, str(t.dtype), tuple(local(t).shape), isinstance(t, DTensor)) for path, t in named]
        return Layout.of(parts, self._values()), [tensor for _, tensor in named]

    def _live_layout(self) -> tuple[Layout, list[torch.Tensor]]:
        if self._layout is None:
            self._layout = self.to_layout()
        return self._layout

    # --- ports.StateSource: the server's threads --------------------------------------------------------------

    def manifest(self, state: StateName) -> bytes | None:
        with self._changed:
            if not self._await(state):
                return None
            frozen = self._frozen.get(state)
            return (frozen.layout if frozen else self._live_layout()[0]).to_json()

    def read(self, state: StateName, lo: int, hi: int) -> bytes | bytearray | None:
        with self._changed:
            if not self._await(state):
                return None
            frozen = self._frozen.get(state)
            if frozen is not None:
                if not frozen.valid.covers(lo, hi):
                    return None  # it was read before the write, and is gone
                return frozen.data[lo:hi].tobytes()
            out = bytearray(hi - lo)
            self._copy_live(np.frombuffer(out, np.uint8), lo, hi)
            self._read.add(lo, hi)
            return out

    def copy_into(self, out: memoryview, state: StateName, lo: int, hi: int) -> bool:
        """`read` for a reader in this process: out[lo:hi] = bytes [lo, hi); False: the state is no longer held."""
        with self._changed:
            if not self._await(state):
                return False
            frozen, into = self._frozen.get(state), np.frombuffer(out, np.uint8)[lo:hi]
            if frozen is None:
                self._copy_live(into, lo, hi)
                self._read.add(lo, hi)
                return True
            if frozen.valid.covers(lo, hi):
                ctypes.memmove(into.ctypes.data, frozen.data[lo:hi].ctypes.data, hi - lo)
            return frozen.valid.covers(lo, hi)

    def done(self, reader: Reader) -> None:
        with self._changed:
            self._done.add(reader)
            self._serve({r: s for r, s in self._readers.items() if r not in self._kept})

    def _await(self, state: StateName) -> bool:
        """Waits for a state that we have not reached yet; False if it is past, TimeoutError if that takes long.

        Whoever asks was told by a decision that we hold it, which may not have come to us yet.
        """

        def known() -> bool:
            held = state == self._live or state in self._frozen
            return self._closed or held or state in self._let_go or state.step < self._reached

        if not self._changed.wait_for(known, self.wait_s):
            raise TimeoutError(f"state {state.step} has not been reached yet")
        return not self._closed and (state == self._live or state in self._frozen)

    def _copy_live(self, out: np.ndarray[Any, np.dtype[np.uint8]], lo: int, hi: int) -> None:
        """out[0 : hi-lo] = live bytes [lo, hi); padding is left as it is."""
        layout, tensors = self._live_layout()
        for entry, tensor in zip(layout.entries, tensors, strict=True):
            a, b = max(lo, entry.lo), min(hi, entry.hi)
            if a < b:
                flat = _flat(tensor)
                ctypes.memmove(out.ctypes.data + a - lo, flat.data_ptr() + a - entry.lo, b - a)

    # --- the control loop -------------------------------------------------------------------------------------

    def serve(self, readers: Mapping[Reader, StateName]) -> None:
        """From now on exactly these states must stay readable, to these readers, unless they are done."""
        with self._changed:
            self._done &= readers.keys()
            self._serve(readers)

    def keep(self, reader: Reader, state: StateName | None) -> None:
        """The same for a reader in this process, until it is told None. Any thread."""
        with self._changed:
            others = {r: s for r, s in self._readers.items() if r not in self._kept}
            self._kept.pop(reader, None)
            if state is not None:
                self._kept[reader] = state
            self._serve(others)

    def _serve(self, readers: Mapping[Reader, StateName]) -> None:
        before = self._readers_of(self._live)
        self._readers = {r: s for r, s in readers.items() if r not in self._done} | self._kept
        if self._readers_of(self._live) != before:
            self._read = RangeSet()  # a new reader lacks what another one has read
        states = set(self._readers.values())
        self._let_go &= states
        for gone in self._frozen.keys() - states:
            self._spares.give(self._frozen.pop(gone).buffer)
        self._changed.notify_all()

    def _readers_of(self, state: StateName | None) -> set[Reader]:
        return {reader for reader, wanted in self._readers.items() if wanted == state}

    def close(self) -> None:
        """Wakes every waiting reader with "not held"."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- the main thread --------------------------------------------------------------------------------------

    def before_write(self) -> int:
        """The live state is about to be overwritten; returns how many bytes had to be copied aside."""
        with self._changed:
            copied = 0
            readers = self._readers_of(self._live)
            if self._live is not None and readers:
                layout, _ = self._live_layout()
                read = self._read if len(readers) == 1 else RangeSet()
                gaps = read.missing(layout.total)
                size = sum(hi - lo for lo, hi in gaps)
                if size <= self.copy_bytes_max:
                    frozen = self._frozen[self._live] = _Frozen(layout, self._spares.take(layout.total))
                    for lo, hi in gaps:
                        self._copy_live(frozen.data[lo:hi], lo, hi)
                        frozen.valid.add(lo, hi)
                    copied = size
                else:
                    self._let_go.add(self._live)
            self._live, self._layout = None, None
            self._read = RangeSet()
            self._changed.notify_all()
            return copied

    def after_write(self, state: StateName | None) -> None:
        """The live tensors now hold `state`."""
        with self._changed:
            self._live = state
            # Now, in the main thread, and not when somebody asks: in forward and backward FSDP2 has other parameters registered.
            self._layout = None if state is None else self.to_layout()
            self._writes += 1
            if (
                self._writes == 2 and self.copy_bytes_max
            ):  # the optimizer's state exists: have the memory before it is needed
                self._spares.prepare(min(self._live_layout()[0].total, self.copy_bytes_max))
            self._reached = max(self._reached, state.step) if state is not None else self._reached
            self._changed.notify_all()

    @property
    def live(self) -> StateName | None:
        return self._live

    @property
    def kept(self) -> bool:
        """Whether a reader in this process still needs the live state."""
        with self._changed:
            return self._live is not None and self._live in self._kept.values()

    def load(self, manifest: bytes, data: bytearray | memoryview) -> None:
        """Overwrites model, optimizer and extra parts with fetched bytes. Call between before_write and after_write.

        `data` must be writable and is ours from now on: the optimizer's tensors are views of it, so that loading needs no second
        copy of the state at a time when memory is short.

        Raises InvariantViolation if the bytes do not describe this model: nothing is half loaded then.
        """
        layout = Layout.from_json(manifest)
        self.check(layout, len(data))
        mine = {path: tensor for path, tensor in self._tensors() if path.startswith("model/")}
        parts = views(layout, memoryview(data))
        self._load_values(layout.values)
        with torch.no_grad():
            for entry in layout.entries:
                part = parts[entry.path]
                if entry.path in mine:
                    local(mine[entry.path]).copy_(part)
                else:
                    _, g, i, key = entry.path.split("/", 3)
                    param = self.optimizer.param_groups[int(g)]["params"][int(i)]
                    self.optimizer.state[param][key] = like(part, param) if entry.sharded else part

    def check(self, layout: Layout, size: int) -> None:
        """Whether a state of this layout, and of `size` bytes, can be loaded. Raises InvariantViolation."""
        mine = {path: tensor for path, tensor in self._tensors() if path.startswith("model/")}
        theirs = {e.path: e for e in layout.entries}
        for path, tensor in mine.items():
            entry = theirs.get(path)
            if entry is None or entry.shape != tuple(local(tensor).shape) or entry.dtype != str(local(tensor).dtype):
                raise InvariantViolation(f"the fetched state does not fit this model at {path}: {entry}")
        if size != layout.total or theirs.keys() - mine.keys() - self._optimizer_paths(layout):
            raise InvariantViolation(
                f"the fetched state has {size} bytes for {layout.total}, or parts that have no place here"
            )
        self._check_values(layout.values)

    def _optimizer_paths(self, layout: Layout) -> set[str]:
        """Those of its tensors that belong to a parameter of this optimizer."""
        groups = [len(group["params"]) for group in self.optimizer.param_groups]
        return {
            e.path
            for e in layout.entries
            if _is_of(e.path.removeprefix("optimizer/"), groups) and e.path[:10] == "optimizer/"
        }

    def _check_values(self, values: dict[str, Any]) -> None:
        """Raises InvariantViolation unless everything that `_load_values` needs is there."""
        groups = [len(group["params"]) for group in self.optimizer.param_groups]
        theirs, plain, extra = values.get("groups"), values.get("optimizer"), values.get("extra")
        fits = (
            isinstance(theirs, list)
            and len(theirs) == len(groups)
            and all(isinstance(group, dict) and "params" not in group for group in theirs)
            and isinstance(plain, dict)
            and all(_is_of(path, groups) for path in plain)
            and isinstance(extra, dict)
            and self.extra.keys() <= extra.keys()
        )
        if not fits:
            raise InvariantViolation(
                "the values in the fetched state do not fit this optimizer, scheduler and extra parts"
            )

    def _load_values(self, values: dict[str, Any]) -> None:
        self.optimizer.state.clear()
        for group, fetched in zip(self.optimizer.param_groups, values["groups"], strict=True):
            for key, value in fetched.items():
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        for path, value in values["optimizer"].items():
            g, i, key = path.split("/", 2)
            self.optimizer.state[self.optimizer.param_groups[int(g)]["params"][int(i)]][key] = value
        for name, part in self.extra.items():
            part.load_state_dict(values["extra"][name])

    def digest(self) -> int:
        """64 bits over every tensor's bytes and every value: equal iff this rank's state is equal."""
        layout, tensors = self.to_layout()
        hasher = xxhash.xxh3_64(layout.to_json())
        for tensor in tensors:
            flat = _flat(tensor)
            if flat.numel():
                hasher.update(_raw(flat))
        return int(hasher.intdigest())


def _is_of(path: str, groups: list[int]) -> bool:
    """Whether GROUP/PARAMETER/KEY is of one of the optimizer's parameters; `groups`: how many there are in each group."""
    g, _, rest = path.partition("/")
    i, _, key = rest.partition("/")
    numbers = all(n.isascii() and n.isdigit() and len(n) < 10 for n in (g, i))
    return numbers and bool(key) and int(g) < len(groups) and int(i) < groups[int(g)]
