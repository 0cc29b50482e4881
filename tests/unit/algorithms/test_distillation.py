"""The distillation advantage makes the policy gradient that of the reverse KL to the teacher, whoever sampled the tokens."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_fixtures import VOCABULARY, make_groups, with_reference, write_model
from transformers import AutoModelForCausalLM

from llamarl.algorithms.aipo import aipo
from llamarl.algorithms.base import TokenBatch
from llamarl.algorithms.distillation import distillation_advantages, top_k_kl
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import OptimizerConfig, ReferenceConfig, TrainerConfig
from llamarl.trainer.batch import make_sequences
from llamarl.trainer.scoring import FrozenScorer
from llamarl.trainer.step import Trainer
from llamarl.types import DEMONSTRATIONS

DISTIL = AlgorithmConfig(advantage="distillation")


@pytest.mark.parametrize("stale", [False, True])
def test_its_mean_over_samples_is_the_gradient_of_the_reverse_kl(stale: bool) -> None:
    """Every token of a vocabulary of six once, weighed by the probability with which mu samples it."""
    torch.manual_seed(0)
    logits, teacher = (torch.randn(6, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    pi, teacher = logits.log_softmax(0), teacher.log_softmax(0)
    mu = torch.randn(6, dtype=torch.float64).log_softmax(0) if stale else pi.detach()
    batch = TokenBatch(
        policy_logprobs=pi,
        behavior_logprobs=mu,
        advantages=distillation_advantages(pi, teacher),
        sequence_ids=torch.zeros(6, dtype=torch.int64),
        num_sequences=1,
    )
    losses = aipo(batch, AlgorithmConfig(rho="none")).losses
    (got,) = torch.autograd.grad((losses * mu.exp()).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((pi.exp() * (pi - teacher)).sum(), logits)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("microbatch", [16, 4096])
def test_the_trainers_gradient_is_the_written_one_in_float64(tmp_path: Path, microbatch: int) -> None:
    folder = write_model(tmp_path / "model")
    settings = TrainerConfig(max_tokens_per_microbatch=microbatch, max_grad_norm=0.0)
    trainer = Trainer(folder, settings, OptimizerConfig(), DISTIL, temperature=1.0)
    found: dict[str, torch.Tensor] = {}
    tensors = trainer.weights.tensors
    trainer.before_update = lambda: found.update({name: t.grad.clone() for name, t in tensors.items()})  # type: ignore[union-attr]
    groups = with_reference(make_groups(failed=False), shift=0.4)
    trainer.train(groups, 0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    objective, count = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        for response in group.responses:
            assert response.reference_logprobs is not None
            ids = torch.tensor(np.concatenate([group.prompt.tokens, response.tokens]), dtype=torch.int64)
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
            for place in np.flatnonzero(response.loss_mask):
                at = len(group.prompt.tokens) + int(place)
                pi, mu = logprobs[at - 1, ids[at]], float(response.behavior_logprobs[place])
                advantage = float(response.reference_logprobs[place]) - pi.detach()
                objective = objective + min(float((pi.detach() - mu).exp()), DISTIL.rho) * advantage * pi
                count += 1
    (-objective / count).backward()
    for name, parameter in model.named_parameters():
        error = (found[name].double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < 5e-5, (name, float(error))


def test_rewards_have_no_part_in_it_and_nothing_is_skipped_for_having_none() -> None:
    groups = with_reference(make_groups(failed=False), shift=0.5)
    sequences = make_sequences(groups, DISTIL)
    assert len(sequences) == 12 and all(s.has_signal and s.advantage == pytest.approx(0.5) for s in sequences)
    alike = [dataclasses.replace(s, reward=0.0) for s in sequences]
    others = [
        dataclasses.replace(
            g,
            responses=tuple(
                dataclasses.replace(r, outcome=dataclasses.replace(r.outcome, value=0.0)) for r in g.responses
            ),
        )  # type: ignore[type-var]
        for g in groups
    ]
    for got, expected in zip(make_sequences(others, DISTIL), alike, strict=True):
        assert got.token_advantages is not None and expected.token_advantages is not None
        np.testing.assert_array_equal(got.token_advantages, expected.token_advantages)


def test_samples_that_no_teacher_has_seen_are_refused() -> None:
    with pytest.raises(
        ValueError, match="has no teacher's log-probs, which algorithm.advantage = 'distillation' needs"
    ):
        make_sequences(make_groups(), DISTIL)


def _written_out(pi: torch.Tensor, teacher: torch.Tensor, named: torch.Tensor) -> torch.Tensor:
    """KL(teacher || pi) of one position over the ``named`` tokens and all others as one; log-probs of a vocabulary."""
    inside = torch.zeros(len(pi), dtype=torch.bool).index_fill(0, named, True)
    p, q = ([*logprobs.exp()[inside], logprobs.exp()[~inside].sum()] for logprobs in (teacher, pi))
    return sum((a * (a / b).log() for a, b in zip(p, q, strict=True) if a), start=torch.zeros((), dtype=pi.dtype))


def test_the_kl_over_k_tokens_and_the_rest_is_the_written_one_and_its_gradient_the_derived_one() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    pi, teacher = logits.log_softmax(-1), torch.randn(5, 9, dtype=torch.float64).log_softmax(-1)
    whole = (teacher.exp() * (teacher - pi)).sum(-1)
    for k in (1, 4, 8, 9):
        named = teacher.topk(k).indices
        found = top_k_kl(pi.gather(-1, named), teacher.gather(-1, named))
        expected = torch.stack([_written_out(*row) for row in zip(pi, teacher, named, strict=True)])
        torch.testing.assert_close(found, expected if k < 9 else whole, rtol=1e-10, atol=1e-12)
        assert bool((found >= 0).all()) and bool((found <= whole + 1e-12).all())
        (got,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
        inside = torch.zeros_like(pi, dtype=torch.bool).scatter(-1, named, True)
        q, p = pi.detach().exp(), teacher.exp()
        rest_q, rest_p = ((x * ~inside).sum(-1, keepdim=True) for x in (q, p))
        derived = torch.where(inside, q - p, q - rest_p * q / rest_q)
        torch.testing.assert_close(got, derived if k < 9 else q - p, rtol=1e-9, atol=1e-12)


def test_a_policy_equal_to_its_teacher_has_no_loss_and_one_that_is_sure_a_finite_one() -> None:
    sure = torch.tensor(
        [[0.0, -40.0]], requires_grad=True
    )  # all of it on one token, where the teacher has a half outside
    half = torch.tensor([[-1.4, -1.4]])
    assert float(top_k_kl(half, half)) == 0.0
    loss = top_k_kl(sure, half).sum()
    (gradient,) = torch.autograd.grad(loss, sure)
    assert bool(loss.isfinite()) and bool(gradient.isfinite().all())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"advantage": "group_mean"}, "teacher_top_k is 4, but advantage 'group_mean' has no teacher"),
        ({"name": "ppo"}, "name is 'ppo', of the loss on sampled tokens, in whose place teacher_top_k puts a KL"),
        ({"ratio_mask": "token"}, "ratio_mask is 'token', of the loss on sampled tokens"),
        ({"top_entropy": 0.2}, "top_entropy is 0.2, of the loss on sampled tokens"),
        ({"teacher_top_k": -1}, "greater than or equal to 0"),
    ],
)
def test_what_has_no_meaning_beside_a_teachers_likeliest_tokens_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AlgorithmConfig(**{"advantage": "distillation", "teacher_top_k": 4, **changes})


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy and its teacher."""
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "policy"), write_model(folder / "teacher", seed=1)


