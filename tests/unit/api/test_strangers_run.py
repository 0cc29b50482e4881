"""What a run's folder names ``eval``, ``generate``, ``doctor`` and ``export`` do not run, nor send secrets there."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from llamarl.api.llm import open_policy
from llamarl.assets import __file__ as assets
from llamarl.checkpoint.storage import CheckpointStore
from llamarl.cli.main import main
from llamarl.config import RunConfig, load_config, save_config, validate
from llamarl.controller.begun import refuse_code_of_a_run
from llamarl.errors import ConfigError
from llamarl.models.exported import ExportFacts

EVIL = "raise SystemExit('it ran')\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder of a finished run, as somebody may send it."""
    folder = tmp_path / "run"
    model = folder / "model"
    model.mkdir(parents=True)
    for file in (Path(assets).parent / "tiny").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    for place in (folder, tmp_path):
        (place / "evil.py").write_text(EVIL)
    return folder


def describe(run: Path, changes: dict[str, Any]) -> None:
    words = [f"--{key}={json.dumps(value)}" for key, value in {"run.dir": str(run), **changes}.items()]
    save_config(load_config(None, words), run / "config.toml")


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("verb", "key"),
    [
        ("eval", "task.reward"),
        *itertools.product(["eval", "generate", "doctor"], ["generator.engine.name", "model.trust_remote_code"]),
    ],
)
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_code_and_consent_of_a_runs_folder_are_refused_by_every_verb_that_would_run_it(
    run: Path, verb: str, key: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"{run if place == 'inside' else run.parent}/evil.py:Thing"
    describe(run, {key: True if key.endswith("code") else code})
    more = ["--prompt", "a"] if verb == "generate" else []
    for model in (run, run / "model"):
        assert main([verb, str(model), *more]) == 2
        told = capsys.readouterr()
        assert key in told.err and "it ran" not in told.out + told.err


@pytest.mark.usefixtures("own_signals")
def test_who_generates_from_a_copied_run_is_not_asked_for_rewards_and_addresses_that_only_training_reads(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    describe(run, {"task.reward": f"{run}/evil.py:Thing", "observability.sinks": ["wandb"], "run.mirror": "file:///m"})
    assert main(["generate", str(run), "--prompt", "a", "--max-new-tokens", "1"]) == 0
    told = capsys.readouterr()
    assert "it ran" not in told.out + told.err
    with pytest.raises(ConfigError) as caught:  # who judges reads the task alone
        open_policy(str(run), section="evaluation")
    assert "task.reward" in str(caught.value) and "wandb" not in str(caught.value)


@pytest.mark.usefixtures("own_signals")
def test_an_export_runs_no_tokenizer_that_a_strangers_run_trusts_and_asks_for_nothing_that_it_does_not_read(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(run), "--out", str(run / "out")]
    gone = {"task.name": "math", "task.data": "gone.jsonl", "judge.path": "gone/judge"}
    store = CheckpointStore(run / "checkpoints")
    store.begin(0)
    store.finish(0, {})
    exported: list[RunConfig] = []

    def export(checkpoint: Path, config: RunConfig, out: Path, **how: Any) -> ExportFacts:
        exported.append(config)
        return ExportFacts(policy_version=1, dtype="float32", served_dtype="float32")

    monkeypatch.setattr("llamarl.trainer.checkpoint_export.export_checkpoint", export)
    describe(run, {"model.path": str(run / "model"), "model.trust_remote_code": True, **gone})
    assert main(words) == 2 and "model.trust_remote_code" in capsys.readouterr().err and not exported
    assert main([*words, "--trust-remote-code"]) == 0
    (run / "out").rmdir()
    describe(run, {"model.path": "bundled:tiny", "task.reward": f"{run}/evil.py:Thing", **gone})
    assert main(words) == 0
    assert [config.model.path for config in exported] == [str(run / "model"), "bundled:tiny"]


def test_what_the_user_names_is_the_users_own(run: Path) -> None:
    describe(run, {"model.trust_remote_code": True})
    with pytest.raises(ConfigError, match="name it yourself, by .* --model.trust_remote_code true"):
        open_policy(str(run))
    settings = {"model.trust_remote_code": ("--trust-remote-code", True)}
    assert open_policy(str(run), settings=settings)[1].model.trust_remote_code
    describe(run, {"task.reward": f"{run}/evil.py:Thing"})
    words = [f"--task.reward={run}/evil.py:Thing"]
    assert open_policy(str(run), words=words, section="evaluation")[1].task.reward


CODE_TASK = {"name": "code", "data": "t.jsonl", "options": {"box": "plain"}}
OWN_JUDGE = {
    "factory": "llamarl.executors.judge:Judge",
    "settings": {
        "judge": {"url": "http://somewhere/v1", "model": "m", "api_key_env": "HOME"},
        "hosts": {"cluster": "10.0.0.1:6379"},
        "run": {"mirror": "s3://theirs/run"},
    },
}


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ({"task": CODE_TASK}, ["task.options.box"]),
        ({"task": [{**CODE_TASK, "label": "a"}, {"name": "steps"}]}, ["task.mixture.a.options.box"]),
        ({"observability": {"sinks": ["wandb"]}}, ["observability.sinks"]),
        (
            {"executors": {"mine": OWN_JUDGE}},
            [
                f"executors.mine.settings.{key}"
                for key in ("judge.url", "judge.api_key_env", "hosts.cluster", "run.mirror")
            ],
        ),
    ],
)
def test_programs_in_no_box_and_addresses_of_an_executor_are_consented_to(
    recipe: dict[str, Any], keys: list[str], tmp_path: Path
) -> None:
    config = validate(recipe)
    assert {key for key, _, _ in config.named_code} >= set(keys)
    with pytest.raises(ConfigError, match="name it yourself") as caught:
        refuse_code_of_a_run(config, tmp_path, {})
    assert all(f"--{key} " in str(caught.value) for key in keys)


def test_a_judges_server_and_the_variable_whose_value_it_is_sent_are_named_by_the_user(tmp_path: Path) -> None:
    judge = {"url": "http://somewhere/v1", "model": "m", "api_key_env": "HOME"}
    config = validate({"judge": judge})
    with pytest.raises(
        ConfigError, match="judge.api_key_env 'HOME'.* name it yourself, by .* --judge.api_key_env HOME"
    ):
        refuse_code_of_a_run(config, tmp_path, {})
    refuse_code_of_a_run(config, tmp_path, {"judge": {"api_key_env": "HOME", "url": judge["url"]}})
    with pytest.raises(ConfigError, match="sent what is yours .judge.url 'http://somewhere/v1'"):  # your task's data
        refuse_code_of_a_run(validate({"judge": {**judge, "api_key_env": ""}}), tmp_path, {})
