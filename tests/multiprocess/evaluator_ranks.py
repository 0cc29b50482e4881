"""One rank of an evaluator under test: an evaluation of version 0, its metrics left in a folder.

``main`` runs in processes forked from a server that has imported this module, so that torch is imported once.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import join_group

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
