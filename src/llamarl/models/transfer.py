"""Small tensors from the host to the device without making the host wait.

A copy from ordinary memory makes the host wait for everything the device was given before it. From
page-locked memory it is queued like a kernel; torch's allocator of such memory keeps it until the
copy has run, so the source may be dropped at once. On the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["indices", "to_device"]


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor``, made on the CPU, on ``device``; nobody may write into it afterwards."""
    device = torch.device(device)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def indices(lists: Sequence[npt.ArrayLike], device: torch.device | str) -> list[Tensor]:
    """Lists or arrays of integers as int64 tensors on ``device``, all in one copy."""
    arrays = [np.asarray(values, np.int64) for values in lists]
    flat = torch.from_numpy(np.concatenate(arrays))
    return list(to_device(flat, device).split([len(values) for values in arrays]))
