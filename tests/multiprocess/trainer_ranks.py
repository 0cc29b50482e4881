"""One rank of a trainer under test: train three ticks in each asked layout, leave weights and metrics in a folder.

``main`` runs in processes forked from a server that has imported this module, so that torch is imported once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_processes import join_group
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit" / "trainer"))
from training_fixtures import make_groups, with_experts
from transformers import AutoModelForCausalLM, PreTrainedModel

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.errors import ModelError, StaleTokenError
from llamarl.trainer import building
from llamarl.trainer.batch import Microbatch
from llamarl.trainer.config import CriticConfig, OptimizerConfig, ReferenceConfig, TrainerConfig
from llamarl.trainer.critic import Critic
from llamarl.trainer.scoring import FrozenScorer
from llamarl.trainer.step import Trainer
from llamarl.types import Group

NUM_TICKS = 3
ALGORITHM = AlgorithmConfig(entropy_coef=0.01, kl_coef=0.01)
GAE = AlgorithmConfig(advantage="gae")
LENGTHS_DIFFER = {"num_groups": 5, "group_size": 3, "max_response": 20}


def share(groups: list[Group], fsdp: int, fsdp_rank: int) -> list[Group]:
    """Uneven on purpose: rank 0 takes one group, the last takes what is left."""
    if fsdp == 1:
        return groups
    return [groups[fsdp_rank]] if fsdp_rank < fsdp - 1 else groups[fsdp - 1 :]


def make_trainer(
    folder: Path, family: str, fsdp: int, tp: int, dtype: str = "float32", *, pp: int = 1, cp: int = 1
) -> Trainer:
    return Trainer(
        folder / family,
        TrainerConfig(
            fsdp=fsdp, tp=tp, pp=pp, cp=cp, dtype=dtype, max_tokens_per_microbatch=48, logprob_chunk_tokens=9,
            activation_checkpointing="selective",
        ),
        OptimizerConfig(lr=1e-3, weight_decay=0.01),
        ALGORITHM,
        temperature=0.9,
    )  # fmt: skip


def make_reference(folder: Path, family: str, fsdp: int, tp: int, dtype: str = "float32") -> FrozenScorer:
    packing = TrainerConfig(max_tokens_per_microbatch=20, logprob_chunk_tokens=9)
    config = ReferenceConfig(fsdp=fsdp, tp=tp, dtype=dtype)
    return FrozenScorer(folder / family, config, ALGORITHM, packing, temperature=0.9)


@functools.cache
def _reference(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@torch.no_grad()
def with_reference(groups: list[Group], model: Path) -> list[Group]:
    """Put beside every response what transformers' own forward of ``model`` says of it, at the policy's temperature."""
    reference = _reference(model)

    def logprobs(group: Group, tokens: np.ndarray) -> np.ndarray:
        row = torch.tensor([*group.prompt.tokens.tolist(), *tokens.tolist()])[None]
        logits = reference(input_ids=row).logits[0, len(group.prompt.tokens) - 1 : -1].float() / 0.9
        return logits.log_softmax(-1).gather(1, row[0, len(group.prompt.tokens) :, None])[:, 0].numpy()

    return [
        dataclasses.replace(
            group,
            responses=tuple(
                dataclasses.replace(r, reference_logprobs=logprobs(group, r.tokens)) for r in group.responses
            ),
        )
        for group in groups
    ]


def run_critic(folder: Path, fsdp: int, tp: int, out: Path, rank: int) -> None:
    """Three ticks of the critic of one family; the last in a fresh one that loaded the state of the one before."""
    config = CriticConfig(fsdp=fsdp, tp=tp, updates_per_tick=2, value_clip=0.1, lr=1e-3)
    as_trainer = TrainerConfig(max_tokens_per_microbatch=40), OptimizerConfig(weight_decay=0.01)
    critic = Critic(folder / "llama", config, GAE, *as_trainer)
    metrics, values = [], []
    for tick in range(NUM_TICKS):
        if tick == NUM_TICKS - 1:
            state = folder / "critic_state" / f"{fsdp}x{tp}"  # one folder of all ranks
            critic.save(state)
            critic = Critic(folder / "llama", config, GAE, *as_trainer)
            critic.load(state)
        groups = share(make_groups(seed=tick, **LENGTHS_DIFFER), fsdp, critic.layout.fsdp_rank)
        valued, row = critic.step(groups, tick)
        metrics.append(row)
        values += [
            [r.prompt_index, r.sample_index, r.values[r.loss_mask].tolist()]
            for g in valued for r in g.responses if r.values is not None
        ]  # fmt: skip
    (out / f"critic-{rank}.json").write_text(json.dumps({"metrics": metrics, "values": values}))
    critic.export(out / "critic")


PLANS: dict[str, dict[str, Any]] = {
    "passes": {"minibatches": 2, "epochs": 2},
}
"""How a tick's batch may be cut into optimizer steps; each is trained in every layout."""


