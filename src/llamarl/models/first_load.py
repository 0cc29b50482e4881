"""What transformers makes in each process at its first model. Importing this makes it, so that what is forked later has it; in a
process of its own a model's first loading takes 0.1 to 0.3 s longer."""

from __future__ import annotations

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

__all__ = ["READY"]

READY = get_checkpoint_conversion_mapping("") is None
"""What no model is called has no conversion."""
