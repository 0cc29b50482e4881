"""The folder of a run: refused if it holds something, held by one process at a time."""

import errno
import fcntl
import multiprocessing
import os
import platform
import shutil
import threading
from pathlib import Path

import pytest

from llamarl.controller.run_folder import CONFIG_FILE, held, refuse_a_run, refuse_if_held, who_holds
from llamarl.errors import ConfigError, RunFolderLost
from llamarl.observability.rollouts import remove_partial


def test_a_second_process_is_refused_and_named_the_first_and_may_run_after_it(tmp_path: Path) -> None:
    with held(tmp_path):
        outcome = _in_another_process(tmp_path)
        assert "in use by another llamarl train" in outcome and f"process {os.getpid()}" in outcome
    assert _in_another_process(tmp_path) == "held"


def test_who_holds_a_folder_can_be_asked_without_holding_it(tmp_path: Path) -> None:
    assert who_holds(tmp_path) == ""
    with held(tmp_path):
        assert who_holds(tmp_path) == f"{os.getpid()} on {platform.node()[:32]}"
        with pytest.raises(ConfigError, match=f"in use by another llamarl train \\(process {os.getpid()} on "):
            refuse_if_held(tmp_path)
    assert who_holds(tmp_path) == ""
    refuse_if_held(tmp_path)


def test_a_folder_whose_holder_is_not_seen_here_is_not_refused_before_it_is_to_be_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = multiprocessing.get_context("fork").Process(target=int)
    ended.start()
    ended.join()
    with held(tmp_path):
        (tmp_path / ".lock").write_text(f"{ended.pid}\n")
        refuse_if_held(tmp_path)
    assert f"is still held by a llamarl train (process {ended.pid})" in capsys.readouterr().err


def test_a_folder_that_another_machine_holds_is_not_taken_for_held_by_the_process_of_that_number_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(tmp_path):
        (tmp_path / ".lock").write_text(f"{os.getpid()} on another-head\n")
        refuse_if_held(tmp_path)
        outcome = _in_another_process(tmp_path)
    told = f"process {os.getpid()} on another-head"
    assert f"is still held by a llamarl train ({told}) that is not on this machine" in capsys.readouterr().err
    assert f"in use by another llamarl train ({told})" in outcome


@pytest.mark.parametrize(("host", "status"), [(platform.node()[:32], 2), ("another-head", 1)])
def test_a_folder_whose_holder_may_be_lost_is_refused_as_one_that_another_attempt_may_have(
    tmp_path: Path, host: str, status: int
) -> None:
    with held(tmp_path):
        (tmp_path / ".lock").write_text(f"{os.getpid()} on {host}\n")
        with pytest.raises(ConfigError) as refused, held(tmp_path):
            pass
    assert refused.value.exit_code == status


def test_one_who_asks_keeps_nobody_from_holding_a_folder(tmp_path: Path) -> None:
    with held(tmp_path):
        pass
    with open(tmp_path / ".lock") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        threading.Timer(0.05, fcntl.flock, (asking, fcntl.LOCK_UN)).start()
        with held(tmp_path):
            assert str(who_holds(tmp_path)).startswith(f"{os.getpid()} on ")


@pytest.mark.parametrize(
    ("files", "refused"),
    [
        ({}, False),
        ({CONFIG_FILE: "x"}, False),  # set-up failed
        ({CONFIG_FILE: "x", "metrics.jsonl": ""}, False),
        ({CONFIG_FILE: "x", "metrics.jsonl": "{}\n"}, True),
        ({CONFIG_FILE: "x", "checkpoints/tick_000000/manifest.json": "{}"}, True),
        ({CONFIG_FILE: "x", "model/config.json": "{}"}, True),
        ({"metrics.jsonl": "{}\n"}, False),  # no run of ours
    ],
)
def test_only_a_folder_with_results_is_refused(tmp_path: Path, files: dict[str, str], refused: bool) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if refused:
        with pytest.raises(ConfigError, match="already holds a run"):
            refuse_a_run(tmp_path)
    else:
        refuse_a_run(tmp_path)


@pytest.mark.parametrize("link", ["symbolic", "hard", "pipe"])
def test_a_lock_that_is_not_a_file_of_the_folder_is_refused_and_its_target_left_alone(
    tmp_path: Path, link: str
) -> None:
    secret, run_dir = tmp_path / "secret", tmp_path / "run"
    secret.write_text("a key\n")
    run_dir.mkdir()
    if link == "pipe":
        os.mkfifo(run_dir / ".lock")
    else:
        (os.symlink if link == "symbolic" else os.link)(secret, run_dir / ".lock")
    with pytest.raises(ConfigError, match=r"\.lock is "), held(run_dir):
        pass
    assert secret.read_text() == "a key\n"


