"""The search: layouts it returns fit, add up and are not beaten by others it could have taken."""

import dataclasses
import itertools
import math
import re
from dataclasses import replace

import pytest

from llamarl.errors import PlanError
from llamarl.forecast.calibrate import Fit
from llamarl.forecast.costs import GeneratorLayout, weight_sync_s
from llamarl.forecast.hardware import Hardware, device_names, find_hardware, this_machine
from llamarl.forecast.lengths import constant, lognormal
from llamarl.forecast.memory import fits, trainer_memory
from llamarl.forecast.model import find_model, tensor_parallel_sizes
from llamarl.forecast.search import (
    Options,
    Plan,
    Workload,
    _generator_choice,
    _shares,
    asynchronous,
    over_kinds,
    recommend,
    search_all,
    split_candidates,
    synchronous,
    trainer_choices,
    trainer_demand,
)
from llamarl.forecast.step_time import step_period
from llamarl.forecast.ticks import GeneratorDemand, TrainerLayout, trainer_tick

H100 = find_hardware("h100")


def _work(model: str = "Llama-3.1-8B", prompts: int = 32, mean: float = 500) -> Workload:
    return Workload(
        model=find_model(model), response=lognormal(mean, 0.7, 4 * int(mean)), prompts_per_step=prompts, group_size=8
    )


@pytest.mark.parametrize(("model", "devices"), [("Llama-3.1-8B", 8), ("Qwen3-30B-A3B", 16), ("Llama-3.1-70B", 64)])
def test_every_plan_fits_memory_and_devices_and_covers_the_batch(model: str, devices: int) -> None:
    for plan in search_all(H100, _work(model), Options(), devices):
        g, t = plan.generator, plan.trainer
        assert plan.used <= devices
        assert fits(t.memory, H100.usable_memory_bytes) and fits(g.memory, H100.usable_memory_bytes)
        assert g.replicas * g.demand.sequences >= 32 * 8
        assert 0 <= plan.waiting < 1 and math.isfinite(plan.step_s)


def test_more_staleness_is_never_slower_and_zero_is_the_sum() -> None:
    work, options = _work(), Options()
    candidates = split_candidates(H100, work, options, 16)
    plans = [asynchronous(H100, work, options, 16, s, candidates) for s in (1, 2, 4, 8)]
    for plan in plans:
        closed, _ = step_period(
            generator_s=plan.generator.time_s + plan.sync_s, reward_s=0.0, trainer_s=plan.trainer.time.total_s,
            sync_s=0.0, max_staleness=plan.max_staleness,
        )  # fmt: skip
        assert plan.step_s == pytest.approx(closed)
    steps = [plan.step_s for plan in plans]
    # 2%: whole batches are preferred to partial rollouts when that close.
    assert all(later <= earlier * 1.02 for earlier, later in itertools.pairwise(steps))
    turns = synchronous(H100, work, options, 16)
    assert turns.step_s == pytest.approx(turns.generator.time_s + turns.trainer.time.total_s + turns.sync_s)
    assert not turns.generator.demand.partial and turns.max_staleness == turns.token_staleness == 0


