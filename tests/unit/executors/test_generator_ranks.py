"""A generator whose model lies on several ranks, as a job: ranks, groups, parts of the weights, and what is refused before a process starts."""

import re

import pytest

from llamarl.config import RunConfig, load_config
from llamarl.controller.graph import llamarl_graph
from llamarl.controller.prepare import plan_run
from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorContext
from llamarl.executors.generator import GeneratorExecutor
from llamarl.executors.generator_ranks import evaluator_weights, generator_weights, replicas_of, why_ranks_unfit
from llamarl.runtime.host_placement import Machine
from llamarl.runtime.placement import place


def _config(*overrides: str) -> RunConfig:
    return load_config(None, ["--run.dir", "unused", *overrides])


def test_replicas_times_tensor_parallel_ranks_are_processes_with_one_group() -> None:
    config = _config("--generator.dp", "2", "--generator.tp", "2", "--generator.device", "cuda")
    generator = llamarl_graph(config).executors[0]
    assert (generator.num_ranks, generator.process_group) == (4, "cpu:gloo,cuda:nccl")
    assert [(replica.first_rank, replica.num_ranks) for replica in replicas_of(config, 4)] == [(0, 2), (2, 2)]
    alone = llamarl_graph(_config("--generator.dp", "2", "--generator.device", "cpu")).executors[0]
    assert (alone.num_ranks, alone.process_group) == (2, "")  # replicas never talk to each other
    placed = place([generator], [Machine("", 8, 4)]).executors[0]
    assert placed.device == "cuda:0,cuda:1,cuda:2,cuda:3"


def test_a_dry_run_lists_every_rank() -> None:
    text = plan_run(_config("--generator.tp", "2", "--generator.device", "cpu"))
    assert [line.split()[:4] for line in text.splitlines() if line.startswith("generator ")] == [
        ["generator", "0", "of", "2"],
        ["generator", "1", "of", "2"],
    ]


def test_adapters_are_cut_as_the_weights_beside_them() -> None:
    sizes = ("--generator.tp", "2", "--evaluation.dp", "2", "--evaluation.tp", "4", "--lora.rank", "3")
    config = _config(
        *sizes, "--lora.hand_over", "adapter", "--lora.targets", '["q_proj", "k_proj", "v_proj", "down_proj"]'
    )
    whole = generator_weights(_config(*sizes))
    generator, evaluator = generator_weights(config), evaluator_weights(config)
    assert whole is not None and generator is not None and evaluator is not None
    layer = "model.layers.1.{}_proj.lora_{}.default.weight".format
    held = [
        {piece.parameter: piece.box for piece in pieces}
        for pieces in map(generator.pieces_of, range(generator.num_ranks))
    ]
    weights = [
        {piece.parameter: piece.box for piece in pieces} for pieces in map(whole.pieces_of, range(whole.num_ranks))
    ]
    assert set(held[0]) == set(held[1]) == set(generator.parameters)
    for name, cut in (("self_attn.q", 0), ("self_attn.v", 0), ("mlp.down", 1)):
        for rank in range(2):
            rows, columns = weights[rank][f"model.layers.1.{name}_proj.weight"]
            assert (rows, columns)[cut] != ((0, 0), (0, 0)) and held[0] != held[1]
            assert held[rank][layer(name, "A")] == ((0, 3), columns)
            assert held[rank][layer(name, "B")] == (rows, (0, 3))
    heads = [
        {piece.parameter: piece.box for piece in pieces}[layer("self_attn.k", "B")]
        for pieces in map(evaluator.pieces_of, range(evaluator.num_ranks))
    ]
    assert heads[0] == heads[1] == heads[4] and heads[2] == heads[3] and heads[0] != heads[2]  # two key-value heads


def test_an_engine_that_runs_on_one_rank_evaluates_in_replicas_alone() -> None:
    with pytest.raises(
        ConfigError, match=r"evaluation.tp is 2, but generator.engine.name is 'vllm'.*raise evaluation.dp"
    ):
        _config("--generator.engine.name", "vllm", "--evaluation.tp", "2")
    graph = llamarl_graph(_config("--evaluation.dp", "3", "--evaluation.device", "cpu"))
    evaluator = next(spec for spec in graph.executors if spec.name == "evaluator")
    assert (evaluator.num_ranks, evaluator.process_group) == (3, "gloo")  # verdicts come together


@pytest.mark.parametrize(
    ("settings", "ranks", "groups", "why"),
    [
        ({}, 3, 6, ""),
        ({"tp": 2}, 4, 6, ""),  # two replicas
        ({"tp": 2, "shards": 4}, 4, 8, ""),  # two, of two shards each
        ({"tp": 2}, 3, 6, r"has 3 ranks, and one replica takes 2 \(generator.tp\)"),
        ({"tp": 4}, 2, 6, "has 2 ranks, and one replica takes 4"),
        ({"shards": 2}, 3, 6, r"has 3 replicas for 2 shards \(generator.shards\)"),
        ({"shards": 4}, 2, 6, r"has 6 groups a tick .*, which do not divide among its 4 shards"),
        ({"tp": 2}, 8, 6, r"has 6 groups a tick .*, which do not divide among its 4 replicas: make them a multiple"),
    ],
)
def test_ranks_that_make_no_whole_replicas_or_no_equal_shares_are_refused_with_what_is_wrong(
    settings: dict[str, int], ranks: int, groups: int, why: str
) -> None:
    words = [word for key, value in settings.items() for word in (f"--generator.{key}", str(value))]
    found = why_ranks_unfit(_config("--schedule.prompts_per_step", "8", *words).generator, ranks, groups)
    assert re.match(why, found) if why else not found, found


def test_a_rank_of_a_further_generator_that_belongs_to_no_replica_is_refused_by_name() -> None:
    config = _config("--generator.tp", "2")
    context = ExecutorContext(name="teacher", rank=2, num_ranks=3, device="cpu", run_dir=None, seed=0)
    with pytest.raises(ConfigError, match="executor 'teacher' has 3 ranks, and one replica takes 2"):
        GeneratorExecutor(config, context)
