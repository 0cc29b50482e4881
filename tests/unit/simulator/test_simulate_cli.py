"""``llamarl simulate`` as a user meets it, and costs fitted to measured runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.cli import main
from llamarl.cli import plan as plan_verb
from llamarl.cli import simulate as verb
from llamarl.config import RunConfig, load_config, save_config, validate
from llamarl.errors import ConfigError, LlamaRLError, PlanError
from llamarl.planner.calibration_cache import save_calibration
from llamarl.planner.hardware import this_machine
from llamarl.simulator.fitted_costs import fit_runs

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny.toml"
H100 = "--model Llama-3.1-8B --devices 8 --hardware h100 --prompts 16 --group-size 8 --response-tokens 300:lognormal"


def simulate(line: str, *overrides: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(["simulate", *line.split()])
    args.overrides = list(overrides)  # as ``cli.main`` parts them
    return int(args.run(args))


@pytest.fixture(autouse=True)
def _no_kept_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def simulations(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return json.loads(capsys.readouterr().out)["simulations"]


def test_durations_give_the_periods_of_the_theory(capsys: pytest.CaptureFixture[str]) -> None:
    simulate("--durations 6,5,5 --staleness 0,1,2 --json")
    assert [(s["step_s"], s["theory_s"]) for s in simulations(capsys)] == [(16, 16), (8, 8), (6, 6)]


def test_the_table_names_every_policy_with_its_step_and_theory(capsys: pytest.CaptureFixture[str]) -> None:
    simulate("--durations 6,5,5,4 --staleness 0,1")
    text = capsys.readouterr().out
    assert "synchronous  20 s  20 s    1.000" in text
    assert "staleness 1  10 s  10 s    1.000" in text


def test_a_plan_is_simulated_beside_its_own_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(f"{H100} --staleness 0,1 --ticks 20 --json")
    zero, one = simulations(capsys)
    assert one["step_s"] < zero["step_s"]
    for found in (zero, one):
        assert found["devices"]["generator"] + found["devices"]["trainer"] <= 8
        assert found["step_s"] == pytest.approx(found["planned_step_s"], rel=0.25)


def test_the_json_of_a_plan_gives_the_simulation_of_its_flags(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parser = argparse.ArgumentParser()
    plan_verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *H100.split(), "--max-segments", "1", "--staleness", "1", "--json"])
    args.run(args)
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    simulate(f"{file} --ticks 10 --json")
    (from_json,) = simulations(capsys)
    simulate(f"{H100} --staleness 1 --ticks 10 --json")
    assert simulations(capsys) == [from_json]


def test_the_json_of_a_plan_keeps_its_model_folder_and_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 16, "vocab_size": 32000}
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    plan_verb.add_parser(parser.add_subparsers())
    flags = "--precision bf16 --reference-model --max-pipeline 2 --max-segments 3 --staleness 0,1"
    args = parser.parse_args(["plan", *H100.replace("Llama-3.1-8B", "own").split(), *flags.split(), "--json"])
    args.run(args)
    text = capsys.readouterr().out
    Path("plan.json").write_text(text, encoding="utf-8")
    monkeypatch.chdir("/")
    simulate(f"{tmp_path / 'plan.json'} --ticks 5 --json")
    planned = [p["step_s"] for p in json.loads(text)["plans"] if p["system"] == "separate"]
    assert [s["planned_step_s"] for s in simulations(capsys)] == pytest.approx(planned)
    old = json.loads(text)
    del old["options"]
    (tmp_path / "old.json").write_text(json.dumps(old), encoding="utf-8")
    with pytest.raises(PlanError, match=r"not the JSON of this version's .*options"):
        simulate(f"{tmp_path / 'old.json'}")


def test_a_recipe_is_simulated_with_its_own_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "tiny.toml"
    simulate(f"{recipe} --response-tokens 40:lognormal:limit=96 --ticks 12 --json")
    (found,) = simulations(capsys)
    config = load_config(recipe)
    assert found["prompts_per_step"] == config.schedule.prompts_per_step
    assert (found["max_staleness"], found["max_segments"]) == (1, config.generator.max_segments)
    assert found["step_s"] > 0


def test_settings_of_a_recipe_are_changed_as_train_changes_them(capsys: pytest.CaptureFixture[str]) -> None:
    simulate("tiny --ticks 12 --json", "--generator.dp=2", "--schedule.max_staleness=0", "--generator.max_segments=1",
             "--generator.oversubscription=1.0")  # fmt: skip
    (found,) = simulations(capsys)
    assert (found["replicas"], found["max_staleness"]) == (2, 0)
    with pytest.raises(ConfigError, match="trainer.fdsp"):
        simulate("tiny", "--trainer.fdsp=2")


def test_settings_are_refused_where_they_would_change_nothing(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--trainer.fsdp=2: only a recipe or a run has settings"):
        simulate("--durations 6,5,5", "--trainer.fsdp=2")
    write_run(tmp_path / "run", 4)
    with pytest.raises(PlanError, match="--trainer.fsdp=2: a run's measured times are those of its own settings"):
        simulate(str(tmp_path / "run"), "--trainer.fsdp=2")


def test_the_command_line_parts_settings_from_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    assert main.main("simulate tiny --generator.dp 2 --ticks 6 --json".split()) == 0
    assert simulations(capsys)[0]["replicas"] == 2
    with pytest.raises(SystemExit):
        main.main("plan tiny --generator.dp 2".split())
    assert "(--section.key VALUE) are taken by train, eval, simulate" in capsys.readouterr().err


def test_trace_and_picture_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    simulate(f"--durations 6,1,5 --staleness 0,1 --ticks 5 --trace {tmp_path}/t/trace.json --picture {tmp_path}/p.png")
    events = json.loads((tmp_path / "t" / "trace.json").read_text())
    ticks = [e for e in events if e.get("cat") == "tick"]
    assert len(ticks) == 2 * 3 * 5 and {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {
        "synchronous: generator",
        "staleness 1: trainer",
    }
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "nothing to simulate"),
        ("--durations 6,5", "expected G,R,T"),
        ("--durations 6,5,-1", "must be >= 0 seconds"),
        ("--durations 6,5,5 --staleness -1", "must be >= 0 trainer ticks"),
        ("--durations 6,5,5 --ticks 0", "at least 1"),
        ("--durations 6,5,5 --slow-replicas 0.5", "--slow-replicas '0.5': expected 2 numbers"),
        ("--durations 6,5,5 --slow-replicas 1.5:2", "0 to 1"),
        ("--durations 6,5,5 --mtbf-hours 0", "above 0 hours"),
        ("--model Llama-3.1-8B --hardware h100", "how many h100-sxm"),
        ("--durations 6,5,5 --prompts 4 --reward-s 2", "--prompts, --reward-s: --durations says what every tick takes"),
        (f"{H100} --oversubscription 2", "add --max-segments 2 or more"),
        (f"{RECIPE} --devices 8", "--devices: a recipe or run says its own layout"),
        (f"{RECIPE} --precision fp8", "--precision: set generator.quantization in the recipe"),
        (f"{RECIPE} --reward-s -1", "must be >= 0 seconds"),
        ("missing.json", "give the JSON of llamarl plan --json"),
        ("missing.toml", "does not exist"),
    ],
)
def test_nonsense_gets_an_error_that_names_what_would_work(line: str, message: str) -> None:
    with pytest.raises((PlanError, ConfigError)) as caught:
        simulate(line)
    assert message in str(caught.value)


def write_run(folder: Path, prompts: int, ticks: int = 8, **generator: object) -> tuple[RunConfig, Path]:
    """A run as it would be measured if a generator's tick took 0.5 + 0.02 a step + 0.003 a token, and so on."""
    config = validate(
        {
            "run": {"dir": str(folder)},
            "schedule": {"prompts_per_step": prompts, "max_staleness": 0},
            "generator": {"group_size": 2, **generator},
            "evaluation": {"every": 0},
        }
    )
    (folder / "rollouts").mkdir(parents=True)
    save_config(config, folder / "config.toml")
    rng = np.random.default_rng(prompts)
    rows = []
    for tick in range(ticks):
        lengths = rng.integers(5, 60, 2 * prompts)
        samples = [json.dumps({"tokens": [0] * int(n), "prompt_tokens": [0] * 10}) for n in lengths]
        (folder / "rollouts" / f"tick_{tick:06d}.jsonl").write_text("\n".join(samples) + "\n")
        times = (0.5 + 0.02 * lengths.max() + 0.003 * lengths.sum(), 0.1, 0.25 + 0.004 * (lengths + 10).sum())
        row = dict(zip(("time/generator_s", "time/reward_s", "time/trainer_s"), times, strict=True))
        rows.append(json.dumps({"step": tick, **row, "time/step_s": sum(times) + 0.05}))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return config, folder


