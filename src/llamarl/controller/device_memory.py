"""What the roles of a run hold of each GPU's memory, added up before it starts; and the sizes that a recipe leaves open.

    configuration, devices, shapes of models ─▶ parts of each rank ─▶ sum of each GPU ─┬─ what is sure to be too much: refused
                                                                                       └─ a table; KV cache and micro-batch
                                                                                          of what is left

Weights, optimizer state, KV cache and versions handed over are exact. What a step or a micro-batch
takes is a bound by formula that no card has confirmed. Of roles that take turns on a GPU and give
their memory back (``schedule.colocated``), the larger counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from llamarl.config import RunConfig
from llamarl.controller.graph import versions_held
from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorSpec
from llamarl.models.folders import resolve_model_path
from llamarl.plural import format_bytes
from llamarl.roles import ROLES, Role, carries_version, present_roles
from llamarl.settings.engine import CPU_CACHE_BYTES, EngineConfig
from llamarl.settings.executors import GeneratorConfig
from llamarl.settings.trainer import MICROBATCH_TOKENS

__all__ = ["GpuMemory", "Held", "fit_sizes", "held"]

_MICROBATCHES = (16384, 8192, MICROBATCH_TOKENS)
_CONTEXT_BYTES = 0.6e9
"""Of a process that uses a GPU: CUDA's context, workspaces of cuBLAS."""
_USABLE = 0.92
"""Of a GPU's memory; the rest is lost between blocks of the allocator."""
_CACHE_SHARE = 0.2
"""Of the smallest GPU, what is left to a cache when a micro-batch is chosen beside it."""
_GRAIN = 1 << 26
"""A cache is a multiple of it, so that a driver's few megabytes change nothing."""


@dataclass(frozen=True)
class Held:
    """Bytes of one rank on its GPU."""

    role: str
    device: str
    sure: Mapping[str, float]
    bounds: Mapping[str, float]
    """At most so much more while it works."""

    @property
    def total(self) -> float:
        return sum(self.sure.values()) + sum(self.bounds.values())


@dataclass(frozen=True)
class GpuMemory:
    """The GPUs of a run and what is held there."""

    held: Sequence[Held]
    sizes: Mapping[str, float]
    """GPU -> its bytes."""
    in_turn: Sequence[str] = ()
    """Roles of which one waits without memory while another works."""

    def sums(self, *, sure: bool = False) -> dict[str, float]:
        """GPU -> bytes at the fullest moment; with ``sure``, without bounds."""
        found = {}
        for device in sorted({one.device for one in self.held}):
            own = [
                (one.role, sum(one.sure.values()) if sure else one.total) for one in self.held if one.device == device
            ]
            beside = sum(size for role, size in own if role not in self.in_turn)
            turns = max((size for role, size in own if role in self.in_turn), default=0.0)
            found[device] = beside + turns + _CONTEXT_BYTES * len(own)
        return found

    @property
    def fits(self) -> bool:
        """Whether all is known to fit, bounds included."""
        return all(size <= _USABLE * self.sizes.get(device, 0.0) for device, size in self.sums().items())

    def check(self) -> None:
        """
        Raises:
            ConfigError: A GPU cannot hold what is sure, whatever the bounds are.
        """
        for device, size in self.sums(sure=True).items():
            if size > self.sizes.get(device, size):
                parts = "; ".join(_line(one.role, one.sure) for one in self.held if one.device == device)
                raise ConfigError(
                    f"{device} has {format_bytes(self.sizes[device])}, and what is to be there takes {format_bytes(size)}: {parts}; "
                    "give these roles GPUs of their own or more ranks, or lower generator.engine.kv_cache_bytes"
                )

    def table(self) -> str:
        """A line a GPU; empty where there is none."""
        lines = []
        for device, size in self.sums().items():
            parts = "; ".join(_line(one.role, {**one.sure, **one.bounds}) for one in self.held if one.device == device)
            of = f" of {format_bytes(self.sizes[device])}" if device in self.sizes else ""
            late = ", MORE THAN IT MAY HAVE" if of and size > _USABLE * self.sizes[device] else ""
            lines.append(f"{device}: at most {format_bytes(size)}{of}{late}: {parts}")
        return "\n".join(lines)


def _line(role: str, parts: Mapping[str, float]) -> str:
    return f"{role} " + ", ".join(f"{format_bytes(size)} {name}" for name, size in parts.items() if size)


@dataclass(frozen=True)
class _Shape:
    """Of a model."""

    parameters: float
    layers: int
    hidden: int
    inside: int
    """Features between the products of a token's MLP."""
    queries: int
    """Features of all query heads."""
    cached: int
    """Numbers that a layer caches a token."""
    vocabulary: int


