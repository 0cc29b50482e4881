"""What a recipe asks for against model, runtime, processors and packages, before any process starts."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from llamarl.config import RunConfig, read_settings
from llamarl.controller.notices import Questions
from llamarl.controller.run_folder import CONFIG_FILE, refuse_a_run, refuse_if_held
from llamarl.data.mixture import MixedStream
from llamarl.data.prompts import PromptStream, uses_chat_template, with_answer
from llamarl.environments.factory import make_task, task_mistakes
from llamarl.errors import ConfigError, DataError, Mistake, ModelError
from llamarl.executors.recorded import RecordedStream
from llamarl.import_path import check
from llamarl.model_support import Use, text_part, why_unsupported
from llamarl.models.folders import check_supported, companion_files, hub_name, read_model_config, resolve_model_path
from llamarl.models.sizes import check_tensor_parallel_size, experts_of, why_experts_not_spread, why_heads_not_shared
from llamarl.observability.rollouts import ROLLOUTS_FOLDER, rollouts_in
from llamarl.progress import shown
from llamarl.reading import read_object, user_path
from llamarl.roles import MODEL_SECTIONS, ROLES, Role, present_roles
from llamarl.runtime.placement import available_cuda_devices, may_have_gpus
from llamarl.settings.checkpoint import why_no_storage
from llamarl.settings.engine import CPU_CACHE_BYTES
from llamarl.settings.environments import TaskSection
from llamarl.settings.executors import GeneratorConfig
from llamarl.settings.observability import why_no_tracker
from llamarl.types import Prompt

__all__ = [
    "check_architectures",
    "check_engine",
    "check_folder",
    "check_lora",
    "check_models",
    "check_parallel_sizes",
    "check_prompts",
    "check_reward",
    "check_reward_models",
    "find_missing",
]

_CALLED_WITH = {
    "algorithm.name": ("batch", "config"),
    "algorithm.advantage": ("rewards",),
    "observability.sinks": ("run_dir", "config", "resume_after_tick"),
    "factory": ("config", "context"),
}
"""Key of code of the user's own, or the key's last part -> arguments with which it is called."""
_THOUGHTS = 2048
"""Tokens that a model which thinks first may need before its answer."""
_MOST_PROMPTS = 64
"""That are looked at for one of each task with an environment."""


def check_models(config: RunConfig) -> None:
    """Refuse, from the models' ``config.json`` alone, what ``model_support`` says cannot be done with them.

    Raises:
        ModelError: A model that the job needs is missing, or is of an architecture that cannot be used so.
    """
    for role in present_roles(config):
        if role.model is not None:
            for use in role.model.uses(config):
                check_supported(role.model.path(config), use, key=role.model.key)


def check_reward_models(config: RunConfig) -> None:
    """Refuse a reward model that is no sequence-classification model with one label.

    Raises:
        ModelError: It names the key and what the folder holds.
    """
    paths = {"reward_model.path": config.reward_model.path} if config.has_reward_model else {}
    for name, own in config.executors.items():
        if path := own.settings.get("reward_model", {}).get("path"):
            paths[f"executors.{name}.settings.reward_model.path"] = str(path)
    if not paths:
        return
    from llamarl.models.reward_model import check_reward_model

    for key, path in paths.items():
        check_reward_model(path, key=key)


def check_architectures(config: RunConfig) -> None:
    """Refuse a model that has no weights or half a file of them, or of which a small copy is not computed as transformers does.

    Raises:
        ModelError: It names the difference, or the file.
    """
    from llamarl.models.loading import load_model_config, open_tensors, record_of_check, stored_files

    uses: dict[tuple[str, str], set[Use]] = {}
    for role in present_roles(config):
        if role.model is not None:
            uses.setdefault((role.model.path(config), role.model.key), set()).update(role.model.uses(config))
    for (path, key), asked in uses.items():
        generated, trained = "generate" in asked, bool(asked & {"train", "critic"})
        if not generated and not trained:
            continue
        of_hub = hub_name(Path(path)) is not None  # what is not here yet is fetched when the run starts
        files = [file for file in sorted(set(stored_files(path).values())) if file.exists() or not of_hub]
        if not files and not of_hub:
            raise ModelError.at(
                key,
                f": {path} has no weights as safetensors (model.safetensors): others, such as *.bin, are programs to be run and "
                "are not read; convert it (save_pretrained)",
            )
        for file in files:
            with open_tensors(file):  # a download that broke off: its header does not fit its length
                pass
        record = record_of_check(load_model_config(path), generated=generated, trained=trained)
        if not os.path.isfile(record):  # False too where it may not be looked for
            from llamarl.executors.self_check import check_architecture

            check_architecture(path, key=key, generated=generated, trained=trained)


def check_parallel_sizes(config: RunConfig, folder: Path) -> None:
    """Refuse sizes of the executors' meshes that cannot work here.

    CUDA devices are counted by ``runtime.placement``; the ranks of one executor never share one.

    Args:
        folder: Of the policy; reference and critic may name their own.

    Raises:
        ConfigError: The mesh does not fit runtime, processor or model; the message names what would.
        ModelError: A ``tp`` does not divide the model (the message names the sizes that do).
    """
    spread = [role for role in present_roles(config) if role.model and role.sizes]
    for role in spread:
        assert role.model is not None
        path = role.model.path(config)
        for check_size in (_check_tensor_parallel, _check_pipeline, _check_context, _check_experts):
            check_size(role, config, folder if path == config.model.path else path)
    if not ROLES["evaluator"].present(config):  # evaluations are switched on and off, also on a resume
        _check_tensor_parallel(ROLES["evaluator"], config, folder)
    found = [f"{role.section} has {role.num_ranks(config)} ranks" for role in spread if role.num_ranks(config) > 1]
    if found and config.run.runtime == "inline":
        raise ConfigError(
            f"run.runtime 'inline' holds one rank an executor, but {' and '.join(found)}: "
            "set run.runtime to 'local', or their sizes (fsdp, dp, tp, pp, cp) to 1"
        )


def _sizes_of(role: Role, config: RunConfig, name: str) -> dict[str, int]:
    """Key -> size, of a role and of its kinds of replicas, where it is above 1."""
    sizes = {f"{role.section}.{name}": role.size_of(config, (size for size in role.sizes if size == name))}
    kinds = config.generator.replicas if role.name == "generator" and name in role.sizes else ()
    sizes |= {f"generator.replicas.{place}.{name}": getattr(kind, name) for place, kind in enumerate(kinds)}
    return {key: size for key, size in sizes.items() if size > 1}


def _check_tensor_parallel(role: Role, config: RunConfig, folder: Path | str) -> None:
    from llamarl.models.loading import load_model_config

    for key, tp in _sizes_of(role, config, "tp").items():
        if reason := why_unsupported(read_model_config(folder), "tensor_parallel"):
            instead = f"{role.section}.{role.sizes[0]}"
            raise ConfigError(f"{key} = {tp}: {reason}; set {key} to 1 and raise {instead} instead")
        check_tensor_parallel_size(load_model_config(folder), tp, key=key)


def _check_pipeline(role: Role, config: RunConfig, folder: Path | str) -> None:
    for key, pp in _sizes_of(role, config, "pp").items():
        described = read_model_config(folder)
        if reason := why_unsupported(described, "pipeline"):
            raise ConfigError(f"{key} = {pp}: {reason}; set {key} to 1")
        layers = text_part(described).get("num_hidden_layers")
        if isinstance(layers, int) and pp > layers:
            text = f"{key} = {pp} is more than the {layers} layers of this model: each stage needs one; set {key} to at most {layers}"
            raise ConfigError(text)


def _check_context(role: Role, config: RunConfig, folder: Path | str) -> None:
    for key, cp in _sizes_of(role, config, "cp").items():
        heads = text_part(read_model_config(folder)).get("num_attention_heads")
        if isinstance(heads, int) and (reason := why_heads_not_shared(heads, tp=role.size_of(config, ("tp",)), cp=cp)):
            raise ConfigError(f"{key} = {cp}: {reason}")


def _check_experts(role: Role, config: RunConfig, folder: Path | str) -> None:
    if (ep := getattr(role.settings(config), "ep", 1)) == 1:
        return
    experts = experts_of(text_part(read_model_config(folder)))
    if reason := why_experts_not_spread(experts, tp=role.size_of(config, ("tp",)), ep=ep):
        raise ConfigError(f"{role.section}.ep = {ep}: {reason}")


def check_engine(config: RunConfig, sections: Collection[str] | None = None) -> None:
    """Refuse what the generator's engine cannot do here. Loads no model.

    Args:
        sections: Those on whose ``device`` the engine will be; None: the generator's, and the
            evaluation's if there is one.

    Raises:
        ConfigError: The engine is not installed, or cannot quantize so on the generator's or the evaluator's device.
    """
    engine, kind_of_engine = config.generator.engine.name, config.generator.engine.kind
    if kind_of_engine.needs and importlib.util.find_spec(kind_of_engine.needs) is None:
        raise ConfigError(
            f"generator.engine.name is {engine!r}, which is not installed here: {kind_of_engine.install}, "
            "or set generator.engine.name to 'native'"
        )
    if config.generator.engine.by_import_path:
        return
    if sections is None:
        generating = {"generate", "vllm"}
        models = [role for role in present_roles(config) if role.model and not role.model.own_tokens]
        roles = [role for role in models if role.model and generating & {*role.model.uses(config)}]
        sections = [role.section for role in roles]
    devices = {f"{section}.device": getattr(config, section).device for section in sections}
    for key, device in devices.items():
        kind = re.split("[:,]", device)[0]
        if kind == "auto":
            kind = "cuda" if available_cuda_devices() else "cpu"
        if kind_of_engine.native:
            _check_padding(config, key, kind)
        choices = ("none", *kind_of_engine.quantizations.get(kind, ()))
        asked: dict[str, str] = {"generator.quantization": config.generator.quantization}
        if key == "generator.device":
            asked |= {
                f"generator.replicas.{i}.quantization": k.quantization for i, k in enumerate(config.generator.replicas)
            }
        for wanted, quantization in asked.items():
            if quantization and quantization not in choices:
                where = f"{key} = {device!r}" + (f", here {kind}" if device == "auto" else "")
                raise ConfigError.at(
                    wanted,
                    f"is {quantization!r}, which the {engine} engine does not have on {kind} ({where}): "
                    f"use one of {', '.join(choices)}",
                )


def _check_padding(config: RunConfig, key: str, device: str) -> None:
    """Refuse decode steps of fixed shapes where the ranks of an engine cannot have them; the
    model's own reasons come when it is built.

    Args:
        key: Of the engine's device.
        device: Its type.
    """
    mode, generator = config.generator.engine.cuda_graphs, config.generator
    if mode == "auto":
        return
    from llamarl.engine.cuda_graphs import why_layout_unsupported

    for tp in generator.replica_ranks if key == "generator.device" else (config.evaluation.tp,):
        reason = why_layout_unsupported(mode, device=device, num_ranks=tp)
        if reason is not None:
            raise ConfigError(
                f"generator.engine.cuda_graphs is {mode!r}, which cannot be with {key} = {getattr(config, key.split('.')[0]).device!r} "
                f"and these ranks: {reason}; set it to 'auto'"
            )


def _check_cache(config: RunConfig, folder: Path, prompt_tokens: int) -> None:
    """Refuse a KV cache that cannot hold one sequence: ``prompt_tokens`` and the longest response, on one rank.

    Raises:
        ConfigError: It names the bytes that would do.
    """
    for kind in range(max(1, len(config.generator.replicas))):
        own = config.generator.replicas[kind].kv_cache_bytes if config.generator.replicas else 0
        key = f"generator.replicas.{kind}.kv_cache_bytes" if own else "generator.engine.kv_cache_bytes"
        _check_cache_of(config.generator.as_of_kind(kind), key, folder, prompt_tokens, elsewhere=config.hosts.wanted)


def _check_cache_of(generator: GeneratorConfig, key: str, folder: Path, prompt_tokens: int, *, elsewhere: bool) -> None:
    from llamarl.models.loading import cache_shape, load_model_config
    from llamarl.models.precision import engine_dtype

    engine = generator.engine
    if not engine.kind.native:
        return
    layers, heads, head_dim = cache_shape(load_model_config(folder))
    dtype = engine_dtype(engine.dtype, generator.quantization, device=generator.device, model=folder)
    width = 4 if dtype == "float32" else 2
    block_size, cache_bytes = engine.block_size_on(generator.device), engine.kv_cache_bytes
    if not cache_bytes:  # of a GPU it is not known yet
        if generator.device != "cpu" and (elsewhere or may_have_gpus()):
            return
        cache_bytes = CPU_CACHE_BYTES
    block_bytes = 2 * layers * max(1, heads // generator.tp) * head_dim * width * block_size
    new_tokens = generator.sampling.max_new_tokens
    # the prompt's last, partial block lies beside the sequence's own copy of it
    blocks = -(-(prompt_tokens + new_tokens) // block_size) + (prompt_tokens % block_size > 0)
    if blocks * block_bytes > cache_bytes:
        raise ConfigError(
            f"{key} is {cache_bytes}, too few for one sequence: {prompt_tokens} prompt tokens and "
            f"generator.sampling.max_new_tokens {new_tokens} take {blocks} blocks of {block_bytes} bytes; set it to at least "
            f"{blocks * block_bytes} (many times that to decode many at once)"
        )


def check_prompts(config: RunConfig, folder: Path) -> Questions:
    """Make the prompts once: a wrong file, or a prompt that is too long, ends the run before it starts.

    All training prompts of a finite task that the run may ask for, the first tick's of an endless one, and those of evaluations.

    Args:
        folder: Of the model.

    Raises:
        ConfigError, DataError: As ``environments.factory`` and ``data.prompts`` say.
    """
    from llamarl.data.turn_template import TurnTemplate
    from llamarl.environments.episode_pool import EpisodePool
    from llamarl.environments.factory import make_prompt_stream
    from llamarl.executors.demonstrations import make_demonstrations
    from llamarl.models.loading import load_tokenizer

    tokenizer = load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code)
    rows = None if config.samples else make_demonstrations(config, tokenizer)
    most = config.groups_per_tick * (config.run.num_ticks + config.generator.max_segments) * config.data.candidates
    num_prompts = None if config.executors else most  # an executor of the user's own asks for others
    if config.algorithm.imitates:
        assert rows is not None
        if isinstance(rows, PromptStream):
            _check_training_prompts(config, rows, num_prompts)
            if config.evaluation.every and rows.holds_out:
                rows.eval_prompts(config.evaluation.num_prompts)
            _tell_of_lost_roles(config, tokenizer, rows.get(0))
        return _found(rows, rows.demonstration(0).prompt, tokenizer)
    if rows is not None:
        _check_temperature_of_rollouts(config)
    if rows is None or config.evaluation.every and config.evaluation.tp > 1:
        _check_sampled_distribution(config)
    _check_rows_beside(config, tokenizer)
    turns = None
    if uses_chat_template(tokenizer, config.data):
        with contextlib.suppress(DataError):  # of a template that takes one turn alone
            turns = TurnTemplate(tokenizer, config.data)
    _tell_of_thinking(config, tokenizer, begun=turns is not None and turns.opens_thought)
    _tell_of_turns_without_end(config, tokenizer, folder, None if turns is None else turns.end_token)
    with contextlib.ExitStack() as pools:
        environments = None
        if config.task.has_environment:  # begins an episode or two, so that one that never does is found here
            TurnTemplate(tokenizer, config.data)
            environments = pools.enter_context(EpisodePool(_with_one_worker(config.task)))
        stream = make_prompt_stream(config, tokenizer, environments)
        _check_training_prompts(config, stream, num_prompts)
        first = _first_prompts(config, stream)
        for prompt in first:
            if prompt.opening is not None and prompt.opening.failure:
                raise DataError.at("task.environment", f": it did not begin an episode: {prompt.opening.failure}")
        _tell_of_lost_roles(config, tokenizer, first[0])
        _check_cache(config, folder, max(len(prompt.tokens) for prompt in first))
        if config.reference.template:
            _check_shown_answers(config, rows if isinstance(rows, RecordedStream) else stream, tokenizer, num_prompts)
        if config.evaluation.every and environments is None and stream.holds_out:
            stream.eval_prompts(config.evaluation.num_prompts)
        found = _found(stream, first[0], tokenizer)
        return found if rows is None else dataclasses.replace(found, num_training=rows.num_items("train"))


def _check_rows_beside(config: RunConfig, tokenizer: Any) -> None:
    """Check rows to imitate that stand beside what is sampled."""
    from llamarl.executors.demonstrations import make_demonstrations

    for name, own in config.executors.items():
        if name not in ROLES and own.factory == ROLES["demonstrations"].factory:
            beside = make_demonstrations(config.for_executor(name), tokenizer)
            if isinstance(beside, PromptStream):
                _check_training_prompts(config, beside, None)


def _check_training_prompts(config: RunConfig, stream: PromptStream | MixedStream, num_prompts: int | None) -> None:
    """Check what is finite, and show how far that is: a million prompts take minutes."""
    shows = config.observability.console != "none" and stream.num_items("train") is not None
    with shown() if shows else contextlib.nullcontext():
        stream.check_training_prompts(num_prompts)


def _check_shown_answers(
    config: RunConfig, stream: PromptStream | MixedStream | RecordedStream, tokenizer: Any, num_prompts: int | None
) -> None:
    """Refuse prompts with which a teacher cannot be shown the answer: of those that the run may ask for, or of an endless
    task's first tick.

    Raises:
        ConfigError: One leaves its context no room for a response.
        DataError: As ``with_answer``.
    """
    from llamarl.models.loading import context_length

    size = stream.num_items("train")
    count = config.groups_per_tick if size is None else min(size, num_prompts or size)
    prompts = (
        stream.demonstration(i).prompt if isinstance(stream, RecordedStream) else stream.get(i) for i in range(count)
    )
    template, context = config.reference.template, context_length(config.reference.path or config.model.path)
    longest = max(len(with_answer(prompt, template, tokenizer, config.data).tokens) for prompt in prompts)
    if context is not None and longest + config.generator.sampling.max_new_tokens > context:
        text = f"makes a prompt of {longest} tokens, which leaves no room for a response in the teacher's {context}: shorten it"
        raise ConfigError.at("reference.template", text)


def _check_sampled_distribution(config: RunConfig) -> None:
    """Refuse to train on samples of a distribution that the trainer does not compute.

    Raises:
        ConfigError: Unlikely tokens are left out of it, or all but one.
    """
    sampling, group_size = config.generator.sampling, config.generator.group_size
    if sampling.temperature == 0 and group_size > 1:
        raise ConfigError.at(
            "generator.sampling.temperature",
            f"is 0 (greedy), so all responses of a group (group_size {group_size}) are equal and teach nothing: set it to 1.0",
            "generator.group_size",
        )
    for name, everything in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if (value := getattr(sampling, name)) != everything:
            raise ConfigError.at(
                f"generator.sampling.{name}",
                f"is {value:g}: samples would come from the likeliest tokens alone, and the trainer's log-probs are of all "
                "tokens, so that no loss could weigh one by the other, nor do tensor-parallel ranks draw so; leave it out to train "
                "(llamarl eval and generate take it)",
            )


def _check_temperature_of_rollouts(config: RunConfig) -> None:
    """Recorded log-probs are of the distribution that was sampled from, and the policy's are compared with them.

    Raises:
        ConfigError: Samples of another temperature are to be weighed by them.
    """
    place = rollouts_in(user_path(config.task.rollouts, "task.rollouts")).absolute()
    recipe = place.parent / CONFIG_FILE
    if place.name != ROLLOUTS_FOLDER or not recipe.is_file():
        return
    recorded = read_settings(recipe).get("generator", {}).get("sampling", {}).get("temperature", 1.0)
    asked = config.generator.sampling.temperature
    if recorded != asked:
        raise ConfigError.at(
            "generator.sampling.temperature",
            f"is {asked:g}, but {config.task.rollouts} (task.rollouts) was sampled at {recorded:g}, and its log-probs are "
            f"of that temperature: set it to {recorded:g}",
            "task.rollouts",
        )


def _tell_of_lost_roles(config: RunConfig, tokenizer: Any, prompt: Prompt) -> None:
    """A base model without a chat template is given conversations."""
    if (
        "messages" in prompt.metadata
        and config.data.chat_template == "auto"
        and not uses_chat_template(tokenizer, config.data)
    ):
        print(
            "this model has no chat template, so of conversations it sees the words alone, not who says them: put a "
            "chat_template.jinja into its folder, or take a model that has one (data.chat_template = 'none' if so meant)",
            file=sys.stderr,
        )


def _tell_of_thinking(config: RunConfig, tokenizer: Any, *, begun: bool) -> None:
    """A model whose template lets it think first needs many tokens before its answer.

    Args:
        begun: Its prompts end inside of a thought.
    """
    limit, set_by_user = config.generator.sampling.max_new_tokens, config.data.chat_template_kwargs
    if set_by_user and not uses_chat_template(tokenizer, config.data):
        print("data.chat_template_kwargs does nothing: prompts of this model are plain text", file=sys.stderr)
    thinks = uses_chat_template(tokenizer, config.data) and "enable_thinking" in str(tokenizer.chat_template)
    if (begun or thinks and "enable_thinking" not in set_by_user) and limit < _THOUGHTS:
        instead = ", or set data.chat_template_kwargs = { enable_thinking = false }" if thinks else ""
        print(
            f"this model thinks before it answers, as its chat template says, and {limit} tokens "
            f"(generator.sampling.max_new_tokens) may end before its answer: allow some {_THOUGHTS}{instead}",
            file=sys.stderr,
        )


def _tell_of_turns_without_end(config: RunConfig, tokenizer: Any, folder: Path, end: int | None) -> None:
    """A base model may have a chat template, but know the end of the text alone.

    Args:
        end: The token that ends a turn.
    """
    sampling = config.generator.sampling
    file = folder / "generation_config.json"
    own = read_object(file).get("eos_token_id") if file.is_file() else None
    own = text_part(read_model_config(folder)).get("eos_token_id") if own is None else own
    ends = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id, *sampling.stop_token_ids}
    if end is not None and end not in ends and (word := tokenizer.decode([end])) not in sampling.stop_strings:
        print(
            f"the chat template ends a turn with {word!r}, which ends no response of this model: it may write on until "
            f"generator.sampling.max_new_tokens. generator.sampling.stop_token_ids = [{end}] ends responses there",
            file=sys.stderr,
        )


def _found(stream: PromptStream | MixedStream | RecordedStream, first: Prompt, tokenizer: Any) -> Questions:
    return Questions(
        num_training=stream.num_items("train"),
        num_held_out=stream.num_items("eval"),
        first_prompt=tokenizer.decode(first.tokens.tolist(), skip_special_tokens=False),
        first_tokens=len(first.tokens),
    )


def _first_prompts(config: RunConfig, stream: PromptStream | MixedStream) -> list[Prompt]:
    """A tick's; with environments, which may be slow, one of each task that has one."""
    if not config.task.has_environment:
        return [stream.get(index) for index in range(config.groups_per_tick)]
    wanted = {label for label, task in config.task.tasks.items() if task.environment}
    found = [stream.get(0)]
    while wanted - {prompt.task for prompt in found} and len(found) < _MOST_PROMPTS:
        found.append(stream.get(len(found)))
    return found


