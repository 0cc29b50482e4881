"""Activations that go to the host and come back: the same bits, each storage once, parameters never. The copies are made from host to
host here; ``tests/gpu`` has those of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_fixtures import make_groups, write_model

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.trainer import activation_offload
from llamarl.trainer.activation_offload import ActivationOffload
from llamarl.trainer.config import OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer


def _trainer(folder: Path, checkpointing: str, max_tokens: int = 64) -> Trainer:
    config = TrainerConfig(
        activation_checkpointing=checkpointing, max_tokens_per_microbatch=max_tokens, skip_zero_advantage=False
    )
    return Trainer(folder, config, OptimizerConfig(lr=1e-2), AlgorithmConfig(), temperature=0.9)


@pytest.fixture(autouse=True)
def _everything_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "_SMALL", 1)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_two_steps_have_the_same_bits(family: str, checkpointing: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, family)
    near, far = _trainer(folder, checkpointing), _trainer(folder, checkpointing)
    offload = ActivationOffload(leaves=lambda tensor: True)
    offload.install(far.policy.layers)
    for tick in range(2):
        assert near.train(make_groups(seed=tick), tick) == far.train(make_groups(seed=tick), tick)
    for name, weight in near.parameters_for_sync().items():
        assert torch.equal(weight, far.parameters_for_sync()[name]), name
    assert offload.num_bytes > 0


def test_of_a_checkpointed_layer_its_input_goes_and_nothing_else(tmp_path: Path) -> None:
    trainer = _trainer(write_model(tmp_path), "full", max_tokens=10_000)
    offload = ActivationOffload(leaves=lambda tensor: True)
    offload.install(trainer.policy.layers)
    computed = trainer.train(make_groups(), 0)["tokens/computed"]
    assert offload.num_bytes == 2 * computed * 32 * 4  # 2 layers, 32 features of 4 bytes


def test_parameters_and_what_all_layers_share_stay_and_a_storage_goes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(write_model(tmp_path), "none", max_tokens=10_000)
    parameters = {p.untyped_storage().data_ptr() for p in trainer.policy.parameters()}
    went: list[list[int]] = []
    shared: set[int] = set()
    offload = ActivationOffload(leaves=lambda tensor: True)
    to_host = offload._to_host

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        went[-1].append(tensor.untyped_storage().data_ptr())
        return to_host(tensor)

    monkeypatch.setattr(offload, "_to_host", noted)
    offload.install(trainer.policy.layers)
    for layer in trainer.policy.layers:
        original = layer.forward

        def forward(*args: object, original: object = original, **kwargs: object) -> object:
            went.append([])
            cos, sin = kwargs["position_embeddings"]  # type: ignore[misc]
            shared.update(t.untyped_storage().data_ptr() for t in (cos, sin))
            return original(*args, **kwargs)  # type: ignore[operator]

        layer.forward = forward  # type: ignore[method-assign]
    trainer.train(make_groups(), 0)
    assert len(went) == 2 and all(len(of_layer) > 5 for of_layer in went)
    for of_layer in went:
        assert len(set(of_layer)) == len(of_layer) and not {*of_layer} & (parameters | shared)


def test_a_pass_without_gradients_keeps_nothing(tmp_path: Path) -> None:
    trainer = _trainer(write_model(tmp_path), "none")
    offload = ActivationOffload(leaves=lambda tensor: True)
    offload.install(trainer.policy.layers)
    with torch.no_grad():
        trainer._with_proximal_logprobs(trainer._with_experts([]))
    assert offload.num_bytes == 0
