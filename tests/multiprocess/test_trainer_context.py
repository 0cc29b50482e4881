"""Context parallelism x FSDP2 x tensor parallelism x pipeline stages over gloo against one process: rows cut unevenly, shared prompts,
windows and soft caps, more ranks than key-value heads, sparse layers. That a layout repeats its bits, resumed or not, each rank
proves for itself (``context_ranks``).

Tolerances are those of ``test_trainer_parallel``: relative 1e-4 for metrics and gradient norms, absolute 2e-5 for weights.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "unit" / "trainer"))
sys.path.insert(0, str(HERE))
import context_ranks  # noqa: E402
import trainer_ranks  # noqa: E402
from training_fixtures import write_model  # noqa: E402

FAMILIES = ("llama", "qwen3", "gemma2", "qwen3_moe")
ALONE = "1x1x1x1"
LAYOUTS = ("1x1x2x1", "1x2x2x1", "1x1x2x2", "1x1x4x1", "2x1x2x1", "1x2x2x2", "2x2x2x1", "2x1x2x2", "1x4x2x1", "1x2x4x1")
"""Stages, FSDP2 ranks, context-parallel ranks, tensor-parallel ranks. There are 4 query heads and 2 key-value heads."""
OTHERS = ("1x1x2x1", "1x2x2x1", "1x1x2x2", "1x1x4x1")
"""Of the families beside the first."""
SHORT = {"llama:1x1x2x1", "qwen3_moe:1x1x2x1", "qwen3:1x1x4x1", "gemma2:1x2x2x1"}
CASES = [
    pytest.param(family, sizes, marks=() if f"{family}:{sizes}" in SHORT else pytest.mark.long)
    for family in FAMILIES
    for sizes in (LAYOUTS if family == FAMILIES[0] else OTHERS)
]
OTHERWISE = {
    "sequences": "llama:1x1x2x1",
    "lora": "qwen3:1x1x2x1",
    "plans": "llama:1x1x2x1",
    "replay": "qwen3_moe:1x1x2x1",
}
"""What else is trained -> by whom, in which layout."""
pytestmark = pytest.mark.timeout(600)


def _world(sizes: str) -> int:
    return math.prod(int(n) for n in sizes.split("x"))


def _launch(folder: Path, world: int, cases: list[str]) -> None:
    run_ranks(context_ranks.main, [(rank, world, folder, cases) for rank in range(world)], limit_s=400)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layouts that are asked for, each set of processes started once."""
    own = [item for item in request.session.items if item.path == request.path]
    long = any(item.get_closest_marker("long") for item in own)
    folder = tmp_path_factory.mktemp("context")
    for family in FAMILIES:
        write_model(folder / family, family)
    others = [f"{case}:{kind}" for kind, case in OTHERWISE.items()]
    alone = [f"{family}:{ALONE}:train" for family in FAMILIES]
    _launch(folder, 1, alone + [f"{case.split(':')[0]}:{ALONE}:{kind}" for kind, case in OTHERWISE.items()])
    cases = [":".join([*case.values, "train"]) for case in CASES if long or not case.marks]
    cases += [*others, "llama:1x1x2x1:parts", "llama:1x2x2x1:refusals"]
    for world in sorted({_world(case.split(":")[1]) for case in cases}):
        _launch(folder, world, [case for case in cases if _world(case.split(":")[1]) == world])
    return folder


def _reports(folder: Path, case: str, sizes: str) -> list[Any]:
    return [json.loads((folder / case / f"{rank}.json").read_text()) for rank in range(_world(sizes))]


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_losses_gradient_norms_and_counts_equal_one_process_on_every_rank(runs: Path, family: str, sizes: str) -> None:
    (alone,) = _reports(runs, f"{family}-{ALONE}", ALONE)
    for report in _reports(runs, f"{family}-{sizes}", sizes):
        for got, expected in zip(report["metrics"], alone["metrics"], strict=True):
            if sizes[:3] != "1x1":  # a prompt may be computed once a micro-batch
                expected["tokens/computed"] = got["tokens/computed"]
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_parts_of_all_ranks_make_the_weights_of_one_process(runs: Path, family: str, sizes: str) -> None:
    whole_weights = load_file(runs / f"{family}-{ALONE}" / "0.safetensors")
    reports = _reports(runs, f"{family}-{sizes}", sizes)
    held = [load_file(runs / f"{family}-{sizes}" / f"{rank}.safetensors") for rank in range(len(reports))]
    pp, _, _, tp = (int(n) for n in sizes.split("x"))
    for name, whole in whole_weights.items():
        covered = torch.zeros_like(whole, dtype=torch.int64)
        for report, tensors in zip(reports, held, strict=True):
            where = tuple(slice(start, stop) for start, stop in report["boxes"][name])
            covered[where] += 1
            if name in tensors:
                torch.testing.assert_close(tensors[name], whole[where], rtol=0, atol=2e-5, msg=name)
            else:
                assert covered[where].numel() == 0, name
        assert 1 <= covered.min() and covered.max() <= pp * tp, name  # context-parallel ranks hold different parts


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_a_state_that_they_saved_goes_on_in_one_process(runs: Path, family: str, sizes: str) -> None:
    trainer = trainer_ranks.make_trainer(runs, family, 1, 1)
    trainer.load(runs / "final" / f"{family}-{sizes}")
    alone = trainer_ranks.make_trainer(runs, family, 1, 1)
    alone.load(runs / "final" / f"{family}-{ALONE}")
    groups = trainer_ranks.with_reference(trainer_ranks.make_groups(seed=9), runs / family)
    expected, got = alone.train(groups, trainer_ranks.NUM_TICKS), trainer.train(groups, trainer_ranks.NUM_TICKS)
    assert got == pytest.approx(expected, rel=2e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["sequences", "lora", "replay"])
def test_losses_of_whole_sequences_adapters_and_replayed_experts_are_those_of_one_process(
    runs: Path, kind: str
) -> None:
    family, sizes = OTHERWISE[kind].split(":")
    (alone,) = _reports(runs, f"{family}-{ALONE}-{kind}", ALONE)
    assert alone[0]["grad_norm"] > 0
    for report in _reports(runs, f"{family}-{sizes}-{kind}", sizes):
        for got, expected in zip(report, alone, strict=True):
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_several_optimizer_steps_and_a_proximal_policy_are_those_of_one_process(runs: Path) -> None:
    (alone,) = _reports(runs, f"llama-{ALONE}-plans", ALONE)
    for found in _reports(runs, "llama-1x1x2x1-plans", "1x1x2x1"):
        for name, expected in alone.items():
            for got, wanted in zip(found[name], expected, strict=True):
                assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_all_ranks_skip_and_refuse_what_one_of_them_alone_sees(runs: Path) -> None:
    reports = _reports(runs, "llama-1x2x2x1-refusals", "1x2x2x1")
    for report in reports:
        assert report["skipped"] == 1.0 and report["kept"]
        assert report["refused"] == reports[0]["refused"]
    assert "sampled by policy version 0, 2 versions before the trainer's 2" in reports[0]["refused"]


def test_a_row_is_filled_up_and_its_log_probs_are_put_together_on_every_rank(runs: Path) -> None:
    first, second = _reports(runs, "llama-1x1x2x1-parts", "1x1x2x1")
    assert first["held"] == [10, 11, 12, 13] and second["held"] == [14, 15, 16, -1]
    assert first["whole"] == second["whole"] == [1.5, -math.inf, 3.0]
    assert first["gradient"] == [] and second["gradient"] == [100.0, 0.0, 0.0]  # each its own part, once
