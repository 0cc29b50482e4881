"""Losses, advantages and diagnostics as pure functions over per-token tensors."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamarl.algorithms.aipo import aipo_loss

__all__ = ["aipo_loss"]


def __getattr__(name: str) -> Any:
    """``aipo_loss`` on first use, so that importing ``algorithms.config`` never imports torch."""
    if name == "aipo_loss":
        from llamarl.algorithms.aipo import aipo_loss

        return aipo_loss
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
