"""A sequence on its way through the engine, and what a caller asks of it. No tensors.

A ``Sequence`` owns its whole history, so that it can leave the engine unfinished, lie in a checkpoint, and come back
under later weights: its KV cache is never part of it, the cache is recomputed by prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from llamarl.engine.expert_record import ExpertRecord
from llamarl.environments.episodes import Episode
from llamarl.types import FinishReason

__all__ = ["SamplingParams", "Sequence", "written"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a response ends."""

    max_new_tokens: int
    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens with at least this probability."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest."""
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One response in the making. The engine appends; ``finish_reason`` is set once, when it ends."""

    prompt_index: int
    sample_index: int
    prompt_tokens: list[int]
    """Never changed: a group's sequences share it."""
    params: SamplingParams
    seed: int
    """64-bit; the draw at position t depends on (seed, t) alone, not on what else is in the batch."""
    tokens: list[int] = field(default_factory=list)
    """Response tokens so far."""
    logprobs: list[float] = field(default_factory=list)
    """log mu of each, under the distribution sampled from (after temperature and filters)."""
    policy_versions: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    experts: ExpertRecord | None = None
    """Of an engine that notes them: which experts computed its tokens."""
    episode: Episode | None = None
    """With an environment: where in its episode it is. An engine knows nothing of it (``engine/episodes.py``)."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens together: what the KV cache must hold."""
        return len(self.prompt_tokens) + len(self.tokens)


def written(sequences: Iterable[Sequence]) -> str:
    """Their response tokens so far, in words."""
    return f"{sum(len(sequence.tokens) for sequence in sequences):,} tokens"
