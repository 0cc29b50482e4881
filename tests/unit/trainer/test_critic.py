"""The critic against the written objective, its state, and the folder that it leaves."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_fixtures import export, make_groups, with_reference, write_model
from transformers import AutoModelForTokenClassification

from llamarl.errors import TrainingDiverged
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import CriticConfig, OptimizerConfig, TrainerConfig
from llamarl.trainer.batch import make_microbatch
from llamarl.trainer.critic import Critic
from llamarl.types import Group, Score

GAE = AlgorithmConfig(advantage="gae", gae_gamma=0.9, gae_lambda=0.8)


def _critic(folder: Path, *, lr: float = 1e-2, algorithm: AlgorithmConfig = GAE, **config: Any) -> Critic:
    own = {name: config.pop(name) for name in ("updates_per_tick", "value_clip", "warmup_ticks") if name in config}
    return Critic(folder, CriticConfig(lr=lr, **own), algorithm, TrainerConfig(**config), OptimizerConfig())


def _values(groups: list[Group]) -> list[np.ndarray]:
    return [r.values for g in groups for r in g.responses if r.values is not None]


def _weights(critic: Critic) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in critic.weights.tensors.items()}


def test_a_fresh_critic_says_zero_of_every_token_that_trains(model_folder: Path) -> None:
    groups, metrics = _critic(model_folder).step(make_groups(), 0)
    for group in groups:
        for response in group.responses:
            if isinstance(response.outcome, Score):
                assert response.values[response.loss_mask].tolist() == [0.0] * int(response.loss_mask.sum())
                assert np.isnan(response.values[~response.loss_mask]).all()
            else:
                assert response.values is None
    assert metrics["critic/value_mean"] == metrics["critic/explained_variance"] == 0.0


def test_values_are_no_view_in_which_a_change_in_place_would_lose_fsdp2_its_hook(model_folder: Path) -> None:
    critic = _critic(model_folder)
    assert critic.module(make_microbatch([], [], critic.device))._base is None


def _by_hand(folder: Path, batches: list[list[Group]], *, lr: float, clip: float, updates: int) -> Any:
    """The library's own forward, one response at a time; GAE and the loss written out."""
    model = AutoModelForTokenClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for parameter in model.score.parameters():
        torch.nn.init.zeros_(parameter)
    adamw = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)

    def estimate(group: Group, response: Any) -> torch.Tensor:
        ids = torch.tensor(np.concatenate([group.prompt.tokens, response.tokens]), dtype=torch.int64)[None]
        before = len(group.prompt.tokens) - 1 + np.flatnonzero(response.loss_mask)
        return model(ids).logits[0, before, 0]

    norms, said = [], []
    for groups in batches:
        samples = [(g, r) for g in groups for r in g.responses if isinstance(r.outcome, Score)]
        total = sum(int(r.loss_mask.sum()) for _, r in samples)
        with torch.no_grad():
            first = [estimate(g, r) for g, r in samples]
        said.append(first)
        targets = []
        for (_, response), values in zip(samples, first, strict=True):
            v = [*values.tolist(), 0.0]
            n = len(values)
            delta = [(response.outcome.value if t == n - 1 else 0.0) + 0.9 * v[t + 1] - v[t] for t in range(n)]
            targets.append([v[t] + sum((0.9 * 0.8) ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)])
        for _ in range(updates):
            for (group, response), old, target in zip(samples, first, targets, strict=True):
                v = estimate(group, response)
                goal = torch.tensor(target)
                error = torch.maximum((v - goal) ** 2, (old + (v - old).clamp(-clip, clip) - goal) ** 2)
                (0.5 * error.sum() / total).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            adamw.step()
            adamw.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms, said


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_two_ticks_of_two_updates_equal_the_written_objective(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family)
    batches = [make_groups(seed=k) for k in range(2)]
    critic = _critic(folder, lr=1e-3, value_clip=0.01, updates_per_tick=2, max_tokens_per_microbatch=40)
    results = [critic.step(groups, k) for k, groups in enumerate(batches)]
    expected, norms, said = _by_hand(folder, batches, lr=1e-3, clip=0.01, updates=2)
    for (groups, metrics), hand, norm in zip(results, said, norms[::2], strict=True):
        assert metrics["critic/grad_norm"] == pytest.approx(norm, rel=1e-3)
        for got, wanted in zip(_values(groups), hand, strict=True):
            np.testing.assert_allclose(got[~np.isnan(got)], wanted.numpy(), rtol=1e-3, atol=2e-5)
    assert results[1][1]["critic/clipped_fraction"] > 0
    assert set(_weights(critic)) == set(expected)
    for name, tensor in _weights(critic).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_kl_as_token_rewards_lowers_what_the_critic_learns(model_folder: Path) -> None:
    """A reference below the behaviour by 0.5 nats a token, lambda and gamma 1: token t loses 0.1 * 0.5 * (n - t)."""
    plain = AlgorithmConfig(advantage="gae", gae_lambda=1.0)
    charged = AlgorithmConfig(advantage="gae", gae_lambda=1.0, kl_coef=0.1, kl_place="token_reward", kl_estimator="k1")
    groups = with_reference(make_groups(), shift=-0.5)
    means = [_critic(model_folder, algorithm=a).step(groups, 0)[1]["critic/return_mean"] for a in (plain, charged)]
    counts = [int(r.loss_mask.sum()) for g in groups for r in g.responses if isinstance(r.outcome, Score)]
    loss = sum(0.05 * n * (n + 1) / 2 for n in counts) / sum(counts)
    assert means[0] - means[1] == pytest.approx(loss, rel=1e-5)