def check_folder(run_dir: Path) -> None:
    """Refuse a folder in which no run can start. Makes nothing.

    Raises:
        ConfigError: It holds a run, another process writes there, or it cannot be made.
    """
    refuse_if_held(run_dir)
    refuse_a_run(run_dir)
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is not writable" if there.is_dir() else "is no folder"
        raise ConfigError(f"run.dir: cannot make {run_dir}: {there} {why}; choose another --run.dir")


def _why_no_copy(config: RunConfig) -> str:
    """Why a mirror's folder is no place for a copy of the run's folder; empty: it is, or is no folder."""
    scheme, _, place = config.run.mirror.partition("://")
    folder, run_dir = Path(place).resolve(), Path(config.run.dir).expanduser().resolve()
    if scheme == "file" and (folder.is_relative_to(run_dir) or run_dir.is_relative_to(folder)):
        return f"must lie outside of the run's folder, and not around it: {folder}, and the run is {run_dir}"
    return ""


def _with_one_worker(task: TaskSection) -> TaskSection:
    return dataclasses.replace(task, pool=dataclasses.replace(task.pool, num_workers=1))


def check_reward(config: RunConfig) -> None:
    """Make the judge once, in a worker process that may hang or die of it: import the user's reward
    function, try the box that programs run in. Else prove the references.

    Raises:
        DataError: It cannot be imported, or there is no such function or box; or an answer that the
            math judge cannot read.
        ExecutorFailed, DeadlineExceeded: The worker died of it, or did not come back in time.
    """
    tasks = list(config.task.tasks.values()) or [config.task]
    if any(task.judges or task.name == "code" for task in tasks):
        from llamarl.environments.pool import RewardPool

        RewardPool(_with_one_worker(config.task), seed=config.run.seed).close()
    for task in tasks:
        if task.name in ("math", "gsm8k") and not task.judges:
            from llamarl.environments.math import check_references

            check_references(make_task(task, config.run.seed))