@cache
def _shape_of(path: str) -> _Shape:
    from llamarl.models.loading import cache_shape, load_model_config
    from llamarl.models.precision import num_parameters

    config: Any = load_model_config(path).get_text_config()
    layers, kv_heads, head_dim = cache_shape(config)
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    chosen = getattr(config, "num_experts_per_tok", None) or 0
    return _Shape(
        parameters=num_parameters(resolve_model_path(path)),
        layers=layers,
        hidden=config.hidden_size,
        inside=max(wide, chosen * (getattr(config, "moe_intermediate_size", None) or wide)),
        queries=config.num_attention_heads * head_dim,
        cached=2 * kv_heads * head_dim,
        vocabulary=config.vocab_size,
    )


def held(config: RunConfig, executors: Sequence[ExecutorSpec]) -> list[Held]:
    """What each rank on a GPU holds.

    Args:
        config: With precisions settled; a cache or a micro-batch that is still 0 takes nothing.
        executors: With devices.
    """
    specs = {spec.name: spec for spec in executors}
    found = []
    for role in present_roles(config):
        devices = specs[role.name].device.split(",")
        if not devices[0].startswith("cuda") or role.name not in ROLES or role.model is None:
            continue
        shape, engine = _shape_of(role.model.path(config)), role.name in ("generator", "evaluator", "judge")
        if engine and not role.model.uses(config):  # an engine of the user's own, or a model elsewhere
            continue
        versions = _versions(config, specs) if role.name == "trainer" else 0
        sure, bounds = _of_engine(role, shape, config) if engine else _of_trainer(role, shape, config, versions)
        found += [Held(role.name, device, sure, bounds) for device in devices]
    return found


def _of_engine(role: Role, shape: _Shape, config: RunConfig) -> tuple[dict[str, float], dict[str, float]]:
    lora, alone = config.lora, config.lora.rank and config.lora.hand_over == "adapter"
    adapted = _adapted(config.model.path, tuple(lora.targets)) if alone and role.name != "judge" else 0
    if role.name != "generator":
        tp = config.evaluation.tp if role.name == "evaluator" else 1
        own = dataclasses.replace(config.generator, replicas=(), dp=1, tp=tp, shards=0)
        return _of_replica(shape, own, adapted)
    kinds = range(max(1, len(config.generator.replicas)))
    each = (_of_replica(shape, config.generator.as_of_kind(kind), adapted) for kind in kinds)
    return max(each, key=lambda p: sum(p[0].values()))


@cache
def _adapted(path: str, targets: tuple[str, ...]) -> int:
    """Numbers in the matrices that have an adapter: an engine that takes adapters alone keeps them as they were."""
    from llamarl.models.loading import parameter_shapes

    shapes = parameter_shapes(path).items()
    return sum(math.prod(shape) for name, shape in shapes if len(shape) == 2 and name.split(".")[-2] in targets)


def _copied(engine: EngineConfig) -> int:
    """So many times the blocks of a layer that its sequences hold, a padded step may copy."""
    return 4 if engine.attention == "copied" else 0


def _of_replica(shape: _Shape, own: GeneratorConfig, adapted: int) -> tuple[dict[str, float], dict[str, float]]:
    engine, tp, width = own.engine, own.tp, _width(own.engine.dtype)
    codes = 0 if own.quantization == "none" else 1  # beside the weights as they arrive
    prefill = engine.max_batch_tokens * width * (4 * shape.hidden + 4 * shape.inside / tp)
    draws = 3 * 4 * engine.max_sequences * shape.vocabulary / tp
    copied = _copied(engine) * engine.kv_cache_bytes / shape.layers
    weights = shape.parameters * (width + codes) / tp
    sure = {"weights": weights, "KV cache": engine.kv_cache_bytes}
    if adapted:
        sure["base of adapters"] = adapted * width / tp
    return sure, {"a step": copied + prefill + draws}


