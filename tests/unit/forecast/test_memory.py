"""What a forecast says fits, by hand. Against tensors counted in real ranks: ``tests/multiprocess/test_memory_forecast.py``."""

import dataclasses
import json
from pathlib import Path

import pytest

from llamarl.forecast import memory as forecast_memory
from llamarl.forecast.costs import GeneratorLayout, exchange_s
from llamarl.forecast.hardware import find_hardware, this_machine
from llamarl.forecast.lengths import constant, lognormal
from llamarl.forecast.memory import fits, generator_memory, trainer_memory
from llamarl.forecast.model import find_model
from llamarl.forecast.search import Options, Workload, trainer_choices
from llamarl.forecast.ticks import GeneratorDemand, TrainerDemand, TrainerLayout, trainer_tick

H100 = find_hardware("h100")
SHAPES = json.loads(Path(forecast_memory.__file__).with_name("models.json").read_text())
PROMPT, RESPONSE = 1024, 130_048
LONG = PROMPT + RESPONSE
"""128k."""
MODEL = "Llama-3.1-8B"
WORK = Workload(
    model=find_model(MODEL), response=constant(RESPONSE), prompts_per_step=16, group_size=4, prompt_tokens=PROMPT
)
DEMAND = TrainerDemand(lengths=WORK.response, prompt_tokens=PROMPT, sequences=WORK.sequences, group_size=4)


def test_128k_tokens_fit_where_the_plan_cuts_rows_and_not_elsewhere() -> None:
    cut = [choice.layout for choice in trainer_choices(H100, WORK, Options(), 8) if choice.layout.tp == 1]
    assert {layout.cp for layout in cut} == {2}  # as few as hold a row
    for layout in (TrainerLayout(fsdp=8), cut[0]):
        memory = trainer_memory(H100, WORK.model, layout, DEMAND)
        assert fits(memory, H100.usable_memory_bytes) == (layout.cp > 1)


def test_cut_rows_cost_exchanges_and_nothing_else_of_note() -> None:
    """Two exchanges a layer, and each of three passes with recomputation: q, out, k, v of every token once."""
    whole = trainer_tick(H100, WORK.model, TrainerLayout(fsdp=8), DEMAND)
    cut = trainer_tick(H100, WORK.model, TrainerLayout(fsdp=2, cp=4), DEMAND)
    values = LONG / 4 * 2 * (4096 + 8 * 128) * 2
    own = exchange_s(H100, values, 4)
    assert cut.exchanges_s == pytest.approx(32 * 3 * 32 * own) and whole.exchanges_s == 0
    assert cut.compute_s == pytest.approx(whole.compute_s, rel=0.01)


def test_a_plan_fits_with_a_tenth_to_spare_and_not_without() -> None:
    parts = {"weights": 60.0, "kv_cache": 30.0}
    assert fits(parts, 99.1) and not fits(parts, 98.9)


def test_a_replica_holds_the_version_its_codes_and_the_caches_peak_by_hand() -> None:
    model = find_model("Llama-3.1-8B")
    demand = GeneratorDemand(
        lengths=constant(1000), prompt_tokens=24, group_size=4, sequences=8, total_sequences=8, slots=8
    )
    bf16, fp8 = (
        generator_memory(H100, model, GeneratorLayout(1, 1, precision), demand) for precision in ("bf16", "fp8")
    )
    assert bf16["weights"] == 2 * model.total_params
    ends = model.vocab * model.hidden  # the embedding has no codes
    assert fp8["weights"] == 2 * model.total_params + model.total_params - ends
    assert bf16["kv_cache"] == pytest.approx((8 * 1000 + 2 * 24) * model.kv_bytes_per_token())  # two groups' prompts
    assert bf16["workspace"] >= 8.0 * 8 * model.vocab  # logits and probabilities of eight draws


def test_more_micro_batches_at_once_hold_activations_and_gradients_of_each() -> None:
    model, hardware = find_model("SmolLM2-135M"), this_machine()
    demand = TrainerDemand(lengths=lognormal(100), prompt_tokens=20, sequences=64)
    one, two = (trainer_memory(hardware, model, TrainerLayout(at_once=n), demand) for n in (1, 2))
    assert two["activations"] == 2 * one["activations"] and two["gradients"] == 4 * one["gradients"]
    assert two["parameters"] == one["parameters"]


def test_muon_keeps_one_moment_of_what_lies_in_layers() -> None:
    layout = TrainerLayout(fsdp=8, micro_batch=1)
    both, one = (trainer_memory(H100, WORK.model, layout, dataclasses.replace(DEMAND, muon=m)) for m in (False, True))
    assert {key: both[key] - one[key] for key in both if both[key] != one[key]} == {
        "optimizer": pytest.approx(4 * (WORK.model.total_params - WORK.model.embedding_params) / 8)
    }
