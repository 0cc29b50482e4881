"""Code outside of a run's folder, which the folder names, is run for the user who began that run, and for nobody else."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from llamarl.cli.main import main
from llamarl.config import load_config, save_config
from llamarl.controller import fork, resume, run
from llamarl.controller.begun import begun_config
from llamarl.controller.run_folder import MARK_FILE, key_file, mark, user_key
from llamarl.errors import ConfigError

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "tiny.toml"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own files."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for module in (run, resume, fork):
        monkeypatch.setattr(module, "execute", lambda *_, **__: None)
    return tmp_path / "state" / "llamarl" / "run_key"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A run that this user has begun, with a reward function that lies beside its folder."""
    (tmp_path / "mine.py").write_text("def score(*a):\n    return 1.0\n")
    begin(tmp_path / "run", f"{tmp_path}/mine.py:score")
    return tmp_path / "run"


def begin(run_dir: Path, reward: str) -> None:
    words = {"run.dir": str(run_dir), "run.runtime": "inline", "run.cores": 2, "task.reward": reward}
    run.start_run(load_config(RECIPE, [f"--{key}={json.dumps(value)}" for key, value in words.items()]))


def refused(run_dir: Path, given: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        begun_config(run_dir, given or {})
    return str(raised.value)


@pytest.mark.parametrize("code", ["{}/../evil.py:score", "cProfile:run", "os:system"])
def test_code_outside_of_a_strangers_folder_is_refused_by_every_verb_with_one_sentence(
    tmp_path: Path, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')\ndef score(*a): ...\n")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    reward = code.format(theirs)
    keys = {"run.dir": str(theirs), "task.reward": reward}
    save_config(
        load_config(RECIPE, [f"--{key}={json.dumps(value)}" for key, value in keys.items()]), theirs / "config.toml"
    )
    told = f"(task.reward '{reward}'), and it bears no mark of a run that you have begun: if you trust it, name it"
    assert told in refused(theirs) and "or by --task.reward" in refused(theirs)
    for words in (
        ["--resume", str(theirs)],
        ["--resume", str(theirs), "--fork", str(tmp_path / "f")],
        ["--replay", str(theirs)],
    ):
        assert main(["train", *words, "--dry-run"]) == 2
        assert told in capsys.readouterr().err
    assert begun_config(theirs, {"task": {"reward": reward}}).task.reward == reward


def test_the_users_own_run_goes_on_without_a_word_wherever_it_is_moved(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capsys.readouterr()
    monkeypatch.chdir("/")  # the path of its code is absolute
    assert begun_config(own, {}).task.reward == f"{tmp_path}/mine.py:score"
    own.rename(tmp_path / "moved")
    config = begun_config(tmp_path / "moved", {"run": {"num_ticks": 300}})
    assert capsys.readouterr() == ("", "")
    resume.resume_run(config)
    assert begun_config(tmp_path / "moved", {}).run.num_ticks == 300  # it is marked again
    assert main(["train", "--replay", str(tmp_path / "moved"), "--dry-run"]) == 0


CHANGES = {
    "no mark": "it bears no mark",
    "another mark": "its mark is another user's, or of other settings",
    "another user": "its mark is another user's, or of other settings",
    "no key": "your key, which would prove it yours, cannot be read",
    "a key that others may read": "it is not a file of this user's alone (chmod 600)",
    "other code": "its mark is another user's, or of other settings",
    "another model": "its mark is another user's, or of other settings",
}


def spoil(own: Path, home: Path, change: str) -> None:
    settings = own / "config.toml"
    if change == "no mark":
        (own / MARK_FILE).unlink()
    elif change == "another mark":
        (own / MARK_FILE).write_bytes(b"0" * 64 + (own / MARK_FILE).read_bytes()[64:])
    elif change == "another user":
        home.write_bytes(bytes(32))
    elif change == "no key":
        home.unlink()
    elif change == "a key that others may read":
        home.chmod(0o644)
    elif change == "other code":
        settings.write_text(settings.read_text().replace("mine.py:score", "mine.py:other"))
    else:
        settings.write_text(
            settings.read_text()
            .replace("[model]\n", "[model]\ntrust_remote_code = true\n")
            .replace("trust_remote_code = false\n", "")
        )


def test_a_mark_proves_one_user_and_one_configuration(own: Path, home: Path, tmp_path: Path) -> None:
    key = home.read_bytes()
    given = {"task": {"reward": "cProfile:run"}, "model": {"trust_remote_code": True}}
    for number, (change, why) in enumerate(CHANGES.items()):
        copy = Path(shutil.copytree(own, tmp_path / f"run {number}"))
        home.write_bytes(key)
        home.chmod(0o600)
        assert begun_config(copy, {}).task.reward.endswith("mine.py:score")
        spoil(copy, home, change)
        assert why in refused(copy), change
        assert begun_config(copy, given).task.reward == "cProfile:run"  # what the user names is the user's


def test_a_run_that_names_no_code_needs_no_mark_and_no_key(tmp_path: Path, home: Path) -> None:
    begin(tmp_path / "run", "")
    assert not home.exists() and not (tmp_path / "run" / MARK_FILE).exists()
    begun_config(tmp_path / "run", {})


def test_relative_paths_are_the_users_own_where_the_run_was_begun_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "reward.py").write_text("def score(*a):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path / "mine")
    begin(tmp_path / "run", "reward.py:score")
    begun_config(tmp_path / "run", {})
    monkeypatch.chdir(tmp_path / "theirs")
    assert begun_config(tmp_path / "run", {}).task.reward == f"{tmp_path}/mine/reward.py:score"
    (tmp_path / "mine" / "reward.py").unlink()  # then another of that name is not the one
    assert f"its paths are those of {tmp_path / 'mine'}, where it was begun" in refused(tmp_path / "run")


def test_where_no_key_can_be_made_the_run_begins_and_says_what_a_resume_will_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    begin(tmp_path / "run", "cProfile:run")
    assert f"{tmp_path / 'run'} cannot be marked as yours ({key_file()}: Not a directory)" in capsys.readouterr().err
    assert "it bears no mark" in refused(tmp_path / "run")


def test_consent_to_a_models_own_code_does_not_reach_into_the_folder(tmp_path: Path) -> None:
    """What lies there may have been put there since."""
    begin(tmp_path / "run", "")
    model, settings = tmp_path / "run" / "model", tmp_path / "run" / "config.toml"
    config = load_config(settings, ["--model.trust_remote_code", "true"])
    save_config(config, settings)
    mark(config, settings.read_bytes(), tmp_path / "run")
    assert begun_config(tmp_path / "run", {}).model.trust_remote_code
    given = {"model": {"path": str(model)}}
    model.mkdir()
    assert "the model's code lies in the run's folder" in refused(tmp_path / "run", given)


def test_lists_that_the_user_gives_are_the_users(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    settings = '[[task.rewards]]\nname = "a"\nfunction = "cProfile:run"\n'
    (tmp_path / "run" / "config.toml").write_text(settings)
    assert "task.rewards.a 'cProfile:run'" in refused(tmp_path / "run")
    given = {"task": {"rewards": [{"name": "a", "function": "cProfile:run"}]}}
    assert begun_config(tmp_path / "run", given).task.rewards[0].function == "cProfile:run"


def test_the_key_is_the_users_alone_and_one_however_many_make_it_at_once(home: Path) -> None:
    keys: list[bytes] = []
    threads = [threading.Thread(target=lambda: keys.append(user_key(create=True))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert len(keys) == 16 and len(set(keys)) == 1 and len(keys[0]) == 32
    assert home.stat().st_mode & 0o777 == 0o600 and os.listdir(home.parent) == ["run_key"]
    home.unlink()
    assert user_key(create=True) != keys[0]