def test_a_fit_finds_the_lines_that_made_the_measurements(tmp_path: Path) -> None:
    costs = fit_runs([write_run(tmp_path / "a", 4), write_run(tmp_path / "b", 12)])
    g, t = costs.generator, costs.trainer
    assert (g.tick_s, g.step_s, g.sequence_s) == pytest.approx((0.5, 0.02, 0.003))
    assert (t.tick_s, t.token_s) == pytest.approx((0.25, 0.004))
    assert (costs.reward.tick_s, costs.round_s, costs.prompt_tokens) == pytest.approx((0.1, 0.05, 10))
    assert max(costs.errors.values()) < 1e-9 and costs.num_ticks == 12


def test_a_runs_folder_is_simulated_with_what_it_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_run(tmp_path / "run", 6, ticks=30)
    simulate(f"{tmp_path / 'run'} --ticks 200 --json")
    (found,) = simulations(capsys)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert found["step_s"] == pytest.approx(np.mean([row["time/step_s"] for row in rows]), rel=0.03)


def test_flags_override_what_a_run_measured_or_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run, _ = tmp_path / "run", write_run(tmp_path / "run", 6, ticks=30)
    # Generator 0.5 + 0.02 * 100 + 0.003 * 1200, reward 3, trainer 0.25 + 0.004 * 12 * (100 + 25), round 0.05.
    simulate(f"{run} --response-tokens 100 --prompt-tokens 25 --reward-s 3 --ticks 10 --json")
    (found,) = simulations(capsys)
    assert found["step_s"] == pytest.approx(6.1 + 3 + 6.25 + 0.05, rel=1e-3)
    with pytest.raises(PlanError, match="--model: a run's measured times"):
        simulate(f"{run} --model SmolLM2-135M")
    with pytest.raises(PlanError, match="prompt_tokens must be at least 1"):
        simulate(f"{run} --prompt-tokens 0")


