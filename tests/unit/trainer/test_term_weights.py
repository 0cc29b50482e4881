"""The three terms of a token's loss: each alone is what its name says, together they add up, and how a step is cut is no matter."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from training_fixtures import make_groups, token_scores, with_reference, write_model

from llamarl.algorithms.aipo import aipo
from llamarl.settings.algorithms import AlgorithmConfig, TermWeights
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer.batch import make_microbatch, make_sequences
from llamarl.trainer.objective import microbatch_loss
from llamarl.trainer.step import Trainer
from llamarl.types import DEMONSTRATIONS, Group, Prompt, Score

KL = AlgorithmConfig(kl_coef=0.1, kl_estimator="k2")


@pytest.mark.parametrize(
    ("config", "terms"),
    [
        (AlgorithmConfig(), TermWeights(rl=1.0)),
        (KL, TermWeights(rl=1.0, kl=0.1)),
        (AlgorithmConfig(kl_coef=0.1, kl_place="reward"), TermWeights(rl=1.0)),
        (AlgorithmConfig(name="sft"), TermWeights(ce=1.0)),
        (AlgorithmConfig(name="sft", kl_coef=0.2), TermWeights(ce=1.0, kl=0.2)),
    ],
)
def test_an_algorithm_says_which_terms_its_tokens_have(config: AlgorithmConfig, terms: TermWeights) -> None:
    assert {sequence.terms for sequence in make_sequences(with_reference(make_groups()), config)} == {terms}


def test_tokens_of_one_micro_batch_have_terms_of_their_own() -> None:
    """Three responses, one a term, and a fourth with all: against sums written out in float64."""
    all_terms = [TermWeights(rl=1.0), TermWeights(ce=0.5), TermWeights(kl=2.0), TermWeights(rl=3.0, ce=0.25, kl=0.125)]
    (group,) = with_reference(make_groups(1, 4, failed=False), shift=-0.3)
    sequences = [
        dataclasses.replace(one, terms=terms) for one, terms in zip(make_sequences([group], KL), all_terms, strict=True)
    ]
    weights = [0.1, 0.2, 0.3, 0.4]
    batch = make_microbatch(sequences, weights, torch.device("cpu"))
    pi = (batch.behavior_logprobs + torch.linspace(-0.5, 0.5, len(batch.weights))).requires_grad_()
    loss, _, _ = microbatch_loss(aipo, token_scores(pi), batch, KL, has_reference=True)
    loss.backward()
    assert pi.grad is not None
    expected, place = np.zeros(len(batch.weights)), 0
    for sequence, weight in zip(sequences, weights, strict=True):
        assert sequence.reference_logprobs is not None
        for mu, reference in zip(sequence.behavior_logprobs, sequence.reference_logprobs, strict=True):
            now, (rl, ce, kl) = float(pi.detach()[place]), sequence.terms
            of_rl = -min(np.exp(now - mu), KL.rho) * sequence.advantage
            expected[place] = weight * (rl * of_rl - ce + kl * (now - float(reference)))
            place += 1
    np.testing.assert_allclose(pi.grad.numpy(), expected, rtol=1e-5, atol=1e-7)


def test_a_term_that_no_token_has_is_not_computed() -> None:
    groups = with_reference(make_groups())
    batch = make_microbatch(make_sequences(groups, AlgorithmConfig()), [1.0] * 11, torch.device("cpu"))
    assert batch.rl_weights is not None and batch.ce_weights is None and batch.kl_weights is None

    def refused(*_: object) -> None:
        raise AssertionError("no token has an rl term")

    sft = AlgorithmConfig(name="sft")
    batch = make_microbatch(make_sequences(groups, sft), [1.0] * 11, torch.device("cpu"))
    pi = torch.zeros(batch.num_trained, requires_grad=True)
    _, sums, clipped = microbatch_loss(refused, token_scores(pi), batch, sft, has_reference=False)  # type: ignore[arg-type]
    assert set(sums) == {"loss/policy", "entropy"} and not clipped.any()


def test_a_rank_without_a_sequence_has_a_loss_of_no_tokens_and_the_same_statistics() -> None:
    for config in (AlgorithmConfig(name="sft"), AlgorithmConfig(ratio_mask="token"), KL):
        keys = []
        for groups in (with_reference(make_groups()), []):
            sequences = make_sequences(groups, config)
            batch = make_microbatch(sequences, [1.0] * len(sequences), torch.device("cpu"))
            pi = torch.zeros(batch.num_trained, requires_grad=True)
            loss, sums, _ = microbatch_loss(aipo, token_scores(pi), batch, config, has_reference=config.kl_coef > 0)
            loss.backward()
            keys.append(set(sums))
        assert keys[0] == keys[1]


def with_terms_of_their_own(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other response imitates, as in a mixture of tasks."""
    kinds = TermWeights(rl=1.0, kl=0.1), TermWeights(ce=2.0)

    def make(groups: list[Group], *rest: object) -> list[object]:
        found = make_sequences(groups, trainer.algorithm)
        return [dataclasses.replace(one, terms=kinds[i % 2]) for i, one in enumerate(found)]

    monkeypatch.setattr("llamarl.trainer.step.make_sequences", make)


