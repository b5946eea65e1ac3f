"""Counts the bytes of tensors that come into being while it is on, and go again.

What it sees: the storage of every result of every torch operation, views once, from its creation to its end. What it does not:
memory inside one operation (a fused kernel's scratch), what was there before, and tensors on "meta", which have none.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMeter(TorchDispatchMode):
    """`with StorageMeter() as meter: ...`, then `meter.peak` and `meter.left`."""

    def __init__(self) -> None:
        super().__init__()
        self.left = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs and storage._cdata not in self._known:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self.left += nbytes
        self.peak = max(self.peak, self.left)
        self._known[key] = weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.pop(key, None)
        self.left -= nbytes
