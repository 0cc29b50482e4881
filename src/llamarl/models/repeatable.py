"""Which kernels a stretch of code gets while ``torch.use_deterministic_algorithms`` is on.

A run prefers repeatable kernels and is only warned where torch has none (``warn_only``). On CUDA
two stretches need more, or less, than that preference:

- ``demanded``: fused attention, flash and memory-efficient alike, takes the repeatable form of its
  backward pass only if determinism is demanded; merely preferred, it warns once and adds gradients
  up in whatever order they arrive. cuDNN's attention is avoided in the same way. Training goes
  through here, so that its bits repeat.
- ``suspended``: a generator's step, draws included, writes to distinct places, with the same
  result in any order. Preferring determinism would sort the indices before each write, copy the
  whole target where the written dimension is not the first, warn of every running sum, and in some
  releases ask the host, which a CUDA graph cannot record. cuDNN's attention is avoided here too: it
  works out a plan for each new shape, and a generator's shapes change with every token.

Both change settings of the process for the time of the block. Without a GPU they do nothing; where
determinism is off they leave it off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["demanded", "suspended"]


@contextmanager
def demanded(device: torch.device | str) -> Iterator[None]:
    """Fail rather than use a kernel that does not repeat itself, if repeatable ones are preferred at all.

    Raises:
        RuntimeError: From inside, by an operator that has no repeatable kernel; torch names it.
    """
    with _setting(device, deterministic=True):
        yield


@contextmanager
def suspended(device: torch.device | str) -> Iterator[None]:
    """Any kernel will do, what is written goes to distinct places; but none that plans for each shape."""
    planned = torch.device(device).type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()
    if planned:
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with _setting(device, deterministic=False):
            yield
    finally:
        if planned:
            torch.backends.cuda.enable_cudnn_sdp(True)


@contextmanager
def _setting(device: torch.device | str, *, deterministic: bool) -> Iterator[None]:
    if torch.device(device).type != "cuda" or not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
