"""Reads the files of a checkpoint through `torch.distributed.checkpoint`, and believes none of them unseen.

Every file is compared with the checksum in its manifest before it is used. `.metadata` is a pickle: what it may name is a closed
set of torch's records of what lies where, so that a file that somebody else wrote runs no code here. Tensors are loaded by torch
with `weights_only`. Fails: CheckpointCorrupt, wrapped by torch as it likes.
"""

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from keepstep.protocol.errors import CheckpointCorrupt
from keepstep.runtime.checkpoint_store import Found

METADATA = ".metadata"


class CheckedReader(FileSystemReader):
    """Reads only files whose checksums are right, and of pickles only torch's own records of what lies where."""

    def __init__(self, found: Found) -> None:
        super().__init__(found.path)
        self._checkpoint = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._checkpoint.check(METADATA)
        with (self._checkpoint.path / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointCorrupt("its metadata are none")
        return metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        for name in sorted({self.storage_data[item.storage_index].relative_path for item in plan.items}):
            self._checkpoint.check(name)
        return super().read_data(plan, planner)


_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath"),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Knows no classes but these, and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise CheckpointCorrupt(f"its metadata name {module}.{name}, which does not belong there")
