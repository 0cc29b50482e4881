"""The source rank's side of a hand-over: lay out a slot, fill it block by block, prove it, mark it ready.

    publish ─▶ next slot of the ring ─▶ WRITING ─▶ copy a block (cast on the way), checksum it while it is in the cache,
                                                    count it ─▶ ... ─▶ READY

    slot = [ header | catalog | checksums | blocks ]        one copy a region: a bare memory copy where the region is one
                                                            run of the tensor in the same dtype, else a cast on the way

Slots are registered once and reused; publishing a version allocates nothing. With
``WeightsPayload.released`` the handle leaves at once and a thread fills the slot: sinks follow
block by block, and the trainer goes on with its next forward and backward pass. It waits for that
event before it changes the tensors. What is read from a GPU is read on a stream of its own: on the
trainer's each block would wait for all passes that were queued since, and the version for the whole tick.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from llamarl.errors import ChannelError, DeadlineExceeded, WeightSyncError
from llamarl.running_time import wait_for
from llamarl.transports.base import SourceBuffer, SourceTransport
from llamarl.transports.checksum import block_digest, digest, mix64
from llamarl.transports.slots import PAGE, SlotState, Word, header_words
from llamarl.weight_sync.catalog import Catalog, build_catalog
from llamarl.weight_sync.layout import AnyLayout, MeshLayout, ParameterSpec, shift, span, whole_box
from llamarl.weight_sync.slot import SlotHandle, manifest_checksum

__all__ = ["Publisher", "WeightsPayload", "own_part", "whole_on_each"]


@dataclass(frozen=True, kw_only=True)
class WeightsPayload:
    """One version of this source rank's shards. They may change again as soon as it was published, or, with
    ``released``, as soon as that event is set."""

    version: int
    """Trainer ticks done."""
    tensors: Mapping[str, torch.Tensor]
    """This rank's local tensors: what it holds of each parameter, by its name; a tied weight once."""
    layout: MeshLayout | None = None
    """Which boxes all source ranks hold; None: every rank holds all whole."""
    wire_dtype: torch.dtype | None = None
    """Floating-point parameters travel in it, one-byte codes excepted; None: all as they are."""
    sink_layout: AnyLayout | None = None
    """What the sinks will ask for, if known: the bytes are then laid out so that each sink reads only its own."""
    released: threading.Event | None = None
    """If given, a thread copies; the event is set when the tensors may change again, also after a failure."""


