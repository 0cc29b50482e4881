"""Log-probs of a frozen model: equal to the library's own forward, whatever the packing."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_fixtures import make_groups, with_reference, write_model
from transformers import AutoModelForCausalLM

from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import OptimizerConfig, ReferenceConfig, TrainerConfig
from llamarl.trainer.batch import make_sequences
from llamarl.trainer.scoring import FrozenScorer
from llamarl.trainer.step import Trainer
from llamarl.types import Group, Score


def _score(folder: Path, groups: list[Group], *, dtype: Any = "float32", **packing: Any) -> list[Group]:
    reference, trainer = ReferenceConfig(dtype=dtype), TrainerConfig(**packing)
    scorer = FrozenScorer(folder, reference, AlgorithmConfig(), trainer, temperature=0.7)
    return scorer.score(groups)


def _rows(groups: list[Group]) -> np.ndarray:
    rows = [r.reference_logprobs for g in groups for r in g.responses if r.reference_logprobs is not None]
    return np.concatenate(rows)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_scores_are_the_models_own_log_softmax_at_the_sampling_temperature(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / family, family)
    groups = make_groups(num_groups=2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for group, scored in zip(groups, _score(folder, groups, logprob_chunk_tokens=5), strict=True):
        assert scored.prompt is group.prompt
        for before, after in zip(group.responses, scored.responses, strict=True):
            if not isinstance(before.outcome, Score):
                assert after is before  # a failed response trains nothing, so nothing is computed for it
                continue
            ids = torch.tensor(np.concatenate([group.prompt.tokens, before.tokens]), dtype=torch.int64)[None]
            with torch.no_grad():
                table = torch.log_softmax(model(ids).logits[0] / 0.7, dim=-1)
            start = len(group.prompt.tokens) - 1
            expected = [table[start + j, token].item() for j, token in enumerate(before.tokens)]
            assert after.reference_logprobs is not None
            np.testing.assert_allclose(
                after.reference_logprobs, np.where(before.loss_mask, expected, np.nan), rtol=1e-4, atol=1e-4
            )


def test_a_teacher_names_its_likeliest_tokens_of_those_that_the_policy_has(model_folder: Path) -> None:
    groups = make_groups(num_groups=2, failed=False)
    algorithm = AlgorithmConfig(advantage="distillation", teacher_top_k=5)
    settings = TrainerConfig(logprob_chunk_tokens=5)
    scorer = FrozenScorer(model_folder, ReferenceConfig(), algorithm, settings, temperature=0.7, num_tokens=40)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    for group, scored in zip(groups, scorer.score(groups), strict=True):
        for response in scored.responses:
            ids = torch.tensor(np.concatenate([group.prompt.tokens, response.tokens]), dtype=torch.int64)[None]
            with torch.no_grad():
                table = torch.log_softmax(model(ids).logits[0] / 0.7, dim=-1)[len(group.prompt.tokens) - 1 : -1]
            values, tokens = table[:, :40].topk(5)
            own = response.loss_mask
            assert response.top_tokens is not None and response.top_logprobs is not None
            assert response.top_tokens.dtype == np.int32 and not response.top_tokens[~own].any()
            np.testing.assert_array_equal(response.top_tokens[own], tokens.numpy()[own])
            np.testing.assert_allclose(response.top_logprobs[own], values.numpy()[own], rtol=1e-4, atol=1e-4)
            assert np.isnan(response.top_logprobs[~own]).all()


def test_packing_and_shared_prompts_change_rounding_only(model_folder: Path) -> None:
    groups = make_groups()
    whole = _rows(_score(model_folder, groups))
    np.testing.assert_allclose(_rows(_score(model_folder, groups, max_tokens_per_microbatch=20)), whole, atol=2e-5)
    np.testing.assert_allclose(_rows(_score(model_folder, groups, share_prompts=False)), whole, atol=2e-5)


def test_a_rank_without_samples_returns_its_groups_as_they_are(model_folder: Path) -> None:
    assert _score(model_folder, []) == []


def _trainer(folder: Path, **algorithm: object) -> Trainer:
    return Trainer(folder, TrainerConfig(), OptimizerConfig(lr=1e-3), AlgorithmConfig(**algorithm), temperature=1.0)  # type: ignore[arg-type]


def test_kl_in_the_loss_without_reference_log_probs_is_refused(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="wire a reference executor"):
        _trainer(model_folder, kl_coef=0.1).train(make_groups(), 0)


def test_a_truncated_response_that_does_not_train_pays_for_its_kl_in_the_baseline(model_folder: Path) -> None:
    (group,) = make_groups(num_groups=1, failed=False)
    cut, *others = group.responses
    cut = dataclasses.replace(cut, finish_reason="length", outcome=Score(value=0.0))
    whole = tuple(dataclasses.replace(r, outcome=Score(value=1.0)) for r in others)
    group = dataclasses.replace(group, responses=(cut, *whole))
    algorithm = AlgorithmConfig(kl_coef=1.0, kl_place="reward", kl_estimator="k1", train_truncated=False)
    scorer = FrozenScorer(model_folder, ReferenceConfig(), algorithm, TrainerConfig(), temperature=1.0)
    (scored,) = scorer.score([group])
    rewards = []
    for response in scored.responses:
        assert response.reference_logprobs is not None and isinstance(response.outcome, Score)
        gap = (response.behavior_logprobs - response.reference_logprobs)[response.loss_mask]
        rewards.append(response.outcome.value - gap.astype(np.float64).sum())
    sequences = make_sequences([scored], algorithm)
    assert [s.sample for s in sequences] == [1, 2, 3]
    np.testing.assert_allclose([s.advantage for s in sequences], np.subtract(rewards[1:], np.mean(rewards)), atol=1e-5)


def test_kl_in_the_reward_changes_advantages_and_not_the_loss(model_folder: Path) -> None:
    """A reference that gives every token the behaviour's own log-prob charges nothing: the step is that without KL."""
    plain = _trainer(model_folder).train(make_groups(), 0)
    free = _trainer(model_folder, kl_coef=3.0, kl_place="reward").train(with_reference(make_groups()), 0)
    assert free["grad_norm"] == plain["grad_norm"] and free["loss/policy"] == plain["loss/policy"]
    charged = with_reference(make_groups(), shift=-0.5)  # k1 = 0.5 a token: longer responses lose more
    moved = _trainer(model_folder, kl_coef=3.0, kl_place="reward", kl_estimator="k1").train(charged, 0)
    assert abs(moved["grad_norm"] - plain["grad_norm"]) > 1e-3
