"""The trainer's attention: several sequences in one row, ``llamarl_packed`` in transformers' attention interface.

The trainer lays its sequences end to end, [1, T], without padding. Attention must then keep them apart: token t sees
the tokens of its own sequence up to itself, and within the layer's sliding window if it has one::

    packed = PackedSequences.of([0, 3, 7])                     # two sequences, of 3 and 4 tokens
    with attending(packed):
        hidden = model(tokens[None], position_ids=packed.position_ids(device)).last_hidden_state

The boundaries travel beside the call, not through it: not every decoder passes what it does not know on to its layers.

How it is computed: on CUDA in half precision by the variable-length flash kernel. Elsewhere
sequences of similar length share one padded batch for ``scaled_dot_product_attention``: padding
lies after the last token, so causality alone hides it and the result is exact. Neither ever holds a
[T, T] matrix. Layers with a soft cap (Gemma 2) have no fused kernel: they go through query chunks
that are recomputed in the backward pass.

The engine's attention is ``llamarl_paged`` in :mod:`llamarl.models.paged_attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from llamarl.models.packing import similar_responses
from llamarl.models.transfer import to_device

__all__ = [
    "PACKED_ATTENTION",
    "PackedSequences",
    "PaddedBatch",
    "Segment",
    "attending",
    "current_packing",
    "fused_attention",
    "packed_attention",
    "places_in",
    "register_attention",
    "repeated_heads",
    "softcapped_attention",
]

PACKED_ATTENTION = "llamarl_packed"
"""Name in transformers' attention interface. To take it from here is to have it registered."""

_SOFTCAP_CHUNK = 256  # query rows whose scores are held at once in a soft-capped layer


class Segment(NamedTuple):
    """Successive rows of a packed row, each of which sees those up to itself, after the rows of a prompt that they go on from."""

    first: int
    num_tokens: int
    prompt: int = 0
    """First row of that prompt."""
    prompt_tokens: int = 0
    """0: it begins a text of its own."""


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Sequences of a row that share one padded batch of shape [num_sequences, length]."""

    num_sequences: int
    length: int
    tokens: Tensor
    """[n] positions in the row, of all tokens of these sequences."""
    slots: Tensor
    """[n] where each goes in the flattened padded batch."""

    @classmethod
    def of(cls, sequences: Sequence[tuple[int, int]]) -> PaddedBatch:
        """
        Args:
            sequences: (tokens, first position in the row) of each, the longest first.
        """
        longest = sequences[0][0]
        tokens = torch.cat([torch.arange(start, start + n) for n, start in sequences])
        slots = torch.cat([i * longest + torch.arange(n) for i, (n, _) in enumerate(sequences)])
        return cls(len(sequences), longest, tokens, slots)

    def to(self, device: torch.device) -> PaddedBatch:
        return PaddedBatch(
            self.num_sequences, self.length, to_device(self.tokens, device), to_device(self.slots, device)
        )

    @property
    def is_full(self) -> bool:
        """Whether no sequence is shorter than the longest."""
        return self.num_sequences * self.length == len(self.tokens)

    def pad(self, row: Tensor) -> Tensor:
        """[num_sequences, length, ..] of a row's [T, ..]; zeros beyond a sequence's end."""
        values = row.index_select(0, self.tokens)
        if not self.is_full:
            empty = row.new_zeros(self.num_sequences * self.length, *row.shape[1:])
            values = empty.index_copy(0, self.slots, values)
        return values.view(self.num_sequences, self.length, *row.shape[1:])

    def unpad(self, out: Tensor) -> Tensor:
        """[n, H, D] of ``tokens`` of an attention's [num_sequences, H, length, D]."""
        values = out.transpose(1, 2).reshape(self.num_sequences * self.length, out.shape[1], out.shape[3])
        return values if self.is_full else values.index_select(0, self.slots)


def places_in(parts: Sequence[Tensor]) -> Tensor:
    """[T] where each of a row's positions stands in ``parts``, which together hold each once, end to end."""
    rows = torch.cat(list(parts))
    place = torch.empty_like(rows)
    place[rows] = torch.arange(len(rows))
    return place