def test_how_a_step_of_mixed_terms_is_cut_changes_no_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model")
    found: list[dict[str, torch.Tensor]] = []
    for max_tokens in (16, 64, 4096):
        settings = TrainerConfig(max_tokens_per_microbatch=max_tokens, max_grad_norm=0.0)
        trainer = Trainer(model, settings, OptimizerConfig(), KL, temperature=1.0)
        with_terms_of_their_own(trainer, monkeypatch)
        gradients: dict[str, torch.Tensor] = {}
        tensors = trainer.weights.tensors
        trainer.before_update = lambda g=gradients, t=tensors: g.update({n: p.grad.clone() for n, p in t.items()})  # type: ignore[misc]
        trainer.train(with_reference(make_groups(), shift=0.1), 0)
        found.append(gradients)
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert (other[name] - gradient).norm() <= 2e-6 * gradient.norm(), name


def rows_to_imitate(weight: float) -> list[Group]:
    """Three, each a group of its own, of the same value."""
    (group,) = make_groups(1, 3, failed=False, seed=5)
    shown = (
        dataclasses.replace(
            response,
            sampled_by=DEMONSTRATIONS,
            behavior_logprobs=np.zeros(len(response.tokens), np.float32),
            outcome=Score(value=weight),
        )
        for response in group.responses
    )
    return [dataclasses.replace(group, responses=(response,)) for response in shown]


@pytest.mark.parametrize("advantage", ["group_std", "gdpo", "batch_std"])
def test_rows_beside_samples_have_their_own_term_and_are_in_no_baseline(advantage: str) -> None:
    config, sampled = AlgorithmConfig(advantage=advantage), make_groups(2, 4, failed=False)
    alone = make_sequences(sampled, config)
    first, *others = rows_to_imitate(0.25)
    both = make_sequences([first, *sampled, *others, *rows_to_imitate(0.0)], config)
    assert [(s.advantage, s.terms) for s in both[:8]] == [(s.advantage, TermWeights(rl=1.0)) for s in alone]
    assert [(s.group, s.terms, s.advantage) for s in both[8:]] == [(i, TermWeights(ce=0.25), 0.0) for i in (0, 3, 4)]
    assert all(len(s.policy_versions) == 0 for s in both[8:])  # nothing that could be stale


def test_rows_beside_samples_enter_no_mean_over_what_was_sampled() -> None:
    config = AlgorithmConfig(ratio_mask="token", kl_coef=0.1)
    sampled, cpu = with_reference(make_groups(2, 4, failed=False), shift=0.3), torch.device("cpu")
    both = make_sequences([*sampled, *rows_to_imitate(1.0)], config)
    found = []
    for sequences in (both[:8], both, both[8:]):
        batch = make_microbatch(sequences, [1.0] * len(sequences), cpu)
        pi = torch.linspace(-4.0, -0.1, sum(len(s.targets) for s in both))[: batch.num_trained]
        found.append(microbatch_loss(aipo, token_scores(pi.clone()), batch, config, has_reference=True)[1])
    alone, mixed, rows = ({k: float(v) for k, v in sums.items() if k != "loss/policy"} for sums in found)
    assert mixed == pytest.approx(alone, rel=1e-6) and alone["responses"] == 8
    assert rows.keys() == alone.keys() and not any(rows.values())


def test_a_row_of_a_token_next_to_impossible_keeps_its_cross_entropy_beside_a_kl_of_the_samples() -> None:
    config, samples = AlgorithmConfig(kl_coef=0.1), with_reference(make_groups(1, 2, failed=False), shift=0.3)
    sequences = make_sequences([*samples, *rows_to_imitate(0.5)], config)
    batch = make_microbatch(sequences, [1.0] * len(sequences), torch.device("cpu"))
    is_shown = torch.tensor(np.repeat([s.terms.ce > 0 for s in sequences], [len(s.targets) for s in sequences]))
    pi = torch.where(is_shown, -200.0, batch.behavior_logprobs).requires_grad_()  # e**200 is no float32
    loss, _, _ = microbatch_loss(aipo, token_scores(pi), batch, config, has_reference=True)
    loss.backward()
    assert pi.grad is not None and torch.isfinite(loss)
    assert pi.grad[is_shown].tolist() == [-0.5] * int(is_shown.sum())
    assert torch.isfinite(pi.grad).all()


def test_means_of_a_tick_are_those_of_its_samples_alone_and_rows_count_among_what_trained(tmp_path: Path) -> None:
    model, sampled, rows = write_model(tmp_path / "model"), make_groups(), rows_to_imitate(1.0)
    alone, both = (
        Trainer(model, TrainerConfig(), OptimizerConfig(), AlgorithmConfig(), temperature=1.0).train(groups, 0)
        for groups in (sampled, [*sampled, *rows])
    )
    for key in ("ratio/mean", "ratio/max", "ratio/effective_samples", "mismatch/kl", "entropy", "staleness/mean"):
        assert both[key] == pytest.approx(alone[key], rel=1e-5), key
    shown = sum(int(r.loss_mask.sum()) for group in rows for r in group.responses)
    assert shown and both["tokens/trained"] == alone["tokens/trained"] + shown
    assert both["samples/trained"] == alone["samples/trained"] + 3 and both["tokens/unused"] == alone["tokens/unused"]


def test_a_response_without_any_term_is_not_computed(tmp_path: Path) -> None:
    prompt = Prompt(index=0, tokens=np.array([3, 4], np.int32), text="")
    (group,) = make_groups(1, 2, failed=False)
    agreed = tuple(dataclasses.replace(response, outcome=Score(value=1.0)) for response in group.responses)
    alike = Group(prompt=prompt, responses=agreed)
    assert not any(sequence.has_signal for sequence in make_sequences([alike], AlgorithmConfig()))
    assert all(sequence.has_signal for sequence in make_sequences([alike], AlgorithmConfig(name="sft")))
    assert all(sequence.has_signal for sequence in make_sequences(with_reference([alike]), KL))
