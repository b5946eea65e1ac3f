"""The optimizer's state in host memory, brought to the device piece by piece around its step (FT-HSDP section 6).

    fetch    |piece 0|piece 1|    |piece 2|piece 3| ...
    compute          |up 0|   |up 1|      |up 2| ...        "up n" is optimizer.step() for the parameters of piece n alone
    drain                 |piece 0|piece 1|   |piece 2| ...

Between steps `optimizer.state` holds tensors in host memory and nothing else does: whoever serves, hashes, saves or loads a state
(`training.state`, `training.checkpoint`) finds and leaves it there, and need not know of this. In a step two device buffers take
turns: while one piece is updated the next is fetched into the other buffer, and the last one drained out of it before.

A piece is some whole parameters, so the bits are those of one step over all of them, as long as the optimizer updates each
parameter from its own gradient and state. That holds for AdamW, SGD and their like, in every implementation; not for one that
counts in its settings, which is refused. Settings, step counts and whatever else has no dimension stay where they are.

Fails: nothing here is recoverable. A rank that dies within a step leaves no state behind, as without offload, and its replica
fetches one from its peers.

Departs from the paper: there is no more in it than that it is done, and 60 ms a GB.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keepstep.protocol.errors import ConfigError
from keepstep.training.buckets import local
from keepstep.training.lanes import Lanes, lanes_of

ALIGN = 512  # of a tensor in a device buffer: what CUDA's own allocator gives
PIECE_BYTES = 256 << 20


@dataclass(slots=True)
class _Moved:
    """One tensor of the state while its piece is on the device."""

    param: torch.Tensor
    key: str
    host: torch.Tensor  # of this rank, as `device`
    device: torch.Tensor


@dataclass(slots=True)
class _Piece:
    """Parameters that are updated together."""

    params: list[list[torch.Tensor]]  # one list for each of the optimizer's groups
    nbytes: int = 0  # of state, with padding
    moved: list[_Moved] = field(default_factory=list)
    fetched: Any = None
    drained: Any = None
    created: list[torch.Tensor] = field(default_factory=list)  # device memory that is not of a buffer


class Offload:
    """Takes the steps of one optimizer whose state lives in host memory. Main thread."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        piece_bytes: int = PIECE_BYTES,
        lanes: Lanes | None = None,
    ) -> None:
        """`lanes`: None: those of the parameters' device. Raises ConfigError."""
        if piece_bytes < 1:
            raise ConfigError(f"offload_bytes must be at least 1, got {piece_bytes}")
        devices = {local(p).device for group in optimizer.param_groups for p in group["params"]}
        if len(devices) != 1:
            raise ConfigError(
                f"offload_optimizer needs all parameters on one device, they are on {sorted(map(str, devices))}"
            )
        self.optimizer, self.piece_bytes = optimizer, piece_bytes
        self._lanes = lanes_of(devices.pop()) if lanes is None else lanes
        self.pieces = 0
        """How many pieces the last step had."""
        self.device_bytes = 0
        """Device memory that state has right now: 0 between steps."""
        self.device_bytes_max = 0
        """The most it ever had. At most twice `piece_bytes`, or twice the state of the largest parameter."""

    def step(self, on_piece: Callable[[], None] = lambda: None) -> None:
        """`optimizer.step()`: afterwards parameters and host memory hold its result. Raises ConfigError.

        `on_piece` is called when one is updated, and not yet in host memory.
        """
        if self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks:
            raise ConfigError(
                "the optimizer has step hooks, which offload_optimizer would call once for every piece: remove them, or set "
                "offload_optimizer=False"
            )
        groups, pieces, lanes = self.optimizer.param_groups, self._plan(), self._lanes
        everything = [group["params"] for group in groups]
        buffers = [self._buffer(pieces[turn::2]) for turn in (0, 1)]
        lanes.fetch.wait(lanes.compute.record())  # whoever had this memory before
        try:
            for number, piece in enumerate(pieces):
                if number == 0:
                    self._fetch(piece, buffers[0], None)
                if number + 1 < len(pieces):
                    self._fetch(pieces[number + 1], buffers[(number + 1) % 2], pieces[number - 1] if number else None)
                if number >= 2:
                    self._let_go(pieces[number - 2])
                self._update(piece)
                on_piece()
                self._drain(piece)
        finally:
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params
        for piece in pieces[-2:]:
            lanes.finish(piece.drained)
            self._let_go(piece)
        for buffer in buffers:
            lanes.release(buffer)
            self._count(-buffer.numel())
        self.pieces = len(pieces)

    # --- the plan ---------------------------------------------------------------------------------------------

    def _plan(self) -> list[_Piece]:
        """Which parameters are updated together: in order, as many as there is room for."""
        pieces: list[_Piece] = []
        count = len(self.optimizer.param_groups)
        room = 0
        for g, group in enumerate(self.optimizer.param_groups):
            for param in group["params"]:
                if param.grad is None:
                    continue  # the optimizer passes it over, too
                held = [tensor for _, tensor in self._offloaded(param)]
                state = sum(_padded(local(tensor)) for tensor in held)
                size = state or 2 * _padded(
                    local(param)
                )  # the optimizer will create it: two moments, if it is like Adam
                if not pieces or size > room:
                    pieces.append(_Piece([[] for _ in range(count)]))
                    room = self.piece_bytes
                pieces[-1].params[g].append(param)
                pieces[-1].nbytes += state
                room -= size
        return pieces

    def _offloaded(self, param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for key, value in self.optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                yield key, value

    # --- one piece --------------------------------------------------------------------------------------------

    def _fetch(self, piece: _Piece, buffer: torch.Tensor, before: _Piece | None) -> None:
        """Starts to bring it into `buffer`, which the piece `before` is leaving."""
        lanes, at = self._lanes, 0
        if before is not None:
            lanes.fetch.wait(before.drained)
        for param in (p for params in piece.params for p in params):
            for key, tensor in self._offloaded(param):
                host = local(tensor).detach()
                if not lanes.is_in_host_memory(host):  # loaded, or of an optimizer that has stepped before
                    host = lanes.host_like(host).copy_(host)
                device = _within(buffer, at, host)
                at += _padded(host)
                lanes.fetch.copy(device, host)
                piece.moved.append(_Moved(param, key, host, device))
        piece.fetched = lanes.fetch.record()

    def _update(self, piece: _Piece) -> None:
        groups = self.optimizer.param_groups
        for moved in piece.moved:
            self._put(moved.param, moved.key, moved.device)
        for group, params in zip(groups, piece.params, strict=True):
            group["params"] = params
        before = [_settings(group) for group in groups]
        self._lanes.compute.wait(piece.fetched)
        self.optimizer.step()
        for group, settings in zip(groups, before, strict=True):
            if changed := [key for key, value in _settings(group).items() if not _same(value, settings.get(key))]:
                raise ConfigError(
                    f"{type(self.optimizer).__name__} changes its settings ({changed[0]}) in step(), so it cannot be run piece "
                    "by piece: set offload_optimizer=False"
                )

    def _drain(self, piece: _Piece) -> None:
        """Starts to bring what the optimizer left into host memory, and puts that into the optimizer's state."""
        lanes = self._lanes
        lanes.drain.wait(lanes.compute.record())
        fetched = {(moved.param, moved.key): moved for moved in piece.moved}
        for param in (p for params in piece.params for p in params):
            for key, tensor in self._offloaded(param):
                device, moved = local(tensor).detach(), fetched.get((param, key))
                if moved is None or not _alike(moved.host, device):
                    host = lanes.host_like(device)
                else:
                    host = moved.host
                if moved is None or moved.device.data_ptr() != device.data_ptr():
                    piece.created.append(device)  # by the optimizer: its first step, or it replaces its tensors
                    self._count(device.nbytes)
                lanes.drain.copy(host, device)
                self._put(param, key, host)
        piece.moved = []
        piece.drained = lanes.drain.record()

    def _let_go(self, piece: _Piece) -> None:
        """Of what the optimizer had created for this piece, in the order of the compute lane."""
        if piece.created:
            self._lanes.compute.wait(piece.drained)
        for device in piece.created:
            self._lanes.release(device)
            self._count(-device.nbytes)
        piece.created = []

    def _put(self, param: torch.Tensor, key: str, part: torch.Tensor) -> None:
        """Makes `part` this rank's part of a tensor of the state, wherever it is."""
        state = self.optimizer.state[param]
        old = state[key]
        # Not from_local: that would move it to the device of the mesh.
        wrapped = isinstance(old, DTensor)
        state[key] = DTensor(part, old._spec, requires_grad=False) if wrapped else part  # type: ignore[no-untyped-call]

    # --- memory -----------------------------------------------------------------------------------------------

    def _buffer(self, pieces: list[_Piece]) -> torch.Tensor:
        buffer = self._lanes.empty(max((piece.nbytes for piece in pieces), default=0))
        self._count(buffer.numel())
        return buffer

    def _count(self, nbytes: int) -> None:
        self.device_bytes += nbytes
        self.device_bytes_max = max(self.device_bytes_max, self.device_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory that the state has, without padding."""
        params = (p for group in self.optimizer.param_groups for p in group["params"])
        return sum(local(tensor).nbytes for p in params for _, tensor in self._offloaded(p))


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGN) * ALIGN


def _within(buffer: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor as `like` is, in the bytes of `buffer` from `at` on."""
    flat = buffer[at : at + like.nbytes].view(like.dtype)
    return flat.as_strided(like.size(), torch.empty_like(like, device="meta").stride())


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _same(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, torch.Tensor) and type(a) is type(b) and bool(a == b))
