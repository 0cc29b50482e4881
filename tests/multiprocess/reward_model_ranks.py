"""One rank of a reward model under test: score texts in each asked layout, leave the scores in a folder.

``main`` runs in processes forked from a server that has imported this module, so that torch is imported once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from rank_processes import join_group

from llamarl.trainer import building
from llamarl.trainer.reward_scoring import RewardScorer

VOCABULARY = 61
TEXTS = [
    [[(3 + 5 * g + 7 * t) % VOCABULARY for t in range(4)] + [(1 + r + 3 * t) % VOCABULARY for t in range(2 + 3 * r)]
     for r in range(4)]
    for g in range(5)
]  # fmt: skip
"""Groups of four texts that begin alike."""


def share(fsdp: int, rank: int) -> list[int]:
    """Groups of a rank: the first has most of them, the last only one."""
    return [len(TEXTS) - 1] if rank else list(range(len(TEXTS) - (fsdp > 1)))


def _refuse_whole_model(*args: object, **kwargs: object) -> NoReturn:
    raise AssertionError("a rank of several read the whole model")


def main(rank: int, world: int, folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    if world > 1:
        join_group(rank, world, f"{folder}/rendezvous{world}")
        building.load_reward_model = _refuse_whole_model  # type: ignore[assignment]
    for case in cases:
        family, sizes = case.split(":")
        fsdp, tp = (int(n) for n in sizes.split("x"))
        scorer = RewardScorer(folder / family, fsdp=fsdp, tp=tp, max_tokens=40)
        mine = share(fsdp, scorer.layout.fsdp_rank)
        scores = scorer.score([TEXTS[g] for g in mine])
        nobody_has_any = scorer.score([])
        found = {"groups": mine, "scores": scores, "empty": nobody_has_any}
        (folder / f"{family}-{sizes}-{rank}.json").write_text(json.dumps(found))
    if world > 1:
        dist.destroy_process_group()