def train_plans(
    folder: Path, family: str, fsdp: int, tp: int, *, pp: int = 1, cp: int = 1
) -> dict[str, list[dict[str, float]]]:
    """Metrics of two ticks under each plan, with a loss that needs the proximal policy."""
    metrics = {}
    for name, plan in PLANS.items():
        trainer = Trainer(
            folder / family,
            TrainerConfig(fsdp=fsdp, tp=tp, pp=pp, cp=cp, max_tokens_per_microbatch=48, **plan),
            OptimizerConfig(lr=1e-3),
            AlgorithmConfig(name="decoupled_ppo"),
            temperature=0.9,
            seed=1,
        )
        ticks = [share(make_groups(seed=k, **LENGTHS_DIFFER), fsdp, trainer.layout.fsdp_rank) for k in range(2)]
        metrics[name] = [trainer.train(groups, k) for k, groups in enumerate(ticks)]
    return metrics


def train_replayed(folder: Path, family: str, fsdp: int, tp: int, *, pp: int = 1) -> list[dict[str, float]]:
    """Metrics of two ticks of a sparse model whose routers choose what the samples say: other experts than they would."""
    trainer = Trainer(
        folder / family,
        TrainerConfig(fsdp=fsdp, tp=tp, pp=pp, max_tokens_per_microbatch=48, router="replay"),
        OptimizerConfig(lr=1e-3),
        AlgorithmConfig(),
        temperature=0.9,
    )
    shape = (trainer.policy.num_sparse_layers, trainer.policy.num_experts, 2)
    ticks = [with_experts(make_groups(seed=k, **LENGTHS_DIFFER), *shape) for k in range(2)]
    return [trainer.train(share(groups, fsdp, trainer.layout.fsdp_rank), k) for k, groups in enumerate(ticks)]


