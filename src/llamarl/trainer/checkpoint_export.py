"""A Hugging Face folder from a checkpoint: RUN/model at a run's end, and later by tick, in any precision; in one process
without an optimizer.

    RUN/checkpoints/tick_N/trainer/state ─▶ weights, a gigabyte at a time ─▶ (+ base, where adapters were trained) ─▶ OUT

What any layout of ranks wrote is read by its global coordinates, so nothing is put together in memory, and ranks need no
way of their own to bring whole weights to one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llamarl.config import RunConfig
from llamarl.errors import CheckpointError
from llamarl.models.adapters import adapter_shapes, merged, whole_shards, write_adapter_folder
from llamarl.models.attention import PACKED_ATTENTION
from llamarl.models.exported import ExportFacts, write_export
from llamarl.models.folders import resolve_model_path
from llamarl.models.loading import load_model
from llamarl.models.parallel import ParameterShard
from llamarl.models.precision import resolve_precision
from llamarl.models.sharded_loading import make_skeleton, read_parts, where_stored
from llamarl.models.value import value_skeleton
from llamarl.trainer.sharded_state import read_state
from llamarl.trainer.storage import export_folder, plan_files

__all__ = ["export_checkpoint", "write_adapter", "write_critic"]

_READ_BYTES = 1 << 30


def export_checkpoint(
    checkpoint: Path,
    config: RunConfig,
    out: Path,
    *,
    export_dtype: str | None = None,
    adapter: bool = False,
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
        base = str(resolve_model_path(config.model.path).resolve())
        write_adapter_folder(out, tensors, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, base=base)
        facts = ExportFacts(policy_version=version, dtype="float32", served_dtype=served)
        write_export(out, facts)
        return facts
    dtype: torch.dtype = getattr(torch, export_dtype or served)
    weights = _merged(config, model, dict(_stored(state, trained))) if lora.rank else _stored(state, shapes)
    export_folder(out, model, weights, shapes, source=config.model.path, dtype=dtype)
    facts = ExportFacts(policy_version=version, dtype=str(dtype).removeprefix("torch."), served_dtype=served)
    write_export(out, facts)
    return facts


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
    export_folder(out, model, _stored(state, shapes), shapes, source=path, dtype=torch.float32)
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
    sizes = {name: 4 * int(torch.Size(shape).numel()) for name, shape in shapes.items()}
    for names in plan_files(sizes, _READ_BYTES):
        tensors, _ = read_state(state, lambda _: shards, only=[f"weight/{name}" for name in names])
        for name in names:
            yield name, tensors.pop(f"weight/{name}")


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
