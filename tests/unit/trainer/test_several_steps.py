"""Several optimizer steps a tick, against trainers that make one and are fed the parts by hand."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_responses import made_group
from training_fixtures import make_groups, make_response, poisoned

from llamarl.algorithms.base import TokenBatch, TokenLosses
from llamarl.errors import TrainingDiverged
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer.batch import make_sequences
from llamarl.trainer.step import Trainer
from llamarl.trainer.step_plan import plan_of_rank, plan_steps
from llamarl.types import Failure, Group, Response, Score


def _trainer(folder: Path, *, algorithm: AlgorithmConfig | None = None, seed: int = 0, **kwargs: Any) -> Trainer:
    config, optimizer = TrainerConfig(**kwargs), OptimizerConfig(lr=1e-2, warmup_ticks=1)
    return Trainer(folder, config, optimizer, algorithm or AlgorithmConfig(), temperature=1.0, seed=seed)


def _assert_same_state(one: Trainer, other: Trainer) -> None:
    ours, theirs = one.weights.state(), other.weights.state()
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def _parts(groups: Sequence[Group], config: TrainerConfig, tick: int) -> list[list[Group]]:
    """The plan of a tick as groups, in the order of its steps."""
    prompts = [groups[s.group].prompt.index for s in make_sequences(groups, AlgorithmConfig())]
    steps = plan_steps(prompts, minibatches=config.minibatches, epochs=config.epochs, seed=0, tick=tick)
    return [[g for g in groups if g.prompt.index in step] for step in steps]


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_each_step_is_the_one_that_its_part_alone_would_make(model_folder: Path, normalization: str) -> None:
    """Bit for bit; so each step averages over its own tokens or responses. The rate is the tick's in all of them."""
    algorithm = AlgorithmConfig(normalization=normalization)  # type: ignore[arg-type]
    groups = make_groups(num_groups=5)
    several = _trainer(model_folder, algorithm=algorithm, minibatches=2, epochs=2)
    metrics = several.train(groups, 0)
    parts = _parts(groups, several.config, 0)
    assert sorted(map(len, parts)) == [2, 2, 3, 3]
    single = _trainer(model_folder, algorithm=algorithm)
    single.optimizer_config = OptimizerConfig(lr=metrics["lr"])  # the first tick's, half of the peak
    alone = [single.train(part, k) for k, part in enumerate(parts)]
    _assert_same_state(several, single)
    assert several.policy_version == 1 and metrics["policy_version"] == 1.0
    assert metrics["lr"] == 5e-3
    assert metrics["grad_norm"] == pytest.approx(np.mean([m["grad_norm"] for m in alone]), rel=1e-12)
    assert metrics["loss/policy"] == pytest.approx(np.mean([m["loss/policy"] for m in alone]), rel=1e-12)
    tokens = [m["tokens/trained"] for m in alone]
    assert metrics["tokens/trained"] == sum(tokens)
    assert metrics["samples/trained"] == sum(m["samples/trained"] for m in alone)
    for key in ("ratio/mean", "mismatch/kl", "entropy", "ratio/clipped_fraction"):
        assert metrics[key] == pytest.approx(np.average([m[key] for m in alone], weights=tokens), rel=1e-9), key
    assert metrics["ratio/max"] == max(m["ratio/max"] for m in alone)
    assert metrics["step/skipped"] == metrics["step/empty"] == 0.0


def test_tokens_that_no_step_takes_are_counted_once_whatever_the_passes(model_folder: Path) -> None:
    lengths, rewards = (1, 2, 3, 4), (0.0, 1.0, 0.5, None)
    outcomes = [Failure(kind="timeout", detail="") if r is None else Score(value=r) for r in rewards]
    responses = [
        make_response(0, i, [7] * n, outcome) for i, (n, outcome) in enumerate(zip(lengths, outcomes, strict=True))
    ]
    responses[2] = dataclasses.replace(responses[2], finish_reason="length")
    group = made_group(responses, tokens=[5, 6])
    trainer = _trainer(model_folder, epochs=3, algorithm=AlgorithmConfig(train_truncated=False))
    metrics = trainer.train([group], 0)
    assert metrics["tokens/trained"] == 9  # the first two responses, three times
    assert metrics["tokens/repeated"] == 6
    assert metrics["tokens/unused"] == 3  # the third was cut; the fourth failed, which others count