@pytest.mark.parametrize(("model", "devices", "prompts"), [("Llama-3.1-8B", 11, 7), ("Qwen2.5-0.5B", 9, 5)])
def test_no_pair_of_layouts_is_faster_than_the_plan(model: str, devices: int, prompts: int) -> None:
    """Every trainer beside every generator, tried: all sizes, numbers of replicas and of data ranks."""
    work = replace(_work(model, prompts), group_size=4)
    shape, options = work.model, Options(max_segments=1)
    trainers: dict[int, float] = {}
    sizes = tensor_parallel_sizes(shape, 8)
    for tp, ranks, recompute, micro in itertools.product(sizes, range(1, prompts + 1), (False, True), range(1, 17)):
        layout = TrainerLayout(tp=tp, fsdp=ranks, micro_batch=micro, recompute=recompute)
        memory = trainer_memory(H100, shape, layout, trainer_demand(work))
        if layout.devices < devices and fits(memory, H100.usable_memory_bytes):
            took = trainer_tick(H100, shape, layout, trainer_demand(work)).total_s
            trainers[layout.devices] = min(took, trainers.get(layout.devices, math.inf))
    best = math.inf
    for tp, replicas, precision in itertools.product(sizes, range(1, prompts + 1), ("bf16", "fp8")):
        layout, left = GeneratorLayout(tp, precision), devices - tp * replicas
        share = math.ceil(prompts / replicas) * 4
        for slots in range(1, share + 1):
            asked = GeneratorDemand(
                lengths=work.response, prompt_tokens=work.prompt_tokens, group_size=4, sequences=share,
                total_sequences=work.sequences, slots=slots,
            )  # fmt: skip
            found = _generator_choice(H100, shape, layout, asked, replicas, prompts)
            if left < 1 or found is None:
                continue
            for used in (n for n in trainers if n <= left):
                sync = weight_sync_s(H100, shape, trainer_devices=used, replicas=[(replicas, layout)])
                plainer = 1.0 if prompts % replicas == 0 else 1.02
                best = min(best, max(found.time_s + sync, trainers[used]) * plainer)
    plan = asynchronous(H100, work, options, devices, 1)
    assert plan.step_s <= 1.01 * best  # steps that agree to three digits count as equal


def test_staleness_bound_counts_partial_rollouts() -> None:
    plan = asynchronous(H100, _work(mean=2000), Options(max_segments=3), 16, 1)
    assert plan.generator.demand.partial
    assert plan.token_staleness == 1 + 3 - 1


def test_the_faster_precision_is_chosen_where_both_are_allowed() -> None:
    work = _work("Llama-3.1-70B")
    plans = {p: asynchronous(H100, work, Options(precisions=(p,)), 64, 1) for p in ("bf16", "fp8")}
    assert {p: plan.generator.layout.precision for p, plan in plans.items()} == {"bf16": "bf16", "fp8": "fp8"}
    assert asynchronous(H100, work, Options(), 64, 1).step_s == min(plan.step_s for plan in plans.values())
    with pytest.raises(PlanError, match="in fp4 on .*: llamarl serves it in bf16, fp8 there"):
        asynchronous(H100, work, Options(precisions=("fp4",)), 64, 1)


def test_recommendation_takes_the_least_staleness_within_two_percent() -> None:
    plans = search_all(H100, _work(), Options(), 16)
    chosen, fastest = recommend(plans), min(plan.step_s for plan in plans)
    assert chosen.step_s <= 1.02 * fastest
    assert all(p.token_staleness >= chosen.token_staleness for p in plans if p.step_s <= 1.02 * fastest)


@pytest.mark.parametrize("model", ["Llama-3.1-70B", "Qwen3-30B-A3B"])
def test_what_fits_nowhere_names_the_smallest_number_that_would_do(model: str) -> None:
    work = _work(model)
    with pytest.raises(PlanError, match=r"does not fit on 1 x .* would do in turns") as caught:
        search_all(H100, work, Options(), 1)
    found = re.search(r"; (\d+) would do in turns, (\d+) with devices of their own", str(caught.value))
    assert found
    shared, split = map(int, found.groups())
    assert shared < split
    with pytest.raises(PlanError, match="does not fit"):
        search_all(H100, work, Options(), shared - 1)
    assert [plan.colocated for plan in search_all(H100, work, Options(), shared, (0, 1))] == [True]
    assert not split_candidates(H100, work, Options(), split - 1)
    assert asynchronous(H100, work, Options(), split, 1)


def test_a_generator_that_fits_on_no_number_of_devices_says_why() -> None:
    """671 B parameters, whose experts llamarl does not cut, in devices of 80 GB."""
    with pytest.raises(PlanError, match="its generator replica does not; llamarl does not cut its layers"):
        search_all(H100, _work("DeepSeek-V3"), Options(), 64)


