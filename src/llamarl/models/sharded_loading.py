"""Load a model over a mesh without any rank holding it whole.

    skeleton (parameters without storage) ─▶ cut by tensor parallelism and FSDP2 ─▶ storage for this rank's parts
                                                              ─▶ each part's slice read from the safetensors files

Every parameter must lie in a safetensors file under its own name, or in pieces as transformers publishes it::

    model.layers.0.mlp.experts.gate_up_proj [E, 2I, H]  ◀─ ....experts.0.gate_proj.weight [I, H]  rows 0 .. I of expert 0
                                                        ◀─ ....experts.0.up_proj.weight   [I, H]  rows I .. 2I

transformers knows how each architecture is written (its weight conversions); what it does to numbered tensors
says which piece goes where. So each rank reads its own experts, and none the whole.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from llamarl.errors import ModelError
from llamarl.models.folders import check_supported, resolve_model_path
from llamarl.models.loading import load_model, load_model_config, open_tensors, stored_files, use_of
from llamarl.models.parallel import (
    Cut,
    ParallelLayout,
    ParameterShard,
    apply_tensor_parallel,
    local_tensor,
    parameter_shards,
)

__all__ = [
    "StoredPart",
    "give_storage",
    "load_tensor_parallel",
    "make_skeleton",
    "read_parts",
    "skeleton_of",
    "stored_buffers",
    "stored_weights",
    "where_stored",
]


def make_skeleton(path: str | Path, *, attention: str) -> PreTrainedModel:
    """The folder's architecture in eval mode: float32 parameters on the meta device, real buffers,
    as stored where they are, tied weights tied.

    Raises:
        ModelError: The architecture is not supported.
    """
    check_supported(path, use_of(attention))
    model = skeleton_of(AutoModelForCausalLM, path, load_model_config(path), attention=attention)
    with suppress(OSError):  # there is none; what it says of a response's end is not in config.json
        model.generation_config = GenerationConfig.from_pretrained(resolve_model_path(path), local_files_only=True)
    return model


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
    """What a folder holds beside parameters, by name: of few architectures, such as the biases of
    DeepSeek's routers."""
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _read_buffers(path: str | Path, model: nn.Module) -> None:
    buffers = stored_buffers(model)
    files = stored_files(path) if buffers else {}
    if names := [name for name in buffers if name in files]:
        with stored_weights(path, names) as read:
            for name in names:
                buffers[name].copy_(read(name))


def load_tensor_parallel(
    path: str | Path, layout: ParallelLayout, *, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, dict[str, Cut]]:
    """This rank's part of a model that an engine samples from, cut over tensor-parallel ranks, in
    eval mode; whole if there is one rank.

    Args:
        layout: Its data axis counts whole copies (replicas).

    Returns:
        The model, and parameter name -> how it was cut.

    Raises:
        ModelError: The model cannot be loaded, or not be cut so.
    """
    if layout.tp == 1:
        return load_model(path, dtype=dtype, device=device, attention="llamarl_paged"), {}
    model = make_skeleton(path, attention="llamarl_paged")
    parts = where_stored(path, model)
    if parts is None:
        model = load_model(path, dtype=dtype, device=device, attention="llamarl_paged")
    cuts = apply_tensor_parallel(model, layout, key="generator.tp", training=False)
    if parts is not None:
        parameters = dict(model.named_parameters())
        shards = parameter_shards(parameters, cuts, dataclasses.replace(layout, fsdp=1), str(dtype).split(".")[1])
        for parameter in parameters.values():
            parameter.data = parameter.data.to(dtype)  # buffers keep their own precision
        give_storage(model, device)
        read_parts(path, dict(model.named_parameters()), shards, parts)
    return model, cuts


@contextmanager
def _open_folder(files: Mapping[str, Path]) -> Iterator[Callable[[str, bool], Any]]:
    """Give a function ``stored(name, whole)`` that reads a tensor of ``files``, or gives one of
    which parts can be read.

    Raises:
        ModelError: The file that is said to hold it does not.
    """
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def stored(name: str, whole: bool) -> Any:
            file = files[name]
            if file not in opened:
                opened[file] = stack.enter_context(open_tensors(file))
            try:
                return opened[file].get_tensor(name) if whole else opened[file].get_slice(name)
            except SafetensorError as error:
                raise ModelError(f"model.path: {file} lacks {name}: {error}") from error

        yield stored


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
    parts: Mapping[str, list[StoredPart]],
) -> None:
    """Fill this rank's part of every parameter from the folder, reading only those slices.

    Args:
        parts: As ``where_stored`` gives it; those without any begin at 0.

    Raises:
        ModelError: A tensor has another shape than the architecture says.
    """
    files = stored_files(path)
    with _open_folder(files) as open_stored:
        for name, parameter in parameters.items():
            shard = shards[name]
            local = local_tensor(parameter)
            if not parts[name]:
                local.zero_()
            for part in parts[name]:
                shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(part.box, shard.box, strict=True)]
                if any(start >= stop for start, stop in shared):
                    continue
                stored = open_stored(part.name, False)
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
    files = stored_files(path)
    if not all(name in files for name in names):
        parameters = dict(load_model(path, dtype=torch.float32).named_parameters())
        yield lambda name: parameters[name].detach()
        return
    with _open_folder(files) as stored:
        yield lambda name: stored(name, True)