def test_the_gradient_over_likeliest_tokens_is_the_written_one_however_a_step_is_cut(
    two_models: tuple[Path, Path],
) -> None:
    policy, teacher = two_models
    algorithm = AlgorithmConfig(advantage="distillation", teacher_top_k=6)
    scorer = FrozenScorer(
        teacher, ReferenceConfig(), algorithm, TrainerConfig(), temperature=0.8, num_tokens=VOCABULARY
    )
    groups = scorer.score(make_groups(failed=False))
    found: list[dict[str, torch.Tensor]] = []
    for microbatch, chunk in ((4096, 2048), (16, 2048), (4096, 7)):
        settings = TrainerConfig(max_tokens_per_microbatch=microbatch, logprob_chunk_tokens=chunk, max_grad_norm=0.0)
        trainer, gradients = Trainer(policy, settings, OptimizerConfig(), algorithm, temperature=0.8), {}
        tensors = trainer.weights.tensors
        trainer.before_update = lambda g=gradients, t=tensors: g.update({n: p.grad.clone() for n, p in t.items()})  # type: ignore[misc]
        metrics = trainer.train(groups, 0)
        found.append(gradients)
    model, judge = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        for folder in (policy, teacher)
    )
    losses = []
    for group in groups:
        for response in group.responses:
            ids = torch.tensor(np.concatenate([group.prompt.tokens, response.tokens]), dtype=torch.int64)
            pi, said = ((m(ids[None]).logits[0] / 0.8).log_softmax(-1) for m in (model, judge))
            for place in np.flatnonzero(response.loss_mask):
                at = len(group.prompt.tokens) + int(place) - 1
                losses.append(_written_out(pi[at], said[at].detach(), said[at].topk(6).indices))
    objective = torch.stack(losses).mean()
    objective.backward()
    calm = Trainer(
        policy, settings, OptimizerConfig(), dataclasses.replace(algorithm, entropy_coef=0.5), temperature=0.8
    )
    assert calm.train(groups, 0)["loss/policy"] == metrics["loss/policy"]  # an entropy term is none of that KL
    assert metrics["kl/reference"] == pytest.approx(objective.item(), rel=1e-5)
    assert metrics["loss/policy"] == pytest.approx(objective.item(), rel=1e-5) and metrics["ratio/mean"] > 0
    for name, parameter in model.named_parameters():
        whole, *cut = (gradients[name] for gradients in found)
        assert (whole.double() - parameter.grad).norm() <= 2e-5 * parameter.grad.norm(), name
        for other in cut:
            assert (other - whole).norm() <= 1e-6 * whole.norm(), name


