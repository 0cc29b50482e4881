"""Pipeline stages x FSDP2 x context- x tensor- x expert-parallel ranks over gloo against one process: tied and untied ends, uneven
stages and micro-batches, shared prompts, rows cut unevenly, windows and soft caps, more ranks than key-value heads, sparse layers.
That a layout repeats its bits from a saved state, each rank proves for itself (``trainer_ranks``).

Tolerance: relative 1e-4 for gradient norms and metrics, absolute 2e-5 for weights after two AdamW steps of 1e-3, which
divide by the root of the second moment and so turn a rounding difference in a tiny gradient into one of the step's size.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_ranks
from rank_processes import run_cases
from safetensors.torch import load_file
from trainer_ranks import ALONE, NUM_TICKS, TEXTS, sizes_of
from training_fixtures import tiny_config, write_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

ONE_HEAD = "one_head"
"""Qwen3 with one key-value head and biases: both ranks of ``tp 2`` hold it, and FSDP2 cuts its rows over two more."""
FAMILIES = ("llama", "deep", "qwen3", "gemma2", "qwen3_moe", ONE_HEAD)
"""``deep`` is Llama of five layers, which lie unevenly over stages. Others have two, and three where there are stages of them: few tokens
choose some expert in each sparse layer, so rounding is the larger a part of its gradient the more layers follow."""
MADE_OF = {"deep": "llama", ONE_HEAD: "qwen3"}
TRAITS: dict[str, dict[str, object]] = {
    "deep": {"num_hidden_layers": 5},
    "gemma2": {"num_hidden_layers": 3},
    "qwen3_moe": {"num_hidden_layers": 3},
    ONE_HEAD: {"num_key_value_heads": 1, "attention_bias": True},
}
SHORT = {  # pp x fsdp x cp x tp x ep; there are 4 query heads and 2 key-value heads
    "llama": ("1x1x1x4x1",),  # two ranks hold a key-value head; untied ends on stages are Muon's
    "qwen3": ("1x1x4x1x1",),
    "gemma2": ("2x2x1x2x1", "1x2x1x2x1", "1x2x2x1x1", "3x1x1x1x1"),  # tied ends, also on stages that are uneven
    "qwen3_moe": ("1x2x1x2x2", "2x1x1x2x1", "1x4x1x1x2"),
    ONE_HEAD: ("1x2x1x2x1",),
}
LONG = {
    "llama": (
        *("1x2x1x1x1", "1x1x1x2x1", "1x2x2x1x1", "1x1x2x2x1", "1x1x4x1x1", "1x2x2x2x1", "1x4x2x1x1", "1x2x4x1x1"),
        "1x2x1x4x1",
    ),
    "deep": (
        *("2x1x1x1x1", "3x1x1x1x1", "4x1x1x1x1", "2x2x1x1x1", "2x1x1x2x1", "4x2x1x1x1", "4x1x1x2x1", "2x4x1x1x1"),
        *("2x1x2x1x1", "2x2x2x1x1", "2x1x2x2x1", "3x2x1x1x1"),
    ),
    "qwen3": ("1x1x1x4x1", "1x1x2x2x1", "2x2x1x2x1", "2x2x2x1x1", "1x4x1x2x1", "2x1x1x4x1"),
    "gemma2": ("1x1x1x4x1", "1x1x2x2x1", "1x1x4x1x1", "1x2x2x2x1"),
    "qwen3_moe": (
        *("1x2x1x2x1", "1x1x1x4x1", "1x2x2x1x1", "1x1x4x1x1", "3x1x1x1x1", "2x2x1x2x1", "1x2x1x1x2", "1x4x1x1x4"),
        *("2x2x1x1x2", "1x2x2x1x2", "1x2x2x1x4", "1x1x2x1x2", "2x2x1x2x2", "1x2x2x2x2", "2x4x1x1x2"),
    ),
    ONE_HEAD: (),
}
CASES = [pytest.param(family, sizes) for family in FAMILIES for sizes in SHORT.get(family, ())] + [
    pytest.param(family, sizes, marks=pytest.mark.long) for family in FAMILIES for sizes in LONG[family]
]
OTHERWISE = {
    "passes": ("llama:2x2x1x1x1",),
    "sequences": ("llama:1x1x4x1x1",),
    "taught": ("llama:1x1x1x4x1", "llama:1x2x2x1x1", "llama:2x1x1x2x1"),
    "replay": ("qwen3_moe:1x1x2x1x1", "qwen3_moe:2x2x1x1x1"),
}
"""What else is trained -> by whom, in which layouts."""
MUON = ("qwen3_moe:1x4x1x1x2", "qwen3_moe:2x1x1x2x1", f"{ONE_HEAD}:1x2x1x2x1")
REFUSING = ("1x2x2x1x1", "2x2x1x1x1")
VALUING = "1x2x1x2x1"
SCORING = (("llama_classifier", "1x1x1x2x1"), ("gemma2_classifier", "1x2x1x2x1"))
PARKED = (("parked", "1x1x1x2x1"), ("parked_rounded", "1x2x1x1x1"))
ROUNDED = (f"{ONE_HEAD}:1x2x1x2x1", f"{ONE_HEAD}:2x2x1x1x1")
pytestmark = pytest.mark.timeout(900)


def _world(sizes: str) -> int:
    return math.prod(sizes_of(sizes).values()) // sizes_of(sizes)["ep"]  # which are among those of fsdp and cp


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that is asked for, the processes of each number of ranks started once."""
    long = any(item.get_closest_marker("long") for item in request.session.items if item.path == request.path)
    folder = tmp_path_factory.mktemp("meshes")
    for family in FAMILIES:
        write_model(folder / family, MADE_OF.get(family, family), **TRAITS.get(family, {}))
    config = write_model(folder / "scaled", "qwen3") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"logits_scaling": 8.0}))
    for family in ("llama", "gemma2"):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(tiny_config(family, num_labels=1), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.3)
        model.save_pretrained(folder / f"{family}_classifier")
    cases = [":".join([*case.values, "train"]) for case in CASES if long or not case.marks]
    cases += [f"{case}:{kind}" for kind, layouts in OTHERWISE.items() for case in layouts]
    cases += [f"llama:{VALUING}:critic"] + [f"{case}:bfloat16" for case in ROUNDED]
    cases += [f"{family}:{sizes}:scores" for family, sizes in SCORING]
    cases += [f"{case}:muon" for case in MUON]
    cases += sorted({":".join((case.split(":")[0], ALONE, case.split(":")[2])) for case in cases})
    cases += [f"llama:{sizes}:refusals" for sizes in REFUSING] + [f"llama:{sizes}:{kind}" for kind, sizes in PARKED]
    cases += ["llama:1x1x2x1x1:row_parts", "scaled:1x2x1x1x1:unknown_logits"]
    # Local groups are named by how many a rank has: those of ranks that are neither first nor last stage have fewer.
    cases.sort(key=lambda case: sizes_of(case.split(":")[1])["pp"])
    run_cases(trainer_ranks.main, folder, cases, lambda case: _world(case.split(":")[1]), limit_s=840)
    return folder


