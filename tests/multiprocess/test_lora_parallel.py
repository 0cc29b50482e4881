"""Adapters on models that lie over FSDP2 x context- x tensor- x expert-parallel ranks x pipeline stages, over gloo, against one process:
first values, metrics of two ticks, both ways of hand-over, exports, states in another layout.

Tolerances are those of ``test_trainer_meshes``: relative 1e-4 for metrics and gradient norms, absolute 2e-5 for weights.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_cases
from safetensors.torch import load_file

pytest.importorskip("peft")
import lora_ranks
from training_fixtures import make_groups, write_model

NUM_LAYERS = 3
ONE_HEAD = "one_head"
"""Qwen3 with one key-value head and biases: both ranks of ``tp 2`` hold it."""
FAMILIES = ("llama", "qwen3", "gemma2", "qwen3_moe", ONE_HEAD)
SHORT = {"qwen3_moe:2x2x1x1x2", f"{ONE_HEAD}:1x2x2"}
"""Stages, FSDP2 ranks, tensor-parallel ranks; of five numbers the last two are context- and expert-parallel ranks, the latter among the others."""
LAYOUTS = {
    "llama": ("2x2x2", "2x2x1", "1x2x1", "1x1x2", "3x1x1", "1x4x1", "1x1x4", "1x2x2", "1x1x1x2x1", "1x2x2x2x1"),
    "qwen3": ("2x1x2", "1x2x2"),
    "gemma2": ("1x2x2", "2x2x1"),
    "qwen3_moe": ("1x2x1", "1x1x2", "1x2x2", "2x2x1x1x2", "1x2x1x2x2", "1x2x2x1x2"),
    ONE_HEAD: ("1x2x2",),
}
CASES = [
    pytest.param(family, sizes, marks=() if f"{family}:{sizes}" in SHORT else pytest.mark.long)
    for family, layouts in LAYOUTS.items()
    for sizes in layouts
]
pytestmark = pytest.mark.timeout(400)


def _world(sizes: str) -> int:
    return math.prod(n for axis, n in lora_ranks.sizes_of(sizes).items() if axis != "ep")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layouts that are asked for, each set of processes started once."""
    own = [item for item in request.session.items if item.path == request.path]
    long = any(item.get_closest_marker("long") for item in own)
    folder = tmp_path_factory.mktemp("adapters")
    for family in FAMILIES:
        traits = {"num_key_value_heads": 1, "attention_bias": True} if family == ONE_HEAD else {}
        write_model(folder / family, "qwen3" if family == ONE_HEAD else family, num_hidden_layers=NUM_LAYERS, **traits)
    cases = [":".join([*case.values, "float32"]) for case in CASES if long or not case.marks]
    cases += [f"llama:{sizes}:bfloat16" for sizes in ("1x2x1", "1x1x2") if long]
    cases += sorted({f"{family}:1x1x1:{dtype}" for family, _, dtype in (case.split(":") for case in cases)})
    run_cases(lora_ranks.main, folder, cases, lambda case: _world(case.split(":")[1]), limit_s=300)
    return folder


def _together(out: Path, what: str, world: int) -> dict[str, torch.Tensor]:
    """Whole tensors out of all ranks' parts, which agree where several ranks hold the same."""
    whole: dict[str, torch.Tensor] = {}
    for rank in range(world):
        parts, boxes = (
            load_file(out / f"{what}-{rank}.safetensors"),
            json.loads((out / f"{what}-{rank}.json").read_text()),
        )
        for name, (shape, box) in boxes.items():
            tensor = whole.setdefault(name, torch.full(shape, torch.nan))
            where = tuple(slice(start, stop) for start, stop in box)
            assert name in parts or tensor[where].numel() == 0, name
            if name in parts:
                known = tensor[where]
                assert ((known == parts[name]) | known.isnan()).all(), name
                tensor[where] = parts[name]
    assert not any(tensor.isnan().any() for tensor in whole.values())  # all of each tensor is somewhere
    return whole