class Publisher:
    """Publishes versions of this rank's shards into at most ``num_slots`` registered buffers.

    Tokens are numbered in the order in which the source fires, those without a version included. The slot of token t is
    written again for token t + num_slots at the earliest, so a source that seldom publishes needs a single one.

    Args:
        rank: This source rank.
        num_slots: A version stays readable until the token that follows it by ``num_slots`` begins to be written.
        transport: Where buffers come from.
    """

    def __init__(self, *, rank: int, num_source_ranks: int, num_slots: int, transport: SourceTransport) -> None:
        self._rank = rank
        self._num_source_ranks = num_source_ranks
        self._num_slots = num_slots
        self._transport = transport
        self._slots: list[_Slot | None] = [None] * num_slots
        self._catalog: Catalog | None = None
        self._catalog_bytes = b""
        self._catalog_checksum = 0
        self._made_for: tuple[object, ...] | None = None
        self._token = -1
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._stream: torch.cuda.Stream | None = None
        """For all versions: torch keeps what was freed on each stream for that stream."""

    def publish(self, payload: WeightsPayload) -> SlotHandle:
        """Copy the shards into the next slot, cast on the way, and mark it ready; with ``payload.released``, beside
        what this process goes on with.

        Raises:
            ValueError: The tensors do not fit the layout.
            WeightSyncError: No memory for the slots, or the copy of the version before this one failed.
        """
        self.skip()
        self.wait()
        local = {name: own_part(tensor) for name, tensor in payload.tensors.items()}
        self._prepare(local, payload)
        version = payload.version
        index = self._free_slot(self._token)
        slot = self._slot(index, local)
        slot.token = self._token
        slot.generation += 1
        slot.words[Word.STATE] = SlotState.WRITING
        slot.words[Word.GENERATION] = slot.generation
        slot.words[Word.VERSION] = version
        slot.words[Word.PROGRESS] = 0
        checksum: int | None = None
        device = _gpu_of([slot.buffer.data, *local.values()])
        # the optimizer's kernels that are queued as the version is announced
        ready = None if device is None else (device, torch.cuda.current_stream(device).record_event())
        if payload.released is not None:
            self._thread = threading.Thread(
                target=self._fill_in_background,
                args=(slot, local, version, ready, payload.released),
                name="weight-copy",
                daemon=True,
            )
            self._thread.start()
        else:
            checksum = self._fill(slot, local, version, ready)
        checksums_offset, data_offset = _offsets(slot.catalog, len(self._catalog_bytes))
        return SlotHandle(
            source_rank=self._rank,
            version=version,
            slot=index,
            generation=slot.generation,
            address=slot.buffer.address,
            transport=self._transport.name,
            pid=os.getpid(),
            catalog_bytes=len(self._catalog_bytes),
            catalog_checksum=self._catalog_checksum,
            checksums_offset=checksums_offset,
            data_offset=data_offset,
            manifest_checksum=checksum,
        )

    def skip(self) -> None:
        """Count a token, of one that carries no version."""
        self._token += 1

    def wait(self, deadline_s: float = 600.0) -> None:
        """Return when no tensor is being read any more.

        Raises:
            WeightSyncError: The copy failed; the message carries its cause.
            DeadlineExceeded: It is still running after ``deadline_s`` seconds.
        """
        if self._thread is not None:
            if not wait_for(partial(_ended, self._thread), deadline_s):
                raise DeadlineExceeded(
                    f"source rank {self._rank} has waited {deadline_s:g} s for its own copy of the weights into a slot; "
                    "the machine is short of memory or cores"
                )
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise WeightSyncError(f"source rank {self._rank}: a version could not be published: {failure}") from failure

    def _fill(self, slot: _Slot, local: Mapping[str, torch.Tensor], version: int, ready: _Ready | None) -> int:
        with self._own_stream(ready):
            if slot.buffer.data.is_cuda:
                self._fill_on_device(slot, local)
            else:
                for block, copies in enumerate(slot.copies):
                    for copy in copies:
                        copy.run(local[copy.tensor])
                    slot.checksums[block] = block_digest(slot.blocks[block], slot.catalog.checksum)
                    slot.words[Word.PROGRESS] = block + 1
        checksum = manifest_checksum(version, self._catalog_checksum, slot.checksums)
        slot.words[Word.CHECKSUM] = checksum
        slot.words[Word.STATE] = SlotState.READY
        return checksum

    @contextmanager
    def _own_stream(self, ready: _Ready | None) -> Iterator[None]:
        """Work on a GPU that comes after an event and after nothing that this process has queued since."""
        if ready is None:
            yield
            return
        device, event = ready
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_event(event)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            yield

    def _fill_on_device(self, slot: _Slot, local: Mapping[str, torch.Tensor]) -> None:
        """All copies and checksums, one wait at the end."""
        for copies in slot.copies:
            for copy in copies:
                copy.run(local[copy.tensor])
        if slot.blocks:  # a rank may hold nothing, where there are more ranks than rows
            checksums = torch.stack([mix64(block) for block in slot.blocks]).cpu()  # waits; so does who calls wait()
            slot.checksums[:] = checksums.numpy().view(np.uint64)
        slot.words[Word.PROGRESS] = len(slot.blocks)

    def _fill_in_background(
        self,
        slot: _Slot,
        local: Mapping[str, torch.Tensor],
        version: int,
        ready: _Ready | None,
        released: threading.Event,
    ) -> None:
        try:
            with torch.no_grad():
                self._fill(slot, local, version, ready)
        except Exception as error:  # raised again by wait(), on the thread that can act on it
            slot.words[Word.STATE] = SlotState.FAILED
            self._failure = error
        finally:
            released.set()

    def close(self) -> None:
        """Free the slots. Idempotent."""
        if self._thread is not None:
            self._thread.join(60.0)
            self._thread = None
        for index, slot in enumerate(self._slots):
            if slot is not None:
                self._slots[index] = None
                slot.close()
        self._transport.close()

    def _free_slot(self, token: int) -> int:
        """A slot whose version nobody may read any more, or one that was never used; the fewest slots are touched."""
        for index, slot in enumerate(self._slots):
            if slot is None or slot.token is None or slot.token <= token - self._num_slots:
                return index
        raise AssertionError("num_slots consecutive tokens cannot hold more than num_slots slots")

    def _slot(self, index: int, local: Mapping[str, torch.Tensor]) -> _Slot:
        """The slot at ``index``, made anew if it was laid out for another catalog."""
        slot = self._slots[index]
        if slot is None or slot.catalog is not self._catalog:
            generation = 0
            if slot is not None:
                generation = slot.generation
                slot.close()
            assert self._catalog is not None
            shapes = {name: tensor.shape for name, tensor in local.items()}
            self._slots[index] = slot = _make_slot(
                self._catalog, self._catalog_bytes, self._transport, shapes, generation=generation
            )
        return slot

    def _prepare(self, local: Mapping[str, torch.Tensor], payload: WeightsPayload) -> None:
        layout = payload.layout
        signature = tuple((name, tuple(t.shape), t.dtype) for name, t in local.items())
        made_for = (signature, layout, payload.wire_dtype, payload.sink_layout)
        if made_for == self._made_for:
            return
        source = whole_on_each(local, self._num_source_ranks) if layout is None else layout
        if source.num_ranks != self._num_source_ranks:
            raise ValueError(f"the layout counts {source.num_ranks} source ranks, the channel {self._num_source_ranks}")
        _check_tensors(source, self._rank, local)
        catalog = build_catalog(
            source,
            self._rank,
            wire_dtypes=_wire_dtypes(source, payload.wire_dtype),
            sink=payload.sink_layout,
            block_bytes=self._transport.block_bytes,
            checksum=self._transport.checksum,
        )
        changed = self._made_for is not None and self._made_for[0] != signature
        if catalog != self._catalog or changed:  # slots know the local tensors' shapes
            self._catalog = catalog
            self._catalog_bytes = catalog.to_bytes()
            self._catalog_checksum = digest(self._catalog_bytes)
        self._made_for = made_for


