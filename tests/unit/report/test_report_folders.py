"""Whatever lies in a run's folder, a page comes of it, or one message."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest
from made_run import MadeRun, decode_block

from llamarl.api.run import Run
from llamarl.cli.main import main
from llamarl.errors import ConfigError, FileError
from llamarl.report.page import make_page, numbered
from llamarl.report.run_data import RunReader, metrics_columns
from llamarl.report.run_files import MAX_RUNS, open_run, read_run, runs_of, title_of


def _run_block(run: Path) -> dict[str, object]:
    return decode_block(RunReader(run).blocks(5_000_000)["run"])


@pytest.mark.parametrize("gone", ["metrics.jsonl", "trace.json", "rollouts", "job.json", "config.toml"])
def test_a_missing_file_is_named_and_the_others_still_tell(tmp_path: Path, gone: str) -> None:
    run = MadeRun(ticks=2).write(tmp_path / "run")
    (shutil.rmtree if (run / gone).is_dir() else os.unlink)(run / gone)
    block = _run_block(run)
    assert any(gone in text for text in block["missing"])
    assert len(block["missing"]) == 1
    assert block["ticks"] == (0 if gone == "metrics.jsonl" else 2)


def test_a_run_that_imitates_lacks_no_rollouts(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[algorithm]\nname = "sft"\n')
    assert not any("rollouts" in text for text in read_run(tmp_path).missing)


def test_torn_last_lines_cost_one_row(tmp_path: Path) -> None:
    run = MadeRun(ticks=3).write(tmp_path / "run")
    for name in ("metrics.jsonl", "trace.json", "rollouts/tick_000002.jsonl"):
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[:-30])
    block = _run_block(run)
    assert (block["ticks"], block["responses"], block["status"]) == (2, 23, "stopped")


def test_a_run_of_no_tick_yet_has_a_page(tmp_path: Path) -> None:
    run = MadeRun(ticks=1).write(tmp_path / "run")
    for name in ("metrics.jsonl", "trace.json"):
        (run / name).unlink()
    shutil.rmtree(run / "rollouts")
    block = _run_block(run)
    assert (block["ticks"], block["responses"], block["findings"]) == (0, 0, [])


def test_a_run_that_goes_on_is_told_by_its_lock_and_the_lock_is_left_alone(tmp_path: Path) -> None:
    run = MadeRun(ticks=2, settings={"run.num_ticks": "9"}).write(tmp_path / "run")
    assert read_run(run).status == "stopped"
    (run / ".lock").write_text(f"{os.getpid()}\n")
    assert read_run(run).status == "stopped"  # a lock that nobody holds
    with open(run / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert read_run(run).status == "running"
    assert read_run(run).status == "stopped"


def test_what_is_no_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    (tmp_path / "file").touch()
    for named, words in (("gone", "no folder"), ("file", "is a file"), ("runs", "no folder in it does")):
        with pytest.raises(ConfigError, match=words):
            open_run(str(tmp_path / named))


def test_a_folder_of_runs_stands_for_the_newest_in_it(tmp_path: Path) -> None:
    folder, one = tmp_path / "runs", MadeRun(ticks=1).write(tmp_path / "one")
    (folder / "no run").mkdir(parents=True)
    for number in range(MAX_RUNS + 2):
        run = folder / f"run{(7 * number) % 18}"  # began in another order than that of their names
        run.mkdir()
        (run / "config.toml").write_text("")
        os.utime(run / "config.toml", (1000 + number, 1000 + number))
    opened = [open_run(str(folder)), open_run(str(one))]
    expected = [folder / f"run{(7 * number) % 18}" for number in range(2, MAX_RUNS + 2)]
    assert runs_of(opened) == [*expected, one]
    assert title_of(opened) == "runs (the newest 16 of 18 runs), one"


def test_a_pipe_in_a_run_of_a_folder_is_refused(tmp_path: Path) -> None:
    run = MadeRun(ticks=1).write(tmp_path / "run")
    os.mkfifo(run / "rollouts" / "pipe")
    with pytest.raises(FileError, match="is a pipe"):
        open_run(str(tmp_path))
    with pytest.raises(FileError, match="is a pipe"):
        read_run(run)  # one that began after the page was opened


def test_columns_keep_every_value_and_say_which_rows_do_not_add_up() -> None:
    ledger = {"tokens/carried": 0, "tokens/failed": 0, "tokens/unused": 0}
    rows = [
        {"step": 0, "tokens/generated": 9, "tokens/trained": 9, **ledger},
        {"step": 1, "tokens/generated": 9, "tokens/trained": 7, "eval/accuracy": 0.5, **ledger},
    ]
    columns = metrics_columns(rows)
    assert columns["columns"]["tokens/trained"] == [9, 7] and columns["columns"]["eval/accuracy"] == [None, 0.5]
    assert columns["imbalance"] == [0, 2] and columns["units"]["tokens/trained"] == "tokens"
    assert metrics_columns([]) == {"columns": {}, "units": {}, "meanings": {}, "imbalance": []}


def test_the_data_stay_within_the_room_and_the_page_says_what_it_carries(tmp_path: Path) -> None:
    import random

    noise = random.Random(0)
    run = MadeRun(ticks=10, groups=6, text=lambda t, g, s: str(noise.getrandbits(2000))).write(tmp_path / "run")
    whole = RunReader(run).blocks(5_000_000)
    assert decode_block(whole["run"])["responses_with_text"] == 240
    room = sum(map(len, whole.values())) // 2
    half = RunReader(run).blocks(room)
    block = decode_block(half["run"])
    assert sum(map(len, half.values())) <= room and block["responses"] == 240
    assert 70 <= block["responses_with_text"] < 240 and block["responses_with_text"] % 4 == 0  # whole groups, room used
    assert {name for name in half if name.startswith("detail/")} == {f"detail/{tick}" for tick in range(10)}


def test_a_reader_reads_again_only_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamarl.report import run_data

    run = MadeRun(ticks=3).write(tmp_path / "run")
    reader, read = RunReader(run), []
    real = run_data.index_file
    monkeypatch.setattr(run_data, "index_file", lambda tick, path: (read.append(tick), real(tick, path))[1])
    first = reader.blocks(5_000_000)
    assert read == [0, 1, 2] and reader.blocks(5_000_000) == first and read == [0, 1, 2]
    path = run / "rollouts" / "tick_000001.jsonl"
    path.write_bytes(path.read_bytes() + b"{}\n")
    second = reader.blocks(5_000_000)
    assert read == [0, 1, 2, 1] and second["detail/0"] == first["detail/0"]


def test_no_text_of_a_run_reaches_the_pages_markup(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    run = MadeRun(ticks=1, text=lambda t, g, s: evil, prompt=lambda t, g: evil, answer=evil).write(tmp_path / "run")
    page = make_page(evil, numbered([RunReader(run).blocks(5_000_000)]))
    assert "alert(" not in page.replace("&lt;script&gt;alert(1)", "").replace("onerror=alert(2)&gt;", "")
    assert page.count("<script>") == 1 and "&lt;/script&gt;" in page


def test_the_command_writes_one_file_and_says_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    run = MadeRun(ticks=2).write(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr().out
    assert str(run / "report.html") in out and "MB" in out
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "{{" not in page.split("<script")[0]
    assert main(["report", str(run), str(run)]) != 0 and "named twice" in capsys.readouterr().err
    assert main(["report", str(tmp_path), str(run)]) != 0 and "named twice" in capsys.readouterr().err
    assert main(["report", str(run / "rollouts")]) != 0 and "holds no run" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 0 and (tmp_path / "report.html").is_file()
    assert main(["report", str(run), "--out", str(tmp_path / "no" / "x.html")]) != 0
    assert "cannot be written" in capsys.readouterr().err
    assert main(["report", str(run), "--max-mb", "nan"]) != 0


@pytest.mark.parametrize("verb", ["report", "watch"])
def test_a_pipe_anywhere_in_a_run_is_refused_before_anything_waits_for_it(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text("")
    pipe = tmp_path / "warnings.jsonl"
    os.mkfifo(pipe)
    assert main([verb, str(tmp_path)]) == 2
    assert f"{pipe} is a pipe, expected a file" in capsys.readouterr().err


def test_folders_of_a_long_run_are_listed_once_and_not_for_each_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = MadeRun(ticks=7).write(tmp_path / "run")
    listed: list[Path] = []
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: (listed.append(folder), iterdir(folder))[1])
    RunReader(run).blocks(5_000_000)
    assert listed.count(run / "trained") == 1
    listed.clear()
    assert len({sample.tick for sample in Run(run).rollouts()}) == 7
    assert listed.count(run / "trained") == 1 and listed.count(run / "rollouts") <= 3