def test_a_run_that_cannot_be_fitted_says_why(tmp_path: Path) -> None:
    with pytest.raises(LlamaRLError, match="let the runs last longer"):
        fit_runs([write_run(tmp_path / "short", 4, ticks=3)])
    with pytest.raises(LlamaRLError, match="finishes every response in its tick"):
        fit_runs([write_run(tmp_path / "cut", 4, max_segments=2, oversubscription=1.5)])


def test_a_run_of_partial_rollouts_names_the_way_that_works(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_run(tmp_path / "cut", 4, max_segments=2, oversubscription=1.5)
    with pytest.raises(PlanError) as caught:
        simulate(str(tmp_path / "cut"))
    line = str(caught.value).split("llamarl simulate ")[1].split(",")[0]
    assert line == f"{tmp_path}/cut/config.toml --response-tokens file:{tmp_path}/cut/rollouts"
    simulate(f"{line} --ticks 10 --json")
    (found,) = simulations(capsys)
    assert (found["max_segments"], found["prompts_per_step"]) == (2, 4) and found["step_s"] > 0


def test_a_plans_json_is_simulated_on_the_hardware_it_was_planned_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = tmp_path / "own.json"
    save_calibration(own, this_machine().with_efficiency(matmul=0.01, decode_step_overhead_s=0.5), "m")
    line = "--model SmolLM2-135M --devices 2 --prompts 2 --group-size 2 --prompt-tokens 8 --response-tokens 20"
    parser = argparse.ArgumentParser()
    plan_verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(
        ["plan", *line.split(), "--calibration", str(own), "--max-segments", "1", "--staleness", "1", "--json"]
    )
    args.run(args)
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    own.unlink()
    simulate(f"{file} --ticks 10 --json")
    (found,) = simulations(capsys)
    assert found["role_s"]["generator"] > 20 * 0.5  # 20 decode steps of half a second and more
    assert found["step_s"] == pytest.approx(found["planned_step_s"], rel=0.02)


def test_keeping_the_cache_is_refused_where_no_version_changes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError, match="add --weights latest"):
        simulate("--durations 6,1,4 --staleness 1 --kv-on-update keep")
    assert simulate("--durations 6,1,4 --staleness 1 --kv-on-update keep --weights exact,latest --json") == 0
    assert len(simulations(capsys)) == 2


def test_a_timeline_is_named_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('[\n{"name": "generator", "ph": "X", "ts": 1, "dur": 2}\n]')
    with pytest.raises(PlanError, match=f"is a timeline, .*llamarl simulate {tmp_path}"):
        simulate(f"{tmp_path / 'trace.json'}")


def test_too_few_ticks_say_that_the_pipeline_is_still_filled(capsys: pytest.CaptureFixture[str]) -> None:
    """At staleness 1 without partial rollouts it is full after 2 * (1 + 1) + 1 = 5 ticks."""
    for ticks, told in ((1, True), (5, True), (6, False)):
        simulate(f"--durations 6,5,5 --staleness 1 --ticks {ticks}")
        assert ("the pipeline is still being filled" in capsys.readouterr().out) == told


def test_what_runs_do_not_do_is_said_of_longest_first_and_not_of_parts(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, told in (("--parts 1,4", False), ("--parts 4 --longest-first", True)):
        simulate(f"{H100} --staleness 0 --ticks 6 {flags}")
        assert ("not yet: llamarl train starts groups in the order of their prompts" in capsys.readouterr().err) == told
