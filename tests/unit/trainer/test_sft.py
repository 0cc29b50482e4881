"""Supervised fine-tuning is the library's cross-entropy on completions, whatever the packing; held-out loss is the same sum."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from training_fixtures import make_groups
from transformers import AutoModelForCausalLM

from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer
from llamarl.types import Group, Score

SFT = AlgorithmConfig(name="sft")


def demonstrations(seed: int) -> list[Group]:
    """Each response as a row of its own, some tokens of it not the assistant's."""
    return [
        Group(
            prompt=group.prompt,
            responses=(
                dataclasses.replace(
                    response,
                    outcome=Score(value=1.0),
                    sampled_by="demonstrations",
                    behavior_logprobs=np.zeros(len(response.tokens), np.float32),
                ),
            ),
        )
        for group in make_groups(seed=seed)
        for response in group.responses
    ]


def cross_entropy(model: torch.nn.Module, groups: list[Group]) -> torch.Tensor:
    """Mean over all trained tokens, by ``cross_entropy`` of torch with -100 for the others, a row at a time."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        (response,) = group.responses
        ids = torch.tensor(np.concatenate([group.prompt.tokens, response.tokens]), dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        own = torch.from_numpy(response.loss_mask)
        labels[len(group.prompt.tokens) :][own] = ids[len(group.prompt.tokens) :][own]
        logits = model(ids[None]).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits.double(), labels[1:], reduction="sum")
        count += int(own.sum())
    return total / count


@pytest.mark.parametrize("microbatch", [16, 4096])
def test_two_steps_equal_the_librarys_cross_entropy(model_folder: Path, microbatch: int) -> None:
    settings = TrainerConfig(max_tokens_per_microbatch=microbatch, logprob_chunk_tokens=5)
    trainer = Trainer(model_folder, settings, OptimizerConfig(lr=1e-3), SFT, temperature=1.0)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    for tick in range(2):
        groups = demonstrations(seed=tick)
        metrics = trainer.train(groups, tick)
        loss = cross_entropy(model, groups)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        assert metrics["loss/policy"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert not any(key.startswith(("ratio/", "mismatch/")) for key in metrics), "nothing was sampled"
    got = trainer.parameters_for_sync()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach(), rtol=1e-4, atol=2e-5, msg=name)


def test_held_out_loss_is_the_mean_over_its_tokens_and_changes_nothing(model_folder: Path) -> None:
    trainer = Trainer(
        model_folder, TrainerConfig(max_tokens_per_microbatch=32), OptimizerConfig(), SFT, temperature=1.0
    )
    before = {name: tensor.clone() for name, tensor in trainer.parameters_for_sync().items()}
    groups = demonstrations(seed=5)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        assert trainer.loss_on(groups) == pytest.approx(cross_entropy(model, groups).item(), rel=1e-5)
    assert np.isnan(trainer.loss_on([]))
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.parameters_for_sync().items())
    assert trainer.policy_version == 0