def test_one_device_is_planned_in_turns_and_none_is_refused() -> None:
    work = Workload(model=find_model("SmolLM2-135M"), response=constant(64), prompts_per_step=4, group_size=4)
    assert [plan.colocated for plan in search_all(H100, work, Options(), 1)] == [True]
    with pytest.raises(PlanError, match="needs at least 2 devices"):
        asynchronous(H100, work, Options(), 1, 1)
    with pytest.raises(PlanError, match="at least 1"):
        search_all(H100, work, Options(), 0)


def test_a_response_longer_than_the_context_says_what_would_fit() -> None:
    with pytest.raises(PlanError, match="let responses have at most 7936 "):
        Workload(model=find_model("SmolLM2-135M"), response=constant(9000), prompts_per_step=1, group_size=1)


# -- cores of a CPU ---------------------------------------------------------------------------------------------------


def _two_cores() -> Hardware:
    here = this_machine()
    return replace(here, device=replace(here.device, devices_per_node=2, memory_bytes=8e9))


def _measured(generator: int, trainer: int, *, factor: float, at_once: bool = False, shares_cores: bool = False) -> Fit:
    """A run with so many threads of each role, ``factor`` times as long as the rooflines say."""
    hardware = _two_cores().with_efficiency(generator_scale=factor, trainer_scale=factor, estimates=())
    return Fit(
        model="SmolLM2-135M", precision="fp32", hardware=hardware, lengths=constant(64), prompt_tokens=8,
        threads={"generator": generator, "trainer": trainer}, at_once=at_once, shares_cores=shares_cores, reward_s=0.0,
        num_ticks=9, jitter={},
    )  # fmt: skip


def _plans(*runs: Fit) -> list[Plan]:
    work = Workload(model=find_model("SmolLM2-135M"), response=constant(64), prompts_per_step=8, group_size=4)
    return search_all(_two_cores(), work, Options(max_segments=1, measured=runs), 2, (0, 1))


def _threads(*runs: Fit) -> list[tuple[int, int, int]]:
    """Of each plan on two cores: staleness, threads of the generator, threads of the trainer."""
    plans = _plans(*runs)
    return [(plan.max_staleness, plan.generator_devices, plan.trainer.threads) for plan in plans]


