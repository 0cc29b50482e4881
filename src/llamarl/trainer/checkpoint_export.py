"""A Hugging Face folder from a checkpoint: RUN/model at a run's end, and later by tick, in any precision; in one process
without an optimizer.

    RUN/checkpoints/tick_N/trainer/state ─▶ weights, one at a time ─▶ (+ base, where adapters were trained) ─▶ OUT

What any layout of ranks wrote is read by its global coordinates, so nothing is put together in memory, and ranks need no
way of their own to bring whole weights to one of them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from llamarl.config import RunConfig
from llamarl.data.turn_template import TurnTemplate
from llamarl.errors import CheckpointError, ModelError
from llamarl.models.adapters import adapter_shapes, merged, whole_shards, write_adapter_folder
from llamarl.models.attention import PACKED_ATTENTION
from llamarl.models.exported import ExportFacts, write_export
from llamarl.models.folders import companion_files, resolve_model_path
from llamarl.models.loading import load_model, load_tokenizer
from llamarl.models.parallel import ParameterShard
from llamarl.models.precision import resolve_precision
from llamarl.models.sharded_loading import make_skeleton, read_parts, stored_buffers, where_stored
from llamarl.models.value import value_skeleton
from llamarl.trainer.sharded_state import read_state, read_tensors

__all__ = ["export_checkpoint", "write_adapter", "write_critic"]

_FILE_BYTES = 4 << 30
"""Size at which a new file of weights is begun."""


def export_checkpoint(
    checkpoint: Path, config: RunConfig, out: Path, *, export_dtype: str | None = None, adapter: bool = False
) -> ExportFacts:
    """Write the policy of a checkpoint as a Hugging Face folder, adapters merged.

    Args:
        checkpoint: ``RUN/checkpoints/tick_N``, proved.
        config: The run's.
        out: An empty folder, or one to be made.
        export_dtype: None: that in which generators computed.
        adapter: Write the adapters of a LoRA run alone.

    Raises:
        CheckpointError: The trainer's state cannot be read, or is of another model.
        ModelError: The run's base model is gone, or a weight is too large for the precision.
    """
    state = checkpoint / "trainer" / "state"
    config = resolve_precision(config)
    served, lora = config.generator.served_dtype, config.lora
    model = make_skeleton(config.model.path, attention=PACKED_ATTENTION)
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    trained = adapter_shapes(shapes, rank=lora.rank, targets=lora.targets) if lora.rank else shapes
    version = _count(state, trained, "policy_version")
    if adapter:
        tensors = dict(_stored(state, trained))
        base = resolve_model_path(config.model.path).resolve()
        write_adapter_folder(out, tensors, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, base=base)
        facts = ExportFacts(policy_version=version, dtype="float32", served_dtype=served)
        write_export(out, facts)
        return facts
    dtype: torch.dtype = getattr(torch, export_dtype or served)
    weights = _merged(config, model, dict(_stored(state, trained))) if lora.rank else _stored(state, shapes)
    _export_folder(out, model, weights, shapes, source=config.model.path, dtype=dtype)
    _name_ends(out, config)
    facts = ExportFacts(policy_version=version, dtype=str(dtype).removeprefix("torch."), served_dtype=served)
    write_export(out, facts)
    return facts


def _name_ends(folder: Path, config: RunConfig) -> None:
    """Add the tokens at which responses ended, or with which rows ended a turn, to those that the folder names: a base
    model's files name the end of the text alone, and whoever generates would go on past the turn."""
    ends = list(config.generator.sampling.stop_token_ids)
    if config.algorithm.imitates and not config.task.rollouts:
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        end = TurnTemplate(tokenizer, config.data).end_token
        ends += [] if end is None else [end]
    file = folder / "generation_config.json"
    values = json.loads(file.read_bytes()) if file.is_file() else {}
    known = values.get("eos_token_id", json.loads((folder / "config.json").read_bytes()).get("eos_token_id"))
    known = known if isinstance(known, list) else [known] if known is not None else []
    if not set(ends) <= set(known):
        named = list(dict.fromkeys([*known, *ends]))
        file.write_text(json.dumps(values | {"eos_token_id": named}, indent=2) + "\n", encoding="utf-8")


def write_adapter(checkpoint: Path, config: RunConfig, out: Path) -> ExportFacts:
    """``export_checkpoint`` of the adapters alone."""
    return export_checkpoint(checkpoint, config, out, adapter=True)


