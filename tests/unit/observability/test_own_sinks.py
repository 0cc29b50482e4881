"""``observability.sinks``: they get every row, and one that fails is left out and named, and ends no run."""

import contextlib
import json
import math
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_run import Report

from llamarl.config import validate
from llamarl.controller.recorder import Recorder
from llamarl.errors import ConfigError, LlamaRLError
from llamarl.observability.metrics import read_metrics, read_warnings
from llamarl.observability.sinks import BUILT_IN, GuardedSink
from llamarl.settings.observability import TRACKERS, ObservabilityConfig

GOOD = """
import json
class Sink:
    def __init__(self, run_dir, config, resume_after_tick):
        self.file = open(run_dir / "mine.jsonl", "a")
        self.file.write(json.dumps([config["run"]["seed"], resume_after_tick]) + "\\n")
    def write(self, row):
        self.file.write(json.dumps(row) + "\\n")
    def close(self):
        self.file.close()
"""
BAD = """
import sys
class Sink:
    def __init__(self, run_dir, config, resume_after_tick):
        self.path = run_dir / "seen"
    def write(self, row):
        with self.path.open("a") as file:
            file.write(f"{row['step']} ")
        if row["step"] == 1:
            %s
    def close(self):
        self.path.with_name("closed").touch()
"""


def run(folder: Path, source: str, num_ticks: int = 4) -> None:
    (folder / "mine.py").write_text(source)
    config = ObservabilityConfig(console="none", tensorboard=False, trace=False, sinks=(f"{folder}/mine.py:Sink",))
    recorder = Recorder(folder, config, ["trainer"], num_ticks, run_config={"run": {"seed": 7}})
    for tick in range(num_ticks):
        recorder.on_report(Report("trainer", tick, {"lr": 0.5}, tick, tick + 0.5))
    recorder.close()


def test_a_sink_of_ones_own_gets_the_recipe_and_every_row(tmp_path: Path) -> None:
    run(tmp_path, GOOD)
    head, *rows = map(json.loads, (tmp_path / "mine.jsonl").read_text().splitlines())
    assert head == [7, None]
    assert rows == read_metrics(tmp_path) and len(rows) == 4


@pytest.mark.parametrize(
    ("statement", "cause"), [("1 / 0", "ZeroDivisionError: division by zero"), ("sys.exit(0)", "SystemExit: 0")]
)
def test_a_sink_that_fails_is_left_out_and_named_and_the_run_goes_on(
    tmp_path: Path, statement: str, cause: str
) -> None:
    run(tmp_path, BAD % statement)
    assert (tmp_path / "seen").read_text() == "0 1 " and (tmp_path / "closed").exists()
    assert len(read_metrics(tmp_path)) == 4
    (warning,) = read_warnings(tmp_path)
    assert (warning["step"], warning["kind"]) == (1, "sink")
    told = f"mine.py:Sink' failed in write(row): {cause} at {tmp_path}/mine.py:10: {statement}. It gets no more rows"
    assert told in warning["text"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (GOOD.replace('["seed"]', '["sead"]'), r"called as Sink\(run_dir, config, resume_after_tick\): KeyError: 'sead'"),
        (GOOD.replace("def close", "def end"), r"has write\(row\) and close\(\); this one lacks close"),
        (GOOD.replace("class Sink", "class Sunk"), r"observability\.sinks '.*mine\.py:Sink': .* has no 'Sink'"),
    ],
)  # fmt: skip
def test_a_sink_that_cannot_be_made_is_refused_before_the_first_tick(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, source)


@pytest.mark.parametrize(("resume", "status"), [(None, 2), (-1, 1), (4, 1)])
def test_a_tracker_whose_server_is_away_refuses_a_new_run_and_lets_a_resume_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: int | None, status: int
) -> None:
    """A loop and a scheduler start again what ended with 1, and not what was refused."""

    def init(**_: Any) -> None:
        raise TimeoutError("Run initialization has timed out")

    monkeypatch.setitem(sys.modules, "wandb", cast(Any, SimpleNamespace(init=init)))
    with pytest.raises(LlamaRLError, match="TimeoutError: Run initialization has timed out") as told:
        GuardedSink("wandb", tmp_path, {}, resume, lambda **_: None)
    assert told.value.exit_code == status


