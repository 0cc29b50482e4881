"""Record what TRL makes of given log-probs and advantages: tests/unit/algorithms/trl_fixture.json.

    pip install trl==1.16.0 && python scripts/make_trl_fixture.py

Calls the loss of ``trl.GRPOTrainer`` itself, on a trainer that is all stand-ins but for the settings that the loss reads:
its model answers with the log-probs given here. Everything is float64, so the test that reads the file compares formulas
and not roundings. No code of TRL is in this repository; only numbers that it computed.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

OUT = Path(__file__).resolve().parents[1] / "tests" / "unit" / "algorithms" / "trl_fixture.json"
MAX_COMPLETION_LENGTH = 9
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo_with_kl": {"loss_type": "grpo", "beta": 0.04},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo_with_kl": {"loss_type": "dapo", "epsilon_low": 0.1, "epsilon_high": 0.28, "beta": 0.1},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 0.1,
        "epsilon_high": 0.15,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.5},
    "truncated_is": {"loss_type": "dapo", "use_vllm": True, "cap": 1.5},
    "sequence_is": {"loss_type": "dapo", "use_vllm": True, "cap": 1.5, "mode": "sequence_truncate"},
    "off_policy_mask": {"loss_type": "dapo", "off_policy_mask_threshold": 0.02},
    "unbiased_kl": {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True},
    "top_entropy": {"loss_type": "dapo", "top_entropy_quantile": 0.3, "responses": 1},
}
"""Name -> settings of the loss. ``cap``: truncation of the sampler's importance ratio. ``mode``: TRL computes it, of the
policy itself; else it is given ready-made, of the proximal policy. ``responses``: of the first ones alone."""


def tensors() -> dict[str, torch.Tensor]:
    """Five responses of up to eight tokens: log-probs that drifted by token and by response, so that all bounds act."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([8, 3, 1, 6, 5])
    mask = torch.arange(8)[None, :] < lengths[:, None]
    behavior = -0.2 - normal(5, 8).abs()
    policy = behavior + 0.3 * normal(5, 8) + 0.25 * normal(5, 1)
    return {
        "mask": mask,
        "behavior_logprobs": behavior,
        "policy_logprobs": policy,
        "proximal_logprobs": behavior + 0.4 * normal(5, 8),
        "reference_logprobs": policy + 0.5 * normal(5, 8),
        "advantages": normal(5),
        "entropy": normal(5, 8).abs().float().double(),  # TRL takes their quantile in float32
    }


def trl_loss(given: dict[str, torch.Tensor], settings: dict[str, Any]) -> dict[str, Any]:
    """Loss, its gradient by the policy's log-probs, and the share of clipped tokens, as TRL computes them."""
    from trl import GRPOTrainer

    given = {name: tensor[: settings.get("responses", 5)] for name, tensor in given.items()}
    policy = given["policy_logprobs"].clone().requires_grad_()
    mask = given["mask"]
    capped = settings.get("use_vllm", False)
    by_mode = "mode" in settings
    trainer: Any = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (policy, given["entropy"], None),
        aux_loss_enabled=False,
        top_entropy_quantile=settings.get("top_entropy_quantile", 1.0),
        off_policy_mask_threshold=settings.get("off_policy_mask_threshold"),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_high_entropy_mask=lambda *a: GRPOTrainer.get_high_entropy_mask(trainer, *a),
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        beta=settings.get("beta", 0.0),
        loss_type=settings["loss_type"],
        epsilon_low=settings.get("epsilon_low", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.2),
        max_completion_length=MAX_COMPLETION_LENGTH,
        use_vllm=capped,
        vllm_importance_sampling_correction=capped,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=None, use_bias_correction_kl=settings.get("use_bias_correction_kl", False), steps_per_generation=1
        ),
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, **_: x,
        ),
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.int64),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "completion_mask": mask.to(torch.int64),
        "advantages": given["advantages"],
        "old_per_token_logps": None if by_mode else given["proximal_logprobs" if capped else "behavior_logprobs"],
        "ref_per_token_logps": given["reference_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    if by_mode:
        inputs["importance_sampling_ratio"] = importance_ratio(given, settings)
    elif capped:
        ratio = (given["proximal_logprobs"] - given["behavior_logprobs"]).exp()
        inputs["importance_sampling_ratio"] = ratio.clamp(max=settings["cap"])
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, policy)
    clipped = trainer._metrics["train"].get("clip_ratio/region_mean")
    return {"loss": loss.item(), "gradient": gradient.tolist(), "clipped": clipped[0] if clipped else None}


def importance_ratio(given: dict[str, torch.Tensor], settings: dict[str, Any]) -> torch.Tensor:
    """The truncated ratio of policy and sampler, by the lines with which TRL makes it while it collects samples."""
    from trl import GRPOTrainer

    whole = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    begin = whole.index("            # Compute the importance sampling ratio when using vLLM")
    end = whole.index("            # Compute the per-token log probabilities for the reference model")
    names: dict[str, Any] = {
        "self": SimpleNamespace(
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=settings["mode"],
            vllm_importance_sampling_clip_min=None,
            vllm_importance_sampling_clip_max=settings["cap"],
        ),
        "torch": torch,
        "math": math,
        "completion_mask": given["mask"].to(torch.int64),
        "tool_mask": None,
        "old_per_token_logps": given["policy_logprobs"],
        "sampling_per_token_logps": given["behavior_logprobs"],
    }
    exec(textwrap.dedent(whole[begin:end]), names)
    return names["vllm_importance_sampling_ratio"]


def main() -> None:
    import trl

    given = tensors()
    record = {
        "made_by": "scripts/make_trl_fixture.py",
        "trl": trl.__version__,
        "torch": torch.__version__,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "tensors": {name: tensor.tolist() for name, tensor in given.items()},
        "cases": {name: {"settings": s, **trl_loss(given, s)} for name, s in CASES.items()},
    }
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    out.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{out}: {len(CASES)} cases of TRL {trl.__version__}")


if __name__ == "__main__":
    main()
