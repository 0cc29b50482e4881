"""Memory of a device given back to whoever shares it, and tensors whose storage can be taken away and put back.

torch and the C library both keep freed memory for the next allocation of their own process. In a
co-located job the next allocation is another process's, so what is freed must leave.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

__all__ = ["give_back_freed", "own_storages", "zero_pages"]

_HUGE_FROM_BYTES = 4 << 20


def give_back_freed(device: torch.device) -> None:
    """Return to the system what this process has freed of a device's memory. Waits for the device's queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    elif device.type == "cpu":
        trim = _malloc_trim()
        if trim is not None:
            trim(0)


@cache
def _malloc_trim():  # type: ignore[no-untyped-def]
    """glibc's; None with another C library, which gives memory back in its own way."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def own_storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The distinct storages on ``device`` behind ``tensors`` that can be resized: not memory that
    others lent, nor pages of a file.

    Resizing one to 0 frees its memory and to its old size takes new memory; every view of it stays a view of it.
    """
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.resizable():
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def zero_pages(nbytes: int) -> Tensor:
    """``nbytes`` zero bytes of host memory; a page is committed when it is first written, and all
    go with the tensor."""
    pages = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # far fewer entries of the page table; only a hint
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
