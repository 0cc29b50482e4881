"""Activations that go to the host and come back: the same bits, each tensor once, parameters never. The copies are made from host to
host here; ``tests/gpu`` has those of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_fixtures import make_groups, write_model

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.trainer.config import OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer


def _trainer(folder: Path, checkpointing: str, max_tokens: int = 64) -> Trainer:
    config = TrainerConfig(
        activation_checkpointing=checkpointing, max_tokens_per_microbatch=max_tokens, skip_zero_advantage=False
    )
    return Trainer(folder, config, OptimizerConfig(lr=1e-2), AlgorithmConfig(), temperature=0.9)


def _offloading(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What ``trainer`` sends to the host from now on."""
    went: list[Tensor] = []
    empty_like = torch.empty_like

    def noted(tensor: Tensor, **options: object) -> Tensor:
        if "pin_memory" in options:
            went.append(tensor)
        return empty_like(tensor, **options)

    monkeypatch.setattr(torch, "empty_like", noted)
    trainer.policy.offload_activations(lambda tensor: True)
    return went


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_two_steps_have_the_same_bits(
    family: str, checkpointing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, family)
    near, far = _trainer(folder, checkpointing), _trainer(folder, checkpointing)
    went = _offloading(far, monkeypatch)
    for tick in range(2):
        assert near.train(make_groups(seed=tick), tick) == far.train(make_groups(seed=tick), tick)
    for name, weight in near.parameters_for_sync().items():
        assert torch.equal(weight, far.parameters_for_sync()[name]), name
    assert went


def test_of_a_checkpointed_layer_its_input_goes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(write_model(tmp_path), "full", max_tokens=10_000)
    went = _offloading(trainer, monkeypatch)
    computed = trainer.train(make_groups(), 0)["tokens/computed"]
    assert sum(tensor.nbytes for tensor in went) == 2 * computed * 32 * 4  # 2 layers, 32 features of 4 bytes


def test_parameters_and_what_all_layers_share_stay_and_a_tensor_goes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(write_model(tmp_path), "none", max_tokens=10_000)
    stay = {p.untyped_storage().data_ptr() for p in trainer.policy.parameters()}
    went = _offloading(trainer, monkeypatch)
    starts: list[int] = []

    def note(module: object, args: object, kwargs: dict) -> None:
        starts.append(len(went))
        stay.update(tensor.untyped_storage().data_ptr() for tensor in kwargs["position_embeddings"])

    for layer in trainer.policy.layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    trainer.train(make_groups(), 0)
    layers = [went[start:end] for start, end in zip(starts, [*starts[1:], len(went)], strict=True)]
    assert len(layers) == 2
    for of_layer in layers:
        places = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in of_layer]
        assert len(set(places)) == len(places) > 5
        assert not {t.untyped_storage().data_ptr() for t in of_layer} & stay


def test_a_pass_without_gradients_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(write_model(tmp_path), "none")
    went = _offloading(trainer, monkeypatch)
    with torch.no_grad():
        trainer._with_proximal_logprobs(trainer._with_experts([]))
    assert not went
