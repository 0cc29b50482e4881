"""Activations in host memory between a layer's forward pass and its backward pass.

    forward    layer i computes ──what autograd keeps of it──▶ host     while layer i + 1 computes
    backward   layer i computes ◀──────────────────────────── host     while layer i + 1 did

The device then holds what about two layers keep instead of all. What stays there: parameters, which a layer's backward pass also keeps (FSDP2
frees and gathers them itself); what all layers are given alike, such as rotary embeddings; and small tensors. A storage of
which several operations keep views goes once. Copies change no bit.

With ``activation_checkpointing`` a layer keeps its input alone: then that goes, and comes back to be computed from.

On CUDA both ways are copies on one further stream, to and from pinned memory, as ``torch.autograd.graph.save_on_cpu`` does without the
stream, and with parameters. Streams are the only thing here that a CPU lacks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["ActivationOffload"]

_SMALL = 1 << 16
"""Bytes below which a copy costs more than the room that it makes."""


class _Layer:
    """What went to the host in one forward pass of one layer."""

    def __init__(self, before: _Layer | None) -> None:
        self.before = before
        """The layer before it in the same forward pass, whose backward pass comes after this one's."""
        self.kept: list[weakref.ref[_Kept]] = []
        """What autograd still holds of it."""
        self.arrived: torch.cuda.Event | None = None
        """Comes to pass when all of it is back on the device."""


class _Kept:
    """One storage, in host memory and back: its bytes, [n] uint8."""

    def __init__(self, layer: _Layer, host: Tensor, device: torch.device) -> None:
        self.layer, self.host, self.device = layer, host, device
        self.back: Tensor | None = None


class _View(NamedTuple):
    """What stands for a tensor meanwhile."""

    kept: _Kept
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationOffload:
    """Lets the layers of one model offload.

    Args:
        leaves: Which tensors do, of those that a layer keeps; others than those on a CUDA device for tests alone.
    """

    def __init__(self, leaves: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda) -> None:
        self._leaves = leaves
        self._stream: torch.cuda.Stream | None = None
        self._last: _Layer | None = None
        self.num_bytes = 0
        """Copied to the host so far."""

    def install(self, layers: Sequence[nn.Module]) -> None:
        """Have these layers, first to last, offload. Call it after their forward passes have been wrapped for other ends."""
        for number, layer in enumerate(layers):
            layer.forward = self._offloading(layer, layer.forward, first=number == 0)  # type: ignore[method-assign]

    def _offloading(self, layer: nn.Module, original: Callable[..., Any], *, first: bool) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            given_to_all = [leaf for leaf in tree_leaves(kwargs) if isinstance(leaf, Tensor)]
            stay = {_storage(tensor) for tensor in (*layer.parameters(), *given_to_all)}
            self._last = _Layer(None if first else self._last)
            with self._keeping(self._last, stay):
                return original(*args, **kwargs)

        return forward

    @contextmanager
    def _keeping(self, layer: _Layer, stay: set[int]) -> Iterator[None]:
        gone: dict[
            tuple[int, int], tuple[_Kept, Tensor]
        ] = {}  # with the tensors: until the end no other takes their place

        def pack(tensor: Tensor) -> Tensor | _View:
            if tensor.nbytes < _SMALL or not self._leaves(tensor) or _storage(tensor) in stay:
                return tensor
            same = _storage(tensor), tensor._version
            if same not in gone:
                kept = _Kept(layer, self._to_host(tensor), tensor.device)
                layer.kept.append(weakref.ref(kept))
                gone[same] = kept, tensor
            return _View(gone[same][0], tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
                yield
        finally:
            gone.clear()  # autograd holds on to the hooks

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        kept = packed.kept
        layer = kept.layer
        self._bring(layer)
        if layer.before is not None:
            self._bring(layer.before)  # on its way while this layer computes
            layer.before = None
        assert kept.back is not None
        if layer.arrived is not None:
            stream = torch.cuda.current_stream(kept.device)
            stream.wait_event(layer.arrived)
            kept.back.record_stream(stream)
        return kept.back.view(packed.dtype).as_strided(packed.shape, packed.stride, packed.offset)

    def _bring(self, layer: _Layer) -> None:
        """Copy back what autograd still holds of a layer; once."""
        wanted = [kept for reference in layer.kept if (kept := reference()) is not None]
        layer.kept.clear()
        for kept in wanted:
            with self._copying(kept.device):
                kept.back = kept.host.to(kept.device, non_blocking=True)
        if wanted and self._stream is not None:
            layer.arrived = self._stream.record_event()

    def _to_host(self, tensor: Tensor) -> Tensor:
        """All bytes of the storage that it lies in, which would be kept with it."""
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self.num_bytes += whole.nbytes
        host = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        with self._copying(tensor.device):
            host.copy_(whole, non_blocking=True)
        if self._stream is not None:
            tensor.record_stream(self._stream)
        return host

    @contextmanager
    def _copying(self, device: torch.device) -> Iterator[None]:
        """Copies inside are made on the stream for them, after what was asked for so far."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
