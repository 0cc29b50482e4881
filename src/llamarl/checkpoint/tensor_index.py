"""The index of a ``torch.distributed.checkpoint`` folder, read without running what it may carry.

The library keeps it as a pickle, and to load a pickle is to run it: whoever wrote the folder would choose what. So names are
looked up in a list of the classes that make an index; any other is refused before it is imported.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from llamarl.errors import CheckpointError

__all__ = ["SafeFileSystemReader"]

_METADATA = "torch.distributed.checkpoint.metadata"
_BELONGS: frozenset[tuple[str, str]] = frozenset(
    {
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),  # name of a tensor's layout -> layout
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
    }
)
"""(module, name) of everything that an index is made of, besides the names of dtypes."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype):
            return vars(torch)[global_name]
        if (module_name, global_name) in _BELONGS:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(
            f"it names {module_name}.{global_name}, which does not belong into an index of tensors. Nothing of it was run. "
            f"It was not written by llamarl: do not trust this folder"
        )


class SafeFileSystemReader(FileSystemReader):
    """The library's reader of a folder, with an index that cannot run code. Tensors are loaded ``weights_only`` by the library."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            CheckpointError: It names a class that is not of an index, a file outside the folder, or cannot be read.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        try:
            with open(path, "rb") as file:
                metadata = _IndexUnpickler(file).load()
            if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
                raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}, no index of tensors")
            for stored in metadata.storage_data.values():
                _check_place(stored)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except Exception as error:  # what a malformed pickle can raise has no bounds
            raise CheckpointError(f"{path} is refused: {error}") from error
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _check_place(stored: object) -> None:
    """Raises UnpicklingError unless ``stored`` is bytes of a file of this folder, as they are."""
    if not isinstance(stored, _StorageInfo):
        raise pickle.UnpicklingError(f"it places a tensor in a {type(stored).__name__}")
    name = stored.relative_path
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise pickle.UnpicklingError(f"it places a tensor in {name!r}, which is no file of this folder")
    if getattr(stored, "transform_descriptors", None):
        raise pickle.UnpicklingError("it asks for transformations that llamarl never writes")
