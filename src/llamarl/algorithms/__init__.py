"""Losses, advantages and diagnostics as pure functions over per-token tensors."""