@dataclass(frozen=True, slots=True)
class _RegionCopy:
    """One region of a slot, and where its values come from."""

    view: torch.Tensor
    """The region, shaped, in the wire dtype."""
    tensor: str
    where: tuple[slice, ...]
    start: int | None
    """Elements from the tensor's first to the region's first, if the region is one run of the (contiguous) tensor."""

    def run(self, tensor: torch.Tensor) -> None:
        view = self.view
        plain = (
            self.start is not None
            and tensor.dtype == view.dtype
            and tensor.is_cpu
            and view.is_cpu
            and tensor.is_contiguous()
        )
        if plain and self.start is not None:  # a bare memory copy: half the overhead of a tensor copy at block size
            address = tensor.data_ptr() + self.start * view.element_size()
            ctypes.memmove(view.data_ptr(), address, view.numel() * view.element_size())
        else:
            view.copy_(tensor[self.where])


@dataclass
class _Slot:
    """One slot of the ring, writable."""

    buffer: SourceBuffer
    catalog: Catalog
    copies: list[list[_RegionCopy]]
    """By block."""
    blocks: list[torch.Tensor]
    """By block: its bytes, uint8."""
    words: npt.NDArray[np.uint64]
    """The header."""
    checksums: npt.NDArray[np.uint64]
    """[num_blocks], in the slot."""
    generation: int
    token: int | None = None
    """Number of the token it holds, counted by the sender; None before the first."""

    def close(self) -> None:
        self.copies.clear()
        self.blocks.clear()
        self.words = self.checksums = np.empty(0, np.uint64)
        self.buffer.close()


