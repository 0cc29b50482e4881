"""Tensors moved out of the device while another executor works there, and back bit for bit.

    park:    device storage ──bytes──▶ pinned host memory, then the storage is resized to nothing
    unpark:  the storage is resized to its old size ◀──bytes── host memory

It is the *storage* that goes, under all tensors that view it. So every reference stays good: the
parameters in the module, the optimizer's state, FSDP2's own views of its shards. Host memory is
taken once and used again at every tick. Between the two, ``where`` gives a tensor's values as they
lie in host memory: what hands weights over or saves them reads those.

On a CPU nothing is moved, host memory being all there is: what the tick has freed is given back, no
more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.models.device_memory import give_back_freed, own_storages

__all__ = ["Parking", "in_pieces"]

_ALIGNMENT = 64


def in_pieces(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Pack memory of several sizes into pieces of a power of two bytes each, the largest first. Torch rounds pinned memory up
    to these: each matrix in a piece of its own, a trainer of Qwen2.5-7B would pin 174 GB for 91.

    Returns:
        Bytes of each piece, and for each of ``sizes`` its piece and where it begins there.
    """
    pieces: list[int] = []
    places = [(0, 0)] * len(sizes)
    left = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    while left:
        rounded = [-(-sizes[i] // _ALIGNMENT) * _ALIGNMENT for i in left]
        whole = max(_ALIGNMENT, 1 << max(sum(rounded).bit_length() - 1, (rounded[0] - 1).bit_length()))
        used, others = 0, []
        for i, size in zip(left, rounded, strict=True):
            if used + size > whole:
                others.append(i)
                continue
            places[i] = len(pieces), used
            used += size
        pieces.append(whole)
        left = others
    return pieces, places


@dataclass
class _Place:
    """One storage and, while it is parked, where its bytes are."""

    storage: torch.UntypedStorage
    nbytes: int
    host: Tensor | None
    """uint8 [nbytes]; None where its owner can compute the values again."""


class Parking:
    """Parks storages of one device.

    Args:
        move: Whether to move anything; None: where the device is not the CPU. (A test moves from
            host memory to host memory.)
    """

    def __init__(self, device: torch.device, *, move: bool | None = None) -> None:
        self.device = device
        self.moves = device.type != "cpu" if move is None else move
        self._places: dict[int, _Place] = {}
        self._host: dict[int, Tensor] = {}  # storage -> its host memory, for every time
        self.parked = False

    @torch.no_grad()
    def park(self, kept: Iterable[Tensor], derived: Iterable[Tensor] = ()) -> int:
        """Free what ``kept`` and ``derived`` hold on the device; returns its bytes.

        Args:
            kept: Come back as they are.
            derived: Come back as zeros: their owner computes them again.
        """
        assert not self.parked, "parked already"
        self.parked = True
        if self.moves:
            storages = own_storages(kept, self.device)
            self._take_host_memory(storages)
            for storage in storages:
                self._places[storage._cdata] = _Place(storage, storage.nbytes(), self._host[storage._cdata])
            for storage in own_storages(derived, self.device):
                self._places.setdefault(storage._cdata, _Place(storage, storage.nbytes(), None))
            for place in self._places.values():
                if place.host is not None:
                    place.host.copy_(_bytes_of(place.storage, self.device), non_blocking=True)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # from here on the host may read
            for place in self._places.values():
                place.storage.resize_(0)
        give_back_freed(self.device)
        return sum(place.nbytes for place in self._places.values())

    @torch.no_grad()
    def unpark(self) -> None:
        """Put everything back. Work that is queued on the device afterwards sees it."""
        assert self.parked, "not parked"
        for place in self._places.values():
            place.storage.resize_(place.nbytes)
            values = _bytes_of(place.storage, self.device)
            if place.host is None:
                values.zero_()
            else:
                values.copy_(place.host, non_blocking=True)
        self._places.clear()
        self.parked = False

    def where(self, tensor: Tensor) -> Tensor:
        """The values of ``tensor``: itself, or while it is parked the same view of host memory; to be read only."""
        place = self._places.get(tensor.untyped_storage()._cdata)
        if place is None:
            return tensor.detach()
        assert place.host is not None, "a derived tensor has no values while it is parked"
        flat = place.host.view(tensor.dtype)  # itself a piece of a larger one
        return flat.as_strided(tensor.size(), tensor.stride(), flat.storage_offset() + tensor.storage_offset())

    def _take_host_memory(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """For those that have none yet; pinned where the device is a GPU."""
        none = torch.empty(0, dtype=torch.uint8)
        new = [storage for storage in storages if len(self._host.get(storage._cdata, none)) != storage.nbytes()]
        sizes, places = in_pieces([storage.nbytes() for storage in new])
        pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda") for size in sizes]
        for storage, (piece, start) in zip(new, places, strict=True):
            self._host[storage._cdata] = pieces[piece][start : start + storage.nbytes()]


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]
