"""The search: layouts it returns fit, add up and are not beaten by others it could have taken."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.errors import PlanError
from llamarl.planner.choices import Options, Workload, fewest_of_each_share, generator_choice, trainer_choices
from llamarl.planner.generation import GeneratorDemand
from llamarl.planner.hardware import Efficiency, device_names, find_hardware
from llamarl.planner.idle import idle_of, spare_of
from llamarl.planner.lengths import constant, lognormal
from llamarl.planner.model_spec import find_model
from llamarl.planner.plan_report import plan_to_dict, report_text, save_picture
from llamarl.planner.rooflines import GeneratorLayout, tensor_parallel_sizes, weight_sync_s
from llamarl.planner.search import (
    best_common,
    best_resharding,
    best_separate,
    best_split,
    recommend,
    search_all,
)
from llamarl.planner.step_time import closed_form_period
from llamarl.planner.training import TrainerDemand, TrainerLayout, trainer_memory, trainer_tick

H100 = find_hardware("h100")


def _work(model: str = "Llama-3.1-8B", prompts: int = 32, mean: float = 500) -> Workload:
    return Workload(
        model=find_model(model), response=lognormal(mean, 0.7, 4 * int(mean)), prompts_per_step=prompts, group_size=8
    )


@pytest.mark.parametrize(("model", "devices"), [("Llama-3.1-8B", 8), ("Qwen3-30B-A3B", 16), ("Llama-3.1-70B", 64)])
def test_every_plan_fits_memory_and_devices_and_covers_the_batch(model: str, devices: int) -> None:
    for plan in search_all(H100, _work(model), Options(), devices):
        g, t = plan.generator, plan.trainer
        used = (g.devices + t.layout.devices) if plan.system == "separate" else max(g.devices, t.layout.devices)
        assert used <= devices
        assert sum(t.memory.values()) <= plan.memory_limit and sum(g.memory.values()) <= plan.memory_limit
        assert g.replicas * g.demand.sequences >= 32 * 8
        assert 0 <= plan.bubble < 1 and math.isfinite(plan.step_s)


def test_more_staleness_is_never_slower_and_zero_is_the_sum() -> None:
    work, options = _work(), Options()
    candidates = best_split(H100, work, options, 16)
    plans = [best_separate(H100, work, options, 16, s, candidates) for s in (0, 1, 2, 4, 8)]
    for plan in plans:
        closed = closed_form_period(
            generator_s=plan.generator.time_s + plan.sync_s, reward_s=0.0, trainer_s=plan.trainer.time.total_s,
            sync_s=0.0, max_staleness=plan.max_staleness,
        )  # fmt: skip
        assert plan.step_s == pytest.approx(closed)
    steps = [plan.step_s for plan in plans]
    # 2%: whole batches are preferred to partial rollouts when that close.
    assert all(later <= earlier * 1.02 for earlier, later in zip(steps, steps[1:], strict=False))
    assert not plans[0].generator.demand.partial


def test_no_other_split_of_a_small_machine_is_faster() -> None:
    work, options = _work(prompts=8), Options(partial_rollouts=False)
    best = best_separate(H100, work, options, 8, 1)
    for trainers in range(1, 8):
        candidates = best_split(H100, work, options, 8, [trainers])
        if candidates:
            assert best_separate(H100, work, options, 8, 1, candidates).step_s >= best.step_s * 0.99


def test_numbers_worth_having_are_the_fewest_of_each_largest_share() -> None:
    assert fewest_of_each_share(8, 7) == (1, 2, 3, 4)  # shares of 8, 4, 3 and 2
    for units in (1, 2, 7, 12, 128):
        for most in (1, 3, units, 2 * units):
            by_share: dict[int, int] = {}
            for count in range(1, min(units, most) + 1):
                by_share.setdefault(math.ceil(units / count), count)
            assert list(fewest_of_each_share(units, most)) == sorted(by_share.values())


@pytest.mark.parametrize(("model", "devices", "prompts"), [("Llama-3.1-8B", 11, 7), ("Llama-3.1-8B", 16, 12), ("Qwen2.5-0.5B", 9, 5)])  # fmt: skip
def test_no_pair_of_layouts_is_faster_than_the_plan(model: str, devices: int, prompts: int) -> None:
    """Every trainer beside every generator, tried: all sizes, numbers of replicas and of data ranks."""
    work = replace(_work(model, prompts), group_size=4)
    limit, shape = H100.usable_memory_bytes, work.model
    trained = TrainerDemand(
        lengths=work.response, prompt_tokens=work.prompt_tokens, sequences=work.sequences, together=4
    )
    trainers: dict[int, float] = {}
    sizes = tensor_parallel_sizes(shape, 8)
    for tp, ranks, recompute, micro in itertools.product(sizes, range(1, prompts + 1), (False, True), range(1, 17)):
        layout = TrainerLayout(tp=tp, fsdp=ranks, micro_batch=micro, recompute=recompute, runnable=True)
        if layout.devices < devices and sum(trainer_memory(H100, shape, layout, trained).values()) <= limit:
            took = trainer_tick(H100, shape, layout, trained).total_s
            trainers[layout.devices] = min(took, trainers.get(layout.devices, math.inf))
    best = math.inf
    for tp, replicas, precision in itertools.product(sizes, range(1, prompts + 1), ("bf16", "fp8")):
        layout, left = GeneratorLayout(tp, 1, precision, runnable=True), devices - tp * replicas
        share = math.ceil(prompts / replicas) * 4
        for slots in range(1, share + 1):
            asked = GeneratorDemand(
                lengths=work.response, prompt_tokens=work.prompt_tokens, group_size=4, sequences=share,
                total_sequences=work.sequences, slots=slots,
            )  # fmt: skip
            found = generator_choice(H100, shape, layout, asked, replicas)
            if left < 1 or sum(found.memory.values()) > limit:
                continue
            for used in (n for n in trainers if n <= left):
                sync = weight_sync_s(H100, shape, trainer_devices=used, replicas=replicas, layout=layout)
                plainer = 1.0 if prompts % replicas == 0 else 1.02
                best = min(best, max(found.time_s + sync, trainers[used]) * plainer)
    plan = best_separate(H100, work, Options(partial_rollouts=False), devices, 1)
    assert plan.step_s <= 1.01 * best  # steps that are alike to three digits count as equal
    assert plan.generator.devices + plan.trainer.layout.devices <= devices


def test_a_pair_that_leaves_devices_idle_says_why() -> None:
    """Five prompts: 3 replicas have at most 2 each, as 4 would; a fifth needs two more devices."""
    work = replace(_work("Qwen2.5-0.5B", 5), group_size=4)
    plan = best_separate(H100, work, Options(partial_rollouts=False), 12, 1)
    used = plan.generator.devices + plan.trainer.layout.devices
    idle = idle_of(plan, work, Options(), "h100-sxm")
    assert (idle.count if idle else 0) == 12 - used
    generator = replace(plan.generator, replicas=3)
    plan = replace(plan, devices=plan.trainer.layout.devices + generator.devices + 1, generator=generator)
    idle = idle_of(plan, work, Options(), "h100-sxm")
    assert idle is not None
    assert (
        f"fewer prompts for each of the generator replicas take {2 * plan.generator.layout.devices} device"
        in idle.text()
    )


def test_a_trainer_that_waits_says_how_few_devices_it_needs() -> None:
    """Every trainer on fewer devices tried, beside the same generators."""
    work = _work()
    plan = best_separate(H100, work, Options(), 25, 1)
    limit, had = H100.usable_memory_bytes, plan.trainer.layout.devices
    steps = {}
    for count in range(1, had):
        trains = [c.time.total_s for c in trainer_choices(H100, work, Options(), count, memory_limit=limit)]
        sync = weight_sync_s(
            H100, work.model, trainer_devices=count, replicas=plan.generator.replicas, layout=plan.generator.layout
        )
        steps[count] = max(plan.generator.time_s + sync, min(trains, default=math.inf))
    enough = min((count for count, step in steps.items() if step <= 1.01 * plan.step_s), default=None)
    spare = spare_of(plan, work, Options(), H100)
    assert (spare.enough if spare else None) == enough
    assert spare is None or (spare.of == had and spare.step_s == pytest.approx(steps[spare.enough]))
    assert spare_of(best_resharding(H100, work, Options(), 25), work, Options(), H100) is None


def test_staleness_bound_counts_partial_rollouts() -> None:
    plan = best_separate(H100, _work(mean=2000), Options(max_segments=3), 16, 1)
    assert plan.generator.demand.partial
    assert plan.token_staleness == 1 + 3 - 1


def test_quantized_generator_is_chosen_only_where_allowed() -> None:
    work = _work("Llama-3.1-70B")
    plans = {p: best_separate(H100, work, Options(precisions=(p,)), 64, 1) for p in ("bf16", "fp8")}
    assert {p: plan.generator.layout.precision for p, plan in plans.items()} == {"bf16": "bf16", "fp8": "fp8"}
    free = best_separate(H100, work, Options(), 64, 1)
    assert free.step_s == min(plan.step_s for plan in plans.values())


def test_one_layout_is_never_faster_than_resharding_with_the_same_precision() -> None:
    work, options = _work("Llama-3.1-70B"), Options(precisions=("bf16",), runnable=False)
    assert best_resharding(H100, work, options, 64).step_s <= best_common(H100, work, options, 64).step_s


def test_recommendation_takes_the_least_staleness_within_two_percent() -> None:
    plans = search_all(H100, _work(), Options(), 16)
    chosen = recommend(plans)
    fastest = min(plan.step_s for plan in plans)
    assert chosen.step_s <= 1.02 * fastest
    assert all(p.token_staleness >= chosen.token_staleness for p in plans if p.step_s <= 1.02 * fastest)


@pytest.mark.long
def test_sixteen_thousand_devices_are_searched() -> None:
    plan = best_separate(H100, _work("Llama-3.1-405B", prompts=2048), Options(runnable=False), 16384, 1)
    assert plan.generator.devices + plan.trainer.layout.devices <= 16384


@pytest.mark.parametrize("model", ["Llama-3.1-70B", "Llama-3.1-405B", "Qwen3-30B-A3B"])
def test_what_fits_nowhere_names_the_smallest_number_that_would_do(model: str) -> None:
    work, options = _work(model), Options(runnable="405B" not in model)
    with pytest.raises(PlanError, match=r"does not fit on 1 x .* devices would do where both share them") as caught:
        search_all(H100, work, options, 1)
    found = re.search(r"; (\d+) devices would do where both share them, (\d+) where each", str(caught.value))
    assert found
    shared, split = map(int, found.groups())
    assert shared < split
    for count in range(max(1, shared - 20), shared):
        with pytest.raises(PlanError, match="does not fit"):
            search_all(H100, work, options, count, (0, 1))
    systems = {plan.system for plan in search_all(H100, work, options, shared, (1,))}
    assert "resharding" in systems and "separate" not in systems
    for count in range(shared, split):
        assert not best_split(H100, work, options, count)
    assert best_separate(H100, work, options, split, 1)
    if shared > 2:
        with pytest.raises(PlanError, match=f"; {split} devices would do$"):
            best_separate(H100, work, options, shared, 1)


def test_a_generator_that_fits_on_no_number_of_devices_says_why() -> None:
    """671 B parameters, whose experts llamarl does not cut, in devices of 80 GB."""
    with pytest.raises(PlanError, match="at most 1 tensor-parallel rank in llamarl, too few for its weights"):
        search_all(H100, _work("DeepSeek-V3"), Options(), 64)


@pytest.mark.parametrize("devices", [0, -4])
def test_no_devices_is_refused(devices: int) -> None:
    with pytest.raises(PlanError, match="at least 1"):
        search_all(H100, _work(), Options(), devices)


def test_one_device_plans_co_located_only() -> None:
    plans = search_all(
        H100,
        Workload(model=find_model("SmolLM2-135M"), response=constant(64), prompts_per_step=4, group_size=4),
        Options(),
        1,
    )
    assert {plan.system for plan in plans} == {"common", "resharding"}
    with pytest.raises(PlanError, match="need 2 devices"):
        best_separate(H100, _work(), Options(), 1, 1)


def test_a_response_longer_than_the_context_says_what_would_fit() -> None:
    with pytest.raises(PlanError, match="limit=7936"):
        Workload(model=find_model("SmolLM2-135M"), response=constant(9000), prompts_per_step=1, group_size=1)


def test_unknown_hardware_gets_the_nearest() -> None:
    with pytest.raises(PlanError, match="nearest is 'h200-sxm'"):
        find_hardware("h200-smx")


def test_every_number_of_every_device_has_a_source() -> None:
    for name in device_names():
        hardware = find_hardware(name)
        for record in (hardware.device, hardware.efficiency):
            named = {f.name for f in dataclasses.fields(record)} - {
                "sources",
                "name",
                "title",
                "price_per_hour",
                "assumed",
                "weight_precisions",
            }
            assert named <= set(record.sources), (name, named - set(record.sources))


@pytest.mark.parametrize(("name", "value"), [("matmul", 0.0), ("memory", 1.5), ("collective_launch_s", -1.0)])
def test_efficiencies_outside_their_meaning_are_refused(name: str, value: float) -> None:
    with pytest.raises(PlanError, match=name):
        dataclasses.replace(H100.efficiency, **{name: value})
    assert isinstance(H100.efficiency, Efficiency)


def test_report_shows_every_plan_and_the_cost() -> None:
    work = _work()
    plans = search_all(H100, work, Options(), 16)
    text = report_text(plans, recommend(plans), work, H100, price=3.6)
    for part in ("sync, one layout", "sync, re-sharding", "separate, staleness 4", "cost/step", "memory", "binds"):
        assert part in text
    assert "logits 0 B" not in text  # they are gone at the moment of the most memory, or counted
    plain = plan_to_dict(plans[0], price=3.6)
    assert plain["cost_per_step"] == pytest.approx(16 * plans[0].step_s * 3.6 / 3600)


def test_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    save_picture(search_all(H100, _work(), Options(), 8, (1,)), path, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
