"""The distillation advantage makes the policy gradient that of the reverse KL to the teacher, whoever sampled the tokens."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from training_fixtures import make_groups, with_reference, write_model
from transformers import AutoModelForCausalLM

from llamarl.algorithms.aipo import aipo
from llamarl.algorithms.base import TokenBatch
from llamarl.algorithms.config import AlgorithmConfig
from llamarl.algorithms.distillation import distillation_advantages
from llamarl.trainer.batch import make_sequences
from llamarl.trainer.config import OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer

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
        assert parameter.grad is not None
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
