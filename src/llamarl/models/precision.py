"""What ``dtype = "auto"`` stands for: bfloat16 where it is faster, else float32. No torch but for a model's size.
An empty one, the default, is float32 on a processor, also on one with such products, and "auto" on a GPU.

    a processor with products of bfloat16, a model of 20 million parameters or more   bfloat16
    a GPU, such a model                                                               bfloat16
    anything else                                                                     float32

Below that size the products are so short that rounding to bfloat16 costs what it saves. What was
chosen stands in the run's ``config.toml``, so a resume on another machine computes as the run
began.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llamarl.config import RunConfig
from llamarl.determinism import platform_facts
from llamarl.roles import Role, present_roles, with_settings
from llamarl.settings.engine import EngineConfig

if TYPE_CHECKING:
    import torch

__all__ = [
    "BFLOAT16_PAYS_FROM",
    "engine_dtype",
    "has_bfloat16_products",
    "num_parameters",
    "resolve_precision",
    "resolve_dtype",
    "torch_dtype",
]

BFLOAT16_PAYS_FROM = 20_000_000
"""Parameters of a model."""
_OPEN = ("", "auto")
_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def resolve_precision(config: RunConfig, processor: str = "") -> RunConfig:
    """``config`` with what "auto" means for each role that has a model; itself, if nothing is left open.

    Args:
        config: With models as folders, or with names that can be resolved to such.
        processor: As for ``resolve_dtype``.
    """
    changes = {
        role.name: _resolved(role, config, processor)
        for role in present_roles(config)
        if role.model is not None and role.model.uses(config)
    }
    return with_settings(config, {name: change for name, change in changes.items() if change})


def _resolved(role: Role, config: RunConfig, processor: str) -> dict[str, Any]:
    """What "auto" means in the section of a role that has a model."""
    assert role.model is not None
    settings = role.settings(config)
    where = {"device": settings.device, "model": role.model.path(config), "processor": processor}
    found: dict[str, Any] = {}
    if getattr(settings, "dtype", "float32") in _OPEN:
        # a frozen model that is compared with the policy computes as that does
        like = config.trainer if role.name == "reference" else settings
        found["dtype"] = resolve_dtype(like.dtype, **where)
    engine = getattr(settings, "engine", None)
    if not isinstance(engine, EngineConfig):
        return found
    if engine.dtype in _OPEN:
        dtype = engine_dtype(engine.dtype, getattr(settings, "quantization", "none"), **where)
        found["engine"] = dataclasses.replace(engine, dtype=cast(Any, dtype))
    kinds = getattr(settings, "replicas", ())
    if any((kind.dtype or engine.dtype) in _OPEN for kind in kinds):
        found["replicas"] = tuple(
            dataclasses.replace(kind, dtype=engine_dtype(seen.engine.dtype, seen.quantization, **where))
            if (seen := settings.as_of_kind(place)).engine.dtype in _OPEN
            else kind
            for place, kind in enumerate(kinds)
        )
    return found


def resolve_dtype(asked: str, *, device: str, model: str | Path, processor: str = "") -> str:
    """``asked``, or what "auto" means for a model in a folder on a device.

    Args:
        asked: "", "auto", "float32", "bfloat16", ...
        device: "cpu", "cuda", "cuda:1"; "auto" is CUDA where this machine has it.
        model: Hugging Face folder.
        processor: As ``llamarl.determinism`` describes it; empty is this machine's. Of several
            kinds (``joint_facts``) all must have the instructions.
    """
    if asked not in _OPEN:
        return asked
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cpu") and (
        not asked or not has_bfloat16_products(processor or platform_facts()["processor"])
    ):
        return "float32"
    return "bfloat16" if num_parameters(model) >= BFLOAT16_PAYS_FROM else "float32"


def torch_dtype(asked: str, *, device: str, model: str | Path) -> torch.dtype:
    """The type of a configured ``dtype``, what "auto" means here included.

    Args:
        model: Hugging Face folder.
    """
    import torch

    dtype = getattr(torch, resolve_dtype(asked, device=device, model=model))
    assert isinstance(dtype, torch.dtype)
    return dtype


def engine_dtype(asked: str, quantization: str, *, device: str, model: str | Path, processor: str = "") -> str:
    """``resolve_dtype`` of an engine: "auto" leaves what stands around int8 weights in float32, and
    around fp8 in bfloat16."""
    if asked in _OPEN and quantization != "none":
        return "float32" if quantization == "int8" else "bfloat16"
    return resolve_dtype(asked, device=device, model=model, processor=processor)


def has_bfloat16_products(processor: str) -> bool:
    """Whether it multiplies bfloat16 in one instruction. Without, oneDNN converts to float32 and
    back, which is slower."""
    return all(any(name in one.split() for name in _INSTRUCTIONS) for one in processor.split(" and "))


def num_parameters(model: str | Path) -> int:
    """Numbers in a model, tied ones once."""
    from llamarl.models.loading import parameter_shapes

    return sum(math.prod(shape) for shape in parameter_shapes(model).values())
