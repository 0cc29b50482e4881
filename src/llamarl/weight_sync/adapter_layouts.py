"""What tensor parallelism and pipeline stages make of LoRA adapters, from the parameters that they are added to. Pure.

W cut by rows ─▶ B cut by rows, A whole          W cut by columns ─▶ A cut by columns, B whole
W on a stage  ─▶ A and B on that stage
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llamarl.models.adapters import adapter_shapes
from llamarl.weight_sync.layout import ParameterSpec
from llamarl.weight_sync.model_layouts import ModelParameters

__all__ = ["adapter_parameters", "adapter_stages"]


def adapter_parameters(parameters: ModelParameters, *, rank: int, targets: Sequence[str]) -> ModelParameters:
    """The adapters beside a model's parameters, as they are handed over alone: float32.

    Args:
        rank: Of the adapters.
        targets: Names of the layers that have one.
    """
    shapes = adapter_shapes({name: spec.shape for name, spec in parameters.items()}, rank=rank, targets=targets)
    dims: dict[str, int] = {}
    at_most: dict[str, int] = {}
    for name in shapes:
        layer, _, factor = name.rpartition(".lora_")
        cut = parameters.tp_dims.get(f"{layer}.weight")
        if cut == (1 if factor.startswith("A") else 0):
            dims[name] = cut
            if (parts := parameters.at_most.get(f"{layer}.weight")) is not None:
                at_most[name] = parts
    return ModelParameters(
        {name: ParameterSpec(shape, "float32") for name, shape in shapes.items()},
        dims,
        at_most=at_most,
        tp_sizes=parameters.tp_sizes,
    )


def adapter_stages(holding: Mapping[str, tuple[int, ...]], adapters: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Adapter -> the stages that hold it: those of its layer's weight.

    Args:
        holding: Of the model's parameters, as ``stage_layouts.holding_stages`` says; empty with a single stage.
    """
    if not holding:
        return {}
    return {name: holding[f"{name.rpartition('.lora_')[0]}.weight"] for name in adapters}
