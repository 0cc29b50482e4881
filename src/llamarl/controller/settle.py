"""Settles what a recipe leaves open, each step from one configuration to the next. Pure but for files that are read.

    recipe ─settle_recipe─▶ ticks, end of the decay, commits ─▶ graph, placement ─settle_on─▶ threads and devices,
                                                                                   precisions, layers with adapters,
                                                                                   sizes that fit a GPU's memory

The result is what config.toml records: a resume begins with it, so nothing is left open twice.

    model.path = "org/name" ─pinned─▶ "org/name@COMMIT"   config.toml and checkpoints: what a resume begins with
                                         └─local─▶ ".../snapshots/COMMIT"    what executors are given

Only the process that starts a run asks the Hub, once; executors get folders. A folder's name says nothing about what
lies in it. The policy's own states are in checkpoints; a reference, a reward model or a judge has none there, so another
one under the same path would go unnoticed and change every bit after it: ``RUN/models.json`` says what they were.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from llamarl.checkpoint.snapshot import canonical_json, checksum_bytes, checksum_file
from llamarl.config import RunConfig, to_plain, validate
from llamarl.environments.factory import make_task, with_preset
from llamarl.environments.items import local_data
from llamarl.errors import ConfigError, FileError
from llamarl.executors.base import ExecutorSpec
from llamarl.models.folders import companion_files, local_model_path, resolve_model_path, split_revision
from llamarl.models.precision import num_parameters, resolve_precision
from llamarl.observability.rollouts import rollouts_in, tick_files
from llamarl.observability.writing import replace_file
from llamarl.plural import plural
from llamarl.reading import read_object
from llamarl.roles import MODEL_SECTIONS, present_roles, with_settings
from llamarl.settings.engine import CPU_CACHE_BYTES
from llamarl.settings.environments import TaskConfig
from llamarl.settings.trainer import MICROBATCH_TOKENS, cpu_microbatch_tokens

__all__ = [
    "MODELS_FILE",
    "Machine",
    "changed_files",
    "fetch_weights",
    "fix_end_of_decay",
    "frozen_paths",
    "local",
    "model_checksum",
    "pinned",
    "record_models",
    "refuse_other_models",
    "settle_on",
    "settle_recipe",
    "with_num_ticks",
    "with_sizes",
]

_Task = TypeVar("_Task", bound=TaskConfig)
_Rename = Callable[[str, str], str]
"""(name on the Hub, folder of this machine) -> what the configuration then says."""

MODELS_FILE = "models.json"
"""Key of the recipe -> {"path": folder, "xxh3_128": of the files that are read}."""


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
    config = resolve_precision(_with_devices(config, machine), machine.processor)
    return with_sizes(_with_adapted_layers(config), machine)


def with_num_ticks(config: RunConfig) -> RunConfig:
    """``run.epochs`` as ``run.num_ticks``.

    Raises:
        ConfigError: The task makes its questions itself, so that no pass over them ends.
    """
    if not config.run.epochs:
        return config
    if config.task.rollouts:
        from llamarl.executors.demonstrations import num_training_rows  # which imports torch

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
    """Settle where a falling rate ends that ``config`` leaves open: where that of ``begun`` does, if it
    falls, or with the run that it describes."""
    optimizer = config.optimizer
    if "constant" in (optimizer.schedule, begun.optimizer.schedule) or optimizer.decay_ticks:
        return config
    ends = begun.optimizer.decay_ticks or begun.run.num_ticks
    return dataclasses.replace(config, optimizer=dataclasses.replace(optimizer, decay_ticks=ends))


def _with_devices(config: RunConfig, machine: Machine) -> RunConfig:
    """A device that was asked for stays as it was asked for: another resume finds it so."""
    placed = {spec.name: spec for spec in machine.executors}
    used = {}
    for role in (role for role in present_roles(config) if role.section):
        spec, asked = placed[role.name], role.settings(config).device
        found = "cuda" if spec.device.startswith("cuda") else "cpu"
        used[role.name] = {"threads": spec.threads, "device": found if asked == "auto" else asked}
    return with_settings(config, used)


def with_sizes(config: RunConfig, machine: Machine) -> RunConfig:
    """The small ones on CPUs and where a GPU's memory is not known, else what the GPUs hold."""
    trainer, generator, known = config.trainer, config.generator, bool(machine.gpu_bytes)
    engine = dataclasses.replace(
        generator.engine,
        block_size=generator.engine.block_size_on(generator.device),
        kv_cache_bytes=generator.engine.kv_cache_bytes or (0 if known else CPU_CACHE_BYTES),
    )
    tokens = trainer.max_tokens_per_microbatch
    if not tokens and not known:
        on_cpu = trainer.device.startswith("cpu")
        tokens = cpu_microbatch_tokens(num_parameters(config.model.path)) if on_cpu else MICROBATCH_TOKENS
    trainer = dataclasses.replace(
        trainer, share_prompts=trainer.shares_prompts(trainer.device), max_tokens_per_microbatch=tokens
    )
    config = dataclasses.replace(config, trainer=trainer, generator=dataclasses.replace(generator, engine=engine))
    if not known:
        return config
    from llamarl.controller.device_memory import fit_sizes

    return fit_sizes(config, machine.executors, machine.gpu_bytes, machine.in_turn)


