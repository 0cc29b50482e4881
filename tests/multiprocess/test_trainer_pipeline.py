"""Pipeline stages x FSDP2 x tensor parallelism over gloo against one process, with tied and untied ends, uneven stages and
micro-batches, shared prompts. That a layout repeats its bits, resumed or not, each rank proves for itself (``pipeline_ranks``).

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
import pipeline_ranks  # noqa: E402
import trainer_ranks  # noqa: E402
from training_fixtures import write_model  # noqa: E402

FAMILIES = ("llama", "qwen3", "gemma2", "qwen3_moe")
NUM_LAYERS = {"qwen3_moe": 3}
"""Of others 5. Few tokens choose some expert in each sparse layer, so rounding is the larger a part of its gradient the more
layers follow."""
SHORT = {"llama:2x2x2", "gemma2:3x1x1", "qwen3_moe:2x1x2"}
LAYOUTS = ("2x1x1", "3x1x1", "4x1x1", "2x2x1", "2x1x2", "2x2x2", "4x2x1", "4x1x2", "2x4x1")
"""Stages, FSDP2 ranks, tensor-parallel ranks."""
OTHERS = ("2x1x1", "3x1x1", "4x1x1", "2x2x1", "2x1x2", "2x2x2")
"""Of the families beside the first: all on 8 ranks would take as long again."""
CASES = [
    pytest.param(family, sizes, marks=() if f"{family}:{sizes}" in SHORT else pytest.mark.long)
    for family in FAMILIES
    for sizes in (LAYOUTS if family == FAMILIES[0] else OTHERS)
    if int(sizes[0]) <= NUM_LAYERS.get(family, 5)
]
pytestmark = pytest.mark.timeout(600)


def _world(sizes: str) -> int:
    return math.prod(int(n) for n in sizes.split("x"))


def _launch(folder: Path, world: int, cases: list[str]) -> None:
    run_ranks(pipeline_ranks.main, [(rank, world, folder, cases) for rank in range(world)], limit_s=400)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layouts that are asked for, each set of processes started once."""
    own = [item for item in request.session.items if item.path == request.path]
    long = any(item.get_closest_marker("long") for item in own)
    folder = tmp_path_factory.mktemp("pipelines")
    for family in FAMILIES:
        write_model(folder / family, family, num_hidden_layers=NUM_LAYERS.get(family, 5))
    rounded, plans = "llama:{}:bfloat16", "llama:{}:plans"
    cases = [":".join([*case.values, "float32"]) for case in CASES if long or not case.marks]
    alone = sorted({f"{case.split(':')[0]}:1x1x1:float32" for case in cases})
    _launch(folder, 1, [*alone, plans.format("1x1x1")])
    cases += [f"qwen3_moe:{sizes}:replay" for sizes in ("1x1x1", "2x2x1")]
    cases += [plans.format("2x1x2"), "llama:2x2x1:refusals"] + [
        rounded.format(sizes) for sizes in ("2x2x1", "3x1x1") if long
    ]
    for world in sorted({_world(case.split(":")[1]) for case in cases}):
        _launch(folder, world, [case for case in cases if _world(case.split(":")[1]) == world])
    return folder


