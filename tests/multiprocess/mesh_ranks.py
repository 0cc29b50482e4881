"""One rank of a trainer under test on any mesh: three ticks without a break, the same again from a state saved before the last, and the
last from a state that one process saved.

``main`` runs in processes forked from a server that has imported this module, so that torch is imported once.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import join_group
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit" / "trainer"))
from trainer_ranks import LENGTHS_DIFFER, NUM_TICKS, share
from training_fixtures import make_groups

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.trainer import building
from llamarl.trainer.config import OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer

AXES = ("pp", "fsdp", "cp", "tp", "ep")
ALONE = "1x1x1x1x1"


def sizes_of(named: str) -> dict[str, int]:
    return dict(zip(AXES, map(int, named.split("x")), strict=True))


def make_trainer(folder: Path, family: str, named: str) -> Trainer:
    """Uneven micro-batches of shared prompts, half of the layers computed again in the backward pass.

    A gradient that is nothing but the rounding of its sum (1e-8 beside a median of 4e-4) is to make no step of its own: hence AdamW's eps.
    """
    return Trainer(
        folder / family,
        TrainerConfig(
            **sizes_of(named),
            max_tokens_per_microbatch=48,
            logprob_chunk_tokens=9,
            activation_checkpointing="selective",
        ),
        OptimizerConfig(lr=1e-3, weight_decay=0.01, eps=1e-6),
        AlgorithmConfig(entropy_coef=0.01),
        temperature=0.9,
    )


def train(trainer: Trainer, tick: int) -> dict[str, float]:
    groups = make_groups(seed=tick, **LENGTHS_DIFFER)
    return trainer.train(share(groups, trainer.layout.fsdp, trainer.layout.fsdp_rank), tick)


def _refuse_whole_model(*args: object, **kwargs: object) -> None:
    raise AssertionError("a rank of a mesh asked for the whole model")


def _keep(trainer: Trainer, out: Path, what: str, metrics: Any) -> None:
    rank = trainer.layout.rank
    held = {name: t.detach().contiguous() for name, t in trainer.parameters_for_sync().items()}
    boxes = {name: shard.box for name, shard in trainer.sync_layout().items()}
    save_file(held, out / f"{what}-{rank}.safetensors")
    (out / f"{what}-{rank}.json").write_text(json.dumps({"metrics": metrics, "boxes": boxes}))


def main(rank: int, world: int, folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="Slicing a flattened dim")
    if world > 1:
        join_group(rank, world, f"{folder}/rendezvous{world}")
        assert callable(building.load_model) and callable(
            building.load_value_model
        )  # so that these replace what is called
        building.load_model = building.load_value_model = _refuse_whole_model  # type: ignore[assignment]
    for case in cases:
        family, named = case.split(":")
        out = folder / case.replace(":", "-")
        out.mkdir(exist_ok=True)
        trainer = make_trainer(folder, family, named)
        metrics = [train(trainer, tick) for tick in range(NUM_TICKS)]
        _keep(trainer, out, "through", metrics)
        trainer.export(out / "model")
        again = make_trainer(folder, family, named)
        same = [train(again, tick) for tick in range(NUM_TICKS - 1)]
        again.save(out / "state")
        again = make_trainer(folder, family, named)
        again.load(out / "state")
        same.append(train(again, NUM_TICKS - 1))
        assert same == metrics
        for name, tensor in trainer.weights.state().items():
            assert torch.equal(tensor, again.weights.state()[name]), name
        if named != ALONE:
            elsewhere = make_trainer(folder, family, named)
            elsewhere.load(folder / f"{family}-{ALONE}" / "state")
            _keep(elsewhere, out, "from_one", [train(elsewhere, NUM_TICKS - 1)])
    if world > 1:
        dist.destroy_process_group()
