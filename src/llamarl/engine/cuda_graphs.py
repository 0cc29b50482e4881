"""Decode steps of few shapes, so that each can be recorded once as a CUDA graph and replayed.

A decode step of a small model is a thousand short kernels; launching them one by one can take
longer than they run. A graph launches all of them at once, but only for the shapes and addresses
that it was recorded with. So a step in which every sequence decodes is padded to a *bucket* of so
many rows and so many blocks of context::

    chunks ──StagedInputs──▶ one int64 array ──one copy──▶ the bucket's inputs ──replay──▶ logits [rows, V], the first N count

- Tables are nearly all of that array, and of them a step writes what is new (``block_tables.py``).
- Rows beyond the sequences hold token 0 and write and read the *scratch block*, one block more than
  the cache has otherwise; no sequence ever looks there.
- A graph is recorded when its bucket is first needed: twice the step runs as it is, on a side
  stream, so that libraries set themselves up, then once more for the record. Graphs share one pool
  of memory, one stream and one tensor of logits, since one runs at a time: the logits of a step are
  valid until the next step.
- The pool's segments never merge, so each wider copy of keys and values would take a further one:
  where they are copied, a bucket larger than all before it starts the pool anew, and smaller ones then
  fit in its segments.
- Weights are written in place, so graphs outlive them. If an address has moved after all, all
  graphs are forgotten.

Steps with prompt tokens, and batches that no bucket fits, go the ordinary way. Which way a step
goes, and in which bucket, depends on its batch alone, so a resumed run takes the same one.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llamarl.engine.block_tables import BlockTables
from llamarl.engine.scheduler import Chunk
from llamarl.model_support import is_known, why_unsupported

__all__ = [
    "Bucket",
    "Buckets",
    "DecodeInputs",
    "PaddedDecoder",
    "StagedInputs",
    "why_graphs_unsupported",
    "why_layout_unsupported",
    "sizes_between",
]

_MOST_ROWS = 512
_LEAST_TOKENS = 64  # of context that the narrowest bucket holds
_MAX_PADDED_RATIO = 4  # a padded step may gather so many times the blocks that its sequences hold
_FREE_TOKENS = 1 << 15  # below so many padded tokens the ratio does not matter
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Bucket:
    """Shape of a padded decode step."""

    rows: int
    width: int
    """Blocks of each row's table."""


