"""Which tensor-parallel sizes fit a model folder. No torch, so that a wrong size is refused before any process starts."""

from __future__ import annotations

import math
from pathlib import Path

from llamarl.errors import ModelError
from llamarl.models.folders import resolve_model_path
from llamarl.reading import read_object

__all__ = ["check_tensor_parallel_size", "fitting_sizes"]


def fitting_sizes(num_heads: int, num_key_value_heads: int, intermediate_size: int) -> list[int]:
    """Every size that divides heads, key-value heads and the intermediate size, ascending."""
    common = math.gcd(num_heads, num_key_value_heads, intermediate_size)
    return [n for n in range(1, common + 1) if common % n == 0]


def check_tensor_parallel_size(path: str | Path, tp: int, *, key: str = "trainer.tp") -> None:
    """Compare a configured size with the folder's ``config.json``.

    Args:
        key: The configuration key to name in the error.

    Raises:
        ModelError: The size does not divide the model; names the sizes that would.
    """
    file = resolve_model_path(path) / "config.json"
    try:
        config = read_object(file)
        config = config.get("text_config") or config
        heads, intermediate = int(config["num_attention_heads"]), int(config["intermediate_size"])
        key_value_heads = int(config.get("num_key_value_heads") or heads)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ModelError(
            f"model.path: {file} does not say the model's heads and intermediate size: {error!r}"
        ) from error
    sizes = fitting_sizes(heads, key_value_heads, intermediate)
    if tp not in sizes:
        raise ModelError(
            f"{key} = {tp} does not divide this model's {heads} heads, {key_value_heads} key-value heads and"
            f" intermediate size {intermediate}; sizes that fit: {', '.join(map(str, sizes))}"
        )
