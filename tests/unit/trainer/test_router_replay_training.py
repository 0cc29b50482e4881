"""``trainer.router``: what the engine sampled, trained on with its own experts and with the router's."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import run
from made_responses import made_group, made_response
from tiny_models import tiny_config

from llamarl.channels.plain_values import from_bytes, to_bytes
from llamarl.engine.engine import NativeEngine
from llamarl.engine.expert_record import of_group
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.models.small_copy import small_model
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.engine import EngineConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer
from llamarl.types import Group, Response, Score


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    small_model(tiny_config("qwen3_moe")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model some updates later: every weight a little elsewhere."""
    folder = tmp_path_factory.mktemp("moved")
    model = small_model(tiny_config("qwen3_moe"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def groups(folder: Path) -> list[Group]:
    """Three groups of four, sampled by the engine."""
    engine = NativeEngine(folder, EngineConfig(kv_cache_bytes=1 << 20), eos_token_ids=(), note_experts=True)
    prompts = [[3, 14, 15, 9, 26, 5], [8, 9, 7], [31, 4, 60, 61, 12]]
    asked = [
        [
            Sequence(
                prompt_index=p, sample_index=s, prompt_tokens=tokens, params=SamplingParams(max_new_tokens=6 + 5 * s), seed=9 * p + s
            )
            for s in range(4)
        ]
        for p, tokens in enumerate(prompts)
    ]  # fmt: skip
    run(engine, [sequence for group in asked for sequence in group])
    return [
        dataclasses.replace(
            made_group(map(response, group), index=p, tokens=prompts[p]),
            prompt_experts=of_group(s.experts for s in group),
        )
        for p, group in enumerate(asked)
    ]


def response(sequence: Sequence) -> Response:
    return made_response(
        sequence.sample_index, index=sequence.prompt_index, tokens=sequence.tokens, logprobs=sequence.logprobs,
        finish_reason="length", outcome=Score(value=float(sum(sequence.tokens) % 7)),
        routed_experts=sequence.experts.rows(len(sequence.tokens)),
    )  # fmt: skip


def trained(folder: Path, groups: list[Group], **settings: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    trainer = Trainer(folder, TrainerConfig(**settings), OptimizerConfig(lr=1e-2), AlgorithmConfig(), temperature=1.0)
    return trainer.train(groups, 0), dict(trainer.parameters_for_sync())


@pytest.mark.parametrize("share_prompts", [True, False])
def test_of_the_same_weights_both_ways_have_the_same_bits(
    folder: Path, groups: list[Group], share_prompts: bool
) -> None:
    live, weights = trained(folder, groups, router="live", share_prompts=share_prompts)
    replay, others = trained(folder, groups, router="replay", share_prompts=share_prompts)
    assert replay == live
    assert live["mismatch/kl"] < 1e-6 and live["grad_norm"] > 0
    assert all(torch.equal(others[name], weight) for name, weight in weights.items())


def test_of_other_weights_the_mismatch_is_less_with_the_generator_s_experts(moved: Path, groups: list[Group]) -> None:
    live, replay = (trained(moved, groups, router=way)[0] for way in ("live", "replay"))
    assert 0 < replay["mismatch/kl"] < 0.8 * live["mismatch/kl"]


@pytest.fixture(scope="module")
def whole(moved: Path, groups: list[Group]) -> dict[str, float]:
    return trained(moved, groups, router="replay")[0]


@pytest.mark.parametrize(
    "way",
    [
        {"activation_checkpointing": "full"},
        {"microbatches_at_once": 2, "max_tokens_per_microbatch": 24},
        {"minibatches": 1, "share_prompts": False},
    ],
)
def test_replay_does_not_depend_on_how_a_tick_is_cut(
    moved: Path, groups: list[Group], whole: dict[str, float], way: dict[str, Any]
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(way.get("microbatches_at_once", threads))
    try:
        cut = trained(moved, groups, router="replay", **way)[0]
    finally:
        torch.set_num_threads(threads)
    for key in ("loss/policy", "mismatch/kl", "grad_norm", "entropy"):
        assert cut[key] == pytest.approx(whole[key], rel=1e-3, abs=1e-6), key


def test_a_response_without_its_experts_is_refused(folder: Path, groups: list[Group]) -> None:
    bare = [
        dataclasses.replace(g, responses=tuple(dataclasses.replace(r, routed_experts=None) for r in g.responses))
        for g in groups
    ]
    with pytest.raises(ValueError, match="came without the experts that computed it"):
        trained(folder, bare, router="replay")
    trained(folder, bare, router="live")


def test_what_another_model_sampled_is_left_to_the_router(folder: Path, groups: list[Group]) -> None:
    others = dataclasses.replace(
        groups[0],
        responses=tuple(dataclasses.replace(r, routed_experts=None, sampled_by="frozen") for r in groups[0].responses),
        prompt_experts=None,
    )
    assert trained(folder, [others, *groups[1:]], router="replay")[0]["mismatch/kl"] < 1e-6


def test_groups_that_are_kept_over_a_checkpoint_keep_their_experts(groups: list[Group]) -> None:
    (again,) = from_bytes(memoryview(to_bytes((groups[0],))))
    assert np.array_equal(again.prompt_experts, groups[0].prompt_experts)  # type: ignore[arg-type]
    assert again.prompt_experts is not None and again.prompt_experts.dtype == np.uint8
    for one, other in zip(again.responses, groups[0].responses, strict=True):
        assert np.array_equal(one.routed_experts, other.routed_experts)  # type: ignore[arg-type]