def _reports(folder: Path, family: str, sizes: str, kind: str) -> list[Any]:
    """Of every rank."""
    out = folder / f"{family}-{sizes}-{kind}"
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(_world(sizes))]


def _read(
    folder: Path, family: str, sizes: str, what: str = "through", kind: str = "train"
) -> tuple[list[dict[str, Any]], list[dict[str, torch.Tensor]]]:
    out = folder / f"{family}-{sizes}-{kind}"
    reports = [json.loads((out / f"{what}-{rank}.json").read_text()) for rank in range(_world(sizes))]
    return reports, [load_file(out / f"{what}-{rank}.safetensors") for rank in range(_world(sizes))]


def _assert_same_rows(got: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for row, wanted in zip(got, expected, strict=True):
        assert wanted["grad_norm"] > 0
        known = [key for key in wanted if key != "tokens/computed"]  # a prompt may be computed once a micro-batch
        assert {key: row[key] for key in known} == pytest.approx(
            {key: wanted[key] for key in known}, rel=1e-4, abs=1e-6
        )


@pytest.mark.parametrize("what", ["through", "from_one"])
@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_metrics_and_gradient_norms_are_those_of_one_process_also_from_what_it_has_saved(
    runs: Path, family: str, sizes: str, what: str
) -> None:
    (alone,), _ = _read(runs, family, ALONE)
    for report in _read(runs, family, sizes, what)[0]:
        _assert_same_rows(report["metrics"], alone["metrics"][-len(report["metrics"]) :])


@pytest.mark.parametrize("what", ["through", "from_one"])
@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_parts_of_all_ranks_make_the_weights_of_one_process(runs: Path, family: str, sizes: str, what: str) -> None:
    _, (expected,) = _read(runs, family, ALONE)
    reports, parts = _read(runs, family, sizes, what)
    for name, whole in expected.items():
        covered = torch.zeros_like(whole, dtype=torch.int64)
        for report, tensors in zip(reports, parts, strict=True):
            where = tuple(slice(start, stop) for start, stop in report["boxes"][name])
            covered[where] += 1
            if name in tensors:
                torch.testing.assert_close(tensors[name], whole[where], rtol=0, atol=2e-5, msg=name)
            else:
                assert covered[where].numel() == 0, name
        tied = name == "model.embed_tokens.weight" and "lm_head.weight" not in expected
        assert 1 <= covered.min(), name
        assert covered.max() <= (2 if tied and sizes_of(sizes)["pp"] > 1 else 1) * _copies(family, name, sizes), name


def _copies(family: str, name: str, sizes: str) -> int:
    """How many tensor-parallel ranks hold the same part of a tensor; ranks of other axes hold other parts."""
    tp = sizes_of(sizes)["tp"]
    if ".k_proj." in name or ".v_proj." in name:
        return max(1, tp // (1 if family == ONE_HEAD else 2))
    cut = (".self_attn." in name or ".mlp." in name) and not name.endswith(
        ("norm.weight", ".mlp.gate.weight", "o_proj.bias")  # a router is whole
    )
    return 1 if cut else tp


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_the_export_is_what_all_ranks_hold(runs: Path, family: str, sizes: str) -> None:
    reports, parts = _read(runs, family, sizes)
    model = AutoModelForCausalLM.from_pretrained(runs / f"{family}-{sizes}-train" / "model")
    for name, parameter in model.named_parameters():
        for report, tensors in zip(reports, parts, strict=True):
            where = tuple(slice(start, stop) for start, stop in report["boxes"][name])
            assert name not in tensors or torch.equal(parameter[where], tensors[name]), name


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_one_process_goes_on_from_what_all_ranks_have_saved(runs: Path, family: str, sizes: str) -> None:
    trainer = trainer_ranks.make_trainer(runs, family, ALONE)
    trainer.load(runs / f"{family}-{sizes}-train" / "state")
    assert trainer.policy_version == NUM_TICKS - 1
    (alone,), (expected,) = _read(runs, family, ALONE)
    _assert_same_rows([trainer_ranks.train(trainer, runs, family, NUM_TICKS - 1)], alone["metrics"][-1:])
    for name, tensor in trainer.parameters_for_sync().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-5, msg=name)


def test_ranks_hold_a_share_not_the_model(runs: Path) -> None:
    family, sizes = ONE_HEAD, "1x2x1x2x1"
    fsdp, tp = sizes_of(sizes)["fsdp"], sizes_of(sizes)["tp"]
    _, (whole,) = _read(runs, family, ALONE)
    _, parts = _read(runs, family, sizes)
    name = "model.layers.0.mlp.down_proj.weight"
    assert all(p[name].numel() == whole[name].numel() // (fsdp * tp) for p in parts)
    heads = sum(t.numel() for n, t in whole.items() if "k_proj" in n or "v_proj" in n)
    cut = sum(t.numel() for n, t in whole.items() if "proj" in n) - heads
    vocabulary = sum(t.numel() for n, t in whole.items() if "embed" in n or "lm_head" in n)
    uncut = sum(t.numel() for n, t in whole.items() if "norm" in n)
    assert cut + heads + vocabulary + uncut == sum(t.numel() for t in whole.values())
    most = max(sum(t.numel() for t in p.values()) for p in parts)
    held = cut / tp + heads + vocabulary / tp + uncut
    assert most <= held / fsdp + 64  # rows that do not divide evenly


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, cases in OTHERWISE.items() for case in cases])
def test_other_losses_passes_and_replayed_experts_are_those_of_one_process(runs: Path, kind: str, case: str) -> None:
    """Also where one rank holds one group: what a step trains on, and the proximal policy, do not depend on the mesh."""
    family, sizes = case.split(":")
    (alone,) = _reports(runs, family, ALONE, kind)
    counts = ("tokens/trained", "samples/trained", "staleness/steps_mean", "step/empty")
    for found in _reports(runs, family, sizes, kind):
        _assert_same_rows(found, alone)
        for got, wanted in zip(found, alone, strict=True):
            assert [got.get(key) for key in counts] == [wanted.get(key) for key in counts]
            assert kind != "replay" or {"experts/load_max", "experts/load_mean", "experts/unused"} <= got.keys()