def sizes_between(smallest: int, largest: int) -> tuple[int, ...]:
    """``smallest``, then by turns half as much again and a third: 4, 6, 8, 12, 16, ...; the last one is ``largest``."""
    sizes, size = [], smallest
    while size < largest:
        sizes += [size, size + size // 2]
        size *= 2
    return (*sorted({size for size in sizes if size < largest}), largest)


class Buckets:
    """The shapes that an engine has, and which one a step takes.

    Args:
        max_rows: Most sequences in a step.
        max_tokens: Longest context.
        in_place: Whether attention reads blocks where they lie: then a wide table costs little, and few widths do.
    """

    def __init__(self, *, max_rows: int, max_tokens: int, block_size: int, in_place: bool = False) -> None:
        self._block_size, self.in_place = block_size, in_place
        widest = -(-max_tokens // block_size)
        self._most_tokens = math.inf if in_place else _FREE_TOKENS
        self.rows = sizes_between(1, min(max_rows, _MOST_ROWS))
        self.widths = sizes_between(min(widest, -(-_LEAST_TOKENS // block_size)), widest)
        if in_place:  # 64, 256, 1024, ... tokens
            self.widths = (*self.widths[:-1:4], widest)

    def choose(self, counts: npt.ArrayLike) -> Bucket | None:
        """The smallest bucket for sequences that hold so many blocks each.

        None if there is none, or if it would gather far more than the sequences hold: one long
        context among many short.
        """
        counts = np.asarray(counts)
        most = counts.max()
        rows = next((size for size in self.rows if size >= len(counts)), None)
        width = next((size for size in self.widths if size >= most), None)
        if rows is None or width is None:
            return None
        if rows * width * self._block_size > self._most_tokens and rows * width > _MAX_PADDED_RATIO * counts.sum():
            return None
        return Bucket(rows, width)


class StagedInputs:
    """Inputs of decode steps on the host, [rows * (width + 4)]: block tables, tokens, positions, slots, lengths.

    Args:
        most_rows: Of the largest bucket.
        scratch: The block of the rows beyond the sequences.
    """

    def __init__(self, *, most_rows: int, block_size: int, scratch: int, device: torch.device) -> None:
        self._most_rows, self._block_size, self._scratch, self._device = most_rows, block_size, scratch, device
        self._idle = np.array([[0], [0], [scratch * block_size], [1]])  # tokens, positions, slots, lengths
        self._flat = torch.empty(0, dtype=torch.int64)
        self._width = 0
        self._num_rows = 0  # of the step before
        self._tables = BlockTables()  # where ``_flat`` begins
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def write(self, chunks: Sequence[Chunk], starts: npt.NDArray[np.int64], bucket: Bucket) -> Tensor:
        """Inputs of a step, valid until the next call.

        Args:
            chunks: One decoded token each; row i is chunk i.
            starts: [len(chunks)] their positions.
        """
        if self._copied is not None:
            self._copied.synchronize()  # of the step before: its draws have been read since
        rows, width, n, size = bucket.rows, bucket.width, len(chunks), self._block_size
        if self._width != width:
            if len(self._flat) < self._most_rows * (width + 4):
                pinned = self._device.type == "cuda"
                self._flat = torch.empty(self._most_rows * (width + 4), dtype=torch.int64, pin_memory=pinned)
            self._tables.begin_in(self._flat.numpy()[: self._most_rows * width].reshape(-1, width))
            self._width, self._num_rows = width, 0
        flat = self._flat[: rows * (width + 4)]
        values = flat.numpy()
        tables = self._tables.write([chunk.blocks for chunk in chunks], starts // size + 1)
        if self._num_rows != n:
            values[n * width : rows * width] = self._scratch
            self._num_rows = n
        columns = values[rows * width :].reshape(4, rows)
        columns[:, n:] = self._idle
        slots = tables[np.arange(n), starts // size] * size + starts % size
        columns[:, :n] = [chunk.tokens[0] for chunk in chunks], starts, slots, starts + 1
        return flat

    def copy_to_device(self, flat: Tensor, target: Tensor | None = None) -> Tensor:
        """Queue the copy of what ``write`` gave, into a tensor or a new one; on the CPU it may be what was given."""
        if target is None:
            target = flat.to(self._device, non_blocking=True)
        else:
            target.copy_(flat, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        return target


class DecodeInputs:
    """Views of the array of ``StagedInputs`` on the device; a graph reads it at this address.

    ``tables`` [rows * width] block ids; of each row ``tokens``, ``positions``, ``slots`` (where its K and V go) and
    ``lengths`` (cached tokens, the new one included).
    """

    def __init__(self, flat: Tensor, bucket: Bucket) -> None:
        self.flat, self.bucket = flat, bucket
        parts = flat.split([bucket.rows * bucket.width] + 4 * [bucket.rows])
        self.tables, self.tokens, self.positions, self.slots, self.lengths = parts


@dataclass(slots=True)
class _Recorded:
    graph: Any
    inputs: DecodeInputs
    logits: Tensor


class PaddedDecoder:
    """Runs decode steps by bucket.

    Args:
        compute: The step itself: inputs -> logits [rows, V]. Asks nothing of the host, and always does the same work.
        record: Whether to record and replay; else ``compute`` runs each time.
        forget: Called when a graph has been recorded: lets go of tensors that ``compute`` has kept for itself.
    """

    def __init__(
        self,
        compute: Callable[[DecodeInputs], Tensor],
        buckets: Buckets,
        *,
        device: torch.device,
        block_size: int,
        scratch: int,
        record: bool,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._compute, self._buckets, self._forget = compute, buckets, forget
        self._device, self._block_size = device, block_size
        self._staged = StagedInputs(most_rows=buckets.rows[-1], block_size=block_size, scratch=scratch, device=device)
        self._record = record
        self._graphs: dict[Bucket, _Recorded] = {}
        self._pool: Any = None
        self._side: Any = None
        self._largest = 0  # padded blocks of the largest bucket in the pool
        self._logits = torch.empty(0)
        self._addresses: tuple[int, ...] | None = None

    def run(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Logits [len(chunks), V] of a step of decodes, valid until the next call; None if no bucket fits."""
        starts = np.array([chunk.start for chunk in chunks])
        bucket = self._buckets.choose(starts // self._block_size + 1)
        if bucket is None:
            return None
        flat = self._staged.write(chunks, starts, bucket)
        if not self._record:
            return self._compute(DecodeInputs(self._staged.copy_to_device(flat), bucket))[: len(chunks)]
        recorded = self._graphs.get(bucket)
        if recorded is None:
            if not self._buckets.in_place and bucket.rows * bucket.width > self._largest:
                self.drop()
                self._largest = bucket.rows * bucket.width
            inputs = DecodeInputs(torch.empty_like(flat, device=self._device), bucket)
            self._staged.copy_to_device(flat, inputs.flat)
            recorded = self._graphs[bucket] = self._capture(inputs)
        else:
            self._staged.copy_to_device(flat, recorded.inputs.flat)
        recorded.graph.replay()
        return recorded.logits[: len(chunks)]

    def served_from(self, addresses: tuple[int, ...]) -> None:
        """Tell where the weights lie now; graphs that read them elsewhere are forgotten."""
        if self._addresses not in (None, addresses):
            self.drop()
        self._addresses = addresses

    def drop(self) -> None:
        """Forget every graph, and free their memory."""
        self._graphs.clear()
        self._pool, self._largest = None, 0
        self._logits = torch.empty(0)

    def _capture(self, inputs: DecodeInputs) -> _Recorded:
        """Record the step. The warm-up computes with the real inputs: it writes what the replay will write again."""
        if self._side is None:  # one for all: cuBLAS keeps a workspace for each stream that it has seen
            self._side = torch.cuda.Stream(self._device)
        current, side = torch.cuda.current_stream(self._device), self._side
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                logits = self._compute(inputs)
        current.wait_stream(side)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._logits = logits.new_empty(self._buckets.rows[-1], logits.shape[1])
        shared = self._logits[: inputs.bucket.rows]  # what a graph returned of its own would stay in the pool for good
        del logits
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may allocate meanwhile: a copy of the weights, a checkpoint
        with uncollected(), torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            shared.copy_(self._compute(inputs))
        self._forget()
        return _Recorded(graph, inputs, shared)


@contextmanager
def uncollected() -> Iterator[None]:
    """Python looks for no circles meanwhile: what it freed of another engine, a graph or an event, would end the record."""
    looked = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looked:
            gc.enable()


def why_layout_unsupported(mode: Literal["auto", "on", "off", "padded"], *, device: str, num_ranks: int) -> str | None:
    """Why decode steps cannot go through padded batches on this device with these ranks; None if they can.

    Args:
        mode: ``engine.cuda_graphs``.
        device: Its type.
        num_ranks: Of the engine.
    """
    if mode in ("off", "padded"):
        return None
    if device != "cuda":
        return f"they need a CUDA device, the engine computes on {device}"
    if num_ranks > 1:
        return "with several ranks a step holds collectives"
    return None


def why_graphs_unsupported(config: Any) -> str | None:
    """Why decode steps of this model cannot be recorded; None if they can.

    Args:
        config: The model's.
    """
    values = config.to_dict()
    if not is_known(values):
        return "it is known of the families in docs/models.md alone"
    if why_unsupported(values, "int8"):  # its experts, whose tokens are counted on the host in every step
        return f"layers of {config.model_type} are not those of a dense decoder"
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    changing = [kind for kind in ("dynamic", "longrope") if kind in kinds]
    if changing:
        return f"rotary embedding {changing[0]!r} asks the host for the longest context in every step"
    return None
