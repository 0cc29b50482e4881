"""What it costs to store weights in fewer bits than they were served in: how many fall back to the
base's, and the KL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llamarl.errors import ModelError
from llamarl.models.exported import ExportFacts, Narrowing, write_export
from llamarl.models.sharded_loading import stored_weights
from llamarl.trainer.storage import export_folder

__all__ = ["export_version", "is_narrower"]

_HELD_BY = {
    "float32": frozenset({"float32", "bfloat16", "float16"}),
    "bfloat16": frozenset({"bfloat16"}),
    "float16": frozenset({"float16"}),
}


def is_narrower(dtype: torch.dtype, served_dtype: str) -> bool:
    """Whether ``dtype`` cannot hold every value that ``served_dtype`` does."""
    return served_dtype not in _HELD_BY[str(dtype).removeprefix("torch.")]


def export_version(
    folder: Path,
    model: PreTrainedModel,
    weights: Iterator[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    source: str | Path,
    dtype: torch.dtype,
    served_dtype: str,
    version: int,
) -> ExportFacts:
    """Write a version as a Hugging Face folder, and beside it what it lost where it was served in more bits.

    Args:
        weights: As ``export_folder`` takes them.
        source: The base model, too.
    """
    narrowing = None
    with ExitStack() as stack:
        count = None
        if is_narrower(dtype, served_dtype):
            count = _NarrowingCount(stack.enter_context(stored_weights(source, shapes)), served_dtype)
        look = None if count is None else count.look
        export_folder(folder, model, weights, shapes, source=source, dtype=dtype, look=look)
        if count is not None:
            narrowing = Narrowing(
                num_weights=count.num_weights,
                num_equal_to_base=count.num_equal,
                num_equal_before=count.num_equal_before,
            )
    written = str(dtype).removeprefix("torch.")
    facts = ExportFacts(policy_version=version, dtype=written, served_dtype=served_dtype, narrowing=narrowing)
    write_export(folder, facts)
    return facts


class _NarrowingCount:
    """Compares each weight, as served and as written, with the base model's, while it is written."""

    def __init__(self, base: Callable[[str], Tensor], served_dtype: str) -> None:
        """
        Args:
            base: Reads the base model's weight of a name.
        """
        self._base = base
        self._served = getattr(torch, served_dtype)
        self.num_weights = self.num_equal = self.num_equal_before = 0

    def look(self, name: str, weight: Tensor, written: Tensor) -> None:
        """
        Raises:
            ModelError: A finite weight is too large for the written precision.
        """
        base, served, stored = self._base(name), weight.to(self._served), written
        if not torch.equal(stored.isfinite(), served.isfinite()):
            largest = served[served.isfinite()].float().abs().max().item()
            precision = str(written.dtype).removeprefix("torch.")
            raise ModelError(f"{name} holds {largest:g}, too large for {precision}: export it in bfloat16 or float32")
        self.num_weights += weight.numel()
        self.num_equal += int((stored == base.to(stored.dtype)).sum())
        self.num_equal_before += int((served == base.to(served.dtype)).sum())
