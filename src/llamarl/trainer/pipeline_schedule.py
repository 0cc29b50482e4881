"""When a pipeline stage computes which micro-batch: pure.

One forward, one backward (Narayanan et al., arXiv:2104.04473): a stage begins with as many forward passes as there are stages
after it, then takes one more forward pass and the oldest backward pass in turn. Three stages, four micro-batches, ``f`` a forward
pass, ``B`` a backward pass of twice its time::

    stage 0   f0 f1 f2 .. .. .. .. B0 B0 f3 B1 B1 .. B2 B2 .. B3 B3
    stage 1   .. f0 f1 .. .. B0 B0 f2 B1 B1 f3 B2 B2 .. B3 B3 .. ..
    stage 2   .. .. f0 B0 B0 f1 B1 B1 f2 B2 B2 f3 B3 B3 .. .. .. ..

Stage s of p keeps the activations of at most ``p - s`` micro-batches, however many there are, and with m of equal cost the
pipeline stands still for ``(p - 1) / (m + p - 1)`` of its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

__all__ = ["Action", "forward_only", "idle_share", "most_alive", "schedule"]

Action = tuple[Literal["F", "B"], int]
"""Forward or backward pass, and of which micro-batch."""


def schedule(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """What a stage does, in order: each micro-batch forward once and backward once, both in their order."""
    ahead = min(num_stages - 1 - stage, num_microbatches)
    actions: list[Action] = [("F", i) for i in range(ahead)]
    for i in range(num_microbatches):
        if i + ahead < num_microbatches:
            actions.append(("F", i + ahead))
        actions.append(("B", i))
    return actions


def forward_only(num_microbatches: int) -> list[Action]:
    """What every stage does where nothing is learned."""
    return [("F", i) for i in range(num_microbatches)]


def most_alive(actions: Sequence[Action]) -> int:
    """Most micro-batches at once whose forward pass is done and whose backward pass is not."""
    alive = most = 0
    for kind, _ in actions:
        alive += 1 if kind == "F" else -1
        most = max(most, alive)
    return most


def idle_share(num_stages: int, num_microbatches: int) -> float:
    """Share of its time that the pipeline stands still, with micro-batches and stages of equal cost."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)