def test_a_sink_without_an_import_path_is_refused() -> None:
    said = (
        "sinks must be wandb, mlflow, trackio, opentelemetry, package.module:Class or path/to/file.py:Class, got 'wand'"
    )
    with pytest.raises(ConfigError, match=said):
        validate({"observability": {"sinks": ["wand"]}})


class Library:
    """Stands in for wandb, trackio, mlflow and OpenTelemetry's modules: notes down what is called on them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.steps: list[int] = []
        """That a run's history holds."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            known = {"get_experiment_by_name": None, "Metric": args, "Param": args, "create_experiment": "7"}
            known["get_metric_history"] = [SimpleNamespace(step=step) for step in self.steps]
            return known[name] if name in known else self

        known = {"id": "abc", "run_id": "abc", "info": self, "entities": self, "starting_step": len(self.steps)}
        return known.get(name, call)

    def all(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


OTLP = ("exporter.otlp.proto.http.metric_exporter", "sdk.metrics", "sdk.metrics.export")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    for name in ("wandb", "trackio", "mlflow", *(f"opentelemetry.{module}" for module in OTLP)):
        monkeypatch.setitem(sys.modules, name, cast(Any, made))
    for name in ("WANDB_PROJECT", "WANDB_NAME", "TRACKIO_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return made


def tracked(folder: Path, name: str) -> None:
    """Two rows of a run, the second without a finite number, and one more of its resume."""
    config = ObservabilityConfig(console="none", tensorboard=False, trace=False, sinks=(name,))
    for resume, values in ((None, (0.5, math.nan)), (1, (0.25,))):
        recipe = {"run": {"seed": 7, "dir": ""}}
        recorder = Recorder(folder, config, ["trainer"], 3, resume_after_tick=resume, run_config=recipe)
        for tick, value in enumerate(values, 0 if resume is None else resume + 1):
            report: Any = SimpleNamespace(
                executor="trainer", tick=tick, metrics={"lr": value}, started_s=tick, finished_s=tick + 0.5, spans=(),
                failures={}, controller_bytes=0, events=(),
            )  # fmt: skip
            recorder.on_report(report)
        recorder.close()
    assert not read_warnings(folder)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_get_each_row_and_a_resume_goes_on_in_the_same_run(
    tmp_path: Path, library: Library, name: str
) -> None:
    tracked(tmp_path, name)
    (_, new), (_, resumed) = library.all("init")
    assert new["project"] == "llamarl" and new["name"] == tmp_path.name and new["config"]["run"]["seed"] == 7
    if name == "wandb":
        assert [(one["id"], one["resume"]) for one in (new, resumed)] == [(None, "allow"), ("abc", "allow")]
        assert resumed["name"] is None  # a run that was renamed keeps its new name
        assert all(of["commit"] for _, of in library.all("log"))  # seen at once, not when the next row comes
    else:
        assert [one["resume"] for one in (new, resumed)] == ["never", "allow"]
    assert [(row.get("lr"), of["step"]) for (row,), of in library.all("log")] == [(0.5, 0), (None, 1), (0.25, 2)]
    assert all("step" not in row for (row,), _ in library.all("log"))
    assert len(library.all("finish")) == 2


def test_mlflow_gets_recipe_and_rows_and_a_resume_goes_on_in_the_same_run(tmp_path: Path, library: Library) -> None:
    tracked(tmp_path, "mlflow")
    ((_, made),) = library.all("create_run")
    assert made == {"run_name": tmp_path.name}
    (_, of_recipe), *rows = library.all("log_batch")
    assert of_recipe["params"] == [("run.seed", "7")]  # an empty text is none that it would take
    metrics = [[one for one in of["metrics"] if one[0] == "lr"] for _, of in rows]
    assert [[(value, step) for _, value, _, step in of] for of in metrics] == [[(0.5, 0)], [], [(0.25, 2)]]
    assert library.all("update_run") == [(("abc",), {"status": "RUNNING"})]
    assert library.all("set_terminated") == [(("abc",), {"status": "FINISHED"})] * 2


@pytest.mark.parametrize("made_by_another", [True, False])
def test_an_mlflow_experiment_that_another_run_makes_meanwhile_is_taken(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch, made_by_another: bool
) -> None:
    found = iter([None, SimpleNamespace(experiment_id="8") if made_by_another else None])

    def create(name: str) -> str:
        raise RuntimeError("RESOURCE_ALREADY_EXISTS")

    monkeypatch.setattr(library, "get_experiment_by_name", lambda name: next(found), raising=False)
    monkeypatch.setattr(library, "create_experiment", create, raising=False)
    refused = contextlib.nullcontext() if made_by_another else pytest.raises(RuntimeError, match="RESOURCE_ALREADY")
    with refused:
        BUILT_IN["mlflow"](tmp_path, {}, None)
    assert [of for of, _ in library.all("create_run")] == [("8",)] * made_by_another


def test_mlflow_gets_no_row_again_that_its_run_has_before_a_resume(tmp_path: Path, library: Library) -> None:
    library.steps = [0, 1, 2]
    tracked(tmp_path, "mlflow")
    _, *rows = library.all("log_batch")
    assert [{step for *_, step in of["metrics"]} for _, of in rows] == [{0}, {1}]


def test_wandb_gets_no_row_that_its_run_has_and_a_new_run_the_name_that_is_set(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_NAME", "mine")
    library.steps = [0, 1]
    made = BUILT_IN["wandb"](tmp_path, {}, 0)
    for step in (1, 2):
        made.write({"step": step, "lr": 0.5})
    assert library.all("init")[0][1]["name"] == "mine"
    assert [of["step"] for _, of in library.all("log")] == [2]


@pytest.mark.parametrize(("stopped", "code", "status"), [("", 0, "FINISHED"), ("by an error", 1, "FAILED")])
def test_a_run_that_did_not_reach_its_end_is_marked_as_failed(
    tmp_path: Path, library: Library, stopped: str, code: int, status: str
) -> None:
    config = ObservabilityConfig(console="none", tensorboard=False, trace=False, sinks=("wandb", "mlflow"))
    Recorder(tmp_path, config, ["trainer"], 3, run_config={}).close(stopped)
    assert library.all("finish") == [((), {"exit_code": code})]
    assert library.all("set_terminated") == [(("abc",), {"status": status})]


def test_opentelemetry_has_a_gauge_a_key_with_the_runs_name(tmp_path: Path, library: Library) -> None:
    tracked(tmp_path, "opentelemetry")
    assert (("llamarl.time.step_s",), {}) in library.all("create_gauge")
    names, values = ([args for args, _ in library.all(called)] for called in ("create_gauge", "set"))
    of_rate = [args for (name,), args in zip(names, values, strict=True) if name == "llamarl.lr"]
    assert of_rate[0] == (0.5, {"run": tmp_path.name}) and math.isnan(of_rate[1][0]) and of_rate[2][0] == 0.25
    assert len(library.all("shutdown")) == 2


def test_every_name_of_a_library_has_its_sink_and_its_extra() -> None:
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(BUILT_IN) == set(TRACKERS) <= set(extras)


def test_a_part_of_any_name_reaches_mlflow_and_opentelemetry_as_they_take_it(tmp_path: Path, library: Library) -> None:
    row = {"step": 0, "reward/parts/exact match@1": 0.5, "reward/parts/réponse": 0.25}
    BUILT_IN["mlflow"](tmp_path, {}, None).write(row)
    (_, logged) = library.all("log_batch")[-1]
    assert [name for name, *_ in logged["metrics"]] == ["reward/parts/exact match_1", "reward/parts/réponse"]
    BUILT_IN["opentelemetry"](tmp_path, {}, None).write(row)
    names = [name for (name,), _ in library.all("create_gauge")]
    assert names == ["llamarl.step", "llamarl.reward.parts.exact_match_1", "llamarl.reward.parts.r_ponse"]
