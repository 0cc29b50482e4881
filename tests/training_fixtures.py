"""Tiny random model folders and scored groups for the trainer's tests."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from made_responses import made_group, made_response
from tiny_models import COMMON
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from llamarl.config import validate
from llamarl.models.exported import ExportFacts
from llamarl.trainer.checkpoint_export import export_checkpoint, write_critic
from llamarl.trainer.critic import Critic
from llamarl.trainer.policy import TokenScores
from llamarl.trainer.step import Trainer
from llamarl.types import Failure, Group, Response, Score

VOCABULARY = 61

_COMMON = {**COMMON, "vocab_size": VOCABULARY, "num_hidden_layers": 2, "head_dim": 8}
_TRAITS: dict[str, dict[str, object]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
}


def tiny_config(family: str, **traits: object) -> PretrainedConfig:
    return AutoConfig.for_model(family, **{**_COMMON, **_TRAITS[family], **traits})


def write_model(
    folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **traits: object
) -> Path:
    """A tiny random model folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **traits), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                parameter.dim() >= 2
            ):  # wide experts: each sees a part of the tokens, and its gradients are to be no rounding
                wide = "embed" in name or "lm_head" in name or parameter.dim() == 3
                parameter.normal_(0.0, 0.5 if wide else 0.15)
    model.to(dtype).save_pretrained(folder)
    return folder


def export(
    trainer: Trainer | Critic, base: Path, out: Path, *, served: str = "float32", adapter: bool = False
) -> ExportFacts | None:
    """What a run on ``base`` leaves at its end: every rank saves its part beside ``out``, rank 0 writes that of them."""
    checkpoint = out.with_name(f"checkpoint_of_{out.name}")
    trainer.save(checkpoint / trainer.role / "state")
    if trainer.layout.rank:
        return None
    lora = {} if trainer.lora is None else dataclasses.asdict(trainer.lora)
    config = validate(
        {
            "model": {"path": str(base)},
            "generator": {"engine": {"dtype": served}},
            "trainer": {"dtype": str(trainer.dtype).removeprefix("torch."), "threads": torch.get_num_threads()},
            "lora": lora,
        }
    )
    if isinstance(trainer, Critic):
        return write_critic(checkpoint, config, out)
    return export_checkpoint(checkpoint, config, out, adapter=adapter)


def token_scores(logprobs: torch.Tensor) -> TokenScores:
    """As a policy says them: these log-probs [T], entropy 0, no logits."""

    def refused() -> torch.Tensor:
        raise AssertionError("nobody asked for logits")

    return TokenScores(logprobs, torch.zeros_like(logprobs.detach()), refused)


def make_response(
    prompt_index: int,
    sample_index: int,
    tokens: Sequence[int],
    outcome: Score | Failure | None,
    *,
    versions: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    mask: Sequence[bool] | None = None,
) -> Response:
    n = len(tokens)
    keep = np.array(mask if mask is not None else [True] * n, dtype=bool)
    behavior = np.array(logprobs if logprobs is not None else [-2.0] * n, dtype=np.float32)
    return made_response(
        sample_index, index=prompt_index, tokens=tokens, logprobs=np.where(keep, behavior, np.nan),
        versions=np.where(keep, versions if versions is not None else [0] * n, -1), mask=keep, outcome=outcome,
    )  # fmt: skip


def make_groups(
    num_groups: int = 3, group_size: int = 4, seed: int = 0, max_response: int = 12, failed: bool = True
) -> list[Group]:
    """Groups with uneven lengths but two or more prompts of one length, masked tokens, behaviour log-probs near log(1 / 8) and one failed sample."""
    rng = np.random.default_rng(seed)
    groups = []
    for p in range(num_groups):
        prompt, responses = rng.integers(3, VOCABULARY, 3 + min(p, 1)), []
        for s in range(group_size):
            n = int(rng.integers(1, max_response + 1))
            mask = rng.random(n) < 0.8
            mask[-1] = True
            outcome = (
                Failure(kind="timeout", detail="") if failed and p == 0 and s == 1 else Score(value=float(rng.random()))
            )
            tokens, logprobs = rng.integers(3, VOCABULARY, n), -2 - 2 * rng.random(n)
            responses.append(make_response(p, s, tokens, outcome, logprobs=logprobs, mask=mask))
        groups.append(made_group(responses, index=p, tokens=prompt))
    return groups


def with_reference(groups: list[Group], shift: float = 0.0) -> list[Group]:
    """Reference log-probs on every response: the behaviour's plus ``shift``."""
    return [
        dataclasses.replace(
            g,
            responses=tuple(
                dataclasses.replace(r, reference_logprobs=(r.behavior_logprobs + np.float32(shift)))
                for r in g.responses
            ),
        )
        for g in groups
    ]


def with_experts(groups: list[Group], num_layers: int, num_experts: int, chosen: int) -> list[Group]:
    """Experts that every token of every prompt and response is said to have chosen, at random."""
    rng = np.random.default_rng(0)

    def draw(tokens: int) -> np.ndarray:
        scores = rng.random((tokens, num_layers, num_experts))
        return scores.argsort(axis=-1)[..., :chosen].astype(np.uint8)

    return [
        dataclasses.replace(
            group,
            prompt_experts=draw(len(group.prompt.tokens)),
            responses=tuple(dataclasses.replace(r, routed_experts=draw(len(r.tokens))) for r in group.responses),
        )
        for group in groups
    ]


def poisoned(index: int = 0) -> Group:
    """Rewards so large that the gradient overflows."""
    responses = (make_response(index, s, [7, 8], Score(value=v)) for s, v in enumerate((3e38, -3e38)))
    return made_group(responses, index=index, tokens=[5, 6])
