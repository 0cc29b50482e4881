"""FSDP2 x tensor parallelism over gloo against one process: losses, gradients and weights after three ticks.

Tolerance: relative 1e-4 for gradient norms and metrics, absolute 2e-5 for weights after three AdamW steps of 1e-3, which
divide by the root of the second moment and so turn a rounding difference in a tiny gradient into one of the step's size.
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
import trainer_ranks  # noqa: E402
from training_fixtures import write_model  # noqa: E402

FAMILIES = ("llama", "qwen3", "gemma2", "qwen3_moe")
HALVES = ("2x1", "1x2")
WHOLE = ("2x2", "1x4")
"""Four ranks; the models have two key-value heads, so that of four tensor-parallel ranks two hold the same one."""
LAYOUTS = (*HALVES, *WHOLE)
ONE_HEAD = "one_head"
"""Qwen3 with one key-value head and biases: both ranks of ``tp 2`` hold it, and FSDP2 cuts its rows over two more."""
SMALLEST, EXPORTED = FAMILIES[:2]
SHORT = {f"{SMALLEST}:2x2", f"{SMALLEST}:1x4", "qwen3:2x2", "gemma2:2x2", f"{ONE_HEAD}:2x2"}
"""The whole mesh stands for its halves, the first family for others on four tensor-parallel ranks. A sparse one trains on such ranks
in ``test_trainer_pipeline`` and ``test_equality_matrix``."""
CASES = [
    pytest.param(family, sizes, marks=() if f"{family}:{sizes}" in SHORT else pytest.mark.long)
    for family, sizes in (*((family, sizes) for family in FAMILIES for sizes in LAYOUTS), (ONE_HEAD, "2x2"))
]
WHOLE_FIRST = [pytest.param(sizes, marks=() if sizes == "2x2" else pytest.mark.long) for sizes in (*HALVES, "2x2")]
OF_SMALLEST = [pytest.param(case.values[1], marks=case.marks) for case in CASES if case.values[0] == SMALLEST]


def _world(sizes: str) -> int:
    return math.prod(int(n) for n in sizes.split("x"))


def _launch(folder: Path, world: int, cases: list[str]) -> None:
    run_ranks(trainer_ranks.main, [(rank, world, folder, cases) for rank in range(world)], limit_s=240)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layouts of all families that are asked for, each set of processes started once."""
    own = [item for item in request.session.items if item.path == request.path]
    long = any(item.get_closest_marker("long") for item in own)
    folder = tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        write_model(folder / family, family)
    write_model(folder / ONE_HEAD, "qwen3", num_key_value_heads=1, attention_bias=True)
    config = write_model(folder / "scaled", "qwen3") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"logits_scaling": 8.0}))
    rounded = "qwen3:{}:bfloat16"
    cases = [":".join([*case.values, "float32"]) for case in CASES if long or not case.marks]
    others = (rounded, "llama:{}:plans", "llama:{}:refusals")
    cases += [kind.format(case.values[0]) for case in WHOLE_FIRST if long or not case.marks for kind in others]
    alone = {f"{case.split(':')[0]}:1x1:float32" for case in cases}
    _launch(folder, 1, [*sorted(alone), rounded.format("1x1"), "llama:1x1:plans"])
    for world in sorted({_world(case.split(":")[1]) for case in cases}):
        _launch(folder, world, [case for case in cases if _world(case.split(":")[1]) == world])
    return folder