@dataclass(frozen=True)
class PackedSequences:
    """Where the sequences of one packed row begin and end, and what attention derives from that
    (once, not per layer)."""

    cu_seqlens: tuple[int, ...]
    """0, then the end of each sequence in tokens, none of them empty; the last is T."""
    _cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, cu_seqlens: Tensor | Sequence[int] | PackedSequences) -> PackedSequences:
        """From boundaries in any form; a device tensor costs one synchronisation, so keep the result."""
        if isinstance(cu_seqlens, PackedSequences):
            return cu_seqlens
        values = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
        return cls(tuple(int(v) for v in values))

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False)]

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def kept(self) -> dict[Any, Any]:
        """What attention derives from the boundaries."""
        return self._cache

    def segments(self) -> list[Segment]:
        return [Segment(start, n) for start, n in zip(self.cu_seqlens, self.lengths, strict=False)]

    def position_ids(self, device: torch.device | str) -> Tensor:
        """[1, T] int64: the position of each token in its own sequence, as the model call needs it."""
        return to_device(torch.cat([torch.arange(n) for n in self.lengths])[None], device)

    def cu_tensor(self, device: torch.device) -> Tensor:
        key = ("cu", device)
        if key not in self._cache:
            self._cache[key] = to_device(torch.tensor(self.cu_seqlens, dtype=torch.int32), device)
        return self._cache[key]

    def padded(self, device: torch.device) -> tuple[tuple[PaddedBatch, ...], Tensor]:
        """Padded batches, and for each token of the row its place in their concatenated outputs, [T]."""
        key = ("padded", device)
        if key not in self._cache:
            sequences = [(0, n, 0, start) for n, start in zip(self.lengths, self.cu_seqlens, strict=False)]
            batches = [PaddedBatch.of([(n, start) for _, n, _, start in of]) for of in similar_responses(sequences)]
            place = places_in([batch.tokens for batch in batches])
            self._cache[key] = tuple(batch.to(device) for batch in batches), to_device(place, device)
        return self._cache[key]

    def window_mask(self, length: int, window: int, device: torch.device) -> Tensor:
        """[length, length] bool, True where query i may see key j: j <= i < j + window."""
        key = ("window", length, window, device)
        if key not in self._cache:
            distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
            self._cache[key] = (distance >= 0) & (distance < window)
        return self._cache[key]


_current: ContextVar[Any] = ContextVar("llamarl_packed_sequences", default=None)


@contextmanager
def attending(packing: Any) -> Iterator[None]:
    """Model calls inside attend within the sequences of ``packing``: a ``PackedSequences``, or what
    another attention of the trainer's takes instead. Whoever runs a layer again in the backward
    pass, on CUDA in another thread, enters it again there."""
    token = _current.set(packing)
    try:
        yield
    finally:
        _current.reset(token)