@pytest.mark.parametrize("name", ["model", "adapter", "critic"])
@pytest.mark.parametrize("link", [True, False])
def test_what_an_export_could_not_replace_is_refused_before_the_run_and_not_at_its_end(
    tmp_path: Path, name: str, link: bool
) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run_dir.mkdir()
    elsewhere.mkdir()
    if link:
        (run_dir / name).symlink_to(elsewhere)
    else:
        (run_dir / name).write_text("")
    with pytest.raises(ConfigError, match=f"{name} is no folder but a .*remove it"), held(run_dir):
        pass
    (run_dir / name).unlink()
    (run_dir / name).mkdir()
    with held(run_dir):
        pass


@pytest.mark.parametrize(
    "name", ["rollouts", "tensorboard", "journal", "checkpoints/tick_000009.partial", "metrics.jsonl", "new"]
)
def test_a_link_out_of_a_runs_folder_is_refused_by_name_and_nothing_is_written_through_it(
    tmp_path: Path, name: str
) -> None:
    real, run_dir, elsewhere = tmp_path / "real", tmp_path / "run", tmp_path / "elsewhere"
    (real / "checkpoints").mkdir(parents=True)
    run_dir.symlink_to(real)  # as a user keeps runs on another disk
    if name != "new":  # a link to what is not there yet would be written through too
        (elsewhere.touch if "." in name and "partial" not in name else elsewhere.mkdir)()
    (run_dir / name).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=f"{name} is a symbolic link to {elsewhere}"), held(run_dir):
        pass
    assert not (real / ".lock").exists()
    (run_dir / name).unlink()
    (real / "debug.log").symlink_to("logs.txt")  # within the folder, as wandb makes them
    with held(run_dir):
        pass


def _run(run_dir: Path) -> None:
    """What a run leaves."""
    (run_dir / "checkpoints" / "tick_000009").mkdir(parents=True)
    (run_dir / CONFIG_FILE).write_text("")


def test_a_folder_that_is_moved_under_its_run_is_followed_to_its_last_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    _run(run_dir)
    with held(run_dir) as folder:
        folder.begin()
        assert folder.lost() == ""
        folder.check()
        run_dir.rename(tmp_path / "other place")
        with pytest.raises(RunFolderLost) as caught:
            folder.check()
    message = str(caught.value)
    assert f"{run_dir} is not there any more" in message
    assert f"its last checkpoint is {tmp_path}/other place/checkpoints/tick_000009" in message
    assert f"llamarl train --resume '{tmp_path}/other place'" in message


@pytest.mark.parametrize(
    "how",
    [
        "removed",
        "removed and made anew",
        "removed and copied back",
        "started over",
        "emptied",
        "emptied and started over",
    ],
)
def test_a_folder_that_is_removed_or_started_over_under_its_run_is_noticed(tmp_path: Path, how: str) -> None:
    run_dir = tmp_path / "run"
    _run(run_dir)
    with held(run_dir) as folder:
        folder.begin()
        shutil.copytree(run_dir, tmp_path / "copy")
        if how.startswith("removed") or how == "started over":
            shutil.rmtree(run_dir)
        else:
            for path in run_dir.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if how in ("removed and made anew", "started over"):
            run_dir.mkdir()
        if how == "removed and copied back":
            (tmp_path / "copy").rename(run_dir)
        if how.endswith("started over"):
            with held(run_dir) as another:
                another.begin()
        words = {
            "removed": "is not there any more",
            "removed and made anew": "is another folder now",
            "removed and copied back": "is another folder now",
            "emptied": "was emptied",
        }
        assert words.get(how, "holds another run now") in folder.lost()
        assert "start it anew" in folder.lost() and "--resume" not in folder.lost()
        with pytest.raises(RunFolderLost, match="nothing more is written"):
            folder.identity.check()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_folder_that_is_out_of_reach_is_not_taken_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def stat(*_: object, **__: object) -> os.stat_result:
        raise OSError(number, os.strerror(number))

    with held(tmp_path) as folder:
        folder.begin()
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", stat)
            folder.check()
            folder.identity.check()
            lost = folder.lost()
            remove_partial(tmp_path)
        assert lost == folder.lost() == ""


def test_a_run_keeps_its_identity_through_a_resume_and_a_new_one_gets_its_own(tmp_path: Path) -> None:
    with held(tmp_path) as folder:
        folder.keep_id()  # of a release without ids
        first = folder.identity
    assert first.run_id
    with held(tmp_path) as folder:
        folder.keep_id()
        assert folder.identity == first
        folder.begin()
        assert folder.identity.run_id not in ("", first.run_id)


def _in_another_process(folder: Path) -> str:
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe()
    child = context.Process(target=_try, args=(str(folder), theirs), daemon=True)
    child.start()
    assert ours.poll(60)
    outcome: str = ours.recv()
    child.join(60)
    return outcome


def _try(folder: str, pipe: object) -> None:
    try:
        with held(Path(folder)):
            pipe.send("held")  # type: ignore[attr-defined]
    except ConfigError as error:
        pipe.send(str(error))  # type: ignore[attr-defined]


def test_a_disk_without_room_for_the_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(ConfigError, match=r"run.dir: cannot write .*\.lock: No space left on device"), held(tmp_path):
        pass
