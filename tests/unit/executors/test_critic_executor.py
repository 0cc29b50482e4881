"""The critic as an executor: what its tick hands on."""

from pathlib import Path

import torch
from training_fixtures import make_groups, write_model

from llamarl.config import load_config
from llamarl.controller.graph import llamarl_graph
from llamarl.executors.base import ExecutorContext
from llamarl.executors.critic import CriticExecutor


def test_a_critic_that_diverges_asks_for_the_end_and_its_tick_can_be_saved(tmp_path: Path) -> None:
    path = str(write_model(tmp_path / "model"))
    config = load_config(
        None, ["--algorithm.advantage", "gae", "--trainer.max_skipped_steps", "0", "--critic.path", path]
    )
    graph = llamarl_graph(config)
    ends = {"reads": graph.inputs["critic"], "writes": graph.outputs["critic"]}
    executor = CriticExecutor(
        config, ExecutorContext(name="critic", rank=0, num_ranks=1, device="cpu", run_dir=None, seed=0, **ends)
    )
    executor.setup()
    groups = make_groups(2, 2, failed=False)
    assert not executor.step(0, {"scored": groups}).stop
    executor.critic.weights.tensors["score.bias"].data.fill_(torch.nan)
    result = executor.step(1, {"scored": groups})
    assert result.stop.startswith("critic: tick 1: 1 steps in a row with a non-finite loss or gradient")
    assert [group.prompt.index for group in result.outputs["valued"]] == [0, 1]
    assert result.metrics["critic/skipped"] == 1
    (tmp_path / "rank_0").mkdir()
    executor.save(tmp_path / "rank_0", 1).result()
    executor.load(tmp_path / "rank_0", 1)  # which proves the tick