def refuse_together(folder: Path, fsdp: int, tp: int, *, pp: int = 1, cp: int = 1) -> dict[str, Any]:
    """What one data-parallel rank alone sees and all must act on: a loss that is not finite, then a token too old."""
    trainer = Trainer(
        folder / "llama", TrainerConfig(fsdp=fsdp, tp=tp, pp=pp, cp=cp), OptimizerConfig(lr=1e-3), AlgorithmConfig(),
        temperature=0.9, max_staleness=1,
    )  # fmt: skip
    last = trainer.layout.fsdp_rank == fsdp - 1
    groups = share(make_groups(seed=0, **LENGTHS_DIFFER), fsdp, trainer.layout.fsdp_rank)
    trainer.train(groups, 0)
    before = {key: value.clone() for key, value in trainer.weights.state().items()}
    right = trainer.policy.forward

    def with_a_token_of_probability_0(
        microbatch: Microbatch, received: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = right(microbatch, received)
        return logprobs.masked_fill(microbatch.sequence_ids == 0, -math.inf), entropy

    if last and trainer.layout.is_last_stage:
        trainer.policy.forward = with_a_token_of_probability_0  # type: ignore[method-assign]
    skipped = trainer.train(groups, 1)
    trainer.policy.forward = right  # type: ignore[method-assign]
    kept = all(torch.equal(value, before[key]) for key, value in trainer.weights.state().items())
    try:  # the tokens of version 0 are now 2 versions old, and only this rank shows its own
        trainer.train(groups if last else [], 2)
    except StaleTokenError as error:
        return {"skipped": skipped["step/skipped"], "kept": kept, "refused": str(error)}
    raise AssertionError("a stale token was trained")


def _refuse_whole_model(*args: object, **kwargs: object) -> None:
    raise AssertionError("a rank of a mesh asked for the whole model")


def refuse_unknown_logits(folder: Path, world: int) -> None:
    """Qwen3 ignores ``logits_scaling``, the trainer would obey it: on a mesh too it must say so."""
    try:
        Trainer(
            folder / "scaled", TrainerConfig(fsdp=world), OptimizerConfig(lr=1e-3), AlgorithmConfig(), temperature=1.0
        )
    except ModelError as error:
        assert "changes its logits" in str(error), error
    else:
        raise AssertionError("a mesh trained a model whose logits it does not know")


def main(rank: int, world: int, folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    if world > 1:
        join_group(rank, world, f"{folder}/rendezvous{world}")
        assert callable(building.load_model) and callable(
            building.load_value_model
        )  # so that these replace what is called
        building.load_model = building.load_value_model = _refuse_whole_model  # type: ignore[assignment]
        refuse_unknown_logits(folder, world)
    for case in cases:
        family, sizes, dtype = case.split(":")
        fsdp, tp = (int(n) for n in sizes.split("x"))
        if dtype == "refusals":
            (folder / f"refusals-{sizes}-{rank}.json").write_text(json.dumps(refuse_together(folder, fsdp, tp)))
            continue
        if dtype == "plans":
            (folder / f"plans-{sizes}-{rank}.json").write_text(json.dumps(train_plans(folder, family, fsdp, tp)))
            continue
        reference = make_reference(folder, family, fsdp, tp, dtype)
        if dtype != "float32":  # gradients and one step are enough
            trainer = make_trainer(folder, family, fsdp, tp, dtype)
            groups = share(make_groups(seed=0, **LENGTHS_DIFFER), fsdp, trainer.layout.fsdp_rank)
            (folder / f"{dtype}-{fsdp}x{tp}-{rank}.json").write_text(
                json.dumps(trainer.train(reference.score(groups), 0))
            )
            continue
        out = folder / f"{family}-{fsdp}x{tp}"
        trainer = make_trainer(folder, family, fsdp, tp, dtype)
        metrics = []
        for tick in range(NUM_TICKS):
            groups = share(make_groups(seed=tick, **LENGTHS_DIFFER), fsdp, trainer.layout.fsdp_rank)
            if tick == NUM_TICKS - 1:  # go on from a snapshot: the last tick runs in a fresh trainer
                state = folder / "state" / f"{family}-{fsdp}x{tp}"
                trainer.save(state)
                trainer = make_trainer(folder, family, fsdp, tp, dtype)
                trainer.load(state)
            metrics.append(trainer.train(reference.score(groups), tick))
        out.mkdir(exist_ok=True)
        boxes = {name: shard.box for name, shard in trainer.sync_layout().items()}
        save_file({n: t.contiguous() for n, t in trainer.parameters_for_sync().items()}, out / f"{rank}.safetensors")
        (out / f"{rank}.json").write_text(json.dumps({"metrics": metrics, "boxes": boxes}))
        trainer.export(out / "model")
        if family == "llama":
            run_critic(folder, fsdp, tp, out, rank)
        trainer.save(folder / "final" / f"{family}-{fsdp}x{tp}")
    if world > 1:
        dist.destroy_process_group()