@contextmanager
def _parameters_without_storage() -> Iterator[None]:
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and param.device.type != "meta":
            # with a gradient where the architecture wants none, too, as transformers leaves what it loads: ranks of a
            # mesh and a lone one hold, hand over and save the same
            self._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.is_floating_point())

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


Box = tuple[tuple[int, int], ...]
"""(start, stop) a dimension."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored tensor that is a part of a parameter."""

    name: str
    box: Box
    """Of the parameter. Dimensions that the stored tensor lacks are leading ones of one entry."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)


def where_stored(
    path: str | Path, model: PreTrainedModel, *, new: Collection[str] = ()
) -> dict[str, list[StoredPart]] | None:
    """Parameter of ``model``, not yet cut -> the tensors of the folder that make it; None where it
    must be loaded whole: some parameter is not there as transformers would write it, in pieces that
    are whole experts, or halves of them.

    Args:
        new: Parameters that begin at 0 where the folder has none of them: they have no parts then.
    """
    files = stored_files(path)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = {name: [StoredPart(name, _whole(shape))] for name, shape in shapes.items() if name in files}
    found |= _pieces(model, {name: shape for name, shape in shapes.items() if name not in found})
    with _open_folder(files) as stored:
        for name, shape in shapes.items():
            if name in new and name not in files:
                found[name] = []
                continue
            parts = found.get(name, [])
            if sum(_numel(part.shape) for part in parts) != _numel(shape):
                return None
            if any(part.name not in files for part in parts):
                return None
            if any(not _fits(part, tuple(stored(part.name, False).get_shape())) for part in parts if part.name != name):
                return None
        owner = {parameter: name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if (
                name in files and (tied_to := owner[parameter]) != name
            ):  # of other values, transformers does not tie them
                if not torch.equal(stored(name, True), stored(tied_to, True)):
                    return None
    return found


def _pieces(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[StoredPart]]:
    """Of parameters that are not stored under their own names. Each is stood for by a small tensor
    of numbers: a row an expert, two where its rows may come from two matrices."""
    probes: dict[str, Tensor] = {}
    sizes = []
    for name, shape in shapes.items():
        small = (shape[0], 2, 1) if len(shape) == 3 and shape[1] % 2 == 0 else (1,) * len(shape)
        sizes.append(_numel(small))
        probes[name] = torch.empty(small)
    starts = [0, *accumulate(sizes)]
    for start, (name, probe) in zip(starts, list(probes.items()), strict=False):
        probes[name] = torch.arange(start, start + probe.numel()).view(probe.shape)
    names = list(probes)
    found: dict[str, list[StoredPart]] = {name: [] for name in names}
    for stored, piece in revert_weight_conversion(model, dict(probes)).items():
        numbers = piece.flatten().tolist()
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            continue  # neither whole experts nor halves
        owner = bisect_right(starts, numbers[0]) - 1
        name, first = names[owner], numbers[0] - starts[owner]
        if (box := _box(shapes[name], tuple(probes[name].shape), first, len(numbers))) is not None:
            found[name].append(StoredPart(stored, box))
    return found


def _box(shape: tuple[int, ...], probe: tuple[int, ...], first: int, count: int) -> Box | None:
    """What ``count`` consecutive numbers of a probe stand for, from the ``first`` on; None: nothing rectangular."""
    if count == _numel(probe):
        return _whole(shape)
    expert, row = divmod(first, 2)
    if count > 2 or (count == 2 and row):
        return None
    half = shape[1] // 2
    rows = (0, shape[1]) if count == 2 else (row * half, (row + 1) * half)
    return ((expert, expert + 1), rows, (0, shape[2]))


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _fits(part: StoredPart, stored: tuple[int, ...]) -> bool:
    lacking = len(part.shape) - len(stored)
    return stored == part.shape[lacking:] and all(size == 1 for size in part.shape[:lacking])