def _offsets(catalog: Catalog, catalog_bytes: int) -> tuple[int, int]:
    """Where a slot's checksums and its data begin."""
    checksums = -(-(PAGE + catalog_bytes) // 64) * 64
    data = -(-(checksums + 8 * len(catalog.blocks)) // PAGE) * PAGE
    return checksums, data


def _make_slot(
    catalog: Catalog,
    catalog_bytes: bytes,
    transport: SourceTransport,
    shapes: Mapping[str, torch.Size],
    *,
    generation: int,
) -> _Slot:
    """Register memory for ``catalog`` and work out the copies that fill it.

    Args:
        shapes: Of the local tensors.
        generation: Of the slot that it replaces; 0 for a first one.

    Raises:
        WeightSyncError: There is not that much memory.
    """
    checksums_offset, data_offset = _offsets(catalog, len(catalog_bytes))
    try:
        buffer = transport.register(data_offset, max(64, catalog.nbytes))
    except ChannelError as error:
        raise WeightSyncError(f"cannot register a slot for the weights: {error}") from error
    buffer.control[PAGE : PAGE + len(catalog_bytes)] = torch.frombuffer(bytearray(catalog_bytes), dtype=torch.uint8)
    starts = {piece.parameter: [a for a, _ in piece.box] for piece in catalog.pieces}
    data = buffer.data
    copies = []
    for block in catalog.blocks:
        of_block = []
        for region in block.regions:
            spec = catalog.parameters[region.parameter]
            view = data[region.offset : region.offset + region.nbytes].view(getattr(torch, spec.dtype))
            where = shift(region.box, starts[region.parameter], [0] * len(region.box))
            start, stop = span(where, whole_box(shapes[region.parameter]))
            of_block.append(
                _RegionCopy(
                    view=view.view([b - a for a, b in region.box]),
                    tensor=region.parameter,
                    where=tuple(slice(a, b) for a, b in where),
                    start=start if stop - start == view.numel() else None,
                )
            )
        copies.append(of_block)
    blocks = [data[b.offset : b.offset + b.nbytes] for b in catalog.blocks]
    control = buffer.control.numpy()
    checksums = control[checksums_offset : checksums_offset + 8 * len(blocks)].view(np.uint64)
    return _Slot(buffer, catalog, copies, blocks, header_words(control), checksums, generation)


_Ready = tuple[torch.device, torch.cuda.Event]


def _gpu_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The first GPU on which one of these lies; None: all are in host memory."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)


def _ended(thread: threading.Thread, within_s: float) -> bool:
    thread.join(within_s)
    return not thread.is_alive()


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, detached, sharing storage."""
    to_local = getattr(tensor, "to_local", None)  # a DTensor hands out this rank's shard
    return (to_local() if to_local is not None else tensor).detach()


def whole_on_each(local: Mapping[str, torch.Tensor], num_ranks: int) -> MeshLayout:
    """Every rank holds these tensors, each a whole parameter of its name."""
    specs = {name: ParameterSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in local.items()}
    return MeshLayout(specs, {"rank": num_ranks})


def _check_tensors(layout: MeshLayout, rank: int, local: Mapping[str, torch.Tensor]) -> None:
    for piece in layout.pieces_of(rank):
        tensor = local.get(piece.parameter)
        shape = tuple(stop - start for start, stop in piece.box)
        if tensor is None or tuple(tensor.shape) != shape:
            found = "is not sent" if tensor is None else f"has shape {tuple(tensor.shape)}"
            raise ValueError(f"source rank {rank}: {piece.parameter!r} {found}, the layout gives it shape {shape}")


def _wire_dtypes(layout: MeshLayout, wire_dtype: torch.dtype | None) -> dict[str, str]:
    if wire_dtype is None:
        return {}
    if not wire_dtype.is_floating_point:
        raise WeightSyncError(f"wire_dtype {wire_dtype} is no floating-point type; quantize the tensors instead")
    if wire_dtype.itemsize == 1:
        raise WeightSyncError(f"wire_dtype {wire_dtype} without scales loses what lies outside its range")
    return {
        name: str(wire_dtype).removeprefix("torch.") for name, spec in layout.parameters.items() if _may_be_cast(spec)
    }


def _may_be_cast(spec: ParameterSpec) -> bool:
    """Floating-point values wider than a byte: codes are exact or worthless."""
    dtype = getattr(torch, spec.dtype)
    return dtype.is_floating_point and dtype.itemsize > 1
