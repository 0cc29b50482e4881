"""What samples can be that were read from a disk: a run's folder may be a stranger's, and checksums prove nothing then."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.roles import ROLES
from llamarl.types import Group, Prompt, Response, Score

__all__ = ["ANY", "Limits", "check_group", "check_part"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of a run's samples."""

    num_token_ids: int = 1 << 31
    """Of the policy's vocabulary."""
    context: int | None = None
    """Tokens of a prompt and a response together; None: any."""
    num_experts: int = 1 << 15
    """Of each sparse layer of the policy."""

    @classmethod
    def of_model(cls, path: str) -> Limits:
        """Of a run whose policy lies in ``path``."""
        # here, for a controller that reads no journal need not wait for models of transformers to be imported
        from llamarl.models.loading import context_length, load_model_config

        config = load_model_config(path).get_text_config()
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next(filter(None, (getattr(config, name, None) for name in names)), cls.num_experts)
        return cls(num_token_ids=config.vocab_size, context=context_length(path), num_experts=experts)


ANY = Limits()


def check_part(part: Any, channel: ChannelSpec, tick: int, limits: Limits) -> None:
    """Look at what a rank of the channel's sink reads of the token of ``tick``.

    Raises:
        ValueError: It is no list of items, or none of groups where a role of the standard job reads
            them, or a number in a group is none that a generator writes.
    """
    if channel.kind is ChannelKind.BROADCAST:
        return
    if not isinstance(part, list | tuple):
        raise ValueError(f"channel {channel.name!r} carries lists of items, and this is a {type(part).__name__}")
    for item in part:
        if isinstance(item, Group):
            check_group(item, tick, limits)
        elif channel.sink in ROLES:
            raise ValueError(
                f"{channel.sink!r} reads groups, and channel {channel.name!r} holds a {type(item).__name__}"
            )


def check_group(group: Group, tick: int, limits: Limits) -> None:
    """Look at a group that ``tick`` made.

    Raises:
        ValueError: A number in it is none that a generator writes.
    """
    for experts in (group.prompt_experts, *(response.routed_experts for response in group.responses)):
        if experts is not None and (experts.ndim != 3 or (experts.size and experts.max() >= limits.num_experts)):
            raise ValueError(
                f"group {group.prompt.index}: names experts that the policy's {limits.num_experts} are not"
            )
    samples: list[Prompt | Response] = [group.prompt, *group.responses]
    for sample in samples:
        prompt_length = 0 if isinstance(sample, Prompt) else len(group.prompt.tokens)
        if why := _why_impossible(sample, prompt_length, tick, limits):
            name = "its prompt" if isinstance(sample, Prompt) else f"response {sample.sample_index}"
            raise ValueError(f"group {group.prompt.index}: {name} {why}")


def _why_impossible(sample: Prompt | Response, prompt_length: int, tick: int, limits: Limits) -> str:
    noted: Iterable[Any] = (sample.tokens,)
    if isinstance(sample, Response):
        noted = (*noted, sample.behavior_logprobs, sample.policy_versions, sample.loss_mask)
        noted = (*noted, *(array for array in (sample.reference_logprobs, sample.values) if array is not None))
    if any(array.ndim != 1 for array in noted):
        return "has numbers of its tokens that are no row"
    tokens = sample.tokens
    if isinstance(sample, Response) and (named := sample.top_tokens) is not None:
        if named.ndim != 2 or sample.top_logprobs is None or named.shape != sample.top_logprobs.shape:
            return "has likeliest tokens that are no table with a log-prob each"
        tokens = np.concatenate([tokens, named.ravel()])
    if limits.context is not None and prompt_length + len(sample.tokens) > limits.context:
        return f"has {len(sample.tokens)} tokens, and the model's context is {limits.context}"
    wrong = tokens[(tokens < 0) | (tokens >= limits.num_token_ids)]
    if len(wrong):
        return f"has the token {wrong[0]}, and the vocabulary {limits.num_token_ids}"
    if isinstance(sample, Prompt):
        return "has no tokens" if not len(sample.tokens) else "has a negative index" if sample.index < 0 else ""
    trained = sample.loss_mask
    logprobs = sample.behavior_logprobs[trained]
    if sample.finish_reason != "error" and not (np.isfinite(logprobs) & (logprobs < 1)).all():
        return "has a log-prob that is no number of a probability"
    versions = sample.policy_versions
    # of samples that the run did not draw itself, such as an earlier run's, they are not its own
    if (versions < np.where(trained, 0, -1)).any() or (not sample.sampled_by and (versions > max(0, tick)).any()):
        return f"was sampled by a policy version outside of 0 .. {max(0, tick)}"
    if any(not 0 <= turn.start <= turn.end <= len(sample.tokens) for turn in sample.turns):
        return f"has a turn outside of its {len(sample.tokens)} tokens"
    if isinstance(sample.outcome, Score) and not math.isfinite(sample.outcome.value):
        return "has a reward that is no number"
    return "has a negative index" if min(sample.prompt_index, sample.sample_index) < 0 else ""
