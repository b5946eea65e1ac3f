"""Queues in which copies between host and device memory run beside the computation, and what orders them.

    compute   kernels of the script and the optimizer: the device's current stream
    fetch     host -> device
    drain     device -> host

What is put into one lane happens in order; between lanes only `record` and `wait` make an order. On CPU tensors (`HostLanes`)
both memories are the same one and everything happens at once, so every order holds; on an accelerator (`StreamLanes`) a wait that
is missing is a race. `tests/unit/races.py` finds those without a device.

`StreamLanes` has never run on a device: `tests/gpu/test_offload_gpu.py` is what checks it, on a machine that has one.
"""

from typing import Any, Protocol

import torch


class Lane(Protocol):
    """One queue. Called from the main thread."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """into[...] = source[...], after what was put into this lane before."""

    def record(self) -> Any:
        """A mark: reached when everything in this lane so far has happened."""

    def wait(self, mark: Any) -> None:
        """What comes into this lane from now on happens after the mark."""


class Lanes(Protocol):
    """The three lanes of a device, and its two memories."""

    fetch: Lane
    drain: Lane

    @property
    def compute(self) -> Lane: ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8, in the order of the compute lane: what was there before may still be used by it."""

    def release(self, tensor: torch.Tensor) -> None:
        """The last reference to this device memory is about to go; the compute lane may be given it again."""

    def is_in_host_memory(self, tensor: torch.Tensor) -> bool:
        """Whether the device can copy from and to it while something else happens."""

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory for what `tensor` holds. Dense, not initialized."""

    def finish(self, mark: Any) -> None:
        """Returns when the mark is reached: what was copied before it may be read by any thread."""


class _AtOnce:
    """A lane in which everything has happened when the call returns."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source)

    def record(self) -> None:
        return None

    def wait(self, mark: Any) -> None:
        pass


class HostLanes:
    """`Lanes` over CPU tensors: what is called the device is other memory of the same kind."""

    def __init__(self) -> None:
        self.fetch: Lane = _AtOnce()
        self.drain: Lane = _AtOnce()

    @property
    def compute(self) -> Lane:
        return _AtOnce()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def release(self, tensor: torch.Tensor) -> None:
        pass

    def is_in_host_memory(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu")

    def finish(self, mark: Any) -> None:
        pass


class _Stream:
    """A lane that is a stream of an accelerator."""

    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        with self.stream:
            into.copy_(source, non_blocking=True)

    def record(self) -> torch.Event:
        return self.stream.record_event()

    def wait(self, mark: torch.Event) -> None:
        self.stream.wait_event(mark)


class StreamLanes:
    """`Lanes` of an accelerator: two streams beside the current one, and pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.fetch: Lane = _Stream(torch.Stream(device))
        self.drain: Lane = _Stream(torch.Stream(device))

    @property
    def compute(self) -> Lane:
        """Whichever stream is current when the optimizer is called."""
        return _Stream(torch.accelerator.current_stream(self.device))

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def release(self, tensor: torch.Tensor) -> None:
        pass  # the allocator gives it to the compute lane again, which has waited for the drain

    def is_in_host_memory(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.is_pinned()

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def finish(self, mark: torch.Event) -> None:
        mark.synchronize()


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a device."""
    return HostLanes() if device.type == "cpu" else StreamLanes(device)
