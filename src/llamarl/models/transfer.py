"""Small tensors from the host to the device without making the host wait.

A copy from ordinary memory makes the host wait for everything the device was given before it. From
page-locked memory it is queued like a kernel; torch's allocator of such memory keeps it until the
copy has run, so the source may be dropped at once. On the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

__all__ = ["indices", "to_device"]


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor``, made on the CPU, on ``device``; nobody may write into it afterwards."""
    device = torch.device(device)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def indices(lists: Sequence[Sequence[int]], device: torch.device | str) -> list[Tensor]:
    """Lists of integers as int64 tensors on ``device``, all in one copy."""
    device = torch.device(device)
    if device.type != "cuda":
        return [torch.tensor(values, dtype=torch.int64, device=device) for values in lists]
    flat = torch.tensor(list(chain.from_iterable(lists)), dtype=torch.int64)
    return list(to_device(flat, device).split([len(values) for values in lists]))
