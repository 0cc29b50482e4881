"""The policy as a Hugging Face folder, for everyone else. What a resume needs is in ``sharded_state``."""

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
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from llamarl.errors import ModelError
from llamarl.models.folders import companion_files, resolve_model_path
from llamarl.models.sharded_loading import stored_buffers

__all__ = ["export_folder", "plan_files"]

_FILE_BYTES = 4 << 30
"""Size at which a new file of weights is begun."""


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
    files = plan_files(sizes, _FILE_BYTES)
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
