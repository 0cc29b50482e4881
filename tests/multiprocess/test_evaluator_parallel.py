"""An evaluator of several replicas, each on tensor-parallel ranks, against one process: the same tokens, the same verdicts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import join_group, run_ranks

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import load_config
from llamarl.executors import evaluator
from llamarl.executors.base import ExecutorContext

CHANNEL = ChannelSpec(name="eval_weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="evaluator")


def main(rank: int, folder: Path, dp: int, tp: int) -> None:
    torch.set_num_threads(1)
    world = dp * tp
    if world > 1:
        join_group(rank, world, f"{folder}/rendezvous-{dp}x{tp}")
    settings = {
        "run.dir": "unused", "evaluation.dp": dp, "evaluation.tp": tp, "evaluation.num_prompts": 7,
        "evaluation.samples_per_prompt": 2, "generator.sampling.max_new_tokens": 12,
    }  # fmt: skip
    config = load_config(None, [part for key, value in settings.items() for part in (f"--{key}", str(value))])
    played: list[list[int]] = []
    sample = evaluator.sample_groups

    def noted(player, prompts, *args, **kwargs):  # type: ignore[no-untyped-def]
        groups = sample(player, prompts, *args, **kwargs)
        played.extend([g.prompt.index, *(int(t) for r in g.responses for t in r.tokens)] for g in groups)
        return groups

    evaluator.sample_groups = noted
    context = ExecutorContext(
        name="evaluator", rank=rank, num_ranks=world, device="cpu", run_dir=None, seed=0, reads=(CHANNEL,)
    )
    executor = evaluator.EvaluatorExecutor(config, context)
    executor.setup()
    metrics = executor.step(0, {"eval_weights": None}).metrics
    executor.close()
    (folder / f"{dp}x{tp}-{rank}.json").write_text(json.dumps({"metrics": metrics, "played": played}))
    if world > 1:
        dist.destroy_process_group()


SIZES = ((2, 2), pytest.param(3, 1, marks=pytest.mark.long), pytest.param(1, 4, marks=pytest.mark.long))


def _run(folder: Path, dp: int, tp: int) -> list[dict[str, Any]]:
    run_ranks(main, [(rank, folder, dp, tp) for rank in range(dp * tp)], limit_s=120)
    return [json.loads((folder / f"{dp}x{tp}-{rank}.json").read_text()) for rank in range(dp * tp)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run(tmp_path_factory.mktemp("alone"), 1, 1)[0]


@pytest.mark.parametrize(("dp", "tp"), SIZES)
def test_replicas_of_tensor_parallel_ranks_say_what_one_process_says(
    alone: dict[str, Any], tmp_path: Path, dp: int, tp: int
) -> None:
    ranks = _run(tmp_path, dp, tp)
    assert ranks[0]["metrics"] == alone["metrics"]
    assert alone["metrics"]["eval/length_mean"] > 0 and alone["metrics"]["eval/failed"] == 0
    assert not any(rank["metrics"] for rank in ranks[1:])
    assert len(alone["played"]) == 7
    for number, rank in enumerate(ranks):  # every replica's prompts, to the token; by their place
        assert rank["played"] == alone["played"][number // tp :: dp]
