"""The policy as a Hugging Face folder, for everyone else. What a resume needs is in ``sharded_state``."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from llamarl.models.folders import resolve_model_path

__all__ = ["export_folder", "plan_files", "source_dtype"]

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf", "*.pt", "*.pth")


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
