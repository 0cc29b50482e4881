"""The way of judged samples from the reward executor to the trainer: who stands on it, and what each edge is called. Pure.

    reward ─scored─▶ trainer
    reward ─scored─▶ reference ─referenced─▶ trainer
    reward ─scored─▶ critic ─valued─▶ trainer
    reward ─scored─▶ reference ─referenced─▶ critic ─valued─▶ trainer

One after another rather than side by side: each edge has one producer, a group travels whole with all that is known of it,
and the critic can charge rewards with the reference's KL. All edges have delay 0, so the proofs of docs/asynchrony.md hold
as they are; a node more lengthens the one long cycle by its own duration, which asynchrony hides.
"""

from __future__ import annotations

from llamarl.config import RunConfig

__all__ = ["sample_channel_from", "sample_channel_into", "sample_path"]

_LEAVES = {"reward": "scored", "reference": "referenced", "critic": "valued"}
"""Executor -> name of the edge on which samples leave it."""


def sample_path(config: RunConfig) -> list[str]:
    """Executors from reward to trainer, in order."""
    between = [("reference", config.has_reference), ("critic", config.has_critic)]
    return ["reward", *(name for name, present in between if present), "trainer"]


def sample_channel_into(config: RunConfig, executor: str) -> str:
    """Name of the channel that brings judged samples to ``executor``."""
    path = sample_path(config)
    return _LEAVES[path[path.index(executor) - 1]]


def sample_channel_from(executor: str) -> str:
    """Name of the channel that takes them from ``executor``."""
    return _LEAVES[executor]
