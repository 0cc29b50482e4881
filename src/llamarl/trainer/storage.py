"""The trainer's state on disk: exact snapshots for a resume, Hugging Face folders for everyone else.

A snapshot is one rank's own: ``state.safetensors`` (master weights, moments) and ``state.json`` (counters, layout).
Tensors are stored as they are, so a resume gives the same bits.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from llamarl.errors import CheckpointError
from llamarl.models.folders import resolve_model_path
from llamarl.models.parallel import ParameterShard

__all__ = ["export_folder", "load_resharded", "load_snapshot", "plan_files", "save_snapshot", "source_dtype"]

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf", "*.pt", "*.pth")


def save_snapshot(folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Write one rank's state into an existing folder."""
    save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, folder / "state.safetensors")
    (folder / "state.json").write_text(json.dumps(values, indent=1), encoding="utf-8")


def load_snapshot(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what ``save_snapshot`` wrote.

    Raises:
        CheckpointError: A file is missing or unreadable.
    """
    try:
        values = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return load_file(folder / "state.safetensors"), values
    except (OSError, ValueError) as error:
        raise CheckpointError(f"trainer state in {folder} cannot be read: {error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"trainer state in {folder} is torn: {error}") from error


def load_resharded(
    folders: Sequence[Path], shards: Mapping[str, ParameterShard]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's part of a state that ranks of *another* layout saved; reads only the slices that it needs.

    Args:
        folders: One a saved rank, in any order.
        shards: What this rank holds.

    Raises:
        CheckpointError: A file is missing or torn, or the folders together do not hold all of a parameter.
    """
    tensors: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    values: dict[str, Any] = {}
    for folder in folders:
        try:
            values = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            with safe_open(folder / "state.safetensors", framework="pt") as file:
                for key in file.keys():
                    kind, _, name = key.partition("/")
                    if name not in shards:
                        raise CheckpointError(f"trainer state in {folder} is of another model: it holds {name}")
                    if kind == "step":
                        tensors[key] = file.get_tensor(key)
                        continue
                    mine, theirs = shards[name].box, values["boxes"][name]
                    both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(mine, theirs, strict=True)]
                    if any(start >= stop for start, stop in both):
                        continue
                    part = file.get_slice(key)[
                        tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, theirs, strict=True))
                    ]
                    if key not in tensors:
                        tensors[key] = part.new_full([stop - start for start, stop in mine], float("nan"))
                        filled[key] = 0
                    where = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, mine, strict=True))
                    target = tensors[key][where]
                    filled[key] += int(torch.isnan(target).sum())
                    target.copy_(part)
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"trainer state in {folder} cannot be read: {error}") from error
    for name, shard in shards.items():
        needed = math.prod(stop - start for start, stop in shard.box)
        if needed and filled.get(f"weight/{name}", 0) < needed:
            raise CheckpointError(f"the folders {', '.join(map(str, folders))} do not hold all of {name}")
        if not needed:
            for kind in sorted({key.partition("/")[0] for key in filled}):
                tensors[f"{kind}/{name}"] = torch.empty([stop - start for start, stop in shard.box])
    return tensors, values


def source_dtype(model_path: str | Path) -> torch.dtype:
    """Precision in which most of a model folder's tensors are stored; float32 where it has no safetensors."""
    counts: dict[str, int] = {}
    for file in sorted(resolve_model_path(model_path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                dtype = tensors.get_slice(name).get_dtype()
                counts[dtype] = counts.get(dtype, 0) + 1
    most = max(counts, key=lambda dtype: (counts[dtype], dtype), default="F32")
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(most, torch.float32)


def plan_files(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
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


def export_folder(
    folder: Path,
    model: PreTrainedModel,
    weights: Iterator[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    source: str | Path,
    dtype: torch.dtype,
    max_file_bytes: int = 4 << 30,
) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads: weights, config, tokenizer files.

    Weights are taken one by one and leave memory with their file, so no more than one file is held at once.

    Args:
        model: The architecture; gives the config.
        weights: Whole parameters by name, tied ones once, in the order of ``shapes``.
        shapes: Of all parameters.
        source: Folder of the initial model; its tokenizer and generation files are copied.
        max_file_bytes: Size at which a new weights file is begun.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(resolve_model_path(source).iterdir()):
        if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHT_FILES):
            shutil.copyfile(file, folder / file.name)
    model.config.save_pretrained(folder)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config |= {"dtype": str(dtype).removeprefix("torch."), "architectures": [type(model).__name__]}
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    files = plan_files(sizes, max_file_bytes)
    index = {}
    for number, names in enumerate(files, start=1):
        file_name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {}
        for expected in names:
            name, weight = next(weights)
            assert name == expected and tuple(weight.shape) == shapes[name], f"{name}: expected {expected}"
            tensors[name] = weight.detach().to(dtype).contiguous()
            index[name] = file_name
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
    if len(files) > 1:
        contents = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
