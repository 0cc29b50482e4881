"""One rank of a trainer of adapters under test: two ticks, the last after a resume; what it holds, hands over and exports.

``main`` runs in processes forked from a server that has imported this module, so that torch is imported once.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from trainer_ranks import LENGTHS_DIFFER, NUM_TICKS, join_mesh, share
from training_fixtures import export, make_groups

from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer

RANK, ALPHA = 3, 12.0
"""An odd rank: FSDP2 cuts the rows of A unevenly, and of four ranks one holds none."""
SEED = 7


def sizes_of(named: str) -> dict[str, int]:
    """``1x2x1`` or ``1x2x1x2x2``, of which those left out are 1."""
    sizes = [*map(int, named.split("x")), 1, 1]
    return dict(zip(("pp", "fsdp", "tp", "cp", "ep"), sizes, strict=False))


def make_trainer(folder: Path, family: str, named: str, hand_over: str, dtype: str) -> Trainer:
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    if "moe" not in family:
        targets += ("gate_proj", "up_proj", "down_proj")
    return Trainer(
        folder / family,
        TrainerConfig(
            **sizes_of(named), dtype=dtype, max_tokens_per_microbatch=48, logprob_chunk_tokens=9,
            activation_checkpointing="selective",
        ),
        OptimizerConfig(lr=1e-3, weight_decay=0.01),
        AlgorithmConfig(entropy_coef=0.01),
        temperature=0.9,
        seed=SEED,
        lora=LoraConfig(rank=RANK, alpha=ALPHA, targets=targets, hand_over=hand_over),  # type: ignore[arg-type]
    )  # fmt: skip


def _keep(trainer: Trainer, out: Path, what: str) -> None:
    """What this rank hands over, and which part of each tensor that is."""
    rank = trainer.layout.rank
    tensors = {name: tensor.detach().contiguous() for name, tensor in trainer.parameters_for_sync().items()}
    save_file(tensors, out / f"{what}-{rank}.safetensors")
    boxes = {name: (shard.shape, shard.box) for name, shard in trainer.sync_layout().items()}
    (out / f"{what}-{rank}.json").write_text(json.dumps(boxes))


def main(rank: int, world: int, folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    if world > 1:
        join_mesh(rank, world, folder)
    for case in cases:
        family, named, dtype = case.split(":")
        out = folder / f"{family}-{named}-{dtype}"
        out.mkdir(exist_ok=True)
        trainer = make_trainer(folder, family, named, "adapter", dtype)
        _keep(trainer, out, "first")
        metrics = []
        for tick in range(NUM_TICKS):
            if tick == NUM_TICKS - 1:
                trainer.save(out / "state")
                trainer = make_trainer(folder, family, named, "adapter", dtype)
                trainer.load(out / "state")
            groups = make_groups(seed=tick, **LENGTHS_DIFFER)
            metrics.append(trainer.train(share(groups, trainer.layout.fsdp, trainer.layout.fsdp_rank), tick))
        (out / f"{rank}.json").write_text(json.dumps(metrics))
        _keep(trainer, out, "adapter")
        export(trainer, folder / family, out / "adapter", adapter=True)
        export(trainer, folder / family, out / "model_of_adapter")
        trainer.save(out / "final")
        merged = make_trainer(folder, family, named, "merged", dtype)
        merged.load(out / "final")
        _keep(merged, out, "merged")
        export(merged, folder / family, out / "model")
    if world > 1:
        dist.destroy_process_group()
