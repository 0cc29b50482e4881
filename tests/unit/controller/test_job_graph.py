"""Which executors a recipe asks for, and how samples travel between them."""

import pytest

from llamarl.channels.base import ChannelKind
from llamarl.config import load_config
from llamarl.controller.graph import llamarl_graph
from llamarl.errors import ConfigError

KL = ["--algorithm.kl_coef", "0.1"]
GAE = ["--algorithm.advantage", "gae"]


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        ([], ["reward scored trainer"]),
        (KL, ["reward scored reference", "reference referenced trainer"]),
        (["--reference.enabled", "true"], ["reward scored reference", "reference referenced trainer"]),
        (GAE, ["reward scored critic", "critic valued trainer"]),
        (KL + GAE, ["reward scored reference", "reference referenced critic", "critic valued trainer"]),
    ],
)
def test_reference_and_critic_stand_between_reward_and_trainer(overrides: list[str], path: list[str]) -> None:
    graph = llamarl_graph(load_config(None, [*overrides, "--schedule.max_staleness", "2"]))  # checked live and bounded
    scatter = [c for c in graph.channels if c.kind is ChannelKind.SCATTER]
    assert [f"{c.source} {c.name} {c.sink}" for c in scatter] == path
    assert all(c.delay == 0 and c.capacity == 3 for c in scatter)  # a checkpoint's cut crosses none of them
    (weights,) = (c for c in graph.channels if c.name == "weights")
    assert (weights.delay, weights.capacity) == (3, 3)


def test_a_policy_that_teaches_itself_comes_to_its_teacher_as_late_as_to_the_generator() -> None:
    taught = ["--algorithm.advantage", "distillation", "--reference.template", "{question}{answer}"]
    graph = llamarl_graph(load_config(None, [*taught, "--schedule.max_staleness", "2", "--evaluation.every", "0"]))
    edges = [(c.name, c.sink, c.delay) for c in graph.channels if c.kind is ChannelKind.WEIGHTS]
    assert edges == [("weights", "generator", 3), ("teacher_weights", "reference", 3)]
    named = llamarl_graph(load_config(None, [*taught, "--reference.path", "teacher"]))
    assert "teacher_weights" not in {c.name for c in named.channels}


def test_ranks_of_a_node_share_a_process_group_and_tensor_parallel_peers_their_samples() -> None:
    sizes = ["--reference.tp", "2", "--critic.fsdp", "2", "--trainer.tp", "2"]
    graph = llamarl_graph(load_config(None, KL + GAE + sizes))
    specs = {e.name: e for e in graph.executors}
    assert {name: specs[name].num_ranks for name in ("reference", "critic", "trainer")} == dict.fromkeys(
        ("reference", "critic", "trainer"), 2
    )
    assert specs["reference"].process_group == specs["critic"].process_group == "gloo"
    replicas = {c.name: c.sink_replicas for c in graph.channels if c.kind is ChannelKind.SCATTER}
    assert replicas == {"scored": 2, "referenced": 1, "valued": 2}


@pytest.mark.parametrize(
    ("reference", "axis", "sharing"), [(3, "pp", (2, 2)), (2, "cp", (4, 1))], ids=["stages", "cut rows"]
)
def test_ranks_of_one_group_that_share_rows_or_stand_in_stages_get_the_same_samples(
    reference: int, axis: str, sharing: tuple[int, int]
) -> None:
    sizes = [f"--reference.fsdp={reference}", "--trainer.fsdp=2", "--trainer.tp=2", f"--trainer.{axis}=2"]
    graph = llamarl_graph(load_config(None, KL + sizes))
    specs = {e.name: (e.num_ranks, e.process_group) for e in graph.executors}
    assert specs["reference"] == (reference, "gloo") and specs["trainer"] == (8, "gloo")
    edges = {c.name: (c.sink_replicas, c.sink_stages) for c in graph.channels if c.kind is ChannelKind.SCATTER}
    assert edges == {"scored": (1, 1), "referenced": sharing}


@pytest.mark.parametrize(("node", "on"), [("reference", KL), ("critic", GAE)])
def test_a_node_with_more_ranks_than_groups_is_refused(node: str, on: list[str]) -> None:
    sizes = [f"--{node}.fsdp", "4", "--schedule.prompts_per_step", "3"]
    with pytest.raises(ConfigError, match=rf"prompts_per_step \(3\) must be >= {node}.fsdp \(4\)"):
        load_config(None, sizes + on)
