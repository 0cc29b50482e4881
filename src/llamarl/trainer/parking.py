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

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.models.device_memory import give_back_freed, own_storages

__all__ = ["Parking"]

_ARENA_BYTES = 64 << 20
_ALIGNMENT = 64


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
        self._arena = torch.empty(0, dtype=torch.uint8)  # what is left of it
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
            for storage in own_storages(kept, self.device):
                self._places[storage._cdata] = _Place(storage, storage.nbytes(), self._host_memory(storage))
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

    def _host_memory(self, storage: torch.UntypedStorage) -> Tensor:
        """Pinned where the device is a GPU. Small ones share a piece: torch rounds each pinned one
        up to a power of two."""
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._host.get(key)
        if known is not None and len(known) == nbytes:
            return known
        pinned = self.device.type == "cuda"
        if nbytes > _ARENA_BYTES // 4:
            host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        else:
            if len(self._arena) < nbytes:
                self._arena = torch.empty(_ARENA_BYTES, dtype=torch.uint8, pin_memory=pinned)
            host, self._arena = self._arena[:nbytes], self._arena[-(-nbytes // _ALIGNMENT) * _ALIGNMENT :]
        self._host[key] = host
        return host


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]
