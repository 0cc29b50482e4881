"""What a user may name as a model, and what is taken from the run that made it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl.api.llm import open_policy
from llamarl.checkpoint.storage import CheckpointStore
from llamarl.cli import eval as eval_verb
from llamarl.cli.main import main
from llamarl.config import RunConfig, validate
from llamarl.engine.factory import resolve_device
from llamarl.errors import ConfigError, ModelError
from llamarl.models.exported import ExportFacts, NamedModel, find_model, write_export

ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


def write_run(folder: Path, recipe: str = "") -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(recipe)
    return folder


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def write_adapter(folder: Path, base: str) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER | {"base_model_name_or_path": base}))
    save_file({}, folder / "adapter_model.safetensors")
    return folder


def test_a_run_and_the_folders_in_it_bring_the_runs_settings(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_model(run / "model")
    expected = NamedModel(str(run / "model"), run=run)
    assert find_model(str(run)) == find_model(str(run / "model")) == expected
    assert expected.recipe == str(run / "config.toml")
    assert find_model(str(write_model(tmp_path / "model"))) == NamedModel(str(tmp_path / "model"))
    assert find_model("bundled:tiny") == NamedModel("bundled:tiny")


def test_an_adapter_is_merged_into_the_base_that_it_names_or_the_user_gives(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    run = write_run(tmp_path / "run")
    adapter = write_adapter(run / "adapter", str(base))
    assert find_model(str(run)) == find_model(str(adapter)) == NamedModel(str(base), adapter=adapter, run=run)
    alone = write_adapter(tmp_path / "alone", "org/not-here")
    assert find_model(str(alone), str(base)) == NamedModel(str(base), adapter=alone)
    with pytest.raises(ModelError, match="names org/not-here as its base model, .* give the folder by --base"):
        find_model(str(alone))
    with pytest.raises(ConfigError, match="--base is the model that an adapter belongs to"):
        find_model(str(base), str(base))


def test_a_run_without_a_policy_says_how_to_get_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="without a final policy .* let it finish .llamarl train --resume "):
        find_model(str(run))
    (run / "checkpoints" / "tick_000003").mkdir(parents=True)
    with pytest.raises(ConfigError, match="write one from a checkpoint: llamarl export"):
        find_model(str(run))


def test_a_run_that_went_on_after_its_policy_was_written_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path / "run")
    write_export(write_model(run / "model"), ExportFacts(policy_version=40, dtype="float32", served_dtype="float32"))
    for tick, said in (("tick_000039", ""), ("tick_000042", "model is policy version 40, the newest checkpoint of")):
        (run / "checkpoints" / tick).mkdir(parents=True)
        assert find_model(str(run)).path == str(run / "model")
        assert said in caplog.text and bool(caplog.text) == bool(said)
    assert "holds 43: llamarl export" in caplog.text
    caplog.clear()
    (run / "config.toml").write_text("[evaluation]\npatience = 2\n")  # its model may be of an earlier one
    assert find_model(str(run)).path == str(run / "model") and not caplog.text


def test_a_torn_export_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    model = write_model(run / "model")
    write_export(model, ExportFacts(policy_version=7, dtype="float32", served_dtype="float32"))
    assert find_model(str(run)).path == str(model)
    (model / "config.json").write_text("{ }")
    with pytest.raises(ModelError, match=r"config\.json is torn: 3 bytes, 2 were written; .*llamarl export"):
        find_model(str(run))


def test_a_runs_engine_and_sampling_are_its_own_and_settings_change_them(tmp_path: Path) -> None:
    recipe = (
        'generator = { quantization = "int8", engine = { dtype = "bfloat16" }, '
        'sampling = { temperature = 0.5, top_k = 3, stop_strings = ["#"] } }'
    )
    run = write_run(tmp_path / "run", recipe)
    write_model(run / "model")
    named, config = open_policy(str(run))
    assert (named.run, config.model.path) == (run, str(run / "model"))
    assert (config.generator.engine.dtype, config.generator.quantization) == ("bfloat16", "int8")
    assert (config.generator.sampling.temperature, config.generator.sampling.stop_strings) == (0.5, ("#",))
    settings = {
        "generator.quantization": ("--quantization", "none"),
        "generator.sampling.temperature": ("--temperature", 0.7),
        "generator.sampling.stop_strings": ("--stop", ["x"]),
        "generator.engine.dtype": ("--dtype", None),
    }
    _, config = open_policy(str(run), settings=settings)
    assert (config.generator.engine.dtype, config.generator.quantization) == ("bfloat16", "none")
    assert (config.generator.sampling.temperature, config.generator.sampling.stop_strings) == (0.7, ("x",))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["{empty}", "--out", "{new}"], "holds no run (no config.toml)"),
        (["{run}", "--out", "{run}"], "exists already: choose another folder"),
        (["{run}", "--out", "{new}", "--adapter"], "--adapter: {run} trained all weights"),
        (["{run}", "--out", "{new}"], "holds no finished checkpoint"),
    ],
)
def test_wrong_flags_of_export_are_told_and_leave_nothing(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"run": str(write_run(tmp_path / "run")), "new": str(tmp_path / "new"), "empty": str(tmp_path / "empty")}
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", *(word.format(**places) for word in words)]) in (1, 2)
    assert line.format(**places) in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_for_an_export_that_cannot_be_made_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = write_run(tmp_path / "run"), tmp_path / "run" / "config.toml" / "policy"
    monkeypatch.setattr(CheckpointStore, "load", lambda store, tick: None)
    assert main(["export", str(run), "--out", str(out)]) == 2
    assert f"--out {out}: cannot be made (Not a directory): choose another folder" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "loaded"), [([], [None, 4]), (["--tick", "9"], [9])])
def test_an_export_is_of_the_lowest_held_out_loss_where_the_runs_model_is(
    words: list[str], loaded: list[int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitates = '[algorithm]\nname = "sft"\n[task]\nname = "demonstrations"\ndata = "rows.jsonl"\n'
    run = write_run(tmp_path / "run", imitates + "[evaluation]\nevery = 5\npatience = 2\n")
    (run / "metrics.jsonl").write_text('{"step": 4, "eval/loss": 1.0}\n{"step": 9, "eval/loss": 2.0}\n')
    asked: list[int | None] = []

    def load(store: CheckpointStore, tick: int | None) -> SimpleNamespace:
        asked.append(tick)
        return SimpleNamespace(tick=9 if tick is None else tick)

    monkeypatch.setattr(CheckpointStore, "load", load)
    monkeypatch.setattr(CheckpointStore, "ticks", lambda store: (4, 9))
    assert main(["export", str(run), "--out", str(run / "config.toml" / "no"), *words]) == 2  # no folder for it
    assert asked == loaded


def test_an_export_reads_neither_the_data_nor_the_other_models_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = '[task]\nname = "math"\ndata = "gone.jsonl"\n[reference]\nenabled = true\npath = "gone/teacher"\n'
    run = write_run(tmp_path / "run", recipe)
    asked: list[int | None] = []
    monkeypatch.setattr(CheckpointStore, "load", lambda store, tick: asked.append(tick))
    assert main(["export", str(run), "--out", str(run / "config.toml" / "no")]) == 2
    assert asked == [None] and "cannot be made (Not a directory)" in capsys.readouterr().err


MATHS = '[task]\nname = "math"\ndata = "mine.jsonl"\ntemplate = "Q: {question}"\n[task.pool]\nnum_workers = 3\n'
ROWS = '[algorithm]\nname = "sft"\n[task]\nname = "demonstrations"\ndata = "mine.jsonl"\n'
ROWS += "[evaluation]\nevery = 5\npatience = 2\n"


@pytest.mark.parametrize("recipe", [MATHS, ROWS])
def test_another_task_to_evaluate_on_brings_its_own_data(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(write_run(tmp_path / "run", recipe) / "model")
    monkeypatch.chdir(tmp_path)
    found: list[RunConfig] = []

    def evaluate(config: RunConfig, *rest: Any, **flags: Any) -> tuple[dict[str, Any], list[Any]]:
        found.append(config)
        return {"failed": 0, "samples": 1, "intervals": {}}, []

    monkeypatch.setattr(eval_verb, "_evaluate", evaluate)
    monkeypatch.setattr(eval_verb, "_compute_as_in_a_run", lambda threads: None)
    options = ["--task.options", "{ min_numbers = 3 }"]
    for model in ("run", "run/model"):
        assert main(["eval", model, "--data", "countdown", *options]) == 0, capsys.readouterr().err
        task = found.pop().task
        expected = {"options": {"min_numbers": 3}, "pool": {"num_workers": 3 if recipe == MATHS else 1}}
        assert task == validate({"task": {"name": "countdown", **expected}}).task
    if recipe == MATHS:  # its own task stays as the run has it
        assert (
            main(["eval", "run", "--data", "math"]) == 2 and "no file or folder mine.jsonl" in capsys.readouterr().err
        )


def test_a_fine_tuned_model_without_a_task_is_told_that_rows_have_no_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(write_run(tmp_path / "run", ROWS) / "model")
    (tmp_path / "run" / "mine.jsonl").write_text('{"prompt": "1 + 1", "completion": "2"}\n' * 4)
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "run"]) == 2
    assert "run was fine-tuned on rows, which have no judge: name a task that has one" in capsys.readouterr().err


def test_an_evaluation_of_a_run_elsewhere_needs_its_reward_model_only_to_rate_and_names_the_key_of_a_device() -> None:
    config = validate({"model": {"path": "bundled:tiny"}, "reward_model": {"path": "gone/model"}})
    assert list(eval_verb._find_missing(config, rates=False)) == []
    assert [mistake.key for mistake in eval_verb._find_missing(config, rates=True)] == ["reward_model.path"]
    with pytest.raises(ConfigError, match="no device 'cuda:99' here .*: set --evaluation.device to cpu or auto"):
        resolve_device("cuda:99", "--evaluation.device")