def test_one_step_reports_what_it_always_did(model_folder: Path) -> None:
    metrics = _trainer(model_folder).train(make_groups(), 0)
    assert not {"staleness/steps_mean", "staleness/steps_max"} & set(metrics)


def _two_groups(versions: tuple[int, int]) -> list[Group]:
    """Group p has two responses of p + 1 tokens, sampled by ``versions[p]``."""

    def response(p: int, s: int) -> Response:
        return make_response(p, s, [7 + s] * (p + 1), Score(value=float(s)), versions=[versions[p]] * (p + 1))

    return [made_group([response(p, 0), response(p, 1)], index=p, tokens=[5, 6]) for p in range(2)]


def test_staleness_in_ticks_and_in_optimizer_steps_by_hand(model_folder: Path) -> None:
    """Three steps a tick; at tick 2, tokens of version 0 are 6 steps old in the first step, 7 and 8 in the others."""
    trainer = _trainer(model_folder, epochs=3)
    for k in range(2):
        trainer.train(make_groups(seed=k), k)
    metrics = trainer.train(_two_groups((0, 1)), 2)  # 2 tokens of version 0, 4 of version 1, in each step
    assert metrics["staleness/mean"] == pytest.approx((2 * 2 + 4 * 1) / 6)
    assert metrics["staleness/max"] == 2.0
    assert metrics["staleness/steps_mean"] == pytest.approx(3 * (2 * 2 + 4 * 1) / 6 + (0 + 1 + 2) / 3)
    assert metrics["staleness/steps_max"] == 3 * 2 + 2


def test_steps_of_uneven_size_weigh_by_their_tokens(model_folder: Path) -> None:
    trainer = _trainer(model_folder, minibatches=2)
    trainer.train(make_groups(), 0)
    metrics = trainer.train(_two_groups((0, 1)), 1)
    (first,), (second,) = _parts(_two_groups((0, 1)), trainer.config, 1)
    tokens = {0: 2, 1: 4}
    ages = {0: 2 * (1 - 0), 1: 2 * (1 - 1)}
    a, b = first.prompt.index, second.prompt.index
    assert metrics["staleness/steps_mean"] == pytest.approx((tokens[a] * ages[a] + tokens[b] * (ages[b] + 1)) / 6)
    assert metrics["staleness/mean"] == pytest.approx(2 / 6)


