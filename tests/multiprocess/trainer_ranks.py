"""One rank of a trainer under test on any mesh: what ``CASES`` of ``test_trainer_meshes`` ask for, left in a folder.

``main`` runs in processes forked from a server that has imported this module, so that torch is imported once.
"""

import dataclasses
import functools
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_processes import join_group
from safetensors.torch import save_file
from training_fixtures import VOCABULARY, export, make_groups, with_experts
from transformers import AutoModelForCausalLM, PreTrainedModel

from llamarl.errors import ModelError, StaleTokenError
from llamarl.models.attention import PackedSequences
from llamarl.models.parallel import make_layout
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import CriticConfig, LoraConfig, OptimizerConfig, ReferenceConfig, TrainerConfig
from llamarl.trainer import building
from llamarl.trainer.batch import Microbatch
from llamarl.trainer.context_parallel import ContextRanks, OwnTokens, RowOverRanks
from llamarl.trainer.critic import Critic
from llamarl.trainer.parking import Parking
from llamarl.trainer.policy import TokenScores
from llamarl.trainer.reward_scoring import RewardScorer
from llamarl.trainer.scoring import FrozenScorer
from llamarl.trainer.step import Trainer
from llamarl.types import Group

AXES = ("pp", "fsdp", "cp", "tp", "ep")
ALONE = "1x1x1x1x1"
NUM_TICKS = 2
ALGORITHM = AlgorithmConfig(entropy_coef=0.01, kl_coef=0.01)
ALGORITHM_ALONE = AlgorithmConfig(entropy_coef=0.01)
GAE = AlgorithmConfig(advantage="gae")
TAUGHT = AlgorithmConfig(advantage="distillation", teacher_top_k=20)
LENGTHS_DIFFER = {"num_groups": 5, "group_size": 3, "max_response": 16}

TEXTS = [
    [[(3 + 5 * g + 7 * t) % VOCABULARY for t in range(4)] + [(1 + r + 3 * t) % VOCABULARY for t in range(2 + 3 * r)]
     for r in range(4)]
    for g in range(5)
]  # fmt: skip
"""Groups of four texts that begin alike."""


def sizes_of(named: str) -> dict[str, int]:
    """``1x2x1x1x2`` -> {"pp": 1, "fsdp": 2, ...}."""
    return dict(zip(AXES, map(int, named.split("x")), strict=True))


def share(groups: list[Any], fsdp: int, fsdp_rank: int) -> list[Any]:
    """Uneven on purpose: rank 0 takes one group, the last takes what is left."""
    if fsdp == 1:
        return groups
    return [groups[fsdp_rank]] if fsdp_rank < fsdp - 1 else groups[fsdp - 1 :]


def _own(trainer: Trainer | Critic, tick: int) -> list[Group]:
    """What this rank trains on at a tick."""
    return share(make_groups(seed=tick, **LENGTHS_DIFFER), trainer.layout.fsdp, trainer.layout.fsdp_rank)


def make_trainer(folder: Path, family: str, named: str, dtype: str = "float32", **more: Any) -> Trainer:
    """Uneven micro-batches of shared prompts, half of the layers computed again in the backward pass.

    A gradient that is nothing but the rounding of its sum (1e-8 beside a median of 4e-4) is to make no step of its own: hence AdamW's eps.
    """
    return Trainer(
        folder / family,
        TrainerConfig(
            **sizes_of(named), dtype=dtype, max_tokens_per_microbatch=48, logprob_chunk_tokens=9,
            activation_checkpointing="selective", **more,
        ),
        OptimizerConfig(lr=1e-3, weight_decay=0.01, eps=1e-6),
        ALGORITHM,
        temperature=0.9,
    )  # fmt: skip


def _other_trainer(folder: Path, family: str, named: str, algorithm: AlgorithmConfig, **more: Any) -> Trainer:
    config = TrainerConfig(**sizes_of(named), max_tokens_per_microbatch=48, **more)
    optimizer = OptimizerConfig(lr=1e-3)
    return Trainer(folder / family, config, optimizer, algorithm, temperature=0.9, seed=1)


@functools.cache
def _scorer(model: Path, fsdp: int, tp: int) -> FrozenScorer:
    packing = TrainerConfig(max_tokens_per_microbatch=20, logprob_chunk_tokens=9)
    return FrozenScorer(model, ReferenceConfig(fsdp=fsdp, tp=tp), ALGORITHM, packing, temperature=0.9)


def train(trainer: Trainer, folder: Path, family: str, tick: int) -> dict[str, float]:
    """One tick."""
    layout = trainer.layout
    sizes = tuple(getattr(layout, axis) for axis in AXES)
    return trainer.train(_groups_with_reference(folder / family, sizes, layout.fsdp_rank, tick), tick)


