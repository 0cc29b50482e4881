"""One rank of a context-parallel trainer under test: three ticks without a break, then again with a resume before the last.

``main`` runs in processes forked from a server that has imported this module, so that torch is imported once.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
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
    with_reference,
)
from training_fixtures import make_groups

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.models.attention import PackedSequences
from llamarl.models.parallel import make_layout
from llamarl.trainer.config import LoraConfig, OptimizerConfig, TrainerConfig
from llamarl.trainer.context_parallel import ContextRanks, OwnTokens, RowOverRanks
from llamarl.trainer.step import Trainer
from llamarl.types import Group

AXES = ("pp", "fsdp", "cp", "tp")


def sizes_of(named: str) -> dict[str, int]:
    """``1x2x2x1`` -> {"pp": 1, "fsdp": 2, ...}."""
    return dict(zip(AXES, map(int, named.split("x")), strict=True))


def _run(folder: Path, family: str, named: str, *, resumes: bool) -> tuple[Trainer, list[dict[str, float]]]:
    sizes = sizes_of(named)
    trainer = make_trainer(folder, family, **sizes)
    metrics = []
    for tick in range(NUM_TICKS):
        if resumes and tick == NUM_TICKS - 1:
            state = folder / "state" / f"{family}-{named}"
            trainer.save(state)
            trainer = make_trainer(folder, family, **sizes)
            trainer.load(state)
        groups = share(make_groups(seed=tick, **LENGTHS_DIFFER), sizes["fsdp"], trainer.layout.fsdp_rank)
        metrics.append(trainer.train(with_reference(groups, folder / family), tick))
    return trainer, metrics


def _train(folder: Path, family: str, named: str, out: Path, rank: int) -> None:
    trainer, metrics = _run(folder, family, named, resumes=False)
    again, same = _run(folder, family, named, resumes=True)
    assert same == metrics
    for name, tensor in trainer.weights.state().items():
        assert torch.equal(tensor, again.weights.state()[name]), name
    save_file({name: t.contiguous() for name, t in trainer.parameters_for_sync().items()}, out / f"{rank}.safetensors")
    boxes = {name: shard.box for name, shard in trainer.sync_layout().items()}
    (out / f"{rank}.json").write_text(json.dumps({"metrics": metrics, "boxes": boxes}))
    trainer.save(folder / "final" / out.name)


def _two_ticks(folder: Path, family: str, named: str, kind: str) -> list[dict[str, float]]:
    """Of a loss that looks at a sequence as one, whose tokens lie on several ranks; or of adapters."""
    sizes = sizes_of(named)
    trainer = Trainer(
        folder / family,
        TrainerConfig(max_tokens_per_microbatch=48, **sizes),
        OptimizerConfig(lr=1e-3),
        AlgorithmConfig(name="gspo", normalization="sequence") if kind == "sequences" else AlgorithmConfig(),
        temperature=0.9,
        lora=LoraConfig(rank=3, targets=("q_proj", "v_proj", "down_proj")) if kind == "lora" else None,
    )
    ticks = [share(make_groups(seed=k, **LENGTHS_DIFFER), sizes["fsdp"], trainer.layout.fsdp_rank) for k in range(2)]
    return [trainer.train(groups, k) for k, groups in enumerate(ticks)]


def _replay(folder: Path, family: str, named: str) -> list[dict[str, float]]:
    """Two ticks by the experts that the samples name, which are not those that the router would choose."""
    sizes = sizes_of(named)
    trainer = Trainer(
        folder / family,
        TrainerConfig(max_tokens_per_microbatch=48, router="replay", **sizes),
        OptimizerConfig(lr=1e-3),
        AlgorithmConfig(),
        temperature=0.9,
    )
    ticks = [_with_experts(make_groups(seed=k, **LENGTHS_DIFFER), layers=1, experts=4) for k in range(2)]
    return [trainer.train(share(groups, sizes["fsdp"], trainer.layout.fsdp_rank), k) for k, groups in enumerate(ticks)]


def _with_experts(groups: list[Group], *, layers: int, experts: int) -> list[Group]:
    rng = np.random.default_rng(5)

    def chosen(tokens: int) -> Any:
        rows = [[rng.permutation(experts)[:2] for _ in range(layers)] for _ in range(tokens)]
        return np.array(rows, np.uint8).reshape(tokens, layers, 2)

    return [
        dataclasses.replace(
            group,
            prompt_experts=chosen(len(group.prompt.tokens)),
            responses=tuple(dataclasses.replace(r, routed_experts=chosen(len(r.tokens))) for r in group.responses),
        )
        for group in groups
    ]


def _put_together(named: str) -> dict[str, Any]:
    """The row of 7 tokens of which 3 train, all by one rank: what each holds, and what comes out on every rank."""
    context = ContextRanks.of(make_layout(device="cpu", keys=(), **sizes_of(named)))
    assert context is not None
    row = RowOverRanks(PackedSequences.of([0, 4, 7]), context)
    held = row.own(torch.arange(10, 17), fill=-1)
    mine = torch.tensor([2, 0, 1] if context.rank == 1 else [])
    own = OwnTokens(0, 3, mine.long(), context)
    values = torch.tensor([1.5, -torch.inf, 3.0])[mine.long()].requires_grad_()
    whole = own.whole(values)
    (whole[1:].nan_to_num(0.0, neginf=0.0) * torch.tensor([10.0, 100.0])).sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    return {"held": held.tolist(), "whole": whole.tolist(), "gradient": values.grad.tolist()}


def main(rank: int, world: int, folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="Slicing a flattened dim")
    if world > 1:
        join_group(rank, world, f"{folder}/rendezvous{world}")
    for case in cases:
        family, named, kind = case.split(":")
        out = folder / "-".join((family, named) if kind == "train" else (family, named, kind))
        out.mkdir(exist_ok=True)
        if kind == "train":
            _train(folder, family, named, out, rank)
            continue
        sizes = sizes_of(named)
        found: Any
        if kind == "plans":
            found = train_plans(folder, family, **sizes)
        elif kind == "refusals":
            found = refuse_together(folder, **sizes)
        elif kind == "replay":
            found = _replay(folder, family, named)
        elif kind == "parts":
            found = _put_together(named)
        else:
            found = _two_ticks(folder, family, named, kind)
        (out / f"{rank}.json").write_text(json.dumps(found))
    if world > 1:
        dist.destroy_process_group()
