"""Four constants fitted to a finished run: made from known ones, they come back; and a run that cannot be fitted says why."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamarl.cli.main import main
from llamarl.config import RunConfig, save_config, validate
from llamarl.errors import PlanError
from llamarl.forecast.calibrate import (
    Fit,
    _scale_and_rest,
    fit_run,
    lengths_of_run,
    non_negative_line,
    shares_cores,
    trainer_layout,
)
from llamarl.forecast.costs import GeneratorLayout, decode_step_s, prefill_s
from llamarl.forecast.hardware import Hardware, find_hardware, this_machine
from llamarl.forecast.lengths import empirical
from llamarl.forecast.model import find_model
from llamarl.forecast.ticks import TrainerDemand, trainer_tick

MODEL, PROMPT = find_model("SmolLM2-135M"), 10
GPU = find_hardware("h100")


def write_run(folder: Path, *, ticks: int = 12, device: str = "cuda", **generator: object) -> RunConfig:
    """A run of an H100 whose rooflines are 3 and 5 times too fast, with 4 ms a decode step and 0.3 s a trainer's tick."""
    settings = {"group_size": 2, "sampling": {"max_new_tokens": 400}, **generator}
    config = validate(
        {
            "run": {"dir": str(folder)}, "model": {"path": "SmolLM2-135M"}, "schedule": {"prompts_per_step": 4, "max_staleness": 0},
            "generator": settings, "trainer": {"device": device, "threads": 1},
        }
    )  # fmt: skip
    (folder / "rollouts").mkdir(parents=True)
    save_config(config, folder / "config.toml")
    rng = np.random.default_rng(0)
    drawn = [rng.integers(20, 400, 8) for _ in range(ticks)]
    lengths = empirical(np.concatenate(drawn[2:]).tolist())
    exact = GPU.with_efficiency(decode_step_overhead_s=0.0, train_step_overhead_s=0.0)
    demand = TrainerDemand(lengths=lengths, prompt_tokens=PROMPT, sequences=8, group_size=2)
    time = trainer_tick(exact, MODEL, trainer_layout(config, MODEL, exact, PROMPT, lengths.mean), demand)
    token_s = time.of_batch_s / (8 * demand.mean_tokens)
    rows = []
    for tick, own in enumerate(drawn):
        lines = [
            {"prompt_index": 4 * tick + i // 2, "prompt_tokens": [0] * PROMPT, "tokens": [0] * int(n)}
            for i, n in enumerate(own)
        ]
        (folder / "rollouts" / f"tick_{tick:06d}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        seconds = prefill_s(exact, MODEL, GeneratorLayout(), PROMPT * 4, PROMPT / 2)
        for step in range(int(own.max())):
            active = float((own > step).sum())
            seconds += float(decode_step_s(exact, MODEL, GeneratorLayout(), active, PROMPT + step))
        generator_s = 3.0 * seconds + 0.004 * int(own.max())
        trainer_s = 5.0 * (token_s * (own.sum() + 8 * PROMPT) + time.optimizer_s) + 0.3
        times = {"time/generator_s": generator_s, "time/reward_s": 0.1, "time/trainer_s": trainer_s}
        rows.append(json.dumps({"step": tick, **times, "time/step_s": sum(times.values())}))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return config


def fitted(config: RunConfig, folder: Path, hardware: Hardware = GPU) -> Fit:
    return fit_run(config, folder, hardware, {"generator": 1, "trainer": 1})


def test_a_fit_finds_the_constants_that_made_the_measurements(tmp_path: Path) -> None:
    fit = fitted(write_run(tmp_path / "run"), tmp_path / "run")
    e = fit.hardware.efficiency
    assert (e.generator_scale, e.decode_step_overhead_s) == pytest.approx((3.0, 0.004), rel=0.02)
    assert (e.trainer_scale, e.train_step_overhead_s) == pytest.approx((5.0, 0.3), rel=0.02)
    assert (fit.reward_s, fit.prompt_tokens, fit.num_ticks) == (0.1, PROMPT, 10)
    assert max(fit.jitter.values()) < 0.01
    assert not e.estimates and "fitted to" in fit.hardware.device.title


def test_the_fit_forecasts_the_run_that_it_was_made_from(tmp_path: Path) -> None:
    config = write_run(tmp_path / "run")
    fit = fitted(config, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][2:]
    demand = TrainerDemand(lengths=fit.lengths, prompt_tokens=PROMPT, sequences=8, group_size=2)
    time = trainer_tick(
        fit.hardware, MODEL, trainer_layout(config, MODEL, fit.hardware, PROMPT, fit.lengths.mean), demand
    )
    assert time.total_s == pytest.approx(np.mean([row["time/trainer_s"] for row in rows]), rel=0.01)


def test_a_run_that_cannot_be_fitted_says_why(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="let the run last longer"):
        fitted(write_run(tmp_path / "short", ticks=3), tmp_path / "short")
    kinds = replace(write_run(tmp_path / "kinds"), generator=validate(
        {"generator": {"replicas": [{"share": 2.0}, {"share": 1.0}]}}).generator)  # fmt: skip
    with pytest.raises(PlanError, match="replicas of one kind, this run has 2"):
        fitted(kinds, tmp_path / "kinds")
    with pytest.raises(PlanError, match="no finished run"):
        fitted(kinds.__class__(), tmp_path / "nowhere")


def test_a_run_on_cpu_cores_measures_its_own_threads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    write_run(run, device="cpu", threads=1)
    assert main(["plan", str(run), "--devices", "2", "--max-segments", "1"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith(("synchronous", "asynchronous"))]
    assert len(rows) == 4 and all(row.count("1 thread") == 2 and "~" not in row for row in rows)
    for change, mark in (([], ""), (["--trainer.threads", "2"], "~ extrapolated")):
        assert main(["simulate", str(run), "--ticks", "4", *change]) == 0
        out = capsys.readouterr().out
        assert ("~" in out) == bool(mark) and mark in out
    twice = ["--fit", str(run), "--fit", str(run)]
    assert main(["plan", str(run), "--devices", "2", *twice]) == 0 and "fitted to 2 runs" in capsys.readouterr().out
    assert main(["simulate", str(run), *twice]) == 2


def test_threads_share_cores_where_both_roles_work_at_once() -> None:
    here = this_machine()
    two = replace(here, device=replace(here.device, devices_per_node=2))
    sync, at_once = (validate({"schedule": {"max_staleness": staleness}}) for staleness in (0, 1))
    one, both = {"generator": 1, "trainer": 1}, {"generator": 1, "trainer": 2}
    assert [shares_cores(at_once, threads, two) for threads in (one, both)] == [False, True]
    assert not shares_cores(sync, both, two) and not shares_cores(at_once, both, GPU)


def test_lengths_and_prompts_are_those_that_a_run_kept(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    found = lengths_of_run(tmp_path / "run")
    assert found is not None and found[1] == PROMPT and 20 <= found[0].mean <= 400
    assert lengths_of_run(tmp_path) is None


def test_ticks_too_much_alike_to_tell_work_from_rest_count_as_work() -> None:
    """Nothing grows with the work in these: a line would say that any larger job takes as long."""
    rows = np.array([[1.0, 1.0], [1.02, 1.0], [0.98, 1.0]])
    assert _scale_and_rest(rows, np.array([2.0, 1.9, 2.1])) == pytest.approx([2.0, 0.0])


def test_a_line_has_no_negative_slope() -> None:
    rows = np.array([[1.0, 1.0], [2.0, 1.0], [4.0, 1.0]])
    assert non_negative_line(rows, np.array([3.0, 5.0, 9.0])) == pytest.approx([2.0, 1.0])
    a, b = non_negative_line(rows, np.array([9.0, 5.0, 3.0]))  # falls: only the constant is left
    assert a == 0.0 and 3.0 <= b <= 9.0
