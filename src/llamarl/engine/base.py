"""The Protocol of a generation engine: the native one, and ``vllm``, stand behind it.

add ─▶ [waiting] ─▶ step ... step ─▶ finished sequences
                      │
         suspend ◀────┘  (unfinished ones leave whole, without their KV cache)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from llamarl.engine.sequence import Sequence as TokenSequence

if TYPE_CHECKING:
    import torch

__all__ = ["AdoptsWeights", "Engine", "Parkable"]


class Engine(Protocol):
    """Samples tokens for many sequences at once. Sequences with equal prompts share the prompt's KV cache."""

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; stamped on every token sampled."""
        ...

    def add(self, sequences: Sequence[TokenSequence]) -> None:
        """Admit new or carried sequences, in order. Order and content alone decide every later bit.

        Raises:
            ValueError: A prompt (plus ``max_new_tokens``) does not fit the context or the KV cache.
        """
        ...

    def step(self) -> list[TokenSequence]:
        """One engine step: prefill what was admitted within the token budget, and decode one token for the rest.

        Returns the sequences that ended in this step, in admission order.
        """
        ...

    @property
    def has_work(self) -> bool:
        """True while an admitted sequence is unfinished."""
        ...

    def suspend(self) -> list[TokenSequence]:
        """Take every unfinished sequence out, in admission order, and drop all KV. ``add`` resumes them."""
        ...

    def parameters_for_sync(self) -> Mapping[str, torch.Tensor]:
        """Name -> live tensor as the trainer names it (tied weights once); what a weight version is written into."""
        ...

    def weights_updated(self, version: int) -> None:
        """The tensors above now hold ``version``: requantize, relayout, drop the KV cache of earlier weights."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters since the last call: tokens sampled, prompt tokens computed, prompt tokens shared, KV bytes, ..."""
        ...


@runtime_checkable
class AdoptsWeights(Protocol):
    """An engine that can compute with parameters that lie in another's memory, so that a hand-over copies nothing."""

    def can_adopt(self, dtypes: Mapping[str, str]) -> bool:
        """Whether ``adopt`` takes whole parameters of these names and types (``float32``, ``bfloat16``, ...)."""
        ...

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take these in place of own copies, until the next ``adopt``; they are only read. ``weights_updated`` follows.

        ``parameters_for_sync`` gives own, writable copies of them again.

        Raises:
            ValueError: One is missing or of another shape.
        """
        ...


@runtime_checkable
class Parkable(Protocol):
    """An engine that gives its memory back while another works on the same devices (``schedule.colocated``)."""

    def park(self) -> int:
        """Give back KV cache and weights; returns the bytes. Sequences have left it before (``suspend``).

        Raises:
            ValueError: A sequence is still inside.
        """
        ...

    def unpark(self) -> None:
        """Take the memory again, empty: a version is loaded and ``weights_updated`` called before the next step."""
        ...
