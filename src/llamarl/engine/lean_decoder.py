"""The decoder without its modules: one engine step as matrix products and compiled loops, for float32 and bfloat16 on CPU.

A step of a small model spends a third of its time between the products: in some twenty short operations a layer, each a pass
over memory and a call through Python. Here a layer is four products and four loops::

    norm ─▶ [q k v] ─▶ head norms, rotation, cache ─▶ attention ─▶ [o] ─▶ add, norm ─▶ [gate up] ─▶ silu · ─▶ [down] ─▶ add, norm

The products are the engine's own served linear layers, so int8 and tensor parallelism work as they do in the module. In float32 the
arithmetic is the module's in another order of sums: log-probs agree to about 1e-6, tests compare the two. In bfloat16 only
products, cache and their inputs are; the residual stream and everything between load and store stay float32, so this way
lies nearer to the float32 model than the module does.

Families whose layer is exactly this stand in ``models/support.py`` (``compiled_kernels``): Gemma's has more norms and soft caps
and goes through its module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llamarl.engine.kernels import Kernels
from llamarl.engine.linears import FusedLinear, fused_of
from llamarl.models.paged_attention import PrefillChunk, prefill_attention
from llamarl.models.paged_context import HeadExchange
from llamarl.models.stages import Stage
from llamarl.models.support import why_unsupported

__all__ = ["DecodeTables", "LeanDecoder", "why_kernels_unsupported"]


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """The decoding sequences, rows 0 .. N - 1 of the step."""

    blocks: Tensor
    """Block tables, one after another, int64."""
    offsets: Tensor
    """[N] where each begins."""
    lengths: Tensor
    """[N] cached tokens, the new one included."""


@dataclass(frozen=True, slots=True)
class _Layer:
    norm: Tensor
    qkv: FusedLinear
    head_norms: tuple[Tensor, Tensor] | None
    window: int | None
    output: FusedLinear
    second_norm: Tensor
    gate_up: FusedLinear
    down: FusedLinear
    num_kv_heads: int
    """That ``qkv`` computes; where tokens lie over ranks the cache has some of them."""


def why_kernels_unsupported(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why this model cannot go this way; None if it can."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return f"they compute in float32 or bfloat16 on CPU, the engine in {str(dtype).removeprefix('torch.')} on {device.type}"
    return why_unsupported(model.config.to_dict(), "compiled_kernels")


class LeanDecoder:
    """Made of a model whose linear layers are served already.

    Args:
        keys, values: The KV cache, a tensor a layer that is here, [num_blocks, block_size, KV, D].
        stage: The one that the model is; None: it is whole.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kernels: Kernels,
        keys: list[Tensor],
        values: list[Tensor],
        stage: Stage | None = None,
    ) -> None:
        config: Any = model.config
        base: Any = model.base_model
        self._kernels = kernels
        self._keys, self._values = keys, values
        self._embedding = base.embed_tokens
        self._rotary = base.rotary_emb
        self._eps: float = config.rms_norm_eps
        layers: list[Any] = list(base.layers) if stage is None else list(stage.layers)
        self._layers = [_layer(layer, config) for layer in layers]
        self._last_norm: Tensor | None = base.norm.weight if stage is None or stage.is_last else None
        self._scale: float = layers[0].self_attn.scaling

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        decodes: DecodeTables,
        prefills: list[PrefillChunk],
        received: Tensor | None = None,
        heads: HeadExchange | None = None,
    ) -> Tensor:
        """Hidden states of the step's row, [T, E]: after the last norm, or, where other stages follow, the residual stream, float32.

        Args:
            tokens, positions, slots: [T]; the decoding sequences come first.
            received: [T, E] float32, the residual stream of the stage before, which is changed; None on the first.
            heads: Where the tokens lie over ranks: ``tokens`` and what is returned are this rank's m of the T then.
        """
        kernels, eps = self._kernels, self._eps
        x = self._embedding(tokens).float() if received is None else received
        cos, sin = (part[0].contiguous() for part in self._rotary(x[None], positions[None]))
        h = kernels.add_norm(x, None, self._layers[0].norm, eps)
        after = [layer.norm for layer in self._layers[1:]] + [self._last_norm]
        for layer, keys, values, next_norm in zip(self._layers, self._keys, self._values, after, strict=True):
            qkv = layer.qkv(h)
            if heads is not None:
                qkv = _own_heads(qkv, heads, KV=layer.num_kv_heads, D=keys.shape[3])
            kernels.rotate_and_store(qkv, cos, sin, layer.head_norms, eps, slots, keys, values)
            attended = self._attention(layer, qkv, keys, values, decodes, prefills)
            if heads is not None:
                attended = heads.to_tokens(attended.view(len(qkv), -1, keys.shape[3])).flatten(1)
            h = kernels.add_norm(x, layer.output(attended), layer.second_norm, eps)
            down = layer.down(kernels.gated_silu(layer.gate_up(h)))
            if next_norm is None:
                return x.add_(down)
            h = kernels.add_norm(x, down, next_norm, eps)
        return h

    def _attention(
        self,
        layer: _Layer,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        decodes: DecodeTables,
        prefills: list[PrefillChunk],
    ) -> Tensor:
        T = len(qkv)
        KV, D = keys.shape[2:]
        H = qkv.shape[1] // D - 2 * KV
        out = qkv.new_empty(T, H * D)
        if len(decodes.lengths):
            self._kernels.decode_attention(
                qkv, keys, values, decodes.blocks, decodes.offsets, decodes.lengths, layer.window, self._scale, out
            )
        if prefills:
            q_THD, k_TKD, v_TKD = qkv.view(T, -1, D).split((H, KV, KV), dim=1)
            key, value = k_TKD.transpose(0, 1)[None], v_TKD.transpose(0, 1)[None]
            for chunk in prefills:
                rows = out[chunk.first : chunk.first + chunk.num_tokens].view(-1, H, D)
                rows.copy_(
                    prefill_attention(
                        chunk, q_THD, key, value, keys, values, scale=self._scale, window=layer.window, softcap=None
                    )
                )
        return out


def _layer(layer: Any, config: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
    fused, output = fused_of(getattr(attention, "qkv_proj", None) or attention.q_proj), fused_of(attention.o_proj)
    # Mistral and Phi-3 read the window from the configuration, the others give each layer its own
    window = getattr(attention, "sliding_window", None)
    if config.model_type in ("mistral", "phi3"):
        window = getattr(config, "sliding_window", None)
    return _Layer(
        norm=layer.input_layernorm.weight,
        qkv=fused,
        head_norms=norms,
        window=window,
        output=output,
        second_norm=layer.post_attention_layernorm.weight,
        gate_up=fused_of(getattr(mlp, "gate_up_proj", None) or mlp.gate_proj),
        down=fused_of(mlp.down_proj),
        num_kv_heads=(fused.out_features - output.in_features) // (2 * attention.head_dim),
    )


def _own_heads(qkv: Tensor, heads: HeadExchange, *, KV: int, D: int) -> Tensor:
    """[T, (h + 2 kv) D] of own heads, from [m, (H + 2 KV) D] of own tokens, neither rotated."""
    parts = qkv.view(len(qkv), -1, D)
    whole = heads.to_heads(*parts.split((parts.shape[1] - 2 * KV, KV, KV), dim=1))
    return whole.reshape(len(whole), -1)
