"""Shape of a decoder, read from a Hugging Face ``config.json``: parameters, work a token, cache a token.

Dense and mixture-of-experts layers, grouped-query and latent (DeepSeek) attention. For experts two counts matter:
*total* parameters fill memory and travel at a weight hand-over; *active* ones are multiplied for a token.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from llamarl.errors import FileError, ModelError, PlanError
from llamarl.model_support import FAMILIES, is_known, text_part, why_unsupported
from llamarl.models.folders import is_hub_id, read_model_config
from llamarl.models.sizes import fitting_sizes, layers_of_stages, whole_experts
from llamarl.reading import read_object

__all__ = [
    "ModelSpec",
    "StageLoad",
    "context_parallel_sizes",
    "expert_parallel_sizes",
    "find_model",
    "spec_from_config",
    "stages_of",
    "tensor_parallel_sizes",
]

_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_UNGATED = {"gpt2", "gpt_neox", "nemotron", "opt", "phi", "starcoder2"}
_QKV_BIAS = {"qwen2"}
_QK_NORM = {"qwen3", "qwen3_moe"}
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "max_position_embeddings": ("n_positions",),
}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer. Counts are exact for the families in ``models.json``."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of a dense layer's MLP."""
    vocab: int
    tied: bool
    gated: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    """Routed experts of a sparse layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_expert_intermediate: int = 0
    dense_layers: int = 0
    """Layers of a sparse model that are dense all the same."""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    """Above 0: latent attention, whose cache holds this many values (and ``rope_dim``) a token."""
    rope_dim: int = 0
    value_dim: int = 0
    max_context: int = 0
    cut_by_llamarl: bool = True
    """llamarl's trainer and engine can cut its layers over tensor-parallel ranks; False: ``tp`` is 1 there."""
    quantized_by_llamarl: bool = True
    """llamarl's engine can serve it in int8 and fp8."""
    rotary_by_length: bool = False
    """Rotary frequencies follow the longest position of a call, so a row's tokens cannot be cut over ranks."""
    unsupported: str = ""
    """Why ``llamarl train`` does not run it, of ``model_support.py``; empty: it does."""

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's attention, its norms included."""
        h = self.hidden
        if self.kv_lora_rank:
            query_dim = self.heads * (self.head_dim + self.rope_dim)
            query = h * self.q_lora_rank + self.q_lora_rank * (query_dim + 1) if self.q_lora_rank else h * query_dim
            latent = h * (self.kv_lora_rank + self.rope_dim) + self.kv_lora_rank
            up = self.kv_lora_rank * self.heads * (self.head_dim + self.value_dim)
            return query + latent + up + self.heads * self.value_dim * h
        kv = self.kv_heads * self.head_dim
        q = self.heads * self.head_dim
        bias = q + 2 * kv if self.qkv_bias else 0
        norms = 2 * self.head_dim if self.qk_norm else 0
        return h * (q + 2 * kv) + q * h + bias + norms

    def _mlp(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert."""
        return self._mlp(self.expert_intermediate)

    @property
    def sparse_fixed_params(self) -> int:
        """Of one sparse layer's MLP, what every token uses: router and shared expert."""
        return self.hidden * self.experts + self._mlp(self.shared_expert_intermediate) if self.experts else 0

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts."""
        return self.sparse_layers * self.experts * self.expert_params

    @property
    def dense_mlp_params(self) -> int:
        return self._mlp(self.intermediate)

    @property
    def layer_params(self) -> float:
        """Parameters of a layer, averaged over the layers."""
        return (self.total_params - self.embedding_params - self.hidden) / self.layers

    @property
    def active_layer_params(self) -> float:
        """Parameters that multiply one token in a layer, averaged over the layers."""
        sparse = self.sparse_fixed_params + self.experts_per_token * self.expert_params
        mlp = self.sparse_layers * sparse + (self.layers - self.sparse_layers) * self.dense_mlp_params
        return self.attention_params + mlp / self.layers

    @property
    def embedding_params(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def head_params(self) -> int:
        """The output projection, which multiplies every token."""
        return self.vocab * self.hidden

    def body_params(self, tp: int) -> float:
        """Of all parameters but embedding and output layer, what one of ``tp`` tensor-parallel
        ranks of llamarl holds: an even part, where ranks beyond the key-value heads hold copies of
        what these are made with."""
        body = self.total_params - self.embedding_params
        copies = max(1, tp // self.kv_shards)
        if copies == 1 or self.kv_lora_rank:
            return body / tp
        heads = self.layers * 2 * self.kv_heads * self.head_dim * (self.hidden + self.qkv_bias)
        return (body + (copies - 1) * heads) / tp

    @property
    def total_params(self) -> int:
        sparse = self.sparse_fixed_params + self.experts * self.expert_params
        mlp = self.sparse_layers * sparse + (self.layers - self.sparse_layers) * self.dense_mlp_params
        return self.embedding_params + self.layers * (self.attention_params + 2 * self.hidden) + mlp + self.hidden

    @property
    def active_params(self) -> int:
        """Parameters that multiply one token, output projection included, input embedding (a look-up) not."""
        return round(self.layers * self.active_layer_params) + self.head_params

    @property
    def kv_values_per_token(self) -> int:
        """Numbers a layer caches a token."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.rope_dim
        return 2 * self.kv_heads * self.head_dim

    @property
    def kv_shards(self) -> int:
        """Ranks a token's cache can be cut over; more tensor-parallel ranks hold copies."""
        return 1 if self.kv_lora_rank else self.kv_heads

    def kv_bytes_per_token(self, bytes_per_value: float = 2.0) -> float:
        """Cache bytes of one token in all layers."""
        return self.layers * self.kv_values_per_token * bytes_per_value

    def attention_flops(self, context: float) -> float:
        """FLOPs one query token spends in a layer on scores and values over ``context`` earlier tokens."""
        if self.kv_lora_rank:
            return 2.0 * context * self.heads * (self.head_dim + self.rope_dim + self.value_dim)
        return 4.0 * context * self.heads * self.head_dim


def spec_from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Shape from the dictionary of a ``config.json``.

    Raises:
        PlanError: It is of no family in ``model_support.py``, so nobody knows how its layers count;
            or a key is missing or not a positive number.
    """
    whole, config = config, text_part(config)
    kind = str(config.get("model_type", ""))
    if not is_known(whole):
        why = why_unsupported(whole, "generate") or f"the layers of {kind!r} are not known"
        raise PlanError(f"model {name}: {why}; a forecast counts the families in docs/models.md: {', '.join(FAMILIES)}")
    read = partial(_read_size, config, name)
    hidden, heads = read("hidden_size"), read("num_attention_heads")
    layers, vocab = read("num_hidden_layers"), read("vocab_size")
    for key, value in (("hidden_size", hidden), ("num_attention_heads", heads), ("num_hidden_layers", layers)):
        if value < 1:
            raise PlanError(f"model {name}: config.json {key} must be at least 1, got {value}")
    latent = read("kv_lora_rank", 0)
    intermediate = read("intermediate_size", read("n_inner", 4 * hidden))
    return ModelSpec(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=read("num_key_value_heads", 1 if config.get("multi_query") else heads),
        head_dim=read("qk_nope_head_dim", 0) if latent else read("head_dim", hidden // heads),
        intermediate=intermediate,
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings", kind in {"gpt2", "gemma", "gemma2", "gemma3_text"})),
        gated=kind not in _UNGATED,
        qkv_bias=kind in _QKV_BIAS or bool(config.get("attention_bias", False)),
        qk_norm=kind in _QK_NORM,
        **_expert_sizes(config, read, layers=layers, intermediate=intermediate),
        q_lora_rank=read("q_lora_rank", 0) if latent else 0,
        kv_lora_rank=latent,
        rope_dim=read("qk_rope_head_dim", 0) if latent else 0,
        value_dim=read("v_head_dim", 0) if latent else 0,
        max_context=read("max_position_embeddings", 0),
        cut_by_llamarl=why_unsupported(whole, "tensor_parallel") is None,
        quantized_by_llamarl=why_unsupported(whole, "int8") is None and why_unsupported(whole, "fp8") is None,
        rotary_by_length=_follows_length(config),
        unsupported=why_unsupported(whole, "generate") or why_unsupported(whole, "train") or "",
    )


def _read_size(config: Mapping[str, Any], name: str, key: str, default: int | None = None) -> int:
    """A number of a ``config.json``, under any of its names.

    Raises:
        PlanError: It is no number, or it is missing and has no default.
    """
    for candidate in (key, *_ALIASES.get(key, ())):
        value = config.get(candidate)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 53:
                raise PlanError(f"model {name}: config.json {candidate} must be a number >= 0, got {value!r}")
            return int(value)
    if default is None:
        raise PlanError(f"model {name}: config.json has no {key}; is it the config of a decoder language model?")
    return default


def _expert_sizes(
    config: Mapping[str, Any], read: Callable[..., int], *, layers: int, intermediate: int
) -> dict[str, int]:
    """The fields of ``ModelSpec`` that say what experts a model has; empty for one that has none."""
    experts = read("num_experts", 0)
    if not experts:
        return {}
    width = read("moe_intermediate_size", intermediate)
    first, stride = read("first_k_dense_replace", 0), max(1, read("decoder_sparse_step", 1))
    own = config["mlp_only_layers"] if isinstance(config.get("mlp_only_layers"), list) else []
    named = {layer for layer in own if isinstance(layer, int) and first <= layer < layers and (layer + 1) % stride == 0}
    dense = layers - layers // stride + min(first, layers) // stride + len(named)
    if isinstance(kinds := config.get("mlp_layer_types"), list | tuple):
        dense = list(kinds).count("dense")
    return {
        "experts": experts,
        "experts_per_token": read("num_experts_per_tok"),
        "expert_intermediate": width,
        "shared_expert_intermediate": read("shared_expert_intermediate_size", read("n_shared_experts", 0) * width),
        "dense_layers": min(dense, layers),
    }


def _follows_length(config: Mapping[str, Any]) -> bool:
    """As ``models.decoder.changes_with_length`` finds it; older files call the same ``rope_scaling`` and ``type``."""
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    tables = (
        [rope for rope in (ropes, *ropes.values()) if isinstance(rope, Mapping)] if isinstance(ropes, Mapping) else []
    )
    kinds = {str(rope.get("rope_type", rope.get("type", ""))) for rope in tables}
    return any(kind in ("longrope", "su") or "dynamic" in kind for kind in kinds)


@lru_cache(maxsize=1)
def _bundled() -> dict[str, dict[str, Any]]:
    return json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def find_model(model: str | Path) -> ModelSpec:
    """A bundled shape by name, or the shape of a Hugging Face folder, a ``config.json``,
    ``bundled:NAME``, or a model of the Hugging Face Hub, of which no weights are fetched.

    Raises:
        PlanError: Neither; the message gives the nearest name. Or the file is not a usable config.
    """
    text = str(model)
    if text.startswith("bundled:"):
        path = _ASSETS / text.removeprefix("bundled:")
    else:
        path = Path(os.path.expanduser(text))
    if os.path.isdir(path):
        path = path / "config.json"
    if os.path.exists(path):
        try:
            config = read_object(path)
        except FileError as error:
            raise PlanError(f"model: {error}; give a config.json") from error
        return spec_from_config(config, path.parent.name if path.name == "config.json" else path.stem)
    by_key = {name.lower(): name for name in _bundled()}
    key = text.rsplit("/", 1)[-1].lower()
    key = key.removeprefix("meta-").removesuffix("-instruct").removesuffix("-base")
    if key in by_key:
        return spec_from_config(_bundled()[by_key[key]], by_key[key])
    near = difflib.get_close_matches(key, by_key, n=1, cutoff=0.5)
    hint = f"the nearest bundled shape is {by_key[near[0]]!r}; " if near else ""
    if is_hub_id(text):
        try:
            return spec_from_config(read_model_config(text, weights=False), text.rsplit("/", 1)[-1])
        except ModelError as error:
            raise PlanError(f"{error}. As a shape: {hint}known are {', '.join(_bundled())}") from error
    raise PlanError(
        f"model {text!r} is neither a folder with a config.json nor a bundled shape: {hint}known are "
        f"{', '.join(_bundled())}"
    )


def tensor_parallel_sizes(model: ModelSpec, limit: int) -> list[int]:
    """Sizes up to ``limit`` that ``llamarl train`` takes, ascending; 1 alone for a model whose
    layers it does not cut."""
    if not model.cut_by_llamarl:
        return [1] if limit >= 1 else []
    sizes = whole_experts(fitting_sizes(model.heads, model.kv_heads, model.intermediate), model.experts)
    return [tp for tp in sizes if tp <= limit]


def context_parallel_sizes(model: ModelSpec, tp: int, limit: int) -> list[int]:
    """Ranks over which ``llamarl train`` cuts rows of tokens beside ``tp``: powers of two that share the query heads.

    Args:
        limit: Of ``tp`` times them.
    """
    if model.rotary_by_length:
        return [1] if tp <= limit else []
    return [2**i for i in range(limit.bit_length()) if tp * 2**i <= limit and model.heads % (tp * 2**i) == 0]


def expert_parallel_sizes(model: ModelSpec, tp: int, shards: int) -> list[int]:
    """Of ``shards`` ranks over which parameters are cut, how many can have different experts (``trainer.ep``)."""
    if not model.experts:
        return [1]
    return [ep for ep in range(1, shards + 1) if shards % ep == 0 and model.experts % (tp * ep) == 0]


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """What a pipeline stage has of the model."""

    layers: int
    alive: int
    """Micro-batches that it keeps at once."""
    is_first: bool
    is_last: bool

    def end_params(self, model: ModelSpec) -> int:
        """Parameters of embedding and output layer. A tied one lies on the first stage and on the last."""
        if self.is_first and self.is_last:
            return model.embedding_params
        return model.head_params if self.is_first or self.is_last else 0

    def params(self, model: ModelSpec, tp: int) -> float:
        """Parameters of one tensor-parallel rank, before they are sharded."""
        return model.body_params(tp) / model.layers * self.layers + self.end_params(model) / tp

    def sharded_params(self, model: ModelSpec, *, tp: int, shards: int, ep: int = 1) -> float:
        """Parameters of one rank, sharded: FSDP2 cuts experts along the first dimension, so of fewer experts than ranks
        some ranks have one and others none."""
        routed = model.routed_params / model.layers * self.layers / tp
        if not routed:
            return self.params(model, tp) / shards
        own = model.experts / (tp * ep)
        return (self.params(model, tp) - routed) / shards + routed / ep * math.ceil(own / (shards / ep)) / own


def stages_of(num_layers: int, pp: int, micro_batches: int = 1) -> list[StageLoad]:
    """The stages of a pipeline, as the trainer cuts the layers and one forward, one backward keeps micro-batches."""
    return [
        StageLoad(
            layers=len(layers), alive=min(pp - stage, micro_batches), is_first=stage == 0, is_last=stage == pp - 1
        )
        for stage, layers in enumerate(layers_of_stages(num_layers, pp))
    ]
