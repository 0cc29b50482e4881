"""What stages hold by name, against the models that are really cut."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
from tiny_models import tiny_config, tiny_model

from llamarl.models.stages import cut_into_stage
from llamarl.weight_sync.model_layouts import model_parameters
from llamarl.weight_sync.stage_layouts import stage_parameters


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])  # tied, not tied, tied with norms on both sides
def test_names_of_each_stage_are_those_of_the_model_cut(family: str) -> None:
    parameters = model_parameters({**tiny_config(family).to_dict()})
    for num_stages in (1, 2, 3):
        for index, stage in enumerate(stage_parameters(parameters, num_stages)):
            model = tiny_model(family, "llamarl_packed")
            cut_into_stage(model, index, num_stages)
            assert set(stage) == {name for name, _ in model.named_parameters()}
            assert set(stage.tp_dims) == set(parameters.tp_dims) & set(stage)
