"""A training step on a GPU against the CPU's, against itself, and in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from training_fixtures import make_groups, write_model

from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer


def _trainer(folder: Path, device: torch.device | str, **settings: Any) -> Trainer:
    # an eps far above the gradients: AdamW then follows them, where it would otherwise follow their signs
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-1)
    algorithm = settings.pop("algorithm", AlgorithmConfig())
    return Trainer(folder, TrainerConfig(**settings), optimizer, algorithm, temperature=0.9, device=str(device))


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in trainer.parameters_for_sync().items()}


@pytest.mark.parametrize("attention", ["auto", "flex"])
@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_two_float32_steps_are_those_of_the_cpu(
    family: str, share_prompts: bool, attention: str, tmp_path: Path, device: torch.device
) -> None:
    folder = write_model(tmp_path, family, head_dim=16)  # the least width of "flex"
    settings = {"share_prompts": share_prompts, "max_tokens_per_microbatch": 64, "attention": attention}
    here, there = _trainer(folder, "cpu", **settings), _trainer(folder, device, **settings)
    for tick in range(2):
        expected, found = (trainer.train(make_groups(seed=tick), tick) for trainer in (here, there))
        for key in ("loss/policy", "entropy", "ratio/mean", "grad_norm", "tokens/trained"):
            assert found[key] == pytest.approx(expected[key], rel=2e-4, abs=1e-6), key
    before = dict(_trainer(folder, "cpu").parameters_for_sync())
    for name, weight in _weights(there).items():
        reached = _weights(here)[name]
        moved = (reached - before[name]).abs().max().item()
        torch.testing.assert_close(weight, reached, atol=1e-2 * moved + 1e-7, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "share_prompts": False}])
def test_steps_repeat_bit_for_bit(settings: dict[str, Any], tmp_path: Path, device: torch.device) -> None:
    """Fused attention's backward pass, whose gradients come in any order unless determinism is demanded."""
    folder = write_model(tmp_path)
    runs = []
    for _ in range(3):
        trainer = _trainer(folder, device, max_tokens_per_microbatch=1024, **settings)
        for tick in range(2):
            trainer.train(make_groups(num_groups=6, group_size=8, max_response=60, seed=tick, failed=False), tick)
        runs.append(_weights(trainer))
    for name, weight in runs[0].items():
        assert torch.equal(weight, runs[1][name]) and torch.equal(weight, runs[2][name]), name


@pytest.mark.parametrize("share_prompts", [True, False])
def test_bfloat16_with_float32_masters_follows_float32(
    share_prompts: bool, tmp_path: Path, device: torch.device
) -> None:
    folder = write_model(tmp_path)
    exact, rounded = (
        _trainer(folder, device, dtype=dtype, share_prompts=share_prompts) for dtype in ("float32", "bfloat16")
    )
    assert all(t.dtype == torch.float32 for t in rounded.parameters_for_sync().values())
    assert all(p.dtype == torch.bfloat16 for p in rounded.policy.parameters())
    expected, found = exact.train(make_groups(), 0), rounded.train(make_groups(), 0)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
    assert found["entropy"] == pytest.approx(expected["entropy"], rel=0.05)


def test_state_saved_on_the_device_goes_on_with_the_same_bits(tmp_path: Path, device: torch.device) -> None:
    folder = write_model(tmp_path / "model")
    whole = _trainer(folder, device)
    for tick in range(3):
        whole.train(make_groups(seed=tick), tick)
    first = _trainer(folder, device)
    first.train(make_groups(seed=0), 0)
    first.save(tmp_path / "state")
    resumed = _trainer(folder, device)
    resumed.load(tmp_path / "state")
    for tick in (1, 2):
        resumed.train(make_groups(seed=tick), tick)
    for name, weight in _weights(whole).items():
        assert torch.equal(weight, _weights(resumed)[name]), name


def test_an_offloaded_optimizer_takes_the_step_of_one_on_the_device(tmp_path: Path, device: torch.device) -> None:
    folder = write_model(tmp_path)
    near, far = _trainer(folder, device), _trainer(folder, device, offload_optimizer=True)
    for trainer in (near, far):
        trainer.train(make_groups(), 0)
    assert all(t.device.type == "cpu" for t in far.parameters_for_sync().values())
    for name, weight in _weights(near).items():
        torch.testing.assert_close(_weights(far)[name], weight, atol=1e-6, rtol=1e-5)
