"""What a resume compares before it starts anything."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from llamarl.checkpoint import storage
from llamarl.checkpoint.platform import platform_facts
from llamarl.config import RunConfig, load_config, save_config
from llamarl.controller import training
from llamarl.errors import ConfigError

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "tiny.toml"


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would have run."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(training, "_execute", lambda prepared, run_dir, **how: calls.append(how))
    return calls


def config(run_dir: Path, **optimizer: float) -> RunConfig:
    made = load_config(RECIPE, ["--run.dir", str(run_dir), "--run.runtime", "inline", "--run.cores", "2"])
    return dataclasses.replace(made, optimizer=dataclasses.replace(made.optimizer, **optimizer))


def checkpointed(run_dir: Path, monkeypatch: pytest.MonkeyPatch, platform: dict[str, str]) -> None:
    prepared = training._prepare(config(run_dir))
    run_dir.mkdir()
    save_config(prepared.config, run_dir / "config.toml")
    with monkeypatch.context() as patch:
        patch.setattr(storage, "platform_facts", lambda: platform)
        store = storage.CheckpointStore(run_dir / "checkpoints")
        store.begin(4)
        store.finish(4, training._describe(prepared))


def test_a_run_without_a_checkpoint_begins_again_under_its_own_configuration_only(
    tmp_path: Path, executed: list[dict[str, Any]]
) -> None:
    run_dir = tmp_path / "run"
    training.start_run(config(run_dir))
    assert executed == [{"resume_after_tick": None, "load_from": None}]
    with pytest.raises(ConfigError, match=r"optimizer\.lr: it has .*, this run 0\.5"):
        training.resume_run(config(run_dir, lr=0.5))
    training.resume_run(config(run_dir))
    assert executed[1:] == [{"resume_after_tick": -1, "load_from": None}]


def test_a_run_whose_set_up_failed_can_be_started_again_with_another_setting(
    tmp_path: Path, executed: list[dict[str, Any]]
) -> None:
    training.start_run(config(tmp_path / "run"))  # nothing ran, so the folder holds its configuration alone
    training.start_run(config(tmp_path / "run", lr=0.5))
    assert len(executed) == 2
    assert load_config(tmp_path / "run" / "config.toml").optimizer.lr == 0.5


def test_other_libraries_or_another_processor_are_refused_unless_asked_for(
    tmp_path: Path, executed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    checkpointed(run_dir, monkeypatch, {**platform_facts(), "torch": "2.0.1", "processor": "x86_64 Other avx2"})
    with pytest.raises(ConfigError) as caught:
        training.resume_run(config(run_dir))
    message = str(caught.value)
    assert "torch: it has '2.0.1'" in message and "processor: it has 'x86_64 Other avx2'" in message
    assert "--checkpoint.other_platform true" in message and "as the recipe" not in message
    assert executed == []
    asked = config(run_dir)
    training.resume_run(
        dataclasses.replace(asked, checkpoint=dataclasses.replace(asked.checkpoint, other_platform=True))
    )
    assert executed == [{"resume_after_tick": 4, "load_from": run_dir / "checkpoints" / "tick_000004"}]


def test_the_same_configuration_and_machine_go_on(
    tmp_path: Path, executed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointed(tmp_path / "run", monkeypatch, dict(platform_facts()))
    training.resume_run(config(tmp_path / "run"))
    assert len(executed) == 1


def test_a_prolonged_run_keeps_the_rate_that_it_was_started_with(
    tmp_path: Path, executed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointed(tmp_path / "run", monkeypatch, dict(platform_facts()))
    assert load_config(tmp_path / "run" / "config.toml").optimizer.decay_ticks == 100
    asked = config(tmp_path / "run")
    training.resume_run(dataclasses.replace(asked, run=dataclasses.replace(asked.run, num_ticks=200)))
    assert len(executed) == 1
    assert load_config(tmp_path / "run" / "config.toml").optimizer.decay_ticks == 100
    assert "'cosine' has fallen to 0 at tick 100" in capsys.readouterr().err


def test_a_run_that_ended_early_without_its_model_is_not_called_complete(
    tmp_path: Path, executed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointed(tmp_path / "run", monkeypatch, dict(platform_facts()))  # after tick 4
    asked = config(tmp_path / "run")
    with pytest.raises(ConfigError, match="without writing its model.*give at least 6"):
        training.resume_run(dataclasses.replace(asked, run=dataclasses.replace(asked.run, num_ticks=5)))
    assert executed == []


def test_what_several_checks_find_is_told_at_once() -> None:
    def refuse(text: str) -> None:
        raise ConfigError(text)

    with pytest.raises(ConfigError, match="2 mistakes.*\n  - one\n  - two"):
        training._raise_all(lambda: refuse("one"), lambda: None, lambda: refuse("two"))
    with pytest.raises(ConfigError, match="^one$"):
        training._raise_all(lambda: refuse("one"), lambda: None)


def test_each_falling_rate_keeps_its_own_end_through_a_second_prolonging() -> None:
    asked = config(Path("run"), lr=1e-4)
    falling = dataclasses.replace(asked.critic.optimizer, schedule="linear")
    constant = dataclasses.replace(asked.optimizer, schedule="constant")
    asked = dataclasses.replace(asked, optimizer=constant, critic=dataclasses.replace(asked.critic, optimizer=falling))
    begun = training._settle_rate(asked, asked)
    for num_ticks in (200, 300):
        longer = dataclasses.replace(asked, run=dataclasses.replace(asked.run, num_ticks=num_ticks))
        begun = training._settle_rate(longer, begun)
        assert (begun.optimizer.decay_ticks, begun.critic.optimizer.decay_ticks) == (0, 100)


def test_a_warm_up_that_outlasts_the_run_is_told(
    tmp_path: Path, executed: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    training.start_run(config(tmp_path / "run", warmup_ticks=399))  # of 100 ticks
    assert "the rate ends at 25% of optimizer.lr" in capsys.readouterr().err
    training.start_run(config(tmp_path / "other", warmup_ticks=99))
    assert "warmup" not in capsys.readouterr().err
    assert len(executed) == 2
