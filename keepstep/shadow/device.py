"""The device modules that a script loads, replaced: `torch.cuda` and NCCL, and where they touch FSDP2.

Called once in a process, before the script runs. Parameters are made without values, whatever device they are made on; a tensor
of values that is moved to `cuda` loses them. NCCL becomes gloo, which carries what has values: the script's own small
collectives, objects, the digests of states, checkpoints' agreements.

Not replaced: threads of the script that use the device (a mode belongs to one thread), CUDA extensions and their kernels,
CUDA graphs. `torch.compile` does nothing.
"""

import contextlib
import os
import traceback
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)

from keepstep.shadow.shapes import META, Moved, ShapesOnly

MEMORY = 80 << 30  # bytes of a device, for those who ask


def replace_device() -> ShapesOnly:
    """Replaces everything, and returns the dispatch mode, entered for this thread and what is forked from it."""
    _replace_parameters()
    _replace_cuda()
    _replace_collectives()
    _replace_fsdp()
    _replace_compile()
    _forget_stacks()
    mode = ShapesOnly()
    mode.__enter__()  # type: ignore[no-untyped-call]
    Moved().__enter__()  # type: ignore[no-untyped-call]
    return mode


class Stream:
    """Of a device that computes nothing: whatever it was given is done."""

    def __init__(self, *args: Any, **more: Any) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass


class Event:
    """A moment that has come."""

    def __init__(self, *args: Any, **more: Any) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: object) -> float:
        return 0.0


def _put(owner: Any, **replaced: Any) -> None:
    """Sets attributes of a class or module of torch's."""
    for name, value in replaced.items():
        setattr(owner, name, value)


def _replace_parameters() -> None:
    make = torch.nn.Parameter.__new__

    def without_values(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if data is not None and type(data) in (torch.Tensor, torch.nn.Parameter) and data.device != META:
            data = torch.empty_like(data, device=META)
        return make(cls, data, requires_grad)

    _put(torch.nn.Parameter, __new__=without_values)

    numpy, tolist = torch.Tensor.numpy, torch.Tensor.tolist
    _put(torch.Tensor, numpy=lambda self, **more: numpy(_read(self), **more))
    _put(torch.Tensor, tolist=lambda self: tolist(_read(self)))


def _read(tensor: Any) -> Any:
    return torch.ones(tensor.shape, dtype=tensor.dtype) if tensor.device == META else tensor


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _silent() -> Callable[..., None]:
    """A function that does nothing; a new one each time, since torch's compiler tells functions by their identity."""
    return lambda *args, **more: None


def _zero() -> Callable[..., int]:
    return lambda device=None: 0


def _replace_cuda() -> None:
    count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # noqa: E731
    about = types.SimpleNamespace(name="shadow", total_memory=MEMORY, major=9, minor=0, multi_processor_count=132)
    told: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": count,
        "current_device": _local_rank,
        "get_device_name": lambda device=None: about.name,
        "get_device_capability": lambda device=None: (about.major, about.minor),
        "get_device_properties": lambda device=None: about,
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_stats": lambda device=None: {},
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "stream": lambda stream: stream or Stream(),
        "device": lambda device=None: contextlib.nullcontext(),
    }
    told |= {
        name: _zero() for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    }
    told |= {
        name: _silent()
        for name in (
            "_lazy_init", "init", "set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats",
            "reset_accumulated_memory_stats", "manual_seed", "manual_seed_all", "seed", "seed_all", "set_stream",
            "set_per_process_memory_fraction",
        )
    }  # fmt: skip
    for name, answer in told.items():
        setattr(torch.cuda, name, answer)
    _put(torch.cuda, Stream=Stream, Event=Event)


def _replace_collectives() -> None:
    init, new_group, make_mesh = (
        distributed_c10d.init_process_group,
        distributed_c10d.new_group,
        device_mesh.DeviceMesh.__init__,
    )

    def init_process_group(backend: str | None = None, *args: Any, **more: Any) -> None:
        more.pop("device_id", None)
        init("gloo", *args, **more)

    def group_of_gloo(*args: Any, **more: Any) -> Any:
        if more.get("backend") is not None:
            more["backend"] = "gloo"
        more.pop("device_id", None)
        return new_group(*args, **more)

    def mesh_of_cpu(self: Any, device_type: str, *args: Any, **more: Any) -> None:
        more.pop("backend_override", None)
        told = torch.cuda.is_available
        _put(torch.cuda, is_available=lambda: False)  # or a mesh of all ranks would connect all of them once more
        try:
            make_mesh(self, "cpu", *args, **more)
        finally:
            _put(torch.cuda, is_available=told)

    for module in (dist, distributed_c10d):
        _put(module, init_process_group=init_process_group)
        _put(module, new_group=group_of_gloo)
        _put(module, is_nccl_available=lambda: True)
    _put(device_mesh.DeviceMesh, __init__=mesh_of_cpu)


def _replace_fsdp() -> None:
    handle_of = device_mesh._get_device_handle

    def handle(device_type: str = "cuda") -> Any:
        return torch.cpu if device_type in ("meta", "cuda") else handle_of(device_type)

    for module in (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state, device_mesh):
        _put(module, _get_device_handle=handle)
    _put(_fully_shard, _get_device_from_mesh=lambda mesh: META)
    _put(_fsdp_param_group.FSDPParamGroup, _validate_no_meta_params=_silent())


def _forget_stacks() -> None:
    """torch plans an operation on DTensors with tensors of its own, and keeps the stack of each: the text of all its sources."""
    _put(fake_tensor, traceback=types.SimpleNamespace(extract_stack=list, format_list=traceback.format_list))


def _replace_compile() -> None:
    def compile(model: Any = None, **more: Any) -> Any:
        return model if model is not None else lambda found: found

    _put(torch, compile=compile)
    _put(torch.nn.Module, compile=_silent())
