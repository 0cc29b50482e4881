"""What a recipe asks for against model, runtime, processors and packages, before any process starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from llamarl.config import RunConfig
from llamarl.errors import ConfigError
from llamarl.models.sizes import check_tensor_parallel_size

__all__ = ["check_lora", "check_parallel_sizes"]

_RANKS_PER_CORE = 4
"""Ranks on the CPU that share one core at most; more is a mistake in the recipe, not a slow run."""


def check_parallel_sizes(config: RunConfig, folder: Path, *, cores: int) -> None:
    """Refuse sizes of the trainer's and the generator's mesh that cannot work here.

    CUDA devices are counted by ``runtime.placement``; the ranks of one executor never share one.

    Args:
        folder: Of the model.
        cores: That this job may use.

    Raises:
        ConfigError: The mesh does not fit runtime, processor or model; the message names what would.
        ModelError: A ``tp`` does not divide the model (the message names the sizes that do), or the model has a plan
            that is not supported.
    """
    trainer = config.trainer
    ranks = trainer.fsdp * trainer.tp
    mesh = f"trainer.fsdp * trainer.tp = {trainer.fsdp} * {trainer.tp} = {ranks} ranks"
    generator = config.generator
    if generator.tp > 1:
        check_tensor_parallel_size(folder, generator.tp, key="generator.tp")
        from llamarl.models.loading import load_model_config
        from llamarl.models.parallel import check_tensor_parallel_plan

        check_tensor_parallel_plan(load_model_config(folder), key="generator.tp")
    if trainer.tp > 1:
        check_tensor_parallel_size(folder, trainer.tp)
        from llamarl.models.loading import load_model_config
        from llamarl.models.parallel import check_tensor_parallel_plan

        model = load_model_config(folder)
        if not getattr(model.get_text_config(), "base_model_tp_plan", None):
            raise ConfigError(
                f"trainer.tp = {trainer.tp}: {model.model_type} has no tensor-parallel plan; set trainer.tp to 1 and "
                f"raise trainer.fsdp instead"
            )
        check_tensor_parallel_plan(model)
    if config.run.runtime == "inline" and max(ranks, generator.dp * generator.tp) > 1:
        raise ConfigError(
            f"run.runtime 'inline' holds one rank an executor, but {mesh} and generator.dp * generator.tp = "
            f"{generator.dp} * {generator.tp}: "
            f"set run.runtime to 'monarch', or all of these sizes to 1"
        )
    most = _RANKS_PER_CORE * cores
    if trainer.device == "cpu" and ranks > most:
        fitting = [f"{fsdp} * {trainer.tp}" for fsdp in range(1, trainer.fsdp) if fsdp * trainer.tp <= most]
        raise ConfigError(
            f"{mesh} on {cores} cores: more than {_RANKS_PER_CORE} ranks a core would only wait for each other; sizes "
            f"that fit with this trainer.tp: {', '.join(fitting) or 'none, lower trainer.tp'}"
        )


def check_lora(config: RunConfig) -> None:
    """Raises ConfigError where adapters are asked for and ``peft`` is not installed."""
    if config.lora.rank and importlib.util.find_spec("peft") is None:
        raise ConfigError("lora.rank > 0 needs the package peft: pip install 'llamarl[lora]', or set lora.rank to 0")
