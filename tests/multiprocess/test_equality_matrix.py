"""Pipeline stages x FSDP2 x context- x tensor- x expert-parallel ranks over gloo against one process, at length in 21 combinations of
up to 8 ranks. That a layout repeats its bits, through or from a saved state, each rank proves for itself (``mesh_ranks``).

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
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "unit" / "trainer"))
sys.path.insert(0, str(HERE))
import mesh_ranks  # noqa: E402
from mesh_ranks import ALONE, NUM_TICKS, sizes_of  # noqa: E402
from training_fixtures import write_model  # noqa: E402

LAYOUTS = {  # pp x fsdp x cp x tp x ep
    "llama": ("2x2x1x2x1", "1x2x2x2x1", "3x2x1x1x1", "2x1x2x2x1", "1x2x1x4x1"),
    "qwen3": ("2x2x2x1x1", "1x4x1x2x1", "2x1x1x4x1"),
    "gemma2": ("2x2x1x2x1", "1x2x2x2x1"),
    "qwen3_moe": (
        *("1x2x1x1x2", "1x4x1x1x2", "1x4x1x1x4", "1x2x1x2x2", "2x2x1x1x2", "1x2x2x1x2", "1x2x2x1x4", "1x1x2x1x2"),
        *("2x2x1x2x2", "1x2x2x2x2", "2x4x1x1x2"),
    ),
}
SHORT = {"qwen3_moe:1x4x1x1x2", "qwen3_moe:1x2x1x2x2"}
"""Stages with experts over ranks of other tokens: ``test_lora_parallel``."""
CASES = [
    pytest.param(family, sizes, marks=() if f"{family}:{sizes}" in SHORT else pytest.mark.long)
    for family, layouts in LAYOUTS.items()
    for sizes in layouts
]
NUM_LAYERS = 3
pytestmark = pytest.mark.timeout(900)


def _world(sizes: str) -> int:
    return math.prod(sizes_of(sizes).values()) // sizes_of(sizes)["ep"]  # which are among those of fsdp and cp


def _launch(folder: Path, world: int, cases: list[str]) -> None:
    run_ranks(mesh_ranks.main, [(rank, world, folder, cases) for rank in range(world)], limit_s=600)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layouts that are asked for, each set of processes started once."""
    asked = {
        f"{item.callspec.params['family']}:{item.callspec.params['sizes']}"
        for item in request.session.items
        if item.path == request.path
    }
    folder = tmp_path_factory.mktemp("meshes")
    families = sorted({case.split(":")[0] for case in asked})
    for family in families:
        write_model(folder / family, family, num_hidden_layers=NUM_LAYERS)
    _launch(folder, 1, [f"{family}:{ALONE}" for family in families])
    for world in sorted({_world(case.split(":")[1]) for case in asked}):
        _launch(folder, world, sorted(case for case in asked if _world(case.split(":")[1]) == world))
    return folder


def _read(out: Path, what: str, world: int) -> tuple[list[dict[str, Any]], list[dict[str, torch.Tensor]]]:
    reports = [json.loads((out / f"{what}-{rank}.json").read_text()) for rank in range(world)]
    return reports, [load_file(out / f"{what}-{rank}.safetensors") for rank in range(world)]


@pytest.mark.parametrize("what", ["through", "from_one"])
@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_a_mesh_trains_as_one_process_also_from_what_one_has_saved(
    runs: Path, family: str, sizes: str, what: str
) -> None:
    (alone,), (expected,) = _read(runs / f"{family}-{ALONE}", "through", 1)
    reports, parts = _read(runs / f"{family}-{sizes}", what, _world(sizes))
    for report in reports:
        for got, wanted in zip(report["metrics"], alone["metrics"][-len(report["metrics"]) :], strict=True):
            del got["tokens/computed"]  # a prompt may be computed once a micro-batch
            assert wanted["grad_norm"] > 0
            assert got == pytest.approx({k: wanted[k] for k in wanted if k != "tokens/computed"}, rel=1e-4, abs=1e-6)
    for name, whole in expected.items():
        covered = torch.zeros_like(whole, dtype=torch.int64)
        for report, tensors in zip(reports, parts, strict=True):
            where = tuple(slice(start, stop) for start, stop in report["boxes"][name])
            covered[where] += 1
            if name in tensors:
                torch.testing.assert_close(tensors[name], whole[where], rtol=0, atol=2e-5, msg=name)
            else:
                assert covered[where].numel() == 0, name
        assert covered.min() > 0, name
        if ".mlp.experts." in name:
            assert covered.max() == 1, name  # every expert is on one rank


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_the_export_of_a_mesh_is_what_its_ranks_hold(runs: Path, family: str, sizes: str) -> None:
    out = runs / f"{family}-{sizes}"
    reports, parts = _read(out, "through", _world(sizes))
    for name, parameter in AutoModelForCausalLM.from_pretrained(out / "model").named_parameters():
        for report, tensors in zip(reports, parts, strict=True):
            where = tuple(slice(start, stop) for start, stop in report["boxes"][name])
            assert name not in tensors or torch.equal(parameter[where], tensors[name]), name


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_one_process_goes_on_from_what_a_mesh_has_saved(runs: Path, family: str, sizes: str) -> None:
    trainer = mesh_ranks.make_trainer(runs, family, ALONE)
    trainer.load(runs / f"{family}-{sizes}" / "state")
    (alone,), (expected,) = _read(runs / f"{family}-{ALONE}", "through", 1)
    got = mesh_ranks.train(trainer, NUM_TICKS - 1)
    assert got == pytest.approx(alone["metrics"][-1], rel=1e-4, abs=1e-6)
    for name, tensor in trainer.parameters_for_sync().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-5, msg=name)