def test_rows_to_imitate_stand_beside_likeliest_tokens(two_models: tuple[Path, Path]) -> None:
    """In one micro-batch with them and alone: their term is cross-entropy, and no mean knows them."""
    algorithm = AlgorithmConfig(advantage="distillation", teacher_top_k=6)
    scorer = FrozenScorer(
        two_models[1], ReferenceConfig(), algorithm, TrainerConfig(), temperature=1.0, num_tokens=VOCABULARY
    )
    sampled = scorer.score(make_groups(failed=False))
    (shown,) = make_groups(1, 2, failed=False, seed=9)
    rows = [dataclasses.replace(r, sampled_by=DEMONSTRATIONS) for r in shown.responses]
    shown = dataclasses.replace(shown, responses=tuple(rows))
    alone, both = (
        Trainer(two_models[0], TrainerConfig(), OptimizerConfig(), algorithm, temperature=1.0).train(groups, 0)
        for groups in (sampled, [*sampled, shown])
    )
    for key in ("kl/reference", "ratio/mean", "entropy"):
        assert both[key] == pytest.approx(alone[key], rel=1e-5), key
    assert both["tokens/trained"] > alone["tokens/trained"] and both["grad_norm"] != alone["grad_norm"]


def test_samples_without_the_likeliest_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="has no teacher's log-probs"):
        make_sequences(with_reference(make_groups()), AlgorithmConfig(advantage="distillation", teacher_top_k=2))