def _recorded(trainer: Trainer) -> list[TokenBatch]:
    """What the loss is given from now on, in order."""
    seen: list[TokenBatch] = []
    loss = trainer.loss

    def record(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
        seen.append(dataclasses.replace(batch, policy_logprobs=batch.policy_logprobs.detach().clone()))
        return loss(batch, config)

    trainer.loss = record
    return seen


@pytest.mark.parametrize("name", ["decoupled_ppo", "truncated_is"])
def test_proximal_logprobs_are_those_before_the_first_update_of_the_tick(model_folder: Path, name: str) -> None:
    algorithm = AlgorithmConfig(name=name)  # type: ignore[arg-type]
    trainer = _trainer(model_folder, algorithm=algorithm, epochs=3, max_tokens_per_microbatch=4096)
    trainer.train(make_groups(seed=1), 0)
    seen = _recorded(trainer)
    trainer.train(make_groups(), 1)
    assert len(seen) == 3  # one micro-batch a step
    before = seen[0].policy_logprobs
    for batch in seen:
        assert batch.proximal_logprobs is not None
        torch.testing.assert_close(batch.proximal_logprobs, before, rtol=1e-5, atol=1e-5)
    assert (seen[2].policy_logprobs - before).abs().max() > 1e-2


def test_proximal_logprobs_follow_their_responses_through_shuffled_steps(model_folder: Path) -> None:
    algorithm = AlgorithmConfig(name="decoupled_ppo")
    groups = make_groups(num_groups=5)
    trainer = _trainer(model_folder, algorithm=algorithm, minibatches=3, max_tokens_per_microbatch=40)
    trainer.optimizer_config = OptimizerConfig(lr=1e-30)  # weights stay, so the proximal policy is the policy
    seen = _recorded(trainer)
    trainer.train(groups, 0)
    assert len(seen) > 3
    for batch in seen:
        assert batch.proximal_logprobs is not None and len(batch.proximal_logprobs) > 0
        torch.testing.assert_close(batch.proximal_logprobs, batch.policy_logprobs, rtol=1e-5, atol=1e-5)


def test_nobody_computes_a_proximal_policy_that_no_one_asks_for(model_folder: Path) -> None:
    for algorithm, epochs in ((AlgorithmConfig(name="decoupled_ppo"), 1), (AlgorithmConfig(name="ppo"), 2)):
        trainer = _trainer(model_folder, algorithm=algorithm, epochs=epochs)
        seen = _recorded(trainer)
        trainer.train(make_groups(), 0)
        assert [batch.proximal_logprobs for batch in seen] == [None] * epochs


def test_a_step_with_a_non_finite_gradient_is_skipped_and_the_others_are_made(model_folder: Path) -> None:
    sound = make_groups(num_groups=1, failed=False)
    several, single = _trainer(model_folder, minibatches=2), _trainer(model_folder)
    metrics = several.train([*sound, poisoned(1)], 0)
    single.train(sound, 0)
    _assert_same_state(several, single)
    assert metrics["step/skipped"] == 1.0 and not math.isfinite(metrics["grad_norm"])
    assert several.policy_version == 1


def test_too_many_skipped_steps_stop_the_tick_midway_with_a_version_made(model_folder: Path) -> None:
    trainer, fresh = _trainer(model_folder, epochs=5, max_skipped_steps=2), _trainer(model_folder)
    seen = _recorded(trainer)
    with pytest.raises(TrainingDiverged, match="tick 0: 3 steps in a row with a non-finite loss or gradient"):
        trainer.train([poisoned(0)], 0)
    assert len(seen) == 3 and trainer.policy_version == 1
    _assert_same_state(trainer, fresh)


def test_steps_without_a_token_are_counted_and_change_nothing(model_folder: Path) -> None:
    groups = make_groups(num_groups=1)
    several, single = _trainer(model_folder, minibatches=3), _trainer(model_folder)
    metrics = several.train(groups, 0)
    single.train(groups, 0)
    _assert_same_state(several, single)
    assert metrics["step/empty"] == 2.0 and metrics["step/skipped"] == 0.0
    nothing = several.train([], 1)
    assert nothing["step/empty"] == 3.0 and nothing["tokens/trained"] == nothing["grad_norm"] == 0.0


# The plan of a tick's steps.


def test_passes_ticks_and_seeds_are_cut_differently_and_each_again_the_same() -> None:
    def plan(seed: int = 0, tick: int = 0) -> list[list[int]]:
        return plan_steps(range(8), minibatches=3, epochs=2, seed=seed, tick=tick)

    made = plan()
    assert [sorted(map(len, part)) for part in (made[:3], made[3:])] == [[2, 3, 3]] * 2  # alike, but for one group
    assert sorted(sum(made[:3], [])) == sorted(sum(made[3:], [])) == list(range(8))  # each group once a pass
    assert {frozenset(step) for step in made[:3]} != {frozenset(step) for step in made[3:]}
    assert plan() == made
    assert plan(tick=1) != made
    assert plan(seed=1) != made


def test_ranks_plan_together_and_groups_stay_whole() -> None:
    """Three ranks, the second without a group; prompts by sequence, those of a group side by side."""
    mine = [[3, 3, 5], [], [1, 1, 1, 7]]
    counts = np.array([2, 0, 2])
    everyone = np.array([3, 5, 1, 7])
    steps = plan_steps(everyone.tolist(), minibatches=2, epochs=2, seed=4, tick=9)
    for rank, prompts in enumerate(mine):
        sent: list[np.ndarray] = []

        def summed(values: np.ndarray, sent: list[np.ndarray] = sent) -> np.ndarray:
            sent.append(values.copy())
            return counts.copy() if len(sent) == 1 else everyone.copy()

        found = plan_of_rank(
            prompts, minibatches=2, epochs=2, seed=4, tick=9, rank=rank, num_ranks=3, sum_over_ranks=summed
        )
        assert sent[0].tolist() == [counts[r] * (r == rank) for r in range(3)]
        start = int(counts[:rank].sum())
        assert sent[1].tolist() == [p if start <= i < start + counts[rank] else 0 for i, p in enumerate(everyone)]
        assert found == [[i for i, prompt in enumerate(prompts) if prompt in step] for step in steps]
