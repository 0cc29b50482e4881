"""Which plan ``--recipe`` writes: the one marked *, or the one that --system asks for, and the output says so."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from test_planner_as_run import plan

from llamarl.cli.plan_recipe import choose_written
from llamarl.config import load_config
from llamarl.errors import PlanError
from llamarl.planner.choices import Options, Workload
from llamarl.planner.hardware import find_hardware, this_machine
from llamarl.planner.lengths import constant
from llamarl.planner.model_spec import find_model
from llamarl.planner.search import search_all

H100 = find_hardware("h100")
JOB = "--model Llama-3.1-8B --hardware h100 --devices 8 --staleness 0"
"""In turns is faster than one after the other on devices of their own."""


def written(line: str, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, bool]:
    """What the command says it wrote, and whether that has the roles in turns."""
    out.unlink(missing_ok=True)
    assert plan(f"{line} --recipe {out}") == 0
    said = capsys.readouterr().out
    recipe = load_config(out)  # which refuses what no run could be
    starred = next(line for line in said.splitlines() if line.startswith("* recommended: "))
    report = next(line for line in said.splitlines() if line.startswith("  wrote      "))
    name = report.split(": ", 1)[1]
    assert name.startswith(
        starred.removeprefix("* recommended: ").split(" (")[0]
    )  # the plan marked is the plan written
    assert out.read_text().splitlines()[0].split(": ")[1].startswith(",".join(name.split(",")[:2]))
    return said, recipe.schedule.colocated


def test_the_plan_marked_is_the_plan_written_in_turns_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said, in_turns = written(JOB, tmp_path / "out.toml", capsys)
    assert in_turns
    assert "the plan marked * (--system separate: separate, staleness 0, " in said
    assert "has not run on one yet" in said
    trainer = tomllib.loads((tmp_path / "out.toml").read_text())["trainer"]
    assert trainer["fsdp"] * trainer["tp"] == 8


def test_who_asks_for_a_system_gets_it_marked_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said, in_turns = written(f"{JOB} --system separate", tmp_path / "out.toml", capsys)
    assert not in_turns and "as --system asks" in said
    job = JOB.replace("--staleness 0", "--staleness 1")
    said, in_turns = written(job, tmp_path / "out.toml", capsys)
    assert not in_turns and "(--system in-turns: sync, re-sharding, " in said
    said, in_turns = written(f"{job} --system in-turns", tmp_path / "out.toml", capsys)
    assert in_turns and "both roles in turns, as --system asks" in said


def test_a_recipe_that_forbids_turns_gets_devices_for_each_role(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = tmp_path / "base.toml", tmp_path / "out.toml"
    base.write_text('[model]\npath = "m"\n[generator]\nkv_on_update = "keep"\n')
    assert plan(f"{base} {JOB} --response-tokens 1024:lognormal --recipe {out}") == 0
    assert not load_config(out).schedule.colocated
    said = capsys.readouterr().out
    assert "not the plan marked *, which llamarl does not run: the recipe's other settings forbid turns: " in said


def test_the_json_says_which_plan_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(f"{JOB} --json --recipe {tmp_path / 'out.toml'}")
    answer = json.loads(capsys.readouterr().out)
    assert answer["written"]["plan"] == answer["recommended"]
    assert answer["plans"][answer["recommended"]]["system"] == "resharding"


def test_a_system_that_fits_nowhere_or_is_no_question_is_refused() -> None:
    with pytest.raises(PlanError, match="--system separate: no such plan fits"):
        plan("--model Llama-3.2-1B --hardware h100 --devices 1 --system separate")
    with pytest.raises(PlanError, match="--system: of several kinds"):
        plan("--model Llama-3.1-8B --devices 8:h100,8:a100 --system separate")


def test_another_plan_is_written_only_where_the_one_marked_does_not_run() -> None:
    model = find_model("Llama-3.1-8B")
    work = Workload(model=model, response=constant(300), prompts_per_step=16, group_size=4)
    plans = search_all(H100, work, Options(), 8, (1,))
    separate = plans[-1]
    staged = replace(separate, generator=replace(separate.generator, layout=replace(separate.generator.layout, pp=2)))
    uncut = replace(model, staged_by_llamarl=False)
    found = choose_written([*plans[:-1], staged], staged, uncut, H100)
    assert found.plan is not staged and found.plan.system != "separate"
    assert "not the plan marked *, which llamarl does not run: the generator of separate" in found.why
    common = replace(plans[0], system="common")
    assert choose_written([common, separate], common, model, H100).plan is common
    assert choose_written([common, separate], common, model, this_machine()).plan is separate


def test_limits_below_what_was_planned_are_raised_and_others_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source.toml", tmp_path / "out.toml"
    source.write_text(
        '[model]\npath = "bundled:tiny"\n[data]\nmax_prompt_tokens = 100\n'
        "[generator]\nengine = { max_batch_tokens = 64, max_sequences = 32 }\n[generator.sampling]\nmax_new_tokens = 16\n"
    )
    written(f"{source} --prompt-tokens 101", out, capsys)
    recipe = load_config(out)
    assert recipe.data.max_prompt_tokens == 101
    assert recipe.generator.engine.max_batch_tokens == recipe.generator.engine.max_sequences > 64
    written(f"{source} --prompt-tokens 100 --prompts 1 --group-size 4", out, capsys)
    recipe = load_config(out)
    assert recipe.data.max_prompt_tokens == 100
    assert recipe.generator.engine.max_batch_tokens == 64 >= recipe.generator.engine.max_sequences