def _read(folder: Path, case: str) -> tuple[list[dict[str, Any]], list[dict[str, torch.Tensor]]]:
    out, world = folder / case, _world(case.split("-")[1])
    reports = [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]
    return reports, [load_file(out / f"{rank}.safetensors") for rank in range(world)]


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_metrics_and_gradient_norms_equal_one_process_on_every_stage(runs: Path, family: str, sizes: str) -> None:
    (alone,), _ = _read(runs, f"{family}-1x1x1-float32")
    reports, _ = _read(runs, f"{family}-{sizes}-float32")
    for report in reports:
        for got, expected in zip(report["metrics"], alone["metrics"], strict=True):
            expected = {key: value for key, value in expected.items() if key != "tokens/computed"}
            del got["tokens/computed"]  # a prompt may be computed once a micro-batch
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_parts_of_all_stages_make_the_weights_of_one_process(runs: Path, family: str, sizes: str) -> None:
    _, (expected,) = _read(runs, f"{family}-1x1x1-float32")
    reports, parts = _read(runs, f"{family}-{sizes}-float32")
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
        tied = name == "model.embed_tokens.weight" and "lm_head.weight" not in expected
        pp, _, tp = (int(n) for n in sizes.split("x"))
        cut = ".self_attn." in name or ".mlp." in name
        cut = cut and not name.endswith(("norm.weight", ".mlp.gate.weight"))  # a router is whole
        assert covered.max() <= (2 if tied and pp > 1 else 1) * (1 if cut else tp), name  # no stage holds another's


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_the_export_of_stages_is_what_they_hold(runs: Path, family: str, sizes: str) -> None:
    reports, parts = _read(runs, f"{family}-{sizes}-float32")
    model = AutoModelForCausalLM.from_pretrained(runs / f"{family}-{sizes}-float32" / "model")
    for name, parameter in model.named_parameters():
        for report, tensors in zip(reports, parts, strict=True):
            where = tuple(slice(start, stop) for start, stop in report["boxes"][name])
            assert name not in tensors or torch.equal(parameter[where], tensors[name]), name


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_a_state_that_stages_saved_goes_on_in_one_process(runs: Path, family: str, sizes: str) -> None:
    trainer = trainer_ranks.make_trainer(runs, family, 1, 1)
    trainer.load(runs / "final" / f"{family}-{sizes}-float32")
    alone = trainer_ranks.make_trainer(runs, family, 1, 1)
    alone.load(runs / "final" / f"{family}-1x1x1-float32")
    groups = trainer_ranks.with_reference(trainer_ranks.make_groups(seed=9), runs / family)
    expected, got = alone.train(groups, trainer_ranks.NUM_TICKS), trainer.train(groups, trainer_ranks.NUM_TICKS)
    assert got == pytest.approx(expected, rel=2e-4, abs=1e-6)


def test_several_optimizer_steps_and_a_proximal_policy_are_those_of_one_process(runs: Path) -> None:
    alone = json.loads((runs / "llama-1x1x1-plans" / "0.json").read_text())
    for rank in range(4):
        found = json.loads((runs / "llama-2x1x2-plans" / f"{rank}.json").read_text())
        for name, expected in alone.items():
            for got, wanted in zip(found[name], expected, strict=True):
                wanted = {key: value for key, value in wanted.items() if key != "tokens/computed"}
                assert {key: got[key] for key in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_routers_of_every_stage_choose_what_samples_say(runs: Path) -> None:
    (alone,) = (json.loads((runs / "qwen3_moe-1x1x1-replay" / "0.json").read_text()),)
    for rank in range(4):
        found = json.loads((runs / "qwen3_moe-2x2x1-replay" / f"{rank}.json").read_text())
        for got, expected in zip(found, alone, strict=True):
            del got["tokens/computed"]
            assert got == pytest.approx({key: expected[key] for key in got}, rel=1e-4, abs=1e-6)
            assert {"experts/load_max", "experts/load_mean", "experts/unused"} <= got.keys()


def test_all_stages_skip_and_refuse_what_the_last_stage_of_one_data_rank_sees(runs: Path) -> None:
    reports = [json.loads((runs / "llama-2x2x1-refusals" / f"{rank}.json").read_text()) for rank in range(4)]
    for report in reports:
        assert report["skipped"] == 1.0 and report["kept"]
        assert report["refused"] == reports[0]["refused"]
    assert "sampled by policy version 0, 2 versions before the trainer's 2" in reports[0]["refused"]


@pytest.mark.long
@pytest.mark.parametrize("sizes", ["2x2x1", "3x1x1"])
def test_bfloat16_compute_in_stages_is_that_of_float32_to_its_rounding(runs: Path, sizes: str) -> None:
    (exact,), _ = _read(runs, "llama-1x1x1-float32")
    reports, _ = _read(runs, f"llama-{sizes}-bfloat16")
    for report in reports:
        assert report["metrics"][0]["grad_norm"] != exact["metrics"][0]["grad_norm"]  # it did round
        assert report["metrics"][0]["grad_norm"] == pytest.approx(exact["metrics"][0]["grad_norm"], rel=0.05)