def current_packing() -> Any:
    """What the enclosing ``attending`` was given; None outside."""
    return _current.get()


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """``scaled_dot_product_attention`` by a kernel that never holds all scores.

    On CUDA only the flash kernel knows heads that share K and V, and it takes neither float32 nor a
    mask: there they are repeated for the memory-efficient one, which would otherwise leave the work
    to plain products. On the CPU the backward pass of bfloat16 takes twice the time of float32's,
    so what will have one is computed in float32.

    Args:
        query: [B, H, Q, D].
        key, value: [B, KV, L, D], H a multiple of KV.
        mask: Broadcasts to [B, H, Q, L]; bool (True: may look) or added to the scores.

    Returns:
        [B, H, Q, D].
    """
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and torch.is_grad_enabled() and query.requires_grad:
        wide = (x.float() for x in (query, key, value))
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
        return fused_attention(*wide, scale=scale, mask=mask, causal=causal).to(query.dtype)
    if mask is not None or query.dtype == torch.float32:
        key, value = repeated_heads(query, key, value)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def repeated_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """K and V [B, KV, L, D] with as many heads as ``query`` where the memory-efficient kernel needs
    that: on CUDA. Whoever attends to the same keys several times makes them once."""
    H, KV = query.shape[1], key.shape[1]
    if H == KV or not query.is_cuda:
        return key, value
    wide = [x[:, :, None].expand(-1, -1, H // KV, -1, -1).reshape(x.shape[0], H, *x.shape[2:]) for x in (key, value)]
    return wide[0], wide[1]


def softcapped_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, *, scale: float, softcap: float
) -> Tensor:
    """Attention with scores ``softcap * tanh(score / softcap)``, softmax in fp32; no fused kernel has this.

    Args:
        query: [B, H, Q, D].
        key, value: [B, KV, L, D], H a multiple of KV.
        allowed: Broadcasts to [B, 1, Q, L]; bool, True where the query may look.

    Returns:
        [B, H, Q, D].
    """
    B, H, Q, D = query.shape
    KV = key.shape[1]
    grouped = query.reshape(B, KV, H // KV * Q, D)
    scores = torch.matmul(grouped, key.transpose(2, 3)).view(B, H, Q, -1).float() * scale
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~allowed, float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(value.dtype).view(B, KV, H // KV * Q, -1)
    return torch.matmul(weights, value).view(B, H, Q, D)


def _softcapped_causal(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float, window: int
) -> Tensor:
    """Soft-capped causal attention over padded sequences, in query chunks that the backward pass recomputes."""
    L = query.shape[2]
    positions = torch.arange(L, device=query.device)
    outputs = []
    for start in range(0, L, _SOFTCAP_CHUNK):
        end = min(start + _SOFTCAP_CHUNK, L)
        first = max(0, start - window + 1)
        distance = positions[start:end, None] - positions[None, first:end]
        allowed = ((distance >= 0) & (distance < window))[None, None]
        chunk = (query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], allowed)
        if torch.is_grad_enabled() and query.requires_grad:
            out = checkpoint(softcapped_attention, *chunk, use_reentrant=False, scale=scale, softcap=softcap)
        else:
            out = softcapped_attention(*chunk, scale=scale, softcap=softcap)
        outputs.append(out)
    return torch.cat(outputs, dim=2)


def _can_use_varlen(query: Tensor, softcap: float | None) -> bool:
    D = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and softcap is None
        and D <= 256
        and D % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _grouped_query_flag(kernel: Callable[..., Any], grouped: bool) -> dict[str, bool]:
    """Tell ``varlen_attn`` that query heads share key heads, where it asks: torch 2.11 has no such flag."""
    return {"enable_gqa": grouped} if "enable_gqa" in inspect.signature(kernel).parameters else {}


def packed_attention(
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
    """Attend within the sequences of a packed row.

    Args:
        query: [1, H, T, D], already rotated.
        key, value: [1, KV, T, D].
        packing: The row's ``PackedSequences``.

    Returns:
        [1, T, H, D].

    Raises:
        ValueError: No boundaries were given, or they do not fit T.
    """
    packed: PackedSequences | None = packing
    if packed is None:
        raise ValueError(
            "llamarl_packed needs the sequence boundaries: enter attending(PackedSequences.of(cu_seqlens))"
        )
    H, T = query.shape[1:3]
    if query.shape[0] != 1 or packed.num_tokens != T:
        raise ValueError(f"cu_seqlens ends at {packed.num_tokens} but the packed row has shape {tuple(query.shape)}")
    window = T if window is None else window
    KV = key.shape[1]
    q_THD, k_TKD, v_TKD = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)

    if _can_use_varlen(query, softcap):
        from torch.nn.attention.varlen import varlen_attn  # two seconds, for nothing without a GPU

        cu, longest = packed.cu_tensor(query.device), max(packed.lengths)
        left = window - 1 if window < longest else -1
        settings: dict[str, Any] = {
            "scale": scale,
            "window_size": (left, 0),
            **_grouped_query_flag(varlen_attn, H != KV),
        }
        out_THD: Any = varlen_attn(q_THD, k_TKD, v_TKD, cu, cu, longest, longest, **settings)
        return torch.unsqueeze(out_THD, 0)

    batches, place = packed.padded(query.device)
    outputs = []
    for batch in batches:
        q, k, v = (batch.pad(x).transpose(1, 2) for x in (q_THD, k_TKD, v_TKD))
        if softcap is not None:
            out = _softcapped_causal(q, k, v, scale=scale, softcap=softcap, window=window)
        elif window < batch.length:
            mask = packed.window_mask(batch.length, window, query.device)
            out = fused_attention(q, k, v, scale=scale, mask=mask)
        else:
            out = fused_attention(q, k, v, scale=scale, causal=True)
        outputs.append(batch.unpad(out))
    return torch.cat(outputs).index_select(0, place)[None]


def register_attention(name: str, attend: Callable[..., Tensor]) -> None:
    """Enter a function with the signature of ``packed_attention`` in transformers' attention interface.

    Heads whose keys and values differ in width (latent attention) are filled up with zeros to the wider one, which add
    nothing to scores or sums, and what comes out is as wide as the values.
    """

    def forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        packed_sequences: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            raise ValueError(f"{name} takes no attention mask: it knows which tokens may see which")
        if dropout:
            raise ValueError(f"{name} has no attention dropout, got {dropout}: set attention_dropout to 0")
        of_keys, of_values = key.shape[-1], value.shape[-1]
        if of_keys != of_values:
            width = max(of_keys, of_values)
            query, key, value = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
        found = attend(
            module,
            query,
            key,
            value,
            scale=of_keys**-0.5 if scaling is None else scaling,
            window=sliding_window,
            softcap=softcap,
            packing=packed_sequences if torch.compiler.is_compiling() else packed_sequences or _current.get(),
        )
        return found if of_keys == of_values else found[..., :of_values], None

    AttentionInterface.register(name, forward)


register_attention(PACKED_ATTENTION, packed_attention)
