"""A version as plain tensors, for tests."""

import torch

from llamarl.weight_sync.sink import WeightVersion


def read_all(version: WeightVersion | None) -> dict[str, torch.Tensor]:
    """Every parameter whole, proved, in the dtype it travels in."""
    full = {
        name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in version.parameters.items()
    }
    version.load_into(full)
    return full