def _read(folder: Path, family: str, sizes: str) -> tuple[list[dict[str, Any]], list[dict[str, torch.Tensor]]]:
    out = folder / f"{family}-{sizes}"
    world = math.prod(int(n) for n in sizes.split("x"))
    reports = [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]
    return reports, [load_file(out / f"{rank}.safetensors") for rank in range(world)]


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_metrics_and_gradient_norms_equal_one_process(runs: Path, family: str, sizes: str) -> None:
    alone, _ = _read(runs, family, "1x1")
    reports, _ = _read(runs, family, sizes)
    for report in reports:
        for got, expected in zip(report["metrics"], alone[0]["metrics"], strict=True):
            expected.pop("tokens/computed", None)
            del got["tokens/computed"]  # a prompt may be computed once a micro-batch
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_parts_of_all_ranks_make_the_weights_of_one_process(runs: Path, family: str, sizes: str) -> None:
    _, (expected,) = _read(runs, family, "1x1")
    reports, parts = _read(runs, family, sizes)
    for name, whole in expected.items():
        covered = torch.zeros_like(whole, dtype=torch.bool)
        for report, tensors in zip(reports, parts, strict=True):
            where = tuple(slice(start, stop) for start, stop in report["boxes"][name])
            covered[where] = True
            torch.testing.assert_close(
                tensors[name], whole[where], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert covered.all(), name


@pytest.mark.parametrize("sizes", OF_SMALLEST)
def test_ranks_hold_a_share_not_the_model(runs: Path, sizes: str) -> None:
    fsdp, tp = (int(n) for n in sizes.split("x"))
    _, (whole,) = _read(runs, "llama", "1x1")
    _, parts = _read(runs, "llama", sizes)
    name = "model.layers.0.mlp.down_proj.weight"
    assert all(p[name].numel() == whole[name].numel() // (fsdp * tp) for p in parts)
    heads = sum(t.numel() for n, t in whole.items() if "k_proj" in n or "v_proj" in n)
    cut = sum(t.numel() for n, t in whole.items() if "proj" in n) - heads
    vocabulary = sum(t.numel() for n, t in whole.items() if "embed" in n or "lm_head" in n)
    uncut = sum(t.numel() for n, t in whole.items() if "norm" in n)
    assert cut + heads + vocabulary + uncut == sum(t.numel() for t in whole.values())
    most = max(sum(t.numel() for t in p.values()) for p in parts)
    held = cut / tp + heads / min(tp, 2) + vocabulary / tp + uncut
    assert most <= held / fsdp + 64  # rows that do not divide evenly


@pytest.mark.parametrize("sizes", WHOLE_FIRST)
def test_export_from_all_ranks_is_what_they_hold(runs: Path, sizes: str) -> None:
    reports, parts = _read(runs, EXPORTED, sizes)
    model = AutoModelForCausalLM.from_pretrained(runs / f"{EXPORTED}-{sizes}" / "model")
    for name, parameter in model.named_parameters():
        for report, tensors in zip(reports, parts, strict=True):
            where = tuple(slice(start, stop) for start, stop in report["boxes"][name])
            assert torch.equal(parameter[where], tensors[name]), name


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_a_state_saved_by_many_ranks_loads_into_one(runs: Path, family: str, sizes: str) -> None:
    trainer = trainer_ranks.make_trainer(runs, family, 1, 1)
    trainer.load(runs / "final" / f"{family}-{sizes}")
    assert trainer.policy_version == trainer_ranks.NUM_TICKS
    reports, parts = _read(runs, family, sizes)
    for name, whole in trainer.parameters_for_sync().items():
        for report, tensors in zip(reports, parts, strict=True):
            where = tuple(slice(start, stop) for start, stop in report["boxes"][name])
            assert torch.equal(whole[where], tensors[name]), name
    alone = trainer_ranks.make_trainer(runs, family, 1, 1)
    alone.load(runs / "final" / f"{family}-1x1")
    groups = trainer_ranks.make_reference(runs, family, 1, 1).score(trainer_ranks.make_groups(seed=9))
    expected, got = alone.train(groups, trainer_ranks.NUM_TICKS), trainer.train(groups, trainer_ranks.NUM_TICKS)
    assert got == pytest.approx(expected, rel=2e-4, abs=1e-6)


@pytest.mark.parametrize("sizes", WHOLE_FIRST)
def test_bfloat16_compute_on_a_mesh_is_that_of_one_process_to_its_rounding(runs: Path, sizes: str) -> None:
    exact = _read(runs, "qwen3", "1x1")[0][0]["metrics"][0]
    alone = json.loads((runs / "bfloat16-1x1-0.json").read_text())
    assert alone["grad_norm"] != exact["grad_norm"]  # it did round
    world = math.prod(int(n) for n in sizes.split("x"))
    for rank in range(world):
        got = json.loads((runs / f"bfloat16-{sizes}-{rank}.json").read_text())
        assert got["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)
        assert got["loss/policy"] == pytest.approx(exact["loss/policy"], rel=0.05, abs=1e-3)
        assert got["entropy"] == pytest.approx(alone["entropy"], rel=0.01)


@pytest.mark.parametrize("sizes", OF_SMALLEST)
def test_a_critic_on_a_mesh_values_and_learns_as_one_process_does(runs: Path, sizes: str) -> None:
    alone = json.loads((runs / "llama-1x1" / "critic-0.json").read_text())
    fsdp, tp = (int(n) for n in sizes.split("x"))
    reports = [json.loads((runs / f"llama-{sizes}" / f"critic-{rank}.json").read_text()) for rank in range(fsdp * tp)]
    for report in reports:
        for got, expected in zip(report["metrics"], alone["metrics"], strict=True):
            assert got == pytest.approx(expected, rel=1e-3, abs=1e-5)
    values = [value for report in reports[::tp] for value in report["values"]]  # tensor-parallel peers say the same
    assert len(values) == len(alone["values"])
    for prompt, sample, value in values:
        known = [v for p, s, v in alone["values"] if (p, s, len(v)) == (prompt, sample, len(value))]
        assert any(value == pytest.approx(v, rel=1e-3, abs=1e-4) for v in known), (prompt, sample)
    expected_weights = load_file(runs / "llama-1x1" / "critic" / "model.safetensors")
    weights = load_file(runs / f"llama-{sizes}" / "critic" / "model.safetensors")
    assert set(weights) == set(expected_weights) and "score.weight" in weights
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("sizes", WHOLE_FIRST)
def test_every_layout_cuts_a_tick_into_the_same_optimizer_steps(runs: Path, sizes: str) -> None:
    """Also where one rank holds one group: what a step trains on, and the proximal policy, do not depend on the mesh."""
    alone = json.loads((runs / "plans-1x1-0.json").read_text())
    for rank in range(math.prod(int(n) for n in sizes.split("x"))):
        found = json.loads((runs / f"plans-{sizes}-{rank}.json").read_text())
        for name, expected in alone.items():
            for got, wanted in zip(found[name], expected, strict=True):
                exact = ("tokens/trained", "samples/trained", "staleness/steps_mean", "step/empty")
                assert [got[key] for key in exact] == [wanted[key] for key in exact]
                wanted = {key: value for key, value in wanted.items() if key != "tokens/computed"}
                assert {key: got[key] for key in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("sizes", WHOLE_FIRST)
def test_all_ranks_skip_and_refuse_what_one_of_them_sees(runs: Path, sizes: str) -> None:
    world = math.prod(int(n) for n in sizes.split("x"))
    reports = [json.loads((runs / f"refusals-{sizes}-{rank}.json").read_text()) for rank in range(world)]
    for report in reports:
        assert report["skipped"] == 1.0 and report["kept"]
        assert report["refused"] == reports[0]["refused"]
    assert "sampled by policy version 0, 2 versions before the trainer's 2" in reports[0]["refused"]
