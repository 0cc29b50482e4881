"""The trainer's state on disk as safetensors: saved while training goes on, loaded by any layout.

    tick ─▶ stage: copies in host memory ─▶ the next tick trains
                        └─▶ a thread: ranks agree who writes what, each writes rank_N.safetensors, rank 0 the values

Every tensor is written with its place in the *global* tensor, so ranks of another layout read the
slices that are theirs. Tensors are stored as they are: the same layout goes on with the same bits.
Replicas write once. A file says itself which parts it holds (JSON in its header), so there is no
index; a part that is in no file is missed when its tensor is read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llamarl.checkpoint.storage import save_failed
from llamarl.errors import CheckpointError
from llamarl.models.parallel import ParameterShard

__all__ = ["Shard", "StagedState", "in_background", "read_state", "read_tensors", "stage", "write_state"]

_VALUES = "values.json"
_PARTS = "parts"
"""Key in a file's header: what the file holds, as ``_Place`` of each key."""
T = TypeVar("T")
_Box = tuple[tuple[int, int], ...]
_Place = tuple[Sequence[int], Sequence[tuple[int, int]], str]
"""Shape of the global tensor, box of the part in it, name of the dtype."""


@dataclass(frozen=True)
class Shard:
    """The part ``box`` of a tensor of global ``shape``."""

    tensor: Tensor
    shape: tuple[int, ...]
    box: _Box


@dataclass(frozen=True)
class StagedState:
    """One rank's state at one moment."""

    shards: Mapping[str, Shard]
    """``kind/NAME`` -> part; kinds are ``weight``, moments, step counts and whatever else the owner keeps."""
    values: Mapping[str, Any]
    """Plain JSON; the same on every rank."""