def test_resume_gives_the_same_bits(model_folder: Path, tmp_path: Path) -> None:
    whole = _critic(model_folder)
    for k in range(3):
        whole.step(make_groups(seed=k), k)
    expected = whole.step(make_groups(seed=3), 3)
    cut = _critic(model_folder)
    for k in range(3):
        cut.step(make_groups(seed=k), k)
    cut.save(tmp_path)
    resumed = _critic(model_folder)
    resumed.load(tmp_path)
    groups, metrics = resumed.step(make_groups(seed=3), 3)
    assert metrics == expected[1]
    for got, wanted in zip(_values(groups), _values(expected[0]), strict=True):
        assert got.tobytes() == wanted.tobytes()
    for name, tensor in _weights(whole).items():
        assert torch.equal(tensor, _weights(resumed)[name])


def test_the_exported_folder_loads_in_transformers_and_as_a_critic(model_folder: Path, tmp_path: Path) -> None:
    critic = _critic(model_folder)
    for k in range(2):
        critic.step(make_groups(seed=k), k)
    export(critic, model_folder, tmp_path / "critic")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    assert model.config.num_labels == 1
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, _weights(critic)[name]), name
    again = _critic(tmp_path / "critic")
    assert set(_weights(again)) == set(_weights(critic))
    for got, wanted in zip(
        _values(again.step(make_groups(seed=5), 0)[0]), _values(critic.step(make_groups(seed=5), 2)[0]), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


def test_a_gradient_that_is_not_finite_changes_nothing_and_a_series_of_them_stops_the_run(model_folder: Path) -> None:
    critic = _critic(model_folder, max_skipped_steps=1)
    with torch.no_grad():
        critic.weights.tensors["score.bias"].fill_(math.nan)
    before = _weights(critic)["model.layers.0.mlp.up_proj.weight"]
    _, metrics = critic.step(make_groups(), 0)
    assert metrics["critic/skipped"] == 1.0
    assert torch.equal(_weights(critic)["model.layers.0.mlp.up_proj.weight"], before)
    with pytest.raises(TrainingDiverged, match="critic: tick 1: 2 steps in a row with a non-finite"):
        critic.step(make_groups(), 1)


def test_a_batch_without_a_trained_token_is_a_tick_without_an_update(model_folder: Path) -> None:
    critic = _critic(model_folder)
    before = _weights(critic)
    assert critic.step([], 0)[0] == []
    assert critic.ticks_done == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in _weights(critic).items())


def test_bfloat16_compute_keeps_float32_master_weights(model_folder: Path) -> None:
    critic = _critic(model_folder, dtype="bfloat16")
    exact = _critic(model_folder)
    for k in range(3):
        rough, fine = critic.step(make_groups(seed=k), k)[1], exact.step(make_groups(seed=k), k)[1]
    assert all(tensor.dtype == torch.float32 for tensor in _weights(critic).values())
    assert rough["critic/loss"] == pytest.approx(fine["critic/loss"], rel=0.1)
    assert rough["critic/loss"] != fine["critic/loss"]  # it did round
