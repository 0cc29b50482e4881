"""The same tensors through TRL's loss and through ours: losses, gradients and clipped shares, to float64 rounding.

``trl_fixture.json`` holds what TRL computed; scripts/make_trl_fixture.py makes it anew.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarl.algorithms.base import TokenBatch
from llamarl.algorithms.config import AlgorithmConfig
from llamarl.algorithms.kl import ESTIMATORS
from llamarl.algorithms.registry import LOSSES
from llamarl.trainer.batch import token_weight

RECORD = json.loads((Path(__file__).parent / "trl_fixture.json").read_text(encoding="utf-8"))
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
OURS: dict[str, AlgorithmConfig] = {
    "grpo": AlgorithmConfig(name="ppo", normalization="sequence", **CLIP),
    "grpo_with_kl": AlgorithmConfig(name="ppo", normalization="sequence", kl_coef=0.04, kl_estimator="k3", **CLIP),
    "bnpo": AlgorithmConfig(name="ppo", normalization="token", **CLIP),
    "dapo": AlgorithmConfig(name="ppo", normalization="token", clip_low=0.2, clip_high=0.28),
    "dapo_with_kl": AlgorithmConfig(name="ppo", clip_low=0.1, clip_high=0.28, kl_coef=0.1, kl_estimator="k3"),
    "dr_grpo": AlgorithmConfig(
        name="ppo", normalization="constant", normalization_constant=RECORD["max_completion_length"], **CLIP
    ),
    "gspo": AlgorithmConfig(name="gspo", normalization="sequence", clip_low=0.1, clip_high=0.15),
    "cispo": AlgorithmConfig(name="cispo", clip_low=1.0, clip_high=0.5),  # TRL's epsilon_high is the bound itself
    "truncated_is": AlgorithmConfig(name="truncated_is", rho=1.5, **CLIP),
}
"""Case of the record -> the recipe that says the same."""


def _tensor(name: str) -> torch.Tensor:
    return torch.tensor(RECORD["tensors"][name], dtype=torch.bool if name == "mask" else torch.float64)


def _ours(config: AlgorithmConfig) -> dict[str, Any]:
    """Loss, gradient [5, 8] and clipped share of the five responses laid end to end, as the trainer sees them."""
    mask = _tensor("mask")
    policy = _tensor("policy_logprobs").requires_grad_()
    counts = mask.sum(dim=1).tolist()
    ids = torch.arange(len(counts))[:, None].expand_as(mask)[mask]
    batch = TokenBatch(
        policy_logprobs=policy[mask],
        behavior_logprobs=_tensor("behavior_logprobs")[mask],
        advantages=_tensor("advantages")[ids],
        sequence_ids=ids,
        num_sequences=len(counts),
        proximal_logprobs=_tensor("proximal_logprobs")[mask],
    )
    terms = LOSSES[config.name](batch, config)
    losses = terms.losses
    if config.term_weights.kl:
        log_ratio = _tensor("reference_logprobs")[mask] - batch.policy_logprobs
        losses = losses + config.kl_coef * ESTIMATORS[config.kl_estimator](log_ratio)
    weights = torch.tensor(
        [token_weight(config, num_own_tokens=n, num_tokens=sum(counts), num_sequences=len(counts)) for n in counts],
        dtype=torch.float64,
    )
    loss = (losses * weights[ids]).sum()
    (gradient,) = torch.autograd.grad(loss, policy)
    return {"loss": loss.item(), "gradient": gradient, "clipped": terms.clipped.double().mean().item()}


def test_every_recorded_case_is_compared() -> None:
    assert set(OURS) == set(RECORD["cases"])


@pytest.mark.parametrize("case", sorted(OURS))
def test_loss_and_gradient_equal_trls(case: str) -> None:
    theirs, ours = RECORD["cases"][case], _ours(OURS[case])
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
    torch.testing.assert_close(
        ours["gradient"], torch.tensor(theirs["gradient"], dtype=torch.float64), rtol=1e-11, atol=1e-15
    )
    assert 0 < ours["clipped"] < 1  # the case covers both sides of the bound


@pytest.mark.parametrize("case", ["grpo", "grpo_with_kl", "bnpo", "dapo", "dapo_with_kl", "dr_grpo"])
def test_the_clipped_share_equals_trls(case: str) -> None:
    assert _ours(OURS[case])["clipped"] == pytest.approx(RECORD["cases"][case]["clipped"], rel=1e-6)
