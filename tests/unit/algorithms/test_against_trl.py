"""The same tensors through TRL's loss and through ours: losses, gradients and clipped shares, to float64 rounding.

``trl_fixture.json`` holds what TRL computed; scripts/make_trl_fixture.py makes it anew.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarl.algorithms.base import TokenBatch
from llamarl.algorithms.kl import ESTIMATORS, unbiased
from llamarl.algorithms.registry import LOSSES
from llamarl.other_names import other_names
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.trainer.batch import token_weight
from llamarl.trainer.objective import ratio_keep_mask, top_entropy_mask

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
    "sequence_is": AlgorithmConfig(name="sequence_is", rho=1.5),
    "off_policy_mask": AlgorithmConfig(name="ppo", ratio_mask="off_policy", ratio_mask_low=math.exp(-0.02), **CLIP),
    "unbiased_kl": AlgorithmConfig(name="ppo", kl_coef=0.1, kl_estimator="unbiased", **CLIP),
    "top_entropy": AlgorithmConfig(name="ppo", top_entropy=0.3, **CLIP),
}
"""Case of the record -> the recipe that says the same."""


def test_who_follows_the_table_from_trl_gets_its_cispo_whose_weight_nothing_bounds_from_below() -> None:
    rows = {theirs: ours for theirs, ours, _ in other_names()["TRL"]}
    assert OURS["cispo"].clip_low == 1.0 != AlgorithmConfig().clip_low
    assert "`algorithm.clip_low = 1`" in rows['`loss_type="cispo"`']


def _ours(case: str) -> dict[str, Any]:
    """Loss, gradient [5, 8] and clipped share of the case's responses laid end to end, as the trainer sees them."""
    config, responses = OURS[case], RECORD["cases"][case]["settings"].get("responses", 5)

    def _tensor(name: str) -> torch.Tensor:
        values = RECORD["tensors"][name][:responses]
        return torch.tensor(values, dtype=torch.bool if name == "mask" else torch.float64)

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
        entropy=_tensor("entropy")[mask],
    )
    terms = LOSSES[config.name](batch, config)
    keep = ratio_keep_mask(batch, config) & top_entropy_mask(batch, config.top_entropy)
    losses = torch.where(keep, terms.losses, 0.0)
    if config.term_weights.kl:
        log_ratio = _tensor("reference_logprobs")[mask] - batch.policy_logprobs
        ratio = (batch.policy_logprobs - batch.behavior_logprobs).exp()
        kind = config.kl_estimator
        kl = unbiased(log_ratio, ratio) if kind == "unbiased" else ESTIMATORS[kind](log_ratio)
        losses = losses + config.kl_coef * kl
    weights = torch.tensor(
        [token_weight(config, num_own_tokens=n, num_tokens=sum(counts), num_sequences=len(counts)) for n in counts],
        dtype=torch.float64,
    )
    loss = (losses * weights[ids]).sum()
    (gradient,) = torch.autograd.grad(loss, policy)
    shares = {"clipped": terms.clipped, "masked": ~keep}
    means = {name: share.double().mean().item() for name, share in shares.items()}
    return {"loss": loss.item(), "gradient": gradient, **means}


def test_every_recorded_case_is_compared() -> None:
    assert set(OURS) == set(RECORD["cases"])


@pytest.mark.parametrize("case", sorted(OURS))
def test_loss_and_gradient_equal_trls(case: str) -> None:
    theirs, ours = RECORD["cases"][case], _ours(case)
    if case != "sequence_is":  # TRL's surrogate has the same gradient and another value
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
    torch.testing.assert_close(
        ours["gradient"], torch.tensor(theirs["gradient"], dtype=torch.float64), rtol=1e-11, atol=1e-15
    )
    assert 0 < max(ours["clipped"], ours["masked"]) < 1  # the case covers both sides of the bound
    assert (0 < ours["masked"] < 1) == (case in ("off_policy_mask", "top_entropy"))


@pytest.mark.parametrize("case", ["grpo", "grpo_with_kl", "bnpo", "dapo", "dapo_with_kl", "dr_grpo"])
def test_the_clipped_share_equals_trls(case: str) -> None:
    assert _ours(case)["clipped"] == pytest.approx(RECORD["cases"][case]["clipped"], rel=1e-6)
