"""One rank of a pipelined trainer under test: three ticks without a break, then again with a resume before the last.

``main`` runs in processes forked from a server that has imported this module, so that torch is imported once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import join_group
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit" / "trainer"))
from trainer_ranks import (
    LENGTHS_DIFFER,
    NUM_TICKS,
    make_trainer,
    refuse_together,
    share,
    train_plans,
    train_replayed,
    with_reference,
)
from training_fixtures import make_groups

from llamarl.trainer import building
from llamarl.trainer.step import Trainer


def _refuse_whole_model(*args: object, **kwargs: object) -> None:
    raise AssertionError("a rank of a mesh asked for the whole model")


def run(folder: Path, family: str, sizes: tuple[int, int, int], dtype: str, resumes: bool) -> tuple[Trainer, Any]:
    pp, fsdp, tp = sizes
    trainer = make_trainer(folder, family, fsdp, tp, dtype, pp=pp)
    metrics = []
    for tick in range(NUM_TICKS):
        if resumes and tick == NUM_TICKS - 1:
            state = folder / "state" / "-".join(map(str, (family, *sizes, dtype)))
            trainer.save(state)
            trainer = make_trainer(folder, family, fsdp, tp, dtype, pp=pp)
            trainer.load(state)
        groups = share(make_groups(seed=tick, **LENGTHS_DIFFER), fsdp, trainer.layout.fsdp_rank)
        metrics.append(trainer.train(with_reference(groups, folder / family), tick))
    return trainer, metrics


def main(rank: int, world: int, folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    if world > 1:
        join_group(rank, world, f"{folder}/rendezvous{world}")
        assert callable(building.load_model) and callable(
            building.load_value_model
        )  # so that these replace what is called
        building.load_model = building.load_value_model = _refuse_whole_model  # type: ignore[assignment]
    for case in cases:
        family, named, dtype = case.split(":")
        pp, fsdp, tp = (int(n) for n in named.split("x"))
        out = folder / f"{family}-{named}-{dtype}"
        out.mkdir(exist_ok=True)
        if dtype == "refusals":
            (out / f"{rank}.json").write_text(json.dumps(refuse_together(folder, fsdp, tp, pp=pp)))
            continue
        if dtype == "plans":
            (out / f"{rank}.json").write_text(json.dumps(train_plans(folder, family, fsdp, tp, pp=pp)))
            continue
        if dtype == "replay":
            (out / f"{rank}.json").write_text(json.dumps(train_replayed(folder, family, fsdp, tp, pp=pp)))
            continue
        trainer, metrics = run(folder, family, (pp, fsdp, tp), dtype, resumes=False)
        again, same = run(folder, family, (pp, fsdp, tp), dtype, resumes=True)
        assert same == metrics
        for name, tensor in trainer.weights.state().items():
            assert torch.equal(tensor, again.weights.state()[name]), name
        held = {name: t.contiguous() for name, t in trainer.parameters_for_sync().items()}
        boxes = {name: shard.box for name, shard in trainer.sync_layout().items()}
        save_file(held, out / f"{rank}.safetensors")
        (out / f"{rank}.json").write_text(json.dumps({"metrics": metrics, "boxes": boxes}))
        trainer.export(out / "model")
        trainer.save(folder / "final" / out.name)
    if world > 1:
        dist.destroy_process_group()
