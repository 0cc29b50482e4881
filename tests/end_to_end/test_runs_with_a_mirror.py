"""A run whose folder is copied to a storage, and that goes on from there where nothing else of it is left."""

import shutil
from pathlib import Path

import pytest
from conftest import CommandLine, wait_until
from same_run import assert_same_run

SETTINGS = {
    "run.num_ticks": 8,
    "checkpoint.every": 2,
    "evaluation.every": 0,
    "schedule.max_staleness": 2,
    "observability.tensorboard": "false",
}


@pytest.fixture(scope="module")
def undisturbed(llamarl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    llamarl.train(run, {**SETTINGS, "run.runtime": '"inline"'})
    return run


def test_a_run_whose_machine_is_lost_goes_on_from_its_mirror_to_the_same_bits(
    llamarl: CommandLine, undisturbed: Path, tmp_path: Path
) -> None:
    url, lost, back = f"file://{tmp_path}/storage/x", tmp_path / "lost", tmp_path / "back"
    running = llamarl.start(lost, {**SETTINGS, "run.mirror": url})
    wait_until(
        lambda: "tick_000003" in _manifest(tmp_path / "storage" / "x"),
        limit_s=120,
        what="two checkpoints in the mirror",
    )
    running.kill()
    shutil.rmtree(lost)
    told = llamarl.run(["train", "--resume", url, "--dry-run", "--run.dir", str(back)])
    assert f"they go to {back}" in told.stderr, told.stderr
    assert not back.exists()
    llamarl.run(["train", "--resume", url, "--run.dir", str(back)])
    assert_same_run(undisturbed, back)
    again = llamarl.run(["train", "--resume", url, "--run.dir", str(tmp_path / "copy"), "--run.runtime=inline"])
    assert "is complete at 8 ticks" in again.stdout, again.stderr
    assert_same_run(undisturbed, tmp_path / "copy")


def _manifest(mirror: Path) -> str:
    path = mirror / "manifest.json"
    return path.read_text() if path.exists() else ""


def test_a_mirror_in_a_strangers_folder_is_refused_in_ones_own_taken_and_left_behind_by_fork_and_replay(
    llamarl: CommandLine, tmp_path: Path
) -> None:
    inline = {
        "run.runtime": '"inline"',
        "run.cores": 2,
        "evaluation.every": 0,
        "run.num_ticks": 2,
        "checkpoint.every": 1,
    }
    run, url = tmp_path / "run", f"file://{tmp_path}/storage"
    llamarl.train(run, {**inline, "run.mirror": url})
    longer = ["--run.num_ticks", "3"]
    (run / ".begun_by").rename(tmp_path / "mark")
    refused = llamarl.run(["train", "--resume", str(run), *longer], status=2)
    assert f"--run.mirror {url}" in refused.stderr
    (tmp_path / "mark").rename(run / ".begun_by")
    llamarl.run(["train", "--resume", str(run), *longer])
    assert '"tick": 2' in _manifest(tmp_path / "storage")
    for words in (
        ["--resume", str(run), "--fork", str(tmp_path / "fork"), "--run.num_ticks", "4"],
        ["--replay", str(run), "--run.dir", str(tmp_path / "replay")],
    ):
        llamarl.run(["train", *words])
    second = llamarl.train(tmp_path / "second", {**inline, "run.mirror": url}, status=2)
    assert "holds another run" in second.stderr