def _assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 2e-5) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_adapters_begin_with_the_same_bits_in_any_layout(runs: Path, family: str, sizes: str) -> None:
    alone = _together(runs / f"{family}-1x1x1-float32", "first", 1)
    here = _together(runs / f"{family}-{sizes}-float32", "first", _world(sizes))
    assert here.keys() == alone.keys() and all(torch.equal(here[name], tensor) for name, tensor in alone.items())
    assert all(tensor.any() == (".lora_A." in name) for name, tensor in alone.items())
    rows = [tensor.flatten()[:4] for name, tensor in alone.items() if ".lora_A." in name]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)  # no two begin alike


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_metrics_and_gradient_norms_equal_one_process(runs: Path, family: str, sizes: str) -> None:
    alone = json.loads((runs / f"{family}-1x1x1-float32" / "0.json").read_text())
    for rank in range(_world(sizes)):
        report = json.loads((runs / f"{family}-{sizes}-float32" / f"{rank}.json").read_text())
        for got, expected in zip(report, alone, strict=True):
            wanted = {key: value for key, value in expected.items() if key != "tokens/computed"}
            assert wanted["grad_norm"] > 0
            assert {key: got[key] for key in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_both_hand_overs_of_all_ranks_are_those_of_one_process(runs: Path, family: str, sizes: str) -> None:
    for what in ("adapter", "merged"):
        alone = _together(runs / f"{family}-1x1x1-float32", what, 1)
        here = _together(runs / f"{family}-{sizes}-float32", what, _world(sizes))
        _assert_close(here, alone)
        first = load_file(runs / f"{family}-1x1x1-float32" / "first-0.safetensors")
        assert what == "merged" or all(
            not torch.equal(tensor, first[name]) for name, tensor in here.items()
        )  # they learned


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_exports_are_those_of_one_process(runs: Path, family: str, sizes: str) -> None:
    alone, here = runs / f"{family}-1x1x1-float32", runs / f"{family}-{sizes}-float32"
    for folder, file in (("model", "model"), ("model_of_adapter", "model"), ("adapter", "adapter_model")):
        expected = load_file(alone / folder / f"{file}.safetensors")
        _assert_close(load_file(here / folder / f"{file}.safetensors"), expected)
    config = Path("adapter") / "adapter_config.json"
    assert (alone / config).read_bytes() == (here / config).read_bytes()


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_a_state_that_many_ranks_saved_goes_on_in_one_process(runs: Path, family: str, sizes: str) -> None:
    def go_on(named: str) -> tuple[dict[str, torch.Tensor], Any]:
        trainer = lora_ranks.make_trainer(runs, family, "1x1x1", "adapter", "float32")
        trainer.load(runs / f"{family}-{named}-float32" / "final")
        tensors = {name: tensor.detach().clone() for name, tensor in trainer.parameters_for_sync().items()}
        return tensors, trainer.train(make_groups(seed=9), lora_ranks.NUM_TICKS)

    tensors, got = go_on(sizes)
    held = _together(runs / f"{family}-{sizes}-float32", "adapter", _world(sizes))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in held.items())
    assert got == pytest.approx(go_on("1x1x1")[1], rel=2e-4, abs=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("sizes", ["1x2x1", "1x1x2"])
def test_bfloat16_merges_what_one_process_merges_to_its_rounding(runs: Path, sizes: str) -> None:
    alone, here = runs / "llama-1x1x1-bfloat16", runs / f"llama-{sizes}-bfloat16"
    exact = json.loads((runs / "llama-1x1x1-float32" / "0.json").read_text())[0]["grad_norm"]
    got = json.loads((here / "0.json").read_text())[0]["grad_norm"]
    assert got != exact and got == pytest.approx(exact, rel=0.05)
    base = load_file(runs / "llama" / "model.safetensors")
    for folder in ("model", "model_of_adapter"):  # the base rounded as it is computed with, or as it is stored
        expected = load_file(alone / folder / "model.safetensors")
        tensors = load_file(here / folder / "model.safetensors")
        _assert_close(tensors, expected, atol=1e-2)
        name = "model.norm.weight"
        assert torch.equal(tensors[name], base[name].bfloat16().float() if folder == "model" else base[name])
        layer = next(name for name in tensors if "q_proj" in name)
        assert not torch.equal(tensors[layer], expected[layer].bfloat16().float())  # merged in float32
