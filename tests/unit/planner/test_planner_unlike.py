"""Devices of several kinds in one job: who trains, who generates, and how many prompts each replica gets."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace

import pytest

from llamarl.cli import plan as verb
from llamarl.errors import PlanError
from llamarl.planner.choices import Options, Workload, generator_choice
from llamarl.planner.generation import GeneratorDemand
from llamarl.planner.hardware import find_hardware
from llamarl.planner.lengths import lognormal
from llamarl.planner.model_spec import find_model
from llamarl.planner.rooflines import GeneratorLayout, pulled_bytes
from llamarl.planner.unlike import Pool, UnlikePlan, best_first, deal, dealt_evenly, kinds_apart, one_kind, plan_unlike

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
    others = [dealt_evenly(plan, job, WHOLE), kinds_apart(two, job, WHOLE, 1)]
    others += [one_kind(pool, job, WHOLE, 1) for pool in two]
    for other in others:
        assert other is not None
        assert plan.step_s <= other.step_s * 1.01
        assert sum(sum(share.prompts) for share in other.shares) == 64
    assert others[1] is not None and not others[1].why_not_run  # a recipe with hosts.on says it


def test_a_plan_that_runs_is_recommended_where_it_is_nearly_as_fast(plan: UnlikePlan) -> None:
    runs = replace(plan, shares=(replace(plan.shares[0], prompts=(8,) * 8),), title="runs")
    even = replace(plan, shares=(replace(plan.shares[0], prompts=(9, 8)),), title="does not")
    assert not runs.why_not_run and even.why_not_run
    near, far = replace(runs, step_s=even.step_s * 1.019), replace(runs, step_s=even.step_s * 1.021)
    assert best_first([even, near])[0] is near
    assert best_first([far, even])[0] is even


def test_what_no_recipe_says_is_named(plan: UnlikePlan) -> None:
    kinds = {(share.hardware.device.name, share.choice.layout) for share in plan.shares}
    counts = {count for share in plan.shares for count in share.prompts}
    if len(kinds) > 1:
        assert "one layout and precision" in plan.why_not_run
    elif len(counts) > 1:
        assert "the same number of prompts" in plan.why_not_run
    else:
        assert not plan.why_not_run


def ask(line: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *line.split()])
    return int(args.run(args))


ASKED = "--model Llama-3.1-8B --prompts 32 --group-size 4 --response-tokens 256 --max-segments 1"


def test_the_command_line_names_kinds_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(f"{ASKED} --devices 8:h100-sxm,8:a100-80gb") == 0
    said = capsys.readouterr().out
    for word in (
        "each kind its share",
        "the same, dealt evenly",
        "* staleness 1",
        "8 x h100-sxm alone",
        "8 x a100-sxm alone",
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
        ("--devices 1:h100-sxm,1:a100 --model Llama-3.1-405B", "does not fit on 1 x h100-sxm and 1 x a100-sxm"),
    ],
)
def test_nonsense_gets_an_error_that_helps(flags: str, message: str) -> None:
    with pytest.raises(PlanError) as error:
        ask(f"{ASKED} {flags}")
    assert message in str(error.value)