def stage(
    tensors: Mapping[str, Tensor], shards: Mapping[str, ParameterShard], values: Mapping[str, Any], *, copy: bool = True
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


def write_state(folder: Path, state: StagedState, *, rank: int, group: dist.ProcessGroup | None) -> tuple[Path, ...]:
    """Write the parts of all ranks into one folder, synced to the disk. Every rank calls it. The
    folder may lie on another disk for each rank: together they then hold what one folder would.

    Args:
        group: A CPU group of the ranks, of this purpose alone: it is used beside the training. None for one rank.

    Returns:
        The files that this rank has written.

    Raises:
        CheckpointError: A rank could not write; every rank raises, naming the cause.
    """
    held = {key: (shard.box, shard.tensor.nbytes) for key, shard in state.shards.items() if shard.tensor.numel()}
    writers = share_out(_of_every_rank(held, group))
    own = {key: shard for key, shard in state.shards.items() if writers.get((key, shard.box)) == (rank if group else 0)}
    files: list[Path] = []
    cause = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if own:
            files.append(folder / f"rank_{rank}.safetensors")
            places = {key: (shard.shape, shard.box, str(shard.tensor.dtype)[6:]) for key, shard in own.items()}
            save_file({key: shard.tensor for key, shard in own.items()}, files[0], {_PARTS: json.dumps(places)})
            with open(files[0], "rb") as file:
                os.fsync(file.fileno())
        if rank == 0:
            files.append(folder / _VALUES)
            files[-1].write_text(json.dumps(dict(state.values), indent=1), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or str(error)
    causes = [f"rank {r}: {why}" for r, why in enumerate(_of_every_rank(cause, group)) if why]
    if causes:
        raise save_failed("trainer state cannot be written", folder, OSError(0, "; ".join(causes)))
    return tuple(files)


def _of_every_rank(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """What each rank of the group gives, by rank."""
    if group is None:
        return [value]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def share_out(held: Sequence[Mapping[str, tuple[_Box, int]]]) -> dict[tuple[str, _Box], int]:
    """Which rank writes each part: of those that hold it, the one with the fewest bytes so far.

    Args:
        held: Of each rank, key -> box and bytes of the part that it holds.
    """
    holders: dict[tuple[str, _Box], list[int]] = {}
    sizes: dict[tuple[str, _Box], int] = {}
    for rank, parts in enumerate(held):
        for key, (box, num_bytes) in parts.items():
            holders.setdefault((key, box), []).append(rank)
            sizes[key, box] = num_bytes
    load = [0] * len(held)
    writers: dict[tuple[str, _Box], int] = {}
    for part in sorted(holders):
        writers[part] = min(holders[part], key=lambda rank: (load[rank], rank))
        load[writers[part]] += sizes[part]
    return writers


def read_state(
    folder: Path, shards_of: Callable[[str], Mapping[str, ParameterShard]], only: Collection[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's parts, on the CPU, of a state that any layout wrote. Reads only what it needs;
    talks to no other rank.

    Args:
        shards_of: Kind -> which part of each name this rank holds.
        only: Keys (``kind/NAME``) to read; None reads all.

    Returns:
        ``kind/NAME`` -> part, and the values.

    Raises:
        CheckpointError: Missing, torn, or of another model.
    """
    with _reading(folder):
        values = json.loads((folder / _VALUES).read_text(encoding="utf-8"))
    read = dict(read_tensors(folder, shards_of, only))
    if only is None and not read:
        raise CheckpointError(f"trainer state in {folder} cannot be read: it holds no tensors (rank_*.safetensors)")
    return read, values


def read_tensors(
    folder: Path, shards_of: Callable[[str], Mapping[str, ParameterShard]], only: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``read_state``, each when it is asked for, in the order of ``only``: hundreds of files are opened once."""
    with _reading(folder), contextlib.ExitStack() as files:
        stored: dict[str, list[tuple[Any, _Place]]] = {key: [] for key in only or ()}
        for path in sorted(folder.glob("rank_*.safetensors")):
            file = files.enter_context(safe_open(path, framework="pt"))
            for key, place in json.loads((file.metadata() or {})[_PARTS]).items():
                if only is None or key in stored:
                    stored.setdefault(key, []).append((file, place))
        for key, parts in stored.items():
            if not parts:
                raise CheckpointError(f"trainer state in {folder} is of another model: it does not hold {key}")
            kind, _, name = key.partition("/")
            shape, shard = tuple(parts[0][1][0]), shards_of(kind).get(name)
            if shard is None or shape not in (shard.shape, ()):
                here = "no such parameter" if shard is None else f"shape {shard.shape}"
                raise CheckpointError(
                    f"trainer state in {folder} is of another model: it holds {name} of shape {shape}, "
                    f"this one has {here}"
                )
            yield key, _assemble(key, parts, shape, shard.box if shape else ())


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"trainer state in {folder} cannot be read: {error}") from error


def _assemble(key: str, parts: Sequence[tuple[Any, _Place]], shape: tuple[int, ...], box: _Box) -> Tensor:
    """The part ``box`` of a tensor, from those in files that overlap it.

    Raises:
        ValueError: The parts are not of one tensor, do not make it whole, or are not what their file's header says.
    """
    dtype = getattr(torch, parts[0][1][2], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key} has no dtype, its file's header says {parts[0][1][2]}")
    whole = torch.empty([stop - start for start, stop in box], dtype=dtype)
    num_stored = 0
    for file, (part_shape, part_box, part_dtype) in parts:
        stored = file.get_slice(key)
        sizes = [stop - start for start, stop in part_box]
        if tuple(part_shape) != shape or part_dtype != parts[0][1][2] or stored.get_shape() != sizes:
            raise ValueError(f"a part of {key} does not fit the others or its file")
        num_stored += math.prod(sizes)
        both = [(a, b, c, d) for (a, b), (c, d) in zip(box, part_box, strict=True)]  # a to b here, c to d in the file
        into = tuple(slice(max(a, c) - a, min(b, d) - a) for a, b, c, d in both)
        out_of = tuple(slice(max(a, c) - c, min(b, d) - c) for a, b, c, d in both)
        if all(one.start < one.stop for one in into):
            found = stored[out_of] if out_of else file.get_tensor(key)
            if found.dtype != whole.dtype:
                raise ValueError(f"{key} is {found.dtype}, its file's header says {part_dtype}")
            whole[into] = found
    if num_stored != math.prod(shape):
        raise ValueError(f"{num_stored:,} of {math.prod(shape):,} numbers of {key} are there")
    return whole


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
