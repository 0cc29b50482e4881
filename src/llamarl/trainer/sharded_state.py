"""The trainer's state on disk, by ``torch.distributed.checkpoint``: saved while training goes on, loaded by any layout.

    tick ─▶ stage: copies in host memory ─▶ the next tick trains
                        └─▶ a thread: ranks agree who writes what, each writes one file, rank 0 the index

Every tensor is written by its *global* coordinates, so ranks of another layout read the slices that are theirs. Tensors are
stored as they are: the same layout goes on with the same bits. Replicas write once.

Our parts are plain tensors with a box in a global shape, not DTensors (tensor parallelism cuts first, FSDP2 then cuts what
is left by rows, unevenly), so ``Shard`` answers what the library asks of its own sharded tensors, and two planners look up its part.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from llamarl.checkpoint.storage import save_failed
from llamarl.checkpoint.tensor_index import SafeFileSystemReader
from llamarl.errors import CheckpointError
from llamarl.models.parallel import ParameterShard

__all__ = ["Shard", "StagedState", "in_background", "read_state", "stage", "write_state"]

# One rank alone needs no process group; the library warns of it at every save.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_VALUES = "values.json"
_INDEX = ".metadata"
T = TypeVar("T")
_Box = tuple[tuple[int, int], ...]


class Shard:
    """The part ``box`` of a tensor of global ``shape``; an empty box takes part in nothing."""

    def __init__(self, tensor: Tensor, shape: tuple[int, ...], box: _Box) -> None:
        self.tensor, self.shape = tensor, torch.Size(shape)
        self._chunk = ChunkStorageMetadata(
            offsets=torch.Size(start for start, _ in box), sizes=torch.Size(stop - start for start, stop in box)
        )

    def size(self) -> torch.Size:
        return self.shape

    def __create_write_items__(self, fqn: str, shard: Shard) -> list[WriteItem]:
        if self.tensor.numel() == 0:
            return []
        data = TensorWriteData(
            chunk=self._chunk, properties=TensorProperties.create_from_tensor(self.tensor), size=self.shape
        )
        return [WriteItem(index=MetadataIndex(fqn, self._chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk] if self.tensor.numel() else []


class _SavePlanner(dcp.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


@dataclass(frozen=True)
class StagedState:
    """One rank's state at one moment."""

    shards: Mapping[str, Shard]
    """``kind/NAME`` -> part; kinds are ``weight``, moments, step counts and whatever else the owner keeps."""
    values: Mapping[str, Any]
    """Plain JSON; the same on every rank."""


def stage(
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, ParameterShard],
    values: Mapping[str, Any],
    *,
    copy: bool = True,
) -> StagedState:
    """Freeze ``tensors`` (``kind/NAME``): copies in host memory, so that training may go on.

    Args:
        shards: Which part of ``NAME`` this rank holds. Scalars (step counts) are whole everywhere.
        copy: False if nothing changes before they are written.
    """
    staged = {}
    for key, tensor in tensors.items():
        shard = shards[key.partition("/")[2]]
        shape, box = (shard.shape, shard.box) if tensor.ndim else ((), ())
        staged[key] = Shard(tensor.detach().to("cpu", copy=copy).contiguous(), shape, box)
    return StagedState(staged, values)


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Names neither the folder nor the moment: equal states are equal files, wherever they are written."""
        return StorageMeta()


def write_state(folder: Path, state: StagedState, *, rank: int, group: dist.ProcessGroup | None) -> tuple[Path, ...]:
    """Write the parts of all ranks into one folder, synced to the disk. Every rank calls it. The folder may lie on another
    disk for each rank: together they then hold what one folder would.

    Args:
        group: A CPU group of the ranks, of this purpose alone: it is used beside the training. None for one rank.

    Returns:
        The files that this rank has written.

    Raises:
        CheckpointError: A rank could not write; every rank raises, naming the cause.
        OSError: This one could not.
    """
    try:  # makes the folder, too, and tells every rank of whoever could not
        dcp.save(
            dict(state.shards),
            storage_writer=_Writer(folder),
            planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:  # not an Exception, and its text is long
        causes = (f"rank {r}: {_root_of(failure[0])}" for r, failure in sorted(error.failures.items()))
        raise save_failed("trainer state cannot be written", folder, OSError(0, "; ".join(causes))) from error
    if rank == 0:
        (folder / _VALUES).write_text(json.dumps(dict(state.values), indent=1), encoding="utf-8")
    own = tuple(sorted(folder.glob(f"__{rank}_*")))
    return (folder / _VALUES, folder / _INDEX, *own) if rank == 0 else own


def _root_of(error: BaseException) -> str:
    """The system's word, where there is one below what the library made of it."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError) and below.strerror:
            return below.strerror
        below = below.__cause__ or below.__context__
    return repr(error)


def read_state(
    folder: Path,
    shards_of: Callable[[str], Mapping[str, ParameterShard]],
    only: Collection[str] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's parts, on the CPU, of a state that any layout wrote. Reads only what it needs; talks to no other rank.

    Args:
        shards_of: Kind -> which part of each name this rank holds.
        only: Keys (``kind/NAME``) to read; None reads all.

    Returns:
        ``kind/NAME`` -> part, and the values.

    Raises:
        CheckpointError: Missing, torn, or of another model.
    """
    wanted: dict[str, Shard] = {}
    try:
        values = json.loads((folder / _VALUES).read_text(encoding="utf-8"))
        reader = SafeFileSystemReader(folder)
        for key, stored in reader.read_metadata().state_dict_metadata.items():
            kind, _, name = key.partition("/")
            if only is not None and key not in only:
                continue
            shard = shards_of(kind).get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"trainer state in {folder} was altered: {key} is no tensor")
            if shard is None or tuple(stored.size) not in (shard.shape, ()):
                here = "no such parameter" if shard is None else f"shape {shard.shape}"
                raise CheckpointError(
                    f"trainer state in {folder} is of another model: it holds {name} of shape {tuple(stored.size)}, "
                    f"this one has {here}"
                )
            shape, box = (shard.shape, shard.box) if len(stored.size) else ((), ())
            part = torch.empty([stop - start for start, stop in box], dtype=stored.properties.dtype)
            wanted[key] = Shard(part, shape, box)
        dcp.load(dict(wanted), storage_reader=reader, planner=_LoadPlanner(flatten_state_dict=False), no_dist=True)
    except (OSError, ValueError, KeyError, EOFError, RuntimeError) as error:
        raise CheckpointError(f"trainer state in {folder} cannot be read: {error}") from error
    except CheckpointException as error:
        causes = "; ".join(repr(failure[0]) for failure in error.failures.values())
        raise CheckpointError(f"trainer state in {folder} cannot be read: {causes}") from error
    if only is not None and (absent := sorted(set(only) - wanted.keys())):
        raise CheckpointError(f"trainer state in {folder} is of another model: it does not hold {absent[0]}")
    return {key: shard.tensor for key, shard in wanted.items()}, values


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` on a thread of its own, which ends with the process; the future holds what it returned or raised."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # handed on to whoever asks for the result
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="save", daemon=True).start()
    return future
