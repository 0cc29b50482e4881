"""One prompt, many responses: the group's prompt is computed once in the training forward pass too.

    row:   p p p p │ a a a │ b b │ q q q │ c c c c │ ...      two groups; positions of a and b go on after p
    sees:  p: p      a: p, a   b: p, b     q: q      c: q, c

Every layer but attention works on single tokens, so leaving out repeated prompts saves their whole
cost there. Attention, ``llamarl_shared_prompts`` in transformers' attention interface, treats
prompts as packed sequences; responses of equal prompt length and similar length share a padded
batch whose keys are the prompt's followed by the response's own. The result is that of separate
sequences, to rounding. Layers with a sliding window or a soft cap are not supported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llamarl.compiler import check_compiler
from llamarl.models.attention import (
    PACKED_ATTENTION,
    PackedSequences,
    PaddedBatch,
    Segment,
    fused_attention,
    packed_attention,
    places_in,
    register_attention,
)
from llamarl.models.flex import FLEX_ATTENTION
from llamarl.models.loading import load_model_config
from llamarl.models.packing import similar_responses
from llamarl.models.transfer import to_device
from llamarl.settings.trainer import TrainerConfig

__all__ = ["RowAttention", "SharedPrompts", "can_share_prompts", "row_attention", "shared_prompt_attention"]


def can_share_prompts(config: PretrainedConfig) -> bool:
    """Whether every layer of the model attends to all earlier tokens, with plain scores."""
    text = config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None):
        return False
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        return all(kind == "full_attention" for kind in kinds)
    return not getattr(text, "sliding_window", None)


class RowAttention(NamedTuple):
    """How a job's rows are laid, and which attention reads them."""

    name: str
    """In transformers' attention interface."""
    share_prompts: bool
    """Whether a row holds a group's prompt once."""


def row_attention(trainer: TrainerConfig, device: str, model_path: str | Path) -> RowAttention:
    """What ``trainer.attention`` and ``trainer.share_prompts`` mean for a model on a device.

    Raises:
        ConfigError: A compiler is missing that it needs there.
    """
    flex = trainer.attention == "flex"
    share = trainer.shares_prompts(device) and (flex or can_share_prompts(load_model_config(model_path)))
    if flex:
        if device.startswith("cuda"):
            check_compiler("kernels of trained rows", 'trainer.attention = "auto"')
        return RowAttention(FLEX_ATTENTION, share)
    return RowAttention("llamarl_shared_prompts" if share else PACKED_ATTENTION, share)


@dataclass(frozen=True, slots=True)
class _AfterPrompts:
    """Responses that share one padded batch, each after a prompt of the same length."""

    responses: PaddedBatch
    prompts: Tensor
    """[responses, prompt tokens] positions in the row of each response's prompt."""

    def keys(self, row: Tensor) -> Tensor:
        """[responses, .., prompt tokens + length, D] of a row's [N, .., D]: prompts, then responses."""
        prompts = row.index_select(0, self.prompts.flatten()).view(*self.prompts.shape, *row.shape[1:])
        return torch.cat([prompts, self.responses.pad(row)], dim=1).transpose(1, 2)


@dataclass(frozen=True)
class SharedPrompts:
    """Prompts and responses of one packed row, unit by unit; and what attention derives from that,
    once a micro-batch."""

    units: tuple[tuple[int, tuple[int, ...]], ...]
    """(prompt tokens, tokens of each of its responses), in row order; a prompt >= 1, a response >= 0."""
    _cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_tokens(self) -> int:
        return sum(prompt + sum(responses) for prompt, responses in self.units)

    @property
    def kept(self) -> dict[Any, Any]:
        """What attention derives from the units."""
        return self._cache

    def segments(self) -> list[Segment]:
        """Each prompt, and each response behind it."""
        found, row = [], 0
        for prompt, responses in self.units:
            first, row = row, row + prompt
            found.append(Segment(first, prompt))
            for n in responses:
                if n:
                    found.append(Segment(row, n, first, prompt))
                row += n
        return found

    @cached_property
    def prompts(self) -> PackedSequences:
        """The prompts alone, end to end."""
        ends = [0]
        for prompt, _ in self.units:
            ends.append(ends[-1] + prompt)
        return PackedSequences.of(ends)

    def position_ids(self, device: torch.device | str) -> Tensor:
        """[1, N] int64: responses go on where their prompt ended."""
        parts = []
        for prompt, responses in self.units:
            parts.append(torch.arange(prompt))
            parts += [torch.arange(prompt, prompt + n) for n in responses]
        return to_device(torch.cat(parts)[None], device)

    def plan(self, device: torch.device) -> tuple[Tensor, tuple[_AfterPrompts, ...], Tensor]:
        """Rows of the prompts, padded batches of the responses, and each row's place in their concatenated outputs."""
        if device not in self._cache:
            prompt_rows, responses, row = [], [], 0
            for prompt, lengths in self.units:
                prompt_rows.append(torch.arange(row, row + prompt))
                start = row + prompt
                for n in lengths:
                    if n:
                        responses.append((prompt, n, row, start))
                    start += n
                row = start
            batches, order = [], list(prompt_rows)
            for members in similar_responses(responses):
                padded = PaddedBatch.of([(n, start) for _, n, _, start in members])
                prompts = torch.stack([torch.arange(first, first + prompt) for prompt, _, first, _ in members])
                batches.append(_AfterPrompts(padded.to(device), to_device(prompts, device)))
                order.append(padded.tokens)
            self._cache[device] = (
                to_device(torch.cat(prompt_rows), device),
                tuple(batches),
                to_device(places_in(order), device),
            )
        return self._cache[device]

    def mask(self, length: int, prompt_length: int, device: torch.device) -> Tensor:
        """[length, prompt_length + length] bool: the whole prompt, and the response up to the query."""
        shape = (length, prompt_length, device)
        if shape not in self._cache:
            own = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            self._cache[shape] = torch.cat([own.new_ones(length, prompt_length), own], dim=1)
        return self._cache[shape]


def shared_prompt_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    packing: Any,
) -> Tensor:
    """The function behind ``llamarl_shared_prompts``: query [1, H, N, D], key and value [1, KV, N,
    D] -> [1, N, H, D]. Under another packing than ``SharedPrompts`` it is ``packed_attention``."""
    if not isinstance(packing, SharedPrompts):
        return packed_attention(module, query, key, value, scale=scale, window=window, softcap=softcap, packing=packing)
    if window is not None or softcap is not None:
        raise ValueError("llamarl_shared_prompts has no sliding window and no soft cap")
    if packing.num_tokens != query.shape[2]:
        raise ValueError(f"the units hold {packing.num_tokens} tokens, the packed row {query.shape[2]}")
    prompt_rows, batches, place = packing.plan(query.device)
    q, k, v = (x.index_select(2, prompt_rows) for x in (query, key, value))
    prompts = packed_attention(module, q, k, v, scale=scale, window=None, softcap=None, packing=packing.prompts)
    outputs = [prompts[0]]
    q_NHD, k_NKD, v_NKD = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    for batch in batches:
        mask = packing.mask(batch.responses.length, batch.prompts.shape[1], query.device)
        queries = batch.responses.pad(q_NHD).transpose(1, 2)
        out = fused_attention(queries, batch.keys(k_NKD), batch.keys(v_NKD), scale=scale, mask=mask)
        outputs.append(batch.responses.unpad(out))
    return torch.cat(outputs).index_select(0, place)[None]


register_attention("llamarl_shared_prompts", shared_prompt_attention)