def write_critic(checkpoint: Path, config: RunConfig, out: Path) -> None:
    """Write the value model of a checkpoint as a folder that ``AutoModelForTokenClassification`` loads.

    In float32, of its own weights: fewer bits would round what it has learned away.

    Raises:
        CheckpointError: The critic's state cannot be read.
    """
    state, config = checkpoint / "critic" / "state", resolve_precision(config)
    path = config.critic.path or config.model.path
    model = value_skeleton(path, attention=PACKED_ATTENTION)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    version = _count(state, shapes, "ticks_done")
    _export_folder(out, model, _stored(state, shapes), shapes, source=path, dtype=torch.float32)
    write_export(out, ExportFacts(policy_version=version, dtype="float32", served_dtype=config.trainer.dtype))


def _whole(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ParameterShard]:
    return whole_shards({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


def _count(state: Path, shapes: Mapping[str, tuple[int, ...]], name: str) -> int:
    shards = _whole(shapes)
    _, values = read_state(state, lambda _: shards, only=())
    if not isinstance(count := values.get(name), int):
        raise CheckpointError(f"the state in {state} has no {name.replace('_', ' ')}")
    return count


def _stored(state: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Master weights by name, in order."""
    shards = _whole(shapes)
    for key, tensor in read_tensors(state, lambda _: shards, [f"weight/{name}" for name in shapes]):
        yield key.removeprefix("weight/"), tensor


def _merged(config: RunConfig, model: PreTrainedModel, adapters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Base weights with their adapters, as generators were given them: one at a time, however the folder divides them.

    Args:
        model: The architecture.
    """
    path, lora = config.model.path, config.lora
    # the trainer's base, where it is that which is handed over
    held = getattr(torch, config.trainer.dtype) if lora.hand_over == "merged" else torch.float32
    parts = where_stored(path, model)
    whole = load_model(path, dtype=held) if parts is None else None  # nobody can say what lies where
    threads = torch.get_num_threads()
    torch.set_num_threads(config.trainer.threads or threads)  # the product's bits may depend on them
    try:
        for name, parameter in (model if whole is None else whole).named_parameters():
            base = parameter if parts is None else nn.Parameter(torch.empty(parameter.shape, dtype=held))
            if parts is not None:
                read_parts(path, {name: base}, _whole({name: tuple(base.shape)}), parts)
            yield from merged({name: base.detach()}, adapters, scaling=lora.alpha / lora.rank)
    finally:
        torch.set_num_threads(threads)


def _plan_files(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names in order, filled into files of at most ``max_bytes``; a larger tensor gets a file of its own."""
    files: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not files or used + size > max_bytes:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files


def _export_folder(
    folder: Path,
    model: PreTrainedModel,
    weights: Iterator[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    source: str | Path,
    dtype: torch.dtype,
) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads: weights, config, tokenizer files.

    Weights are taken one by one and leave memory with their file, so no more than one file is held at once.

    Args:
        model: The architecture; gives the config.
        weights: Whole parameters by name, tied ones once, in the order of ``shapes``.
        shapes: Of all parameters.
        source: Folder of the initial model; its tokenizer and generation files are copied.

    Raises:
        ModelError: A tokenizer file of ``source`` is a link that leads out of it, or a finite weight is too large for ``dtype``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in companion_files(resolve_model_path(source)):
        shutil.copyfile(file, folder / file.name)
    model.config.save_pretrained(folder)
    config_file = folder / "config.json"
    config = _with_dtype(json.loads(config_file.read_text(encoding="utf-8")), str(dtype).removeprefix("torch."))
    config |= {"architectures": [type(model).__name__]}
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    mode = stat.S_IMODE(config_file.stat().st_mode)  # what the umask leaves; safetensors makes its files private
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    files = _plan_files(sizes, _FILE_BYTES)
    index: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file_name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {}
        for expected in names:
            name, weight = next(weights)
            assert name == expected and tuple(weight.shape) == shapes[name], f"{name}: expected {expected}"
            tensors[name] = weight.detach().to(dtype).contiguous()
            if dtype == torch.float16 and not torch.equal(tensors[name].isfinite(), weight.isfinite()):
                largest = weight[weight.isfinite()].float().abs().max().item()
                raise ModelError(f"{name} holds {largest:g}, too large for float16: export it in bfloat16 or float32")
        if number == len(files):
            tensors |= {name: buffer.detach().cpu() for name, buffer in stored_buffers(model).items()}
        # By the names and in the pieces of published folders, such as one tensor an expert: for whoever else reads it.
        tensors = {name: t.contiguous() for name, t in revert_weight_conversion(model, tensors).items()}
        index |= dict.fromkeys(tensors, file_name)
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        os.chmod(folder / file_name, mode)
    if len(files) > 1:
        contents = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A ``config.json`` whose every entry of a precision, those of its parts too, says ``dtype``: loaders obey it."""
    for value in config.values():
        if isinstance(value, dict) and ({"dtype", "torch_dtype"} & value.keys()):
            _with_dtype(value, dtype)
    config.pop("torch_dtype", None)  # the name of old; two would contradict each other
    config["dtype"] = dtype
    return config
