"""Load a model over a mesh without any rank holding it whole.

    skeleton (parameters without storage) ─▶ cut by tensor parallelism and FSDP2 ─▶ storage for this rank's parts
                                                              ─▶ each part's slice read from the safetensors files

Every parameter must lie in a safetensors file under its own name, or in pieces as transformers publishes it (one tensor an expert).
``where_stored`` tells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from llamarl.errors import ModelError
from llamarl.models.folders import check_supported, resolve_model_path
from llamarl.models.loading import load_model, load_model_config, use_of
from llamarl.models.parallel import (
    Cut,
    ParallelLayout,
    ParameterShard,
    apply_tensor_parallel,
    local_tensor,
    parameter_shards,
)
from llamarl.models.small_copy import small_model
from llamarl.models.stages import check_stages, cut_into_stage
from llamarl.models.stored_parts import StoredPart, find_parts
from llamarl.reading import read_object

__all__ = [
    "can_stream",
    "give_storage",
    "load_tensor_parallel",
    "make_skeleton",
    "open_tensors",
    "read_parts",
    "skeleton_of",
    "stored_buffers",
    "stored_weights",
    "where_stored",
]


def make_skeleton(path: str | Path, *, attention: str) -> PreTrainedModel:
    """The folder's architecture in eval mode: float32 parameters on the meta device, real buffers, as stored where they are, tied
    weights tied.

    Raises:
        ModelError: The architecture is not supported.
    """
    check_supported(path, use_of(attention))
    return skeleton_of(AutoModelForCausalLM, path, load_model_config(path), attention=attention)


def skeleton_of(kind: Any, path: str | Path, config: PretrainedConfig, *, attention: str) -> PreTrainedModel:
    """The same for a head of another kind.

    Args:
        kind: One of transformers' auto classes.

    Raises:
        ValueError: It has no such model of this architecture.
    """
    with _parameters_without_storage():
        model: PreTrainedModel = kind.from_config(
            config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
        )
    _read_buffers(path, model)
    return model.eval()


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What a folder holds beside parameters, by name: of few architectures, such as the biases of DeepSeek's routers."""
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _read_buffers(path: str | Path, model: nn.Module) -> None:
    buffers = stored_buffers(model)
    files = _files(path) if buffers else {}
    if names := [name for name in buffers if name in files]:
        with stored_weights(path, names) as read:
            for name in names:
                buffers[name].copy_(read(name))


def load_tensor_parallel(
    path: str | Path,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    section: str,
) -> tuple[PreTrainedModel, dict[str, Cut]]:
    """This rank's part of a model that only computes, of its pipeline stage and cut over tensor-parallel ranks, in eval mode; whole
    if there is one rank.

    Args:
        layout: Its data axis counts whole copies (replicas), and so does ``cp``.
        section: Of the configuration, with the keys ``tp`` and ``pp`` of the sizes, to name in errors.

    Returns:
        The model, and parameter name -> how it was cut.

    Raises:
        ModelError: The model cannot be loaded, or not be cut so.
    """
    if layout.tp * layout.pp == 1:
        return load_model(path, dtype=dtype, device=device, attention=attention), {}
    model = make_skeleton(path, attention=attention)
    parts = where_stored(path, model)
    if parts is None:
        model = load_model(path, dtype=dtype, device=device, attention=attention)
    if layout.pp > 1:
        small = small_model(model.config)
        small.set_attn_implementation("llamarl_packed")
        check_stages(small, layout.pp, key=f"{section}.pp")
    cut_into_stage(model, layout.pp_rank, layout.pp, key=f"{section}.pp")
    cuts = apply_tensor_parallel(model, layout, key=f"{section}.tp", training=False)
    if parts is not None:
        parameters = dict(model.named_parameters())
        shards = parameter_shards(parameters, cuts, dataclasses.replace(layout, fsdp=1, cp=1), str(dtype).split(".")[1])
        for parameter in parameters.values():
            parameter.data = parameter.data.to(dtype)  # buffers keep their own precision
        give_storage(model, device)
        read_parts(path, dict(model.named_parameters()), shards, parts)
    return model, cuts


def can_stream(path: str | Path, model: PreTrainedModel) -> bool:
    """Whether no rank needs to read the folder whole."""
    return where_stored(path, model) is not None


