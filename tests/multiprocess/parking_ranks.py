"""One rank of two trainers under test: one moves out between its ticks, the other stays; every bit must agree.

``main`` runs in processes forked from a server that has imported this module, so that torch is imported once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import join_group
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit" / "trainer"))
from training_fixtures import make_groups

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.trainer.config import OptimizerConfig, TrainerConfig
from llamarl.trainer.parking import Parking
from llamarl.trainer.step import Trainer

NUM_TICKS = 3


def _make(folder: Path, fsdp: int, tp: int, dtype: str, offload: bool) -> Trainer:
    return Trainer(
        folder,
        TrainerConfig(fsdp=fsdp, tp=tp, dtype=dtype, offload_optimizer=offload, max_tokens_per_microbatch=48),  # type: ignore[arg-type]
        OptimizerConfig(lr=1e-2),
        AlgorithmConfig(entropy_coef=0.01),
        temperature=0.9,
    )


def _held_bytes(trainer: Trainer) -> int:
    """Of the storages behind parameters (this rank's parts), masters and moments."""
    local = [getattr(p, "_local_tensor", p) for p in trainer.policy.model.parameters()]
    tensors = [*local, *trainer.weights.state().values()]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    bits = ({name: t.detach().reshape(-1).view(torch.uint8) for name, t in side.items()} for side in (one, other))
    ours, theirs = bits
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def compare(folder: Path, fsdp: int, tp: int, dtype: str, offload: bool) -> dict[str, list[object]]:
    stays, parked = (_make(folder, fsdp, tp, dtype, offload) for _ in range(2))
    parked.parking = Parking(torch.device("cpu"), move=True)
    found: dict[str, list[object]] = {"metrics": [], "handed_over": [], "parked": [], "back": []}
    for tick in range(NUM_TICKS):
        groups = make_groups(num_groups=4, group_size=3, seed=tick)[stays.layout.fsdp_rank :: fsdp]
        found["metrics"].append(parked.train(groups, tick) == stays.train(groups, tick))
        before = _held_bytes(parked)
        freed = parked.park()
        found["parked"].append([before, freed, _held_bytes(parked)])
        found["handed_over"].append(_same(parked.parameters_for_sync(), stays.parameters_for_sync()))
        parked.unpark()
        found["back"].append(_same(parked.weights.state(), stays.weights.state()) and _held_bytes(parked) == before)
    return found


def main(rank: int, world: int, folder: Path, cases: list[tuple[int, int, str, bool]]) -> None:
    torch.set_num_threads(1)
    join_group(rank, world, folder / "rendezvous")
    found = [compare(folder / "model", *case) for case in cases]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