@pytest.mark.parametrize("devices", [64, 256, 1024])
def test_half_of_a_plans_trainer_would_not_keep_up(devices: int) -> None:
    work = _work(prompts=128, mean=1000)
    plan = asynchronous(H100, work, Options(), devices, 1)
    (generator,) = plan.generators
    half = []
    for trainer in trainer_choices(H100, work, Options(), plan.trainer.layout.devices // 2):
        replicas = [(generator.replicas, generator.layout)]
        sync = weight_sync_s(H100, work.model, trainer_devices=trainer.layout.devices, replicas=replicas)
        half.append((trainer, plan.generators, sync))
    assert not half or asynchronous(H100, work, Options(), devices, 1, half).step_s > 1.0005 * plan.step_s


def test_without_a_run_two_cores_are_split_by_guess() -> None:
    assert _threads() == [(0, 2, 2), (1, 1, 2)]  # the trainer has both once the generator waits


def test_no_threads_are_planned_that_no_run_has_measured() -> None:
    """Of two threads each, which the guess takes for 1.7 of one, a run found that they do less than one."""
    apart, more = _measured(1, 1, factor=2.0), _measured(2, 2, factor=5.0)
    assert _threads(apart) == [(0, 1, 1), (1, 1, 1)]
    assert _threads(more) == [(0, 2, 2)]  # four threads at once on two cores were not measured
    assert _threads(more, apart) == [(0, 1, 1), (1, 1, 1)]
    assert _threads(_measured(2, 2, factor=3.0), apart) == [(0, 2, 2), (1, 1, 1)]
    assert _threads(_measured(2, 1, factor=3.0), _measured(1, 2, factor=2.0)) == [(0, 2, 2), (1, 1, 1)]


def test_each_plan_rests_on_the_run_that_worked_as_it_does() -> None:
    """At once both roles took a quarter longer than in turns: a cache that they share, for example."""
    turns, at_once = _measured(1, 1, factor=2.0), _measured(1, 1, factor=2.5, at_once=True)
    for runs in ((turns, at_once), (at_once, turns)):
        assert [plan.step_s for plan in _plans(*runs)] == [_plans(turns)[0].step_s, _plans(at_once)[1].step_s]
    assert _plans(turns)[1].step_s == pytest.approx(_plans(at_once)[1].step_s / 1.25, rel=1e-3)


def test_a_trainer_that_shared_cores_is_planned_as_it_was_measured() -> None:
    shared = _measured(1, 2, factor=1.0, shares_cores=True)
    assert _threads(shared) == [(1, 1, 2)]
    assert _threads(shared, _measured(1, 1, factor=2.0)) == [(0, 1, 1), (1, 1, 2)]
    with pytest.raises(PlanError, match="no run measured this on 2 cores"):
        _threads(_measured(4, 4, factor=1.0))


# -- several kinds ----------------------------------------------------------------------------------------------------


def test_the_faster_kind_trains_and_prompts_follow_the_tokens_a_second() -> None:
    pools = [(find_hardware("a100"), 16), (H100, 16)]
    work = replace(_work(prompts=128), response=constant(2048), group_size=16)
    plans = over_kinds(pools, work, Options(max_segments=1), [1])
    together, alone = plans
    assert together.hardware.device.name == alone.hardware.device.name == "h100-sxm"
    assert [g.hardware.device.name for g in together.generators] == ["h100-sxm", "a100-sxm"]
    assert sum(g.prompts for g in together.generators) == 128 and together.used <= 32
    slow, fast = sorted(g.time_s for g in together.generators)
    assert fast < 1.25 * slow  # both are done at about the same time
    assert together.step_s < alone.step_s and recommend(plans) is together


def test_a_kind_that_gets_no_prompt_makes_no_plan_of_its_own() -> None:
    """The only prompt goes to the kind that trains: what is left is the plan of that kind alone."""
    work = Workload(model=find_model("SmolLM2-135M"), response=constant(64), prompts_per_step=1, group_size=4)
    plans = over_kinds([(H100, 2), (find_hardware("a100"), 1)], work, Options(max_segments=1), [1])
    assert [(plan.devices, plan.other_kinds) for plan in plans] == [(2, False)]


def test_prompts_are_dealt_whole_in_the_ratio_of_rates() -> None:
    assert _shares(10, [3.0, 1.0]) == [8, 2]  # 7.5 and 2.5: of equal remainders, to the first
    assert _shares(7, [1.0, 1.0, 1.0]) == [3, 2, 2]
    assert _shares(4, [1.0, 0.0]) == [4, 0]


# -- constants --------------------------------------------------------------------------------------------------------


def test_unknown_hardware_gets_the_nearest() -> None:
    with pytest.raises(PlanError, match="nearest is 'h200-sxm'"):
        find_hardware("h200-smx")


def test_every_number_of_every_device_has_a_source_and_estimates_are_named_ones() -> None:
    plain = {
        "sources",
        "name",
        "title",
        "assumed",
        "weight_precisions",
        "estimates",
        "generator_scale",
        "trainer_scale",
    }
    for name in device_names():
        hardware = find_hardware(name)
        for record in (hardware.device, hardware.efficiency):
            named = {f.name for f in dataclasses.fields(record)} - plain
            assert named <= set(record.sources), (name, named - set(record.sources))
        assert set(hardware.efficiency.estimates) <= set(hardware.efficiency.sources)
