"""Devices of several kinds in one job: who trains, who generates, and how many prompts each replica gets."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.cli import plan as verb
from llamarl.cli.plan_hosts import HostDevices, from_inventories, pools_of, read_inventory
from llamarl.config import load_config
from llamarl.controller.standard_graph import llamarl_graph
from llamarl.errors import PlanError
from llamarl.planner.choices import Options, Workload, generator_choice
from llamarl.planner.generation import GeneratorDemand
from llamarl.planner.hardware import find_hardware, kind_of_gpu
from llamarl.planner.idle import ALIKE, idle_of_kinds
from llamarl.planner.kinds_compared import best_first, compare_kinds, one_kind
from llamarl.planner.lengths import lognormal
from llamarl.planner.model_spec import find_model
from llamarl.planner.replica_times import Pool, deal, layouts_of
from llamarl.planner.rooflines import GeneratorLayout, pulled_bytes
from llamarl.planner.runnable import why_not_run
from llamarl.planner.search import search_all
from llamarl.planner.unlike import UnlikePlan, dealt_evenly, kinds_apart, plan_unlike
from llamarl.planner.unlike_recipe import share_numbers
from llamarl.roles import present_roles
from llamarl.runtime.config import hosts_named
from llamarl.runtime.host_placement import spread
from llamarl.runtime.hosts.inventory import Inventory, take_inventory

H100, A100 = find_hardware("h100"), find_hardware("a100-80gb")
WHOLE = Options(partial_rollouts=False)


def work(prompts: int, model: str = "Llama-3.1-8B") -> Workload:
    return Workload(
        model=find_model(model), response=lognormal(512), prompts_per_step=prompts, group_size=8, prompt_tokens=64
    )  # fmt: skip


def pools(first: int, second: int) -> list[Pool]:
    return [Pool(hardware=H100, devices=first), Pool(hardware=A100, devices=second)]


def test_prompts_are_dealt_in_proportion_to_the_rates() -> None:
    # a replica of the first kind takes 1 s a prompt, one of the second 2 s: 6 s and 6 s
    assert deal([lambda n: 1.0 * n, lambda n: 2.0 * n], [1, 1], 9) == [[6], [3]]
    # two of the second: 5 s, 4 s and 4 s
    assert deal([lambda n: 1.0 * n, lambda n: 2.0 * n], [1, 2], 9) == [[5], [2, 2]]
    # the second needs 10 s before its first prompt: it gets none of four, and one of eleven
    assert deal([lambda n: 1.0 * n, lambda n: 10.0 + 0.5 * n], [1, 1], 4) == [[4], [0]]
    assert deal([lambda n: 1.0 * n, lambda n: 10.0 + 0.5 * n], [1, 1], 11) == [[10], [1]]


def test_prompts_are_whole_and_none_is_lost() -> None:
    for prompts in (1, 2, 7, 30):
        dealt = deal([lambda n: 1.5 * n, lambda n: 0.4 + n], [3, 2], prompts)
        assert sum(map(sum, dealt)) == prompts
        assert all(max(kind) - min(kind) <= 1 for kind in dealt)


def tick_s(hardware: Pool, layout: GeneratorLayout, of: Workload, prompts: int) -> float:
    share = prompts * of.group_size
    demand = GeneratorDemand(
        lengths=of.response, prompt_tokens=of.prompt_tokens, group_size=of.group_size, sequences=share,
        total_sequences=of.sequences, slots=share,
    )  # fmt: skip
    return generator_choice(hardware.hardware, of.model, layout, demand, 1).time_s


def test_the_division_is_the_best_of_all() -> None:
    """Every division of 12 prompts over one replica of each kind, tried: the trainer has a device of the first kind."""
    job, two = work(12, "Qwen2.5-0.5B"), pools(2, 1)
    options = Options(partial_rollouts=False, precisions=("bf16",))
    plan = plan_unlike(two, job, options, 1)
    layout = GeneratorLayout(1, 1, "bf16", True, True)
    both = {}
    for first in range(1, 12):
        both[first] = max(tick_s(two[0], layout, job, first), tick_s(two[1], layout, job, 12 - first))
    assert {share.hardware.device.name for share in plan.shares} | {plan.trainer_hardware.device.name} == {
        "h100-sxm", "a100-sxm",
    }  # fmt: skip
    if len(plan.shares) == 2:
        assert max(share.choice.time_s for share in plan.shares) <= 1.02 * min(both.values())
    else:  # the trainer took a kind for itself
        assert plan.step_s <= min(both.values())


@pytest.fixture(scope="module")
def plan() -> UnlikePlan:
    return plan_unlike(pools(32, 32), work(64, "Llama-3.1-70B"), WHOLE, 1)


def test_a_plan_uses_what_there_is_and_deals_every_prompt(plan: UnlikePlan) -> None:
    assert sum(itertools.chain.from_iterable(share.prompts for share in plan.shares)) == 64
    used = {"h100-sxm": 0, "a100-sxm": 0}
    for share in plan.shares:
        used[share.hardware.device.name] += share.devices
        assert sum(share.choice.memory.values()) <= share.hardware.usable_memory_bytes
        assert share.choice.demand.sequences == 8 * max(share.prompts)
    used[plan.trainer_hardware.device.name] += plan.trainer.layout.devices
    assert all(count <= 32 for count in used.values())
    slowest = max(share.choice.time_s + share.sync_s for share in plan.shares)
    assert plan.step_s == pytest.approx(max(slowest, plan.trainer.time.total_s))
    assert 0.0 <= plan.waiting < 1.0


def test_the_hand_over_goes_over_the_network_at_the_slower_rate(plan: UnlikePlan) -> None:
    model = find_model("Llama-3.1-70B")
    pulled = [pulled_bytes(share.hardware, model, share.choice.layout) for share in plan.shares]
    sent = (
        sum(share.devices * size for share, size in zip(plan.shares, pulled, strict=True)) / plan.trainer.layout.devices
    )
    for share, size in zip(plan.shares, pulled, strict=True):
        cards = {share.hardware.device.name, plan.trainer_hardware.device.name}
        rate = (25e9 if "a100-sxm" in cards else 50e9) * 0.8
        assert share.sync_s == pytest.approx(max(size, sent) / rate + 10e-6)


def test_a_plan_is_no_slower_than_simpler_ones(plan: UnlikePlan) -> None:
    job, two = work(64, "Llama-3.1-70B"), pools(32, 32)
    apart, even = kinds_apart(two, job, WHOLE, 1), dealt_evenly(plan, job, WHOLE)
    assert apart is not None and not apart.why_not_run  # a recipe with hosts.on says it
    assert even is None or [share.prompts for share in even.shares] != [share.prompts for share in plan.shares]
    for other in (apart, *(one_kind(pool, job, WHOLE, 1) for pool in two), *([even] if even else [])):
        assert plan.step_s <= other.step_s * 1.01
        assert sum(sum(share.prompts) for share in other.shares) == 64


def test_devices_that_stay_idle_are_named_with_the_reason() -> None:
    job, two = work(64, "Llama-3.1-70B"), pools(32, 32)
    alone = one_kind(two[0], job, WHOLE, 1)
    idle = {one.kind: one for one in idle_of_kinds(alone, two, job, WHOLE)}
    assert (idle["a100-sxm"].count, idle["a100-sxm"].of) == (32, 32)
    used = alone.trainer.layout.devices + sum(share.devices for share in alone.shares)
    assert ("h100-sxm" in idle) == (used < 32) and all(one.why for one in idle.values())
    least = min(found.least_s for found in layouts_of(two[1], job, WHOLE, False))
    hurried = replace(alone, step_s=least)  # no replica of the other kind ends a tick in less
    (slow,) = (one for one in idle_of_kinds(hurried, two, job, WHOLE) if one.kind == "a100-sxm")
    assert f"a tick, however few its prompts, of a step of {least:.3g} s" in slow.text()


@pytest.mark.parametrize(
    ("first", "second", "staleness"), [(2, 1, 1), (4, 1, 1), (8, 8, 0), (8, 8, 1), (1, 3, 1), (16, 2, 1)]
)  # fmt: skip
def test_a_kind_more_never_makes_the_recommended_plan_slower(first: int, second: int, staleness: int) -> None:
    """Against every system that the search for one kind finds, with both roles in turns too."""
    job, two = work(32), pools(first, second)
    found = compare_kinds(two, job, Options(), staleness)
    for pool in two:
        try:
            alone = search_all(pool.hardware, job, Options(), pool.devices, sorted({0, staleness}))
        except PlanError:
            continue
        runnable = [plan.step_s for plan in alone if not why_not_run(plan, job.model)]
        assert found[0].step_s <= ALIKE * min(runnable)
        assert any(pool.name in other.title and "alone" in other.title for other in found)
    assert all(len(other.kinds) > 1 or other.one is not None for other in found)


def test_in_turns_on_one_kind_is_recommended_where_it_is_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.toml"
    assert ask(f"--model Llama-3.1-8B --devices 2:h100-sxm,1:a100-80gb --recipe {out}") == 0
    said = capsys.readouterr().out
    (best,) = (line for line in said.splitlines() if line.startswith("2 x h100-sxm alone, in turns*"))
    assert ask("--model Llama-3.1-8B --devices 2 --hardware h100-sxm") == 0
    (same,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("sync, re-sharding*"))
    assert best.split()[6:8] == same.split()[2:4] and "colocated = true" in said
    assert "idle       1 of 1 a100-sxm: one kind alone, both roles in turns, is faster; the fastest plan with" in said
    assert "dealt evenly" not in said  # a single replica: there is nothing to deal
    config = load_config(out)
    assert config.schedule.colocated and config.schedule.max_staleness == 0 and not config.generator.replicas
    assert (config.generator.dp, config.generator.tp, config.trainer.fsdp) == (2, 1, 2)


def test_of_steps_that_are_alike_fewer_kinds_then_even_shares_come_last(plan: UnlikePlan) -> None:
    alone = one_kind(pools(32, 32)[0], work(64, "Llama-3.1-70B"), WHOLE, 1)
    assert len(plan.kinds) == 2 and alone.kinds == {"h100-sxm"}
    nearly, slower = replace(alone, step_s=1.009 * plan.step_s), replace(alone, step_s=1.011 * plan.step_s)
    assert best_first([plan, nearly])[0] is nearly
    assert best_first([plan, slower])[0] is plan
    even = replace(plan, title="the same, dealt evenly", step_s=plan.step_s * 0.997)
    assert best_first([plan, even]) == [plan, even]


def test_of_three_kinds_one_that_brings_nothing_stays_idle() -> None:
    """The trainer sets the pace, and one of the other kinds alone generates as fast as it trains."""
    three = [*pools(8, 8), Pool(hardware=find_hardware("h200"), devices=8)]
    job = Workload(
        model=find_model("Llama-3.1-8B"), response=lognormal(1024), prompts_per_step=128, group_size=16, prompt_tokens=256
    )  # fmt: skip
    found = compare_kinds(three, job, WHOLE, 1)
    assert found[0].kinds == {"h100-sxm", "h200-sxm"}
    assert found[0].step_s <= ALIKE * min(other.step_s for other in found)
    (idle,) = (one for one in idle_of_kinds(found[0], three, job, WHOLE, found) if one.kind == "a100-sxm")
    assert idle.count == 8


def staged(plan: UnlikePlan) -> UnlikePlan:
    """With generators in pipeline stages, of a model that llamarl does not cut so."""
    share = plan.shares[0]
    layout = replace(share.choice.layout, pp=2)
    return replace(
        plan,
        shares=(replace(share, choice=replace(share.choice, layout=layout)),),
        title="does not run",
        staged_by_llamarl=False,
    )


def test_a_plan_that_runs_is_recommended_where_it_is_nearly_as_fast(plan: UnlikePlan) -> None:
    other = staged(plan)
    assert not plan.why_not_run and "2 pipeline stages" in other.why_not_run
    assert not replace(other, staged_by_llamarl=True).why_not_run
    near, far = replace(plan, step_s=other.step_s * 1.019), replace(plan, step_s=other.step_s * 1.021)
    assert best_first([other, near])[0] is near
    assert best_first([far, other])[0] is other


# -- the recipe -------------------------------------------------------------------------------------------------------


def test_shares_are_prompts_a_tick_or_whole_numbers_in_their_ratios() -> None:
    assert share_numbers([(21, 21, 20, 20), (23, 23)]) == [20.5, 23]
    assert share_numbers([(4, 3, 3), (6,)]) == [10, 18]  # 10/3 and 6


def test_the_recipe_of_a_plan_is_one_that_train_reads_and_deals_as_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inventory = tmp_path / "hosts.toml"
    inventory.write_text('[hosts]\na = "8:h100-sxm"\nb = "8:h100-sxm"\nc = "8:a100-80gb"\nd = "8:a100"\n')
    out = tmp_path / "plan.toml"
    assert (
        ask(f"--model Llama-3.1-8B --max-segments 1 --response-tokens 4096 --devices {inventory} --recipe {out} --json")
        == 0
    )
    plans = json.loads(capsys.readouterr().out)
    best = plans["plans"][plans["recommended"]]
    config = load_config(out)
    kinds = config.generator.replicas
    assert [(kind.dp, kind.tp) for kind in kinds] == [(g["replicas"], g["tp"]) for g in best["generators"]]
    dealt = [sum(generator["prompts"]) for generator in best["generators"]]
    first, quotas = 0, config.dealing.quotas
    for kind, prompts in zip(kinds, dealt, strict=True):
        assert sum(quotas[first : first + kind.dp]) == pytest.approx(prompts)
        first += kind.dp
    assert config.trainer.fsdp * config.trainer.tp == best["trainer"]["devices"]
    assert [kind.quantization or "none" for kind in kinds] == [
        "fp8" if generator["precision"] == "fp8" else "none" for generator in best["generators"]
    ]
    # a whole host of H100s trains, the other one generates beside both of A100s
    assert config.hosts.on == {"trainer": ("a",), "generator_0": ("b",), "generator_1": ("c", "d")}
    assert config.hosts.workers == ("a", "b", "c", "d")
    graph = llamarl_graph(config)
    units = {role.name: role.units(config) for role in present_roles(config) if role.section}
    on = {name: hosts_named(names, config.hosts.workers) for name, names in config.hosts.on.items()}
    where = spread(graph.executors, 4, on, tensor_parallel=units)
    assert where["trainer"] == (0,) * 8
    assert where["generator"] == (1,) * 8 + (2,) * 8 + (3,) * 8


def test_hosts_that_are_all_alike_are_planned_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inventory = tmp_path / "hosts.toml"
    inventory.write_text('[hosts]\na = "4:h100-sxm"\nb = "4:h100-sxm"\n')
    assert ask(f"{ASKED} --devices {inventory}") == 0
    said = capsys.readouterr().out
    assert "on 8 x NVIDIA H100 SXM 80 GB" in said and "generator on a; trainer on b" in said  # four a host


def test_a_plan_of_alike_replicas_takes_the_place_of_unlike_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.toml"
    assert ask(f"unlike --hardware h100 --devices 8 --recipe {out}") == 0
    capsys.readouterr()
    config = load_config(out)
    assert config.generator.replicas == () and config.generator.dp >= 1


def inventory_of(*gpus: str) -> Inventory:
    return replace(take_inventory("127.0.0.1"), device_names=gpus)


def test_hosts_are_counted_by_what_their_drivers_call_their_devices() -> None:
    h100, a100 = ("NVIDIA H100 80GB HBM3",) * 8, ("NVIDIA A100-SXM4-80GB",) * 4
    found = from_inventories(["a", "b", "c"], [inventory_of(*h100), inventory_of(*a100), inventory_of(*a100)])
    assert found == [HostDevices("a", "h100-sxm", 8), HostDevices("b", "a100-sxm", 4), HostDevices("c", "a100-sxm", 4)]
    two, names = pools_of(found)
    assert [(pool.name, pool.devices, pool.hardware.device.devices_per_node) for pool in two] == [
        ("h100-sxm", 8, 8),
        ("a100-sxm", 8, 4),
    ]
    assert names == {"h100-sxm": ["a"], "a100-sxm": ["b", "c"]}
    assert Inventory.from_plain(inventory_of(*a100).to_plain()).cuda_devices == 4


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200", "h200-sxm"), ("NVIDIA B200", "b200-sxm"), ("AMD Instinct MI300X", "mi300x"), ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-40GB", None), ("NVIDIA H100 PCIe", None), ("NVIDIA A100 80GB PCIe", None), ("Tesla T4", None),
    ],
)  # fmt: skip
def test_only_devices_whose_rates_are_known_are_recognised(name: str, kind: str | None) -> None:
    assert kind_of_gpu(name) == kind


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ({"a": ()}, "a has no GPU"),
        ({"a": ("Tesla T4",) * 2}, r'a has Tesla T4, of which no rates are known: .* a = "2:KIND"'),
        ({"a": ("NVIDIA H200", "NVIDIA B200")}, "a has NVIDIA B200, NVIDIA H200"),
    ],
)
def test_hosts_of_which_no_plan_knows_rates_are_named(hosts: dict[str, tuple[str, ...]], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        from_inventories(list(hosts), [inventory_of(*gpus) for gpus in hosts.values()])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[host]\na = 1\n", r"expected a table \[hosts\]"),
        ('[hosts]\na = "h100"\n', "a = 'h100' is no number and kind"),
        ('[hosts]\na = "0:h100"\n', "a = '0:h100' is no number and kind"),
        ('[hosts]\na = "8:h900"\n', "unknown hardware 'h900'"),
        ('[hosts]\na = "8:h100"\nb = "4:h100"\n', r"unlike numbers of them \(a 8, b 4\)"),
    ],
)
def test_a_file_of_hosts_that_cannot_be_counted_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(PlanError, match=words):
        pools_of(read_inventory(path))


def ask(line: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *line.split()])
    return int(args.run(args))


ASKED = "--model Llama-3.1-8B --prompts 32 --group-size 4 --response-tokens 256 --max-segments 1"


def test_the_command_line_names_kinds_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("--model Llama-3.1-8B --max-segments 1 --response-tokens 4096 --devices 16:h100-sxm,16:a100-80gb") == 0
    said = capsys.readouterr().out
    for word in (
        "each kind its share*",
        "the same, dealt evenly",
        "* staleness 1",
        "16 x h100-sxm alone",
        "16 x a100-sxm alone",
        "times as fast as",
        "to run",
    ):
        assert word in said
    assert ask(f"{ASKED} --devices 8:h100-sxm,8:a100-80gb --json") == 0
    found = json.loads(capsys.readouterr().out)
    best = found["plans"][found["recommended"]]
    assert best["step_s"] <= 1.02 * min(plan["step_s"] for plan in found["plans"])
    assert sum(sum(generator["prompts"]) for generator in best["generators"]) == 32


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--devices 8:h100-sxm,8:h100", "names h100-sxm twice"),
        ("--devices 8:h100-sxm", "devices of one kind"),
        ("--devices 8:h100-sxm,8:h900", "unknown hardware 'h900'"),
        ("--devices 8:h100-sxm,eight:a100", "'eight:a100' is no number and kind"),
        ("--devices 8:h100-sxm,0:a100", "at least 1 a100-sxm"),
        ("--devices 8:h100-sxm,8:cpu", "kinds are those of other machines"),
        ("--devices 8:h100-sxm,8:a100 --hardware h100", "--hardware: speaks of devices of one kind"),
        ("--devices 8:h100-sxm,8:a100 --staleness 0,1", "one value"),
        ("--devices 8:h100-sxm,8:a100 --every-rank", "--every-rank: counts the replicas of one kind"),
        (
            "--devices 1:h100-sxm,1:a100 --model Llama-3.1-405B",
            "does not fit on 1 x h100-sxm and 1 x a100-sxm with one kind that trains: the trainer needs at least ",
        ),
    ],
)
def test_nonsense_gets_an_error_that_helps(flags: str, message: str) -> None:
    with pytest.raises(PlanError) as error:
        ask(f"{ASKED} {flags}")
    assert message in str(error.value)
