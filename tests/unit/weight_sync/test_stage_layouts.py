"""What stages hold by name, against the models that are really cut."""

from __future__ import annotations

import pytest
from test_random_layouts import plan
from tiny_models import tiny_config, tiny_model

from llamarl.models.parallel import Cut, ParallelLayout, ParameterShard, shard_box
from llamarl.models.stages import cut_into_stage
from llamarl.weight_sync.layout import MeshLayout, Shard
from llamarl.weight_sync.model_layouts import holding_stages, layout_of_shards, model_parameters


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])  # tied, not tied, tied with norms on both sides
def test_names_of_each_stage_are_those_of_the_model_cut(family: str) -> None:
    parameters = model_parameters({**tiny_config(family).to_dict()})
    for num_stages in (1, 2, 3):
        holding = holding_stages(parameters, num_stages)
        for index in range(num_stages):
            model = tiny_model(family, "llamarl_packed")
            cut_into_stage(model, index, num_stages)
            names = {name for name in parameters if index in holding.get(name, (0,))}
            assert names == {name for name, _ in model.named_parameters()}


def test_each_part_travels_once_from_a_stage_that_holds_it() -> None:
    """Two stages x two tensor-parallel ranks to two tensor-parallel ranks, by hand; ``embed`` is tied."""
    trainer = ParallelLayout(fsdp=1, tp=2, pp=2, mesh=None)
    held = {"embed": ((6, 4), (), (0, 1)), "q0": ((4, 4), (Cut("tp", 0),), (0,)), "q1": ((4, 4), (Cut("tp", 0),), (1,))}
    shards = {
        name: ParameterShard(shape, "float32", shard_box(shape, cuts, trainer, 0, stages), cuts, stages)
        for name, (shape, cuts, stages) in held.items()
    }
    source = layout_of_shards(shards, trainer)
    sink = MeshLayout(source.parameters, {"tp": 2}, {"q0": (Shard("tp", 0),), "q1": (Shard("tp", 0),)})
    copies = plan(source, sink)
    assert {(c.parameter, c.box, c.source_rank, c.sink_rank) for c in copies if c.parameter != "embed"} == {
        (name, ((2 * tp, 2 * tp + 2), (0, 4)), 2 * stage + tp, tp)
        for stage, name in enumerate(["q0", "q1"])
        for tp in (0, 1)
    }
    received = [sum(c.nbytes for c in copies if c.sink_rank == rank) for rank in (0, 1)]
    assert received == [4 * (24 + 8 + 8)] * 2  # embed whole, and half of each matrix