def _of_trainer(
    role: Role, shape: _Shape, config: RunConfig, versions: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Of the trainer, the critic, and models that are frozen.

    Args:
        versions: That lie there for others.
    """
    assert role.model is not None
    own, trainer = role.settings(config), config.trainer
    policy, learns = role.name == "trainer", role.model.trained
    tp, pp, cp = own.tp, getattr(own, "pp", 1), getattr(own, "cp", 1)
    shards, width = own.fsdp * cp, _width(getattr(own, "dtype", trainer.dtype))
    each = shape.parameters / (tp * pp)
    sure = {"weights": each * width / shards}
    if policy and trainer.offload_optimizer and not config.lora.rank and shards > 1:  # FSDP2 keeps both in float32
        sure = {"weights, gradients": 8 * each / shards}
    if learns and not (policy and (config.lora.rank or trainer.offload_optimizer)):
        copy = width if shards == 1 and width < 4 else 0  # FSDP2 rounds as it gathers
        state = 8 + config.optimizer.moment_bytes
        sure = {"weights, gradients, moments": (state / shards + copy) * each}
    if versions:
        served = shape.parameters * _width(config.generator.served_dtype) / trainer.num_ranks
        sure["versions handed over"] = versions * served
    if policy and config.lora.rank and config.lora.hand_over == "merged" and not config.schedule.colocated:
        sure["merged weights"] = each * _width(config.generator.served_dtype) / shards
    tokens = getattr(own, "max_tokens_per_microbatch", trainer.max_tokens_per_microbatch) / cp
    mlp = 4 * shape.inside + 2 * shape.queries + shape.cached
    a_layer = 2 * shape.hidden * (4 + 2 * width) + width * mlp / tp
    layers = shape.layers / pp if learns else 1.0
    whole = {"none": layers, "selective": layers / 2 + 1, "full": 1.0}[
        trainer.activation_checkpointing if policy else "none"
    ]
    activations = tokens * (whole * a_layer + layers * shape.hidden * width)
    logits = 8 * trainer.logprob_chunk_tokens * shape.vocabulary / tp
    ends = shape.vocabulary * shape.hidden / tp  # of the output layer: its gradient; gathered, with the embedding
    gathered = 2 * width * (each / layers + ends) if shards > 1 else 0.0
    return sure, {"a micro-batch": activations + logits + (4 * ends if learns else 0.0) + gathered}


def _versions(config: RunConfig, specs: Mapping[str, ExecutorSpec]) -> int:
    """That lie on the trainer's GPUs at once, at most: each role that takes them has an edge of its own, and over hosts
    they lie in host memory."""
    held = 0
    adapters = config.lora.rank and config.lora.hand_over == "adapter"  # of megabytes
    for role in present_roles(config) if not config.schedule.colocated and not adapters else ():
        settings = role.settings(config)
        for reads in role.reads if settings is not None and settings.device != "cpu" else ():
            devices = [d for name in ("trainer", role.name) if name in specs for d in specs[name].device.split(",")]
            hosts = {device.partition("@")[2] for device in devices if device.startswith("cuda")}
            if reads.kind == "weights" and len(hosts) == 1:
                carries = partial(carries_version, config, role.name)
                held += versions_held(reads.capacity(config), config.run.num_ticks, carries)
    return held


def _width(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def fit_sizes(
    config: RunConfig, executors: Sequence[ExecutorSpec], sizes: Mapping[str, float], in_turn: Sequence[str] = ()
) -> RunConfig:
    """``config`` with the sizes that it leaves open: what the GPUs hold.

    Args:
        config: With precisions and devices settled.
        sizes, in_turn: As of ``GpuMemory``.
    """
    trainer, engine = config.trainer, config.generator.engine
    if not trainer.max_tokens_per_microbatch:
        beside = engine.kv_cache_bytes or int(_CACHE_SHARE * min(sizes.values()))
        choices = _MICROBATCHES if trainer.device != "cpu" else (MICROBATCH_TOKENS,)
        for tokens in choices:
            config = _with(config, "trainer", max_tokens_per_microbatch=tokens)
            if GpuMemory(held(_with(config, "engine", kv_cache_bytes=beside), executors), sizes, in_turn).fits:
                break
    if not engine.kv_cache_bytes:
        config = _with(config, "engine", kv_cache_bytes=_cache_bytes(config, executors, sizes, in_turn))
    return config


def _cache_bytes(
    config: RunConfig, executors: Sequence[ExecutorSpec], sizes: Mapping[str, float], in_turn: Sequence[str]
) -> int:
    """What each engine on a GPU can have: at most what its longest sequences take."""
    found = held(config, executors)
    engines = [one for one in found if "KV cache" in one.sure]
    if not engines or not all(one.device in sizes for one in engines):
        return CPU_CACHE_BYTES
    own, shape = config.generator, _shape_of(config.model.path)
    longest = config.data.max_prompt_tokens + own.sampling.max_new_tokens + own.engine.block_size
    room: list[float] = [own.engine.max_sequences * longest * shape.layers * shape.cached * _width(own.engine.dtype)]
    for device in {one.device for one in engines}:
        others = [one for one in found if one.device == device and (one in engines or one.role not in in_turn)]
        left = _USABLE * sizes[device] - sum(one.total + _CONTEXT_BYTES for one in others)
        room.append(
            left / (1 + _copied(config.generator.engine) / shape.layers) / sum(one in engines for one in others)
        )
    return max(CPU_CACHE_BYTES // 4, int(min(room) // _GRAIN * _GRAIN))


def _with(config: RunConfig, section: str, **changes: Any) -> RunConfig:
    if section == "engine":
        engine = dataclasses.replace(config.generator.engine, **changes)
        return dataclasses.replace(config, generator=dataclasses.replace(config.generator, engine=engine))
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **changes)})
