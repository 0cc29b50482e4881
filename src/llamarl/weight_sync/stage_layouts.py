"""Which of a model's parameters each pipeline stage holds, from their names alone. Pure."""

from __future__ import annotations

import re

from llamarl.models.sizes import layers_of_stages
from llamarl.weight_sync.model_layouts import ModelParameters

__all__ = ["holding_stages", "stage_parameters"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def stage_parameters(parameters: ModelParameters, num_stages: int) -> list[ModelParameters]:
    """The parameters of each stage, cut as ``models.stages`` cuts the decoder: what is named before the layers is the first
    stage's, what is named after them the last one's. With tied ends the embedding, too, is the last one's as well.

    Args:
        parameters: Of the whole model, in its order.

    Raises:
        ValueError: There are fewer layers than stages.
    """
    if num_stages == 1:
        return [parameters]
    names = list(parameters)
    layer = {name: int(found[1]) for name in names if (found := _LAYER.search(name))}
    places = [i for i, name in enumerate(names) if name in layer]
    own = layers_of_stages(max(layer.values(), default=-1) + 1, num_stages)
    before, after = names[: places[0]], names[places[-1] + 1 :]
    tied = [] if any(len(parameters[name].shape) > 1 for name in after) else before
    held = [[name for name in names if name in layer and layer[name] in layers] for layers in own]
    held[0] = before + held[0]
    held[-1] = tied + held[-1] + after
    return [
        parameters.with_specs(
            {name: parameters[name] for name in stage},
            {name: dim for name, dim in parameters.tp_dims.items() if name in stage},
        )
        for stage in held
    ]


def holding_stages(parameters: ModelParameters, num_stages: int) -> dict[str, tuple[int, ...]]:
    """Parameter -> the stages that hold it; empty with a single stage: it holds all.

    Raises:
        ValueError: There are fewer layers than stages.
    """
    held: dict[str, tuple[int, ...]] = {}
    for stage, own in enumerate(stage_parameters(parameters, num_stages) if num_stages > 1 else ()):
        for name in own:
            held[name] = (*held.get(name, ()), stage)
    return held