def _with_adapted_layers(config: RunConfig) -> RunConfig:
    if not config.lora.rank or config.lora.targets:
        return config
    from llamarl.models.adapters import with_targets

    lora = with_targets(config.lora, resolve_model_path(config.model.path))
    return dataclasses.replace(config, lora=lora)


def pinned(config: RunConfig) -> RunConfig:
    """``config`` with the commit of each model and data set of the Hub, and with the data that a
    task of this package stands for; without weights yet.

    Raises:
        ModelError, DataError: As ``models.folders.resolve_model_path`` and ``environments.items.local_data``.
    """

    def with_commit(named: str, folder: str) -> str:
        return f"{split_revision(named)[0]}@{Path(folder).name}"

    return _with_models(_with_data(config, with_commit), with_commit, weights=False)


def local(config: RunConfig) -> RunConfig:
    """``config`` with a folder of this machine for each model and data set of the Hub.

    Args:
        config: As ``pinned`` gave it.
    """

    def as_folder(named: str, folder: str) -> str:
        return folder

    return _with_models(_with_data(config, as_folder), as_folder, weights=False)


def fetch_weights(config: RunConfig) -> None:
    """Have the weights of each model of the Hub here.

    Args:
        config: As ``pinned`` gave it.

    Raises:
        ModelError: As ``models.folders.resolve_model_path``.
    """
    _with_models(config, lambda named, folder: named, weights=True)


def _with_data(config: RunConfig, rename: _Rename) -> RunConfig:
    """Rename the tables of the tasks that are of the Hub."""
    mixture = tuple(_task_with_data(task, rename, f"task.mixture.{task.title}") for task in config.task.mixture)
    task = _task_with_data(dataclasses.replace(config.task, mixture=mixture), rename, "task")
    return dataclasses.replace(config, task=task)


def _task_with_data(task: _Task, rename: _Rename, section: str) -> _Task:
    task = with_preset(task)
    for key in ("data", "eval_data"):
        named = getattr(task, key)
        if named and (found := local_data(named, f"{section}.{key}")) != named:
            task = dataclasses.replace(task, **{key: rename(named, found)})  # type: ignore[arg-type]
    return task


def _with_models(config: RunConfig, rename: _Rename, *, weights: bool) -> RunConfig:
    """Rename the models that are of the Hub."""
    code = config.model.trust_remote_code

    def renamed(key: str, path: str) -> str:
        found = local_model_path(path, key=key, weights=weights, code=code)
        return path if found == path else rename(path, found)

    for key in sorted({role.model.key for role in present_roles(config) if role.model}):
        section = key.partition(".")[0]
        model = getattr(config, section)
        if model.path:
            new = dataclasses.replace(model, path=renamed(key, model.path))
            config = dataclasses.replace(config, **{section: new})
    for name, section in [(name, section) for name in config.executors for section in MODEL_SECTIONS]:
        own = config.executors[name]
        given = own.settings.get(section, {})
        if given.get("path"):
            path = renamed(f"executors.{name}.settings.{section}.path", given["path"])
            settings = {**own.settings, section: {**given, "path": path}}
            executors = {**config.executors, name: dataclasses.replace(own, settings=settings)}
            config = dataclasses.replace(config, executors=executors)
    return config