@functools.cache
def _groups_with_reference(model: Path, sizes: tuple[int, ...], fsdp_rank: int, tick: int) -> list[Group]:
    """What a rank trains on. Log-probs of the reference are a frozen scorer's on the same mesh where it has only axes that a scorer has,
    elsewhere those of transformers' own forward."""
    pp, fsdp, cp, tp, ep = sizes
    groups = share(make_groups(seed=tick, **LENGTHS_DIFFER), fsdp, fsdp_rank)
    return _scorer(model, fsdp, tp).score(groups) if pp == cp == ep == 1 else with_reference(groups, model)


@functools.cache
def _reference(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@torch.no_grad()
def with_reference(groups: list[Group], model: Path, *, named: bool = False) -> list[Group]:
    """Put beside every response what transformers' own forward of ``model`` says of it, at the policy's temperature;
    where ``named``, of its likeliest tokens too."""
    reference = _reference(model)

    def noted(group: Group, tokens: np.ndarray) -> dict[str, np.ndarray]:
        row = torch.tensor([*group.prompt.tokens.tolist(), *tokens.tolist()])[None]
        logits = reference(input_ids=row).logits[0, len(group.prompt.tokens) - 1 : -1].float() / 0.9
        table = logits.log_softmax(-1)
        values, likeliest = table[:, : VOCABULARY - 2].topk(TAUGHT.teacher_top_k)
        own = table.gather(1, row[0, len(group.prompt.tokens) :, None])[:, 0]
        top = {"top_tokens": likeliest.int().numpy(), "top_logprobs": values.numpy()}
        return {"reference_logprobs": own.numpy(), **(top if named else {})}

    return [
        dataclasses.replace(
            group, responses=tuple(dataclasses.replace(r, **noted(group, r.tokens)) for r in group.responses)
        )
        for group in groups
    ]


def _train(folder: Path, family: str, named: str, out: Path, rank: int) -> None:
    """Two ticks; the last once more from a state saved before it, then in the same trainer from what one process has saved, which
    replaces all that this tick has made."""
    trainer = make_trainer(folder, family, named)
    metrics = [train(trainer, folder, family, tick) for tick in range(NUM_TICKS - 1)]
    trainer.save(out / "state")
    metrics.append(train(trainer, folder, family, NUM_TICKS - 1))
    _keep(trainer, out, "through", metrics)
    export(trainer, folder / family, out / "model")
    again = make_trainer(folder, family, named)
    again.load(out / "state")
    assert train(again, folder, family, NUM_TICKS - 1) == metrics[-1]
    for name, tensor in trainer.weights.state().items():
        assert torch.equal(tensor, again.weights.state()[name]), name
    if named != ALONE:
        again.load(folder / f"{family}-{ALONE}-train" / "state")
        _keep(again, out, "from_one", [train(again, folder, family, NUM_TICKS - 1)])


def _keep(trainer: Trainer, out: Path, what: str, metrics: Any) -> None:
    rank = trainer.layout.rank
    held = {name: t.detach().contiguous() for name, t in trainer.parameters_for_sync().items()}
    boxes = {name: shard.box for name, shard in trainer.sync_layout().items()}
    save_file(held, out / f"{what}-{rank}.safetensors")
    (out / f"{what}-{rank}.json").write_text(json.dumps({"metrics": metrics, "boxes": boxes}))


def _critic(folder: Path, family: str, named: str, out: Path) -> dict[str, Any]:
    """Two ticks of a critic; the last in a fresh one that loaded the state of the one before."""
    sizes = sizes_of(named)
    config = CriticConfig(fsdp=sizes["fsdp"], tp=sizes["tp"], updates_per_tick=2, value_clip=0.1, lr=1e-3)
    as_trainer = TrainerConfig(max_tokens_per_microbatch=40), OptimizerConfig(weight_decay=0.01)
    critic = Critic(folder / family, config, GAE, *as_trainer)
    metrics, values = [], []
    for tick in range(NUM_TICKS):
        if tick == NUM_TICKS - 1:
            critic.save(out / "state")  # one folder of all ranks
            critic = Critic(folder / family, config, GAE, *as_trainer)
            critic.load(out / "state")
        valued, row = critic.step(_own(critic, tick), tick)
        metrics.append(row)
        values += [
            [r.prompt_index, r.sample_index, r.values[r.loss_mask].tolist()]
            for g in valued for r in g.responses if r.values is not None
        ]  # fmt: skip
    export(critic, folder / family, out / "critic")
    return {"metrics": metrics, "values": values}


def _refusals(folder: Path, family: str, named: str, out: Path) -> dict[str, Any]:
    """What one data-parallel rank alone sees and all must act on: a loss that is not finite, then a token too old."""
    trainer = Trainer(
        folder / family, TrainerConfig(**sizes_of(named)), OptimizerConfig(lr=1e-3), AlgorithmConfig(), temperature=0.9,
        max_staleness=1,
    )  # fmt: skip
    last = trainer.layout.fsdp_rank == trainer.layout.fsdp - 1
    groups = _own(trainer, 0)
    trainer.train(groups, 0)
    before = {key: value.clone() for key, value in trainer.weights.state().items()}
    right = trainer.policy.forward

    def with_a_token_of_probability_0(microbatch: Microbatch, received: torch.Tensor | None = None) -> TokenScores:
        scores = right(microbatch, received)
        return scores._replace(logprobs=scores.logprobs.masked_fill(microbatch.sequence_ids == 0, -math.inf))

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


def _unknown_logits(folder: Path, family: str, named: str, out: Path) -> str:
    """Qwen3 ignores ``logits_scaling``, the trainer would obey it: on a mesh too it must say so."""
    try:
        make_trainer(folder, family, named)
    except ModelError as error:
        return str(error)
    raise AssertionError("a mesh trained a model whose logits it does not know")


def _row_parts(folder: Path, family: str, named: str, out: Path) -> dict[str, Any]:
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
    return {"held": held.tolist(), "whole": whole.tolist(), "gradient": values.grad.tolist()}


def _two_ticks(trainer: Trainer) -> list[dict[str, float]]:
    return [trainer.train(_own(trainer, tick), tick) for tick in range(2)]


def _passes(folder: Path, family: str, named: str, out: Path) -> list[dict[str, float]]:
    """Several optimizer steps a tick, with a loss that needs the proximal policy."""
    algorithm = AlgorithmConfig(name="decoupled_ppo")
    return _two_ticks(_other_trainer(folder, family, named, algorithm, minibatches=2, epochs=2))


def _sequences(folder: Path, family: str, named: str, out: Path) -> list[dict[str, float]]:
    """A loss that looks at a sequence as one, whose tokens lie on several ranks."""
    return _two_ticks(_other_trainer(folder, family, named, AlgorithmConfig(name="gspo", normalization="sequence")))


def _taught(folder: Path, family: str, named: str, out: Path) -> list[dict[str, float]]:
    """Towards another model's likeliest tokens: more of them than a quarter of the vocabulary has. Where the mesh has only axes
    that a scorer has, it is that model's scorer who names them."""
    trainer, sizes = _other_trainer(folder, family, named, TAUGHT), sizes_of(named)
    teacher, packing = folder / "qwen3", TrainerConfig(max_tokens_per_microbatch=20, logprob_chunk_tokens=9)
    groups = _own(trainer, 0)
    if sizes["pp"] == sizes["cp"] == 1:
        config = ReferenceConfig(fsdp=sizes["fsdp"], tp=sizes["tp"])
        scorer = FrozenScorer(teacher, config, TAUGHT, packing, temperature=0.9, num_tokens=VOCABULARY - 2)
        return [trainer.train(scorer.score(groups), 0)]
    return [trainer.train(with_reference(groups, teacher, named=True), 0)]


def _replay(folder: Path, family: str, named: str, out: Path) -> list[dict[str, float]]:
    """A sparse model whose routers choose what the samples say: other experts than they would."""
    trainer = _other_trainer(folder, family, named, AlgorithmConfig(), router="replay")
    shape = (trainer.policy.num_sparse_layers, trainer.policy.num_experts, 2)
    layout = trainer.layout
    ticks = [with_experts(make_groups(seed=tick, **LENGTHS_DIFFER), *shape) for tick in range(2)]
    return [trainer.train(share(groups, layout.fsdp, layout.fsdp_rank), k) for k, groups in enumerate(ticks)]


def _bfloat16(folder: Path, family: str, named: str, out: Path) -> dict[str, float]:
    """Gradients and one step are enough."""
    return train(make_trainer(folder, family, named, "bfloat16"), folder, family, 0)


def _scores(folder: Path, family: str, named: str, out: Path) -> dict[str, Any]:
    """What a reward model says of this rank's texts."""
    sizes = sizes_of(named)
    scorer = RewardScorer(folder / family, fsdp=sizes["fsdp"], tp=sizes["tp"], max_tokens=40)
    mine = share(list(range(len(TEXTS))), sizes["fsdp"], scorer.layout.fsdp_rank)
    return {"groups": mine, "scores": scorer.score([TEXTS[g] for g in mine]), "empty": scorer.score([])}


def _held_bytes(trainer: Trainer) -> int:
    """Of the storages behind parameters (this rank's parts), masters and moments."""
    local = [getattr(p, "_local_tensor", p) for p in trainer.policy.model.parameters()]
    tensors = [*local, *trainer.weights.state().values()]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    ours, theirs = ({n: t.detach().reshape(-1).view(torch.uint8) for n, t in side.items()} for side in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _parked(
    folder: Path, family: str, named: str, out: Path, dtype: str = "float32", offload: bool = False
) -> dict[str, list[object]]:
    """Two trainers: one moves out between its ticks, the other stays."""
    stays, parked = (make_trainer(folder, family, named, dtype, offload_optimizer=offload) for _ in range(2))
    parked.parking = Parking(torch.device("cpu"), move=True)
    found: dict[str, list[object]] = {"same": [], "parked": []}
    for tick in range(NUM_TICKS):
        groups = with_reference(_own(stays, tick), folder / family)
        same = [parked.train(groups, tick) == stays.train(groups, tick)]
        before = _held_bytes(parked)
        freed = parked.park()
        found["parked"].append([before, freed, _held_bytes(parked)])
        same.append(_same_bits(parked.parameters_for_sync(), stays.parameters_for_sync()))
        parked.unpark()
        same.append(_same_bits(parked.weights.state(), stays.weights.state()) and _held_bytes(parked) == before)
        found["same"].append(same)
    return found


def _parked_rounded(folder: Path, family: str, named: str, out: Path) -> dict[str, list[object]]:
    return _parked(folder, family, named, out, "bfloat16", offload=sizes_of(named)["fsdp"] > 1)


def _muon(folder: Path, family: str, named: str, out: Path) -> list[dict[str, float]]:
    """As ``_train``, by Muon: this rank's parts and what its optimizer keeps, saved and gone on with, here and elsewhere."""
    optimizer, lora = OptimizerConfig(name="muon", lr=1e-3, weight_decay=0.01, eps=1e-6), None
    if family == "one_head":  # adapters are matrices too, cut as what they stand beside
        lora = LoraConfig(rank=3, targets=("q_proj", "v_proj", "down_proj"), hand_over="adapter")

    def make() -> Trainer:
        config = TrainerConfig(**sizes_of(named), max_tokens_per_microbatch=48)
        return Trainer(folder / family, config, optimizer, ALGORITHM_ALONE, temperature=0.9, seed=1, lora=lora)

    trainer, again = make(), make()
    metrics = [trainer.train(_own(trainer, 0), 0)]
    trainer.save(out / "state")
    metrics.append(trainer.train(_own(trainer, 1), 1))
    again.load(out / "state")
    assert again.train(_own(again, 1), 1) == metrics[1]
    assert _same_bits(again.weights.state(), trainer.weights.state())
    assert "momentum_buffer" in trainer.weights.kinds
    _keep(trainer, out, "through", metrics)
    if named != ALONE:
        again.load(folder / f"{family}-{ALONE}-muon" / "state")
        _keep(again, out, "from_one", [again.train(_own(again, 1), 1)])
    return metrics


KINDS = {
    "muon": _muon,
    "scores": _scores,
    "parked": _parked,
    "parked_rounded": _parked_rounded,
    "critic": _critic,
    "refusals": _refusals,
    "unknown_logits": _unknown_logits,
    "row_parts": _row_parts,
    "passes": _passes,
    "taught": _taught,
    "sequences": _sequences,
    "replay": _replay,
    "bfloat16": _bfloat16,
}
"""What else than ``train`` a rank may be asked for -> what it leaves in its file."""


def _refuse_whole_model(*args: object, **kwargs: object) -> None:
    raise AssertionError("a rank of a mesh asked for the whole model")


def join_mesh(rank: int, world: int, folder: Path) -> None:
    """Meet the other ranks of a mesh, of which none may ask for the whole model."""
    join_group(rank, world, f"{folder}/rendezvous{world}")
    for loader in ("load_model", "load_value_model", "load_reward_model"):
        assert callable(getattr(building, loader))  # so that these replace what is called
        setattr(building, loader, _refuse_whole_model)


def main(rank: int, world: int, folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="Slicing a flattened dim")
    if world > 1:
        join_mesh(rank, world, folder)
    for case in cases:
        family, named, kind = case.split(":")
        out = folder / f"{family}-{named}-{kind}"
        out.mkdir(exist_ok=True)
        if kind == "train":
            _train(folder, family, named, out, rank)
        else:
            (out / f"{rank}.json").write_text(json.dumps(KINDS[kind](folder, family, named, out)))
    if world > 1:
        dist.destroy_process_group()