@pytest.mark.parametrize("what", ["through", "from_one"])
@pytest.mark.parametrize("case", MUON)
def test_muon_gathers_what_is_cut_and_makes_the_weights_of_one_process(runs: Path, case: str, what: str) -> None:
    """Also from what one process has saved; ``one_head`` trains adapters. A step of 1e-3 moves a weight by 2e-4 on average."""
    family, sizes = case.split(":")
    (alone,), (expected,) = _read(runs, family, ALONE, kind="muon")
    reports, parts = _read(runs, family, sizes, what, kind="muon")
    compared: set[str] = set()
    for report, tensors in zip(reports, parts, strict=True):
        _assert_same_rows(report["metrics"], alone["metrics"][-len(report["metrics"]) :])
        for name, tensor in tensors.items():
            where = tuple(slice(start, stop) for start, stop in report["boxes"][name])
            torch.testing.assert_close(tensor, expected[name][where], rtol=0, atol=1e-5, msg=name)
            compared.add(name)
    assert compared == expected.keys()


@pytest.mark.parametrize("case", ROUNDED)
def test_bfloat16_compute_on_a_mesh_is_that_of_one_process_to_its_rounding(runs: Path, case: str) -> None:
    family, sizes = case.split(":")
    exact = _read(runs, family, ALONE)[0][0]["metrics"][0]
    (alone,) = _reports(runs, family, ALONE, "bfloat16")
    assert alone["grad_norm"] != exact["grad_norm"]  # it did round
    for got in _reports(runs, family, sizes, "bfloat16"):
        assert got["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)
        assert got["loss/policy"] == pytest.approx(exact["loss/policy"], rel=0.05, abs=1e-3)
        assert got["entropy"] == pytest.approx(alone["entropy"], rel=0.01)


def test_a_critic_on_a_mesh_values_and_learns_as_one_process_does(runs: Path) -> None:
    (alone,) = _reports(runs, "llama", ALONE, "critic")
    reports = _reports(runs, "llama", VALUING, "critic")
    for report in reports:
        for got, expected in zip(report["metrics"], alone["metrics"], strict=True):
            assert got == pytest.approx(expected, rel=1e-3, abs=1e-5)
    values = [v for report in reports[:: sizes_of(VALUING)["tp"]] for v in report["values"]]  # peers say the same
    assert len(values) == len(alone["values"])
    for prompt, sample, value in values:
        known = [v for p, s, v in alone["values"] if (p, s, len(v)) == (prompt, sample, len(value))]
        assert any(value == pytest.approx(v, rel=1e-3, abs=1e-4) for v in known), (prompt, sample)
    expected_weights, weights = (
        load_file(runs / f"llama-{named}-critic" / "critic" / "model.safetensors") for named in (ALONE, VALUING)
    )
    assert set(weights) == set(expected_weights) and "score.weight" in weights
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize(("family", "sizes"), SCORING)
def test_scores_of_a_reward_model_are_those_of_one_process(runs: Path, family: str, sizes: str) -> None:
    (alone,) = _reports(runs, family, ALONE, "scores")
    each, seen = len(TEXTS[0]), set()
    for found in _reports(runs, family, sizes, "scores"):
        expected = [score for g in found["groups"] for score in alone["scores"][g * each : (g + 1) * each]]
        assert found["empty"] == [] and found["scores"] == pytest.approx(expected, abs=2e-5)
        seen |= set(found["groups"])
    assert seen == set(range(len(TEXTS)))


@pytest.mark.parametrize(("kind", "sizes"), PARKED)
def test_a_sharded_trainer_parked_between_ticks_gives_the_bits_of_one_that_stays(
    runs: Path, kind: str, sizes: str
) -> None:
    """FSDP2's own views of its shards survive it."""
    for shown in _reports(runs, "llama", sizes, kind):
        assert shown["same"] == [[True] * 3] * NUM_TICKS
        for before, freed, left in shown["parked"]:
            assert before == freed > 0 and left == 0


@pytest.mark.parametrize("sizes", REFUSING)
def test_all_ranks_skip_and_refuse_what_one_of_them_sees(runs: Path, sizes: str) -> None:
    reports = _reports(runs, "llama", sizes, "refusals")
    for report in reports:
        assert report["skipped"] == 1.0 and report["kept"]
        assert report["refused"] == reports[0]["refused"]
    assert "sampled by policy version 0, 2 versions before the trainer's 2" in reports[0]["refused"]


def test_a_mesh_refuses_a_model_whose_logits_it_does_not_know(runs: Path) -> None:
    reports = _reports(runs, "scaled", "1x2x1x1x1", "unknown_logits")
    assert all("changes its logits" in said for said in reports)


def test_a_row_is_filled_up_and_its_log_probs_are_put_together_on_every_rank(runs: Path) -> None:
    first, second = _reports(runs, "llama", "1x1x2x1x1", "row_parts")
    assert first["held"] == [10, 11, 12, 13] and second["held"] == [14, 15, 16, -1]
    assert first["whole"] == second["whole"] == [1.5, -math.inf, 3.0]
    assert first["gradient"] == [] and second["gradient"] == [100.0, 0.0, 0.0]  # each its own part, once
