"""Settles what a recipe leaves open, each step from one configuration to the next. Pure but for files that are read.

    recipe ─settle_recipe─▶ ticks, end of the decay, commits ─▶ graph, placement ─settle_on─▶ threads and devices,
                                                                                   precisions, layers with adapters,
                                                                                   sizes that fit a GPU's memory

The result is what config.toml records: a resume begins with it, so nothing is left open twice.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence

from llamarl.config import RunConfig, to_plain, validate
from llamarl.controller.run_models import pinned
from llamarl.engine.config import CPU_CACHE_BYTES
from llamarl.environments.factory import make_task
from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorSpec
from llamarl.executors.demonstrations import num_training_rows
from llamarl.models.folders import resolve_model_path
from llamarl.models.precision import resolve_precision
from llamarl.plural import plural
from llamarl.roles import present_roles, with_settings
from llamarl.trainer.config import MICROBATCH_TOKENS

__all__ = ["Machine", "fix_end_of_decay", "settle_on", "settle_recipe", "with_num_ticks", "with_sizes"]


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where a run is placed."""

    executors: Sequence[ExecutorSpec]
    """With threads and devices."""
    processor: str = ""
    """Of all its hosts (``models.precision.resolve_dtype``)."""
    gpu_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Memory of each GPU; empty where it is not known."""
    in_turn: Sequence[str] = ()
    """Roles that take turns on a GPU, each without memory while it waits."""


def settle_recipe(config: RunConfig) -> RunConfig:
    """Settle what hangs on no machine: the number of ticks, which are saved, where a falling rate ends, commits of the Hub.

    Raises:
        ConfigError, ModelError, DataError: Of a pass over a task without end; of models and data that are not there.
    """
    config = _with_saved_evaluations(with_num_ticks(config))
    return pinned(fix_end_of_decay(config, config))


def settle_on(config: RunConfig, machine: Machine) -> RunConfig:
    """Settle what hangs on where a run is placed.

    Raises:
        ModelError: No layer of the model can have an adapter.
    """
    for step in (_with_devices, _with_precisions, _with_adapted_layers, with_sizes):
        config = step(config, machine)
    return config


def with_num_ticks(config: RunConfig) -> RunConfig:
    """``run.epochs`` as ``run.num_ticks``.

    Raises:
        ConfigError: The task makes its questions itself, so that no pass over them ends.
    """
    if not config.run.epochs:
        return config
    if config.task.rollouts:
        sizes = [num_training_rows(config)]
    else:
        tasks = list(config.task.tasks.values()) or [config.task]
        sizes = [make_task(task, config.run.seed).num_items("train") for task in tasks]
    if None in sizes:
        raise ConfigError.at(
            "run.epochs", "has no meaning for a task that makes its questions itself: set run.num_ticks"
        )
    items = sum(size or 0 for size in sizes)
    num_ticks = math.ceil(config.run.epochs * items / config.groups_per_tick)
    print(
        f"run.epochs {config.run.epochs:g} over {plural(items, 'question')}, {config.groups_per_tick} a tick: "
        f"{plural(num_ticks, 'tick')}",
        file=sys.stderr,
    )
    plain = to_plain(config)
    plain["run"] |= {"num_ticks": num_ticks, "epochs": 0}
    return validate(plain)


def _with_saved_evaluations(config: RunConfig) -> RunConfig:
    """With a checkpoint at each evaluation where the best of them is to become the run's model."""
    if not config.evaluation.patience or config.checkpoint.every:
        return config
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, every=config.evaluation.every))


def fix_end_of_decay(config: RunConfig, begun: RunConfig) -> RunConfig:
    """Settle where a falling rate ends that ``config`` leaves open: where that of ``begun`` does, or
    with the run that it describes."""
    optimizer = config.optimizer
    if optimizer.schedule == "constant" or optimizer.decay_ticks:
        return config
    ends = begun.optimizer.decay_ticks or begun.run.num_ticks
    return dataclasses.replace(config, optimizer=dataclasses.replace(optimizer, decay_ticks=ends))


def _with_devices(config: RunConfig, machine: Machine) -> RunConfig:
    placed = {spec.name: spec for spec in machine.executors}
    used = {
        role.name: {
            "threads": placed[role.name].threads,
            "device": "cuda" if placed[role.name].device.startswith("cuda") else "cpu",
        }
        for role in present_roles(config)
        if role.section
    }
    return with_settings(config, used)


def _with_precisions(config: RunConfig, machine: Machine) -> RunConfig:
    return resolve_precision(config, machine.processor)


def with_sizes(config: RunConfig, machine: Machine) -> RunConfig:
    """The small ones on CPUs and where a GPU's memory is not known, else what the GPUs hold."""
    trainer, generator, known = config.trainer, config.generator, bool(machine.gpu_bytes)
    engine = dataclasses.replace(
        generator.engine,
        block_size=generator.engine.block_size_on(generator.device),
        kv_cache_bytes=generator.engine.kv_cache_bytes or (0 if known else CPU_CACHE_BYTES),
    )
    trainer = dataclasses.replace(
        trainer,
        share_prompts=trainer.shares_prompts(trainer.device),
        max_tokens_per_microbatch=trainer.max_tokens_per_microbatch or (0 if known else MICROBATCH_TOKENS),
    )
    config = dataclasses.replace(config, trainer=trainer, generator=dataclasses.replace(generator, engine=engine))
    if not known:
        return config
    from llamarl.controller.device_memory import fit_sizes

    return fit_sizes(config, machine.executors, machine.gpu_bytes, machine.in_turn)


def _with_adapted_layers(config: RunConfig, machine: Machine) -> RunConfig:
    if not config.lora.rank or config.lora.targets:
        return config
    from llamarl.models.adapters import with_targets

    lora = with_targets(config.lora, resolve_model_path(config.model.path))
    return dataclasses.replace(config, lora=lora)
