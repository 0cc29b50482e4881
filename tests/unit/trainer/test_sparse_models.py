"""Training a model with experts: neither what shares a micro-batch nor how it is computed changes what comes out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SPARSE, tiny_config
from training_fixtures import make_groups

from llamarl.models.parallel import ParallelLayout
from llamarl.models.small_copy import small_model
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer.batch import TrainingSequence, make_microbatch
from llamarl.trainer.building import build_policy
from llamarl.trainer.policy import Policy
from llamarl.trainer.step import Trainer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sparse")
    for family in SPARSE:
        small_model(tiny_config(family)).save_pretrained(root / family)
    return root


def policy_of(folder: Path) -> Policy:
    return build_policy(
        folder,
        ParallelLayout(fsdp=1, tp=1, mesh=None),
        temperature=1.0,
        dtype=torch.float32,
        chunk_tokens=16,
        attention="llamarl_packed",
        device=torch.device("cpu"),
    ).module


def trained(folder: Path, **settings: Any) -> dict[str, float]:
    config = TrainerConfig(skip_zero_advantage=False, **settings)
    trainer = Trainer(folder, config, OptimizerConfig(lr=1e-2), AlgorithmConfig(), temperature=1.0)
    return trainer.train(make_groups(), 0)


def experts(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key.startswith("experts/")}


@pytest.mark.parametrize("family", SPARSE)
def test_a_sequence_has_the_same_logprobs_alone_and_packed_with_others(folders: Path, family: str) -> None:
    policy = policy_of(folders / family)
    rows = [[3 + (7 * i + n) % 90 for i in range(n + 8)] for n in (4, 9, 2)]
    sequences = [TrainingSequence.to_score(row[:-8], row[-8:], group=i) for i, row in enumerate(rows)]

    def logprobs(parts: list[TrainingSequence]) -> torch.Tensor:
        with torch.no_grad():
            return policy(make_microbatch(parts, [1.0] * len(parts), torch.device("cpu")))[0]

    together = logprobs(sequences).split(8)
    for sequence, packed in zip(sequences, together, strict=True):
        torch.testing.assert_close(packed, logprobs([sequence]), atol=1e-5, rtol=0)
    torch.testing.assert_close(logprobs(sequences[::-1]), torch.cat(together[::-1]), atol=1e-5, rtol=0)


WAYS: dict[str, dict[str, Any]] = {
    "small micro-batches": {"max_tokens_per_microbatch": 12, "share_prompts": False},
    "several at once": {"max_tokens_per_microbatch": 12, "share_prompts": False, "microbatches_at_once": 2},
    "activations computed again": {"share_prompts": False, "activation_checkpointing": "full"},
}


@pytest.fixture(scope="module")
def metrics(folders: Path) -> dict[str, float]:
    """Of one pass."""
    return trained(folders / "qwen3_moe", share_prompts=False)


@pytest.mark.parametrize("way", WAYS)
def test_a_tick_is_the_same_however_it_is_cut_into_passes(folders: Path, metrics: dict[str, float], way: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(WAYS[way].get("microbatches_at_once", threads))
    try:
        others = trained(folders / "qwen3_moe", **WAYS[way])
    finally:
        torch.set_num_threads(threads)
    assert others["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)
    assert others["loss/policy"] == pytest.approx(metrics["loss/policy"], abs=1e-5)
    assert experts(others) == experts(metrics)  # the same tokens chose the same experts, each counted once


def test_bfloat16_trains_near_float32(folders: Path) -> None:
    exact = trained(folders / "mixtral")
    rounded = trained(folders / "mixtral", dtype="bfloat16")
    assert rounded["step/skipped"] == 0
    assert rounded["entropy"] == pytest.approx(exact["entropy"], rel=0.05)
    assert rounded["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.25)


@pytest.mark.parametrize("family", SPARSE)
def test_a_tick_says_how_evenly_its_tokens_lay_over_experts(folders: Path, family: str) -> None:
    found = experts(trained(folders / family))
    count = tiny_config(family).num_local_experts if family != "qwen3_moe" else tiny_config(family).num_experts
    assert 1 <= found["experts/load_mean"] <= found["experts/load_max"] <= count
    assert 0 <= found["experts/unused"] < 1
