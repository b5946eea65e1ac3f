"""Tensors with shapes only: what would be on the device is on torch's `meta` device, and nothing is computed.

A dispatch mode for the main thread of a rank, under autograd, FSDP2 and DTensor, which run as they are:

    asks for cuda                       gets a tensor of that shape without values
    one operand has no values           the result has none: shapes and dtypes are checked as ever, the kernel is skipped
    all operands have values            computed, as data loading needs it
    a collective of tensors without     counted, and returns at once; `Calls` lets the ranks compare what they have called
    values

Who reads a number from a tensor without values gets 1, a truth value: false (`isfinite`: true). So `loss.item()` is 1.
What needs values to know a shape (`nonzero`, `masked_select`, `unique`) is refused: ConfigError.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from keepstep.protocol.errors import ConfigError

META = torch.device("meta")
REPLACED = ("cuda",)  # device types that become META
_NAMES = (str, torch.device)  # what names one

aten = torch.ops.aten
_NEED_VALUES = {"nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount", "equal"}
_FINITE: dict[Any, bool] = {torch.isfinite: True, torch.isnan: False, torch.isinf: False}
_FINITE |= {torch.Tensor.isfinite: True, torch.Tensor.isnan: False, torch.Tensor.isinf: False}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_FILLS = {
    "normal_",
    "uniform_",
    "zero_",
    "fill_",
    "random_",
    "bernoulli_",
    "exponential_",
    "log_normal_",
}  # nothing but values


class Calls:
    """The collectives without values that this rank has called, in order, as one digest. `on_call`: told of each, in words."""

    def __init__(self) -> None:
        self.on_call: Callable[[str], None] = lambda words: None
        self.forget()

    def forget(self) -> None:
        """As if none had been called."""
        self.count, self._digest = 0, hashlib.blake2b(digest_size=7)

    def note(self, words: str) -> None:
        """One was called."""
        self.count += 1
        self._digest.update(words.encode())
        self.on_call(words)

    def digest(self) -> int:
        """Equal on ranks that have called the same, 56 bits."""
        return int.from_bytes(self._digest.digest(), "big")


class ShapesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """The mode. `calls`: what it has seen of collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = Calls()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here: the compiler, which is large, is not loaded for it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if kind is FakeTensor:
                return func(*args, **kwargs)  # torch plans with tensors of its own that have no values either
            if kind not in _PLAIN:
                return NotImplemented  # a DTensor for one: it comes back to us with its parts
        device = kwargs.get("device")
        if device is not None and torch.device(device).type in REPLACED:
            kwargs = {**kwargs, "device": META}
            device = META
        found = _tensors(args)
        found += _tensors(kwargs.values())
        if device == META and func is aten._to_copy.default:
            return torch.empty_like(args[0], device=META, dtype=kwargs.get("dtype") or args[0].dtype)
        if not any(t.device == META for t in found):
            return func(*args, **kwargs)
        return self._without_values(func, args, kwargs, found)

    def _without_values(self, func: Any, args: Any, kwargs: Any, found: list[torch.Tensor]) -> Any:
        if func.namespace == "c10d":
            return self._collective(func, args, found)
        name = func._opname
        if name in _FILLS:
            return args[0]
        if name == "_local_scalar_dense":
            return _number(args[0])
        if name in _NEED_VALUES:
            raise ConfigError(
                f"the script needs the values of a tensor on the device (aten.{name}), which a shadow run does not compute: "
                "it knows shapes only"
            )
        if name == "_to_copy" and torch.device(kwargs.get("device") or META).type == "cpu":
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if name == "copy_" and args[0].device != META:
            return args[0].fill_(1)
        args, kwargs = tree_map_only(torch.Tensor, _to_meta, (args, kwargs))
        result = func(*args, **kwargs)
        first = found[0]
        if first.device != META and func._schema.is_mutable and name.endswith("_"):
            return first  # a tensor with values stays what it was
        return result

    def _collective(self, func: Any, args: Any, found: list[torch.Tensor]) -> Any:
        self.calls.note(f"{func._opname}{[(tuple(t.shape), str(t.dtype)) for t in found]}")
        returns = func._schema.returns
        given = [FakeWork().boxed() if "Work" in str(each.type) else args[0] for each in returns]
        return given[0] if len(given) == 1 else tuple(given)


class Moved(TorchFunctionMode):
    """What names a replaced device in a call of torch names META: before torch looks for a device that this machine lacks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0].to(META)
        if func in _FINITE and _has_no_values(args[0]):
            return torch.full(args[0].shape, _FINITE[func])
        if func is torch.device:
            return func(*args, **kwargs)  # the name may stay; what is on it is not
        for arg in args:
            if type(arg) in _NAMES and _is_replaced(arg):
                args = tuple(META if _is_replaced(arg) else arg for arg in args)
                break
        if kwargs and _is_replaced(kwargs.get("device")):
            kwargs = {**kwargs, "device": META}
        return func(*args, **kwargs)


def _has_no_values(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.device == META


def _is_replaced(arg: Any) -> bool:
    if isinstance(arg, torch.device):
        return arg.type in REPLACED
    return isinstance(arg, str) and arg.partition(":")[0] in REPLACED


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Those among them, and in lists of them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device == META else torch.empty_like(tensor, device=META)


def _number(tensor: torch.Tensor) -> float | int | bool:
    if tensor.dtype == torch.bool:
        return False
    return 1.0 if tensor.dtype.is_floating_point else 1