def frozen_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Key of the recipe and path, of every model that never learns; of these is the policy's, where adapters learn in its
    place or a reference begins with it."""
    for role in present_roles(config):
        if role.model and not role.model.trained and role.model.named_itself(config):
            yield role.model.key, role.model.path(config)
        elif role.model and role.model.key == "reference.path" and not config.teaches_itself:
            yield "model.path", config.model.path
    if config.lora.rank:
        yield "model.path", config.model.path
    for name, own in config.executors.items():
        for section in MODEL_SECTIONS:
            if path := own.settings.get(section, {}).get("path"):
                yield f"executors.{name}.settings.{section}.path", str(path)


def model_checksum(folder: Path) -> str:
    """Of the configuration, the weights and the tokenizer in a model's folder: names and contents."""
    files = {folder / "config.json", *folder.glob("*.safetensors"), *companion_files(folder)}
    found = {file.name: checksum_file(file)[1] for file in sorted(files)}
    return checksum_bytes(canonical_json(found))


def record_models(config: RunConfig, run_dir: Path) -> None:
    """Write down which frozen models and data files a run that begins now reads; nothing where it reads none.

    Args:
        config: With models by folders.
    """
    if found := _facts(config):
        replace_file(run_dir / MODELS_FILE, canonical_json(found))


def refuse_other_models(config: RunConfig, run_dir: Path) -> None:
    """Refuse a model or a data file that is not the one that the run in ``run_dir`` began with.

    Args:
        config: Of the run as it is to go on, with models by folders.

    Raises:
        ConfigError: It names each of them.
    """
    if found := changed_files(config, run_dir):
        raise ConfigError(
            f"--resume: {run_dir} would not go on bit for bit:\n"
            + "\n".join(f"  - {sentence}" for sentence in found.values())
            + "\nPut the former files back, or begin a "
            f"new run that goes on from this one's last checkpoint: llamarl train --resume {run_dir} --fork NEW"
        )


def changed_files(config: RunConfig, run_dir: Path) -> dict[str, str]:
    """Keys of frozen models and data files that are not what they were when the run in ``run_dir`` began, each with a
    sentence that says so. Of a model of the Hub whose weights are not here yet nothing is said: its commit is named.

    Raises:
        ConfigError: What was written down then cannot be read.
    """
    file = run_dir / MODELS_FILE
    if not file.is_file():
        return {}
    try:
        begun: Mapping[str, Any] = read_object(file)
        had = {key: (str(facts["path"]), str(facts["xxh3_128"])) for key, facts in begun.items()}
    except (FileError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} does not say which models the run read: {error}") from error
    now = _facts(config)
    return {
        key: f"{key}: {now[key]['path']} is not what {path} was when the run began (xxh3_128 {checksum} then, "
        f"{now[key]['xxh3_128']} now)"
        for key, (path, checksum) in had.items()
        if key in now and now[key]["xxh3_128"] != checksum
    }


def _facts(config: RunConfig) -> dict[str, dict[str, str]]:
    folders = {key: resolve_model_path(path, key=key) for key, path in frozen_paths(config)}
    here = {folder for folder in folders.values() if any(folder.glob("*.safetensors"))}  # not those yet to be fetched
    sums = {folder: model_checksum(folder) for folder in here}
    found = {key: (folder, sums[folder]) for key, folder in folders.items() if folder in here}
    found |= {key: (file, checksum_file(file)[1]) for key, file in _data_files(config)}
    folder = Path(config.task.rollouts).expanduser()
    if config.task.rollouts and (files := tick_files(rollouts_in(folder))):
        contents = {file.name: checksum_file(file)[1] for _, file in files}
        found["task.rollouts"] = folder, checksum_bytes(canonical_json(contents))
    return {key: {"path": str(path), "xxh3_128": checksum} for key, (path, checksum) in found.items()}


def _data_files(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Key of the recipe, and the file that it names, of every task whose data are a file here."""
    for label, task in config.task.by_label.items():
        for name in ("data", "eval_data"):
            file = Path(getattr(task, name, "")).expanduser()
            if file.is_file():
                yield f"task.{label}.{name}" if label else f"task.{name}", file