def find_missing(config: RunConfig) -> Iterator[Mistake]:
    """What a recipe names and does not find: model folders, data files, the reward function. For ``load_config``."""
    models = [role.model for role in present_roles(config) if role.model]
    trained = {model.key for model in models if model.trained}
    for key, path in {model.key: model.path(config) for model in models}.items():
        try:
            if key == "model.path" or path != config.model.path:
                folder = resolve_model_path(path, key=key, weights=False)
                if key in trained:  # it is written at the end, with these files
                    companion_files(folder, key=key)
        except ModelError as error:
            yield from error.mistakes
    for name in config.executors:
        model, key = config.for_executor(name).model, f"executors.{name}.settings.model.path"
        try:
            if model.path != config.model.path:
                folder = resolve_model_path(model.path, key=key, weights=False)
                check_supported(folder, "generate", key=key)
        except ModelError as error:
            yield from error.mistakes
        for section in MODEL_SECTIONS[1:]:
            given = config.executors[name].settings.get(section, {})
            try:
                if path := given.get("path"):
                    key = f"executors.{name}.settings.{section}.path"
                    resolve_model_path(str(path), key=key, weights=False)
            except ModelError as error:
                yield from error.mistakes
    if config.run.mirror and (why := why_no_storage(config.run.mirror) or _why_no_copy(config)):
        yield Mistake("run.mirror", why)
    for name in config.observability.sinks:
        if why := why_no_tracker(name):
            yield Mistake("observability.sinks", why)
    if config.observability.prometheus_port and importlib.util.find_spec("prometheus_client") is None:
        yield Mistake(
            "observability.prometheus_port",
            "needs the package prometheus_client: pip install 'llamarl[prometheus]', or leave it out",
        )
    if why := config.judge.why_no_key():
        text = f"names {config.judge.api_key_env}, which {why} here: export it, or leave the key out"
        yield Mistake("judge.api_key_env", text)
    yield from task_mistakes(config.task, config.run.seed)
    for key, import_path in config.own_code:
        if not key.startswith("task."):  # of those the task has spoken
            try:
                own = key.rpartition(".settings.")[2]
                check(import_path, key, _CALLED_WITH.get(own) or _CALLED_WITH.get(own.rpartition(".")[2], ()))
            except DataError as error:
                yield from error.mistakes


def check_lora(config: RunConfig) -> None:
    """Refuse adapters that cannot be made. Looks at no weights.

    Raises:
        ConfigError: ``peft`` is not installed, or the model has no layers of the names that shall
            get one; it says which it has.
    """
    if not config.lora.rank:
        return
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("lora.rank > 0 needs the package peft: pip install 'llamarl[lora]', or set lora.rank to 0")
    from llamarl.models.decoder import adaptable_layers
    from llamarl.models.loading import load_model_config

    layers = adaptable_layers(load_model_config(config.model.path))
    if unknown := [name for name in config.lora.targets if name not in layers]:
        raise ConfigError(
            f"lora.targets: {', '.join(unknown)} may have no adapter in this model; set lora.targets = {json.dumps(layers)}, or "
            "some of these, or leave it out for all"
        )