def where_stored(
    path: str | Path, model: PreTrainedModel, *, new: Collection[str] = ()
) -> dict[str, list[StoredPart]] | None:
    """Parameter of ``model``, not yet cut -> the tensors of the folder that make it; None where it must be loaded whole.

    Args:
        new: Parameters that begin at 0 where the folder has none of them.
    """
    files = _files(path)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def shape_of(name: str) -> tuple[int, ...]:
            return tuple(_slice_of(name, files, opened, stack).get_shape())

        return find_parts(model, files, shape_of, new)


def _slice_of(name: str, files: Mapping[str, Path], opened: dict[Path, Any], stack: ExitStack) -> Any:
    """A stored tensor of which parts can be read; its file stays open as long as ``stack``.

    Raises:
        ModelError: The file that is said to hold it does not.
    """
    file = files[name]
    if file not in opened:
        opened[file] = stack.enter_context(open_tensors(file))
    try:
        return opened[file].get_slice(name)
    except SafetensorError as error:
        raise ModelError(f"model.path: {file} lacks {name}: {error}") from error


def give_storage(module: nn.Module, device: torch.device) -> None:
    """Allocate, in place, what ``module`` still has on the meta device; values undefined, buffers and ties kept."""
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # keeps Parameter objects, hence ties
    try:
        module.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


@torch.no_grad()
def read_parts(
    path: str | Path,
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, ParameterShard],
    parts: Mapping[str, list[StoredPart]] | None = None,
) -> None:
    """Fill this rank's part of every parameter from the folder, reading only those slices.

    Args:
        parts: As ``where_stored`` gives it, those without any begin at 0; None: each under its own name.

    Raises:
        ModelError: A tensor has another shape than the architecture says.
    """
    files = _files(path)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, parameter in parameters.items():
            shard = shards[name]
            whole = StoredPart(name, tuple((0, size) for size in shard.shape))
            local = local_tensor(parameter)
            if parts is not None and not parts[name]:
                local.zero_()
            for part in [whole] if parts is None else parts[name]:
                shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(part.box, shard.box, strict=True)]
                if any(start >= stop for start, stop in shared):
                    continue
                stored = _slice_of(part.name, files, opened, stack)
                kept = len(stored.get_shape())
                if tuple(stored.get_shape()) != part.shape[len(part.shape) - kept :]:
                    raise ModelError(
                        f"{files[part.name]}: {part.name} has shape {tuple(stored.get_shape())}, expected {part.shape}"
                    )
                there = [slice(a - c, b - c) for (a, b), (c, _) in zip(shared, part.box, strict=True)]
                here = [slice(a - c, b - c) for (a, b), (c, _) in zip(shared, shard.box, strict=True)]
                local[tuple(here)] = stored[tuple(there[len(there) - kept :])].to(local.dtype)


@contextmanager
def stored_weights(path: str | Path, names: Collection[str]) -> Iterator[Callable[[str], Tensor]]:
    """A function that reads one of ``names``, parameters of the folder's model, as it is stored.

    Folders that do not hold every one under its own name are loaded whole, in float32.

    Raises:
        ModelError: The model cannot be loaded.
    """
    files = _files(path)
    if not all(name in files for name in names):
        parameters = dict(load_model(path, dtype=torch.float32).named_parameters())
        yield lambda name: parameters[name].detach()
        return
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def read(name: str) -> Tensor:
            file = files[name]
            if file not in opened:
                opened[file] = stack.enter_context(open_tensors(file))
            try:
                tensor = opened[file].get_tensor(name)
            except SafetensorError as error:
                raise ModelError(f"model.path: {file} lacks {name}: {error}") from error
            assert isinstance(tensor, Tensor)
            return tensor

        yield read


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """A safetensors file, by ``safe_open``.

    Raises:
        ModelError: It is not one.
    """
    try:
        opened = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"model.path: {file} is not a usable safetensors file: {error}") from error
    with opened as tensors:
        yield tensors


def _files(path: str | Path) -> dict[str, Path]:
    """Tensor name -> file that holds it."""
    folder = resolve_model_path(path)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ModelError(f"model.path: {index} has no weight_map of file names")
        return {name: folder / file for name, file in weight_map.items()}
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with open_tensors(file) as tensors:
            found |= {name: file for name in tensors.keys()}
    return found


@contextmanager
def _parameters_without_storage() -> Iterator[None]:
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and param.device.type != "meta":
            self._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
