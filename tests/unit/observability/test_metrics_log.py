"""metrics.jsonl: rows in order, one spelling, cut and continued on resume."""

import math
import operator
import os
from pathlib import Path

import numpy as np
import pytest
from tools.metric_keys import PAGE, page

from llamarl.errors import ConfigError, LlamaRLError
from llamarl.observability.keys import KEYS, is_timing_key, key_order
from llamarl.observability.metrics import (
    MetricsLog,
    TickJoin,
    WarningLog,
    merge_metrics,
    read_metrics,
    read_warnings,
    row_to_line,
    strip_timing,
)
from llamarl.observability.writing import append_all, replace_file


def test_ticks_leave_in_order_when_the_last_executor_has_reported() -> None:
    join: TickJoin[str] = TickJoin(["generator", "trainer"])
    assert join.add("generator", 0, "g0") == []
    assert join.add("generator", 1, "g1") == []
    assert join.add("trainer", 1, "t1") == []  # complete, but tick 0 is not
    assert join.add("trainer", 0, "t0") == [
        (0, {"generator": "g0", "trainer": "t0"}),
        (1, {"generator": "g1", "trainer": "t1"}),
    ]


def test_items_of_a_tick_are_in_the_order_of_the_executors_whoever_came_first() -> None:
    join: TickJoin[int] = TickJoin(["a", "b"], first_tick=5)
    join.add("b", 5, 2)
    [(tick, items)] = join.add("a", 5, 1)
    assert tick == 5 and list(items) == ["a", "b"]


@pytest.mark.parametrize(("executor", "tick"), [("a", 3), ("a", 2), ("x", 3)])
def test_a_report_that_cannot_be_is_refused(executor: str, tick: int) -> None:
    join: TickJoin[int] = TickJoin(["a", "b"], first_tick=3)
    join.add("a", 3, 1)
    with pytest.raises(AssertionError):
        join.add(executor, tick, 1)


def test_a_row_has_stable_order_shortest_floats_whole_counts_and_null_for_nan() -> None:
    row = {
        "zz/own": np.float32(0.5),
        "grad_norm": math.nan,
        "reward/mean": 0.1 + 0.2,
        "policy_version": 3.0,
        "aa/own": math.inf,
        "step": 2,
        "tokens/generated": np.int64(7),
    }
    assert row_to_line(row) == (
        b'{"step": 2, "policy_version": 3, "reward/mean": 0.30000000000000004, "tokens/generated": 7, '
        b'"grad_norm": null, "aa/own": null, "zz/own": 0.5}\n'
    )


def test_metrics_of_executors_are_merged_and_their_times_and_tokens_add_up() -> None:
    row = merge_metrics(
        4,
        {
            "generator": {"tokens/generated": 5.0, "time/weight_sync_s": 1.0},
            "teacher": {"tokens/generated": 7.0},
            "trainer": {"time/weight_sync_s": 0.5, "lr": 1.0},
        },
    )
    assert row == {"step": 4, "tokens/generated": 12.0, "time/weight_sync_s": 1.5, "lr": 1.0}


def test_two_values_under_one_key_are_refused_with_both_owners() -> None:
    with pytest.raises(ValueError, match="tick 4: generator reports entropy = 1.0, trainer reports 2.0"):
        merge_metrics(4, {"generator": {"entropy": 1.0}, "trainer": {"entropy": 2.0}})
    same = {"a": {"x": math.nan, "y": 1.0}, "b": {"x": math.nan, "y": 1.0}}
    assert merge_metrics(0, same)["y"] == 1.0


def test_a_resumed_file_ends_as_that_of_an_uninterrupted_run(tmp_path: Path) -> None:
    rows = [{"step": tick, "reward/mean": tick / 7} for tick in range(8)]
    whole = MetricsLog(tmp_path / "whole")
    killed = MetricsLog(tmp_path / "killed")
    for row in rows:
        whole.write(row)
    for row in rows[:6]:
        killed.write(row)
    os.truncate(killed.path, killed.path.stat().st_size - 5)  # the kill tore the last line
    resumed = MetricsLog(tmp_path / "killed", resume_after_tick=3)
    assert [row["step"] for row in resumed.rows] == [0, 1, 2, 3]
    for row in rows[4:]:
        resumed.write(row)
    assert resumed.path.read_bytes() == whole.path.read_bytes()


def test_a_resume_keeps_the_rows_after_one_that_is_damaged(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for tick in range(4):
        log.write({"step": tick})
    log.path.write_bytes(log.path.read_bytes().replace(b": 1}", b"\xff 1}"))
    assert [row["step"] for row in MetricsLog(tmp_path, resume_after_tick=3).rows] == [0, 2, 3]
    assert log.path.read_bytes() == b'{"step": 0}\n{"step": 2}\n{"step": 3}\n'


def test_a_run_without_a_checkpoint_starts_its_file_over(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write({"step": 0})
    assert MetricsLog(tmp_path, resume_after_tick=-1).rows == ()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_new_run_does_not_overwrite_an_old_one(tmp_path: Path) -> None:
    MetricsLog(tmp_path).write({"step": 0})
    with pytest.raises(ConfigError, match="already holds a run.*--resume.*another run.dir"):
        MetricsLog(tmp_path)
    assert read_metrics(tmp_path) == [{"step": 0}]


def test_reading_leaves_out_a_torn_last_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"step": 1, "rew')
    assert read_metrics(tmp_path) == [{"step": 0}]
    with pytest.raises(LlamaRLError, match="cannot be read"):
        read_metrics(tmp_path / "nowhere.jsonl")


def test_the_rows_of_a_long_run_hold_each_key_once(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0, "reward/mean": 0.5}\n{"step": 1, "reward/mean": 1.0}\n')
    first, second = (list(row) for row in read_metrics(tmp_path))
    assert first == ["step", "reward/mean"] and all(map(operator.is_, first, second))


def full(data: bytes) -> int:
    with open("/dev/full", "wb", buffering=0) as file:
        return file.write(data)


@pytest.mark.parametrize(
    ("key", "timing"),
    [
        ("time/step_s", True),
        ("idle/critic", True),
        ("tokens_per_s/generated", True),
        ("mine/frames_per_s", True),
        ("reward/mean", False),
        ("staleness/max", False),
    ],
)
def test_which_keys_depend_on_timing(key: str, timing: bool) -> None:
    assert is_timing_key(key) is timing
    assert (key in strip_timing({key: 1.0})) is not timing


def test_key_names_are_unique_and_known_ones_come_first_in_table_order() -> None:
    names = [key.name for key in KEYS]
    assert len(set(names)) == len(names)
    assert key_order(["zeta", "lr", "alpha", "step", "reward/mean"]) == ["step", "reward/mean", "lr", "alpha", "zeta"]


def test_the_page_on_keys_holds_the_table_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/tools/metric_keys.py"


def test_an_empty_file_of_a_run_that_ended_before_its_first_tick_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    MetricsLog(tmp_path)


def test_links_in_a_runs_folder_are_not_written_through(tmp_path: Path) -> None:
    secret, run_dir = tmp_path / "secret", tmp_path / "run"
    secret.write_text("a key\n")
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").symlink_to(tmp_path / "not there yet")
    (run_dir / ".config.toml.partial").symlink_to(secret)
    with pytest.raises(LlamaRLError, match=r"metrics\.jsonl"):
        MetricsLog(run_dir)
    replace_file(run_dir / "config.toml", b"new")
    assert (run_dir / "config.toml").read_bytes() == b"new" and not (run_dir / "config.toml").is_symlink()
    assert secret.read_text() == "a key\n" and not (tmp_path / "not there yet").exists()


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:3]))
    with open(tmp_path / "f", "wb", buffering=0) as file:
        append_all(file.fileno(), b"0123456789")
    assert (tmp_path / "f").read_bytes() == b"0123456789"


def test_a_torn_warning_hides_none_of_those_behind_it(tmp_path: Path) -> None:
    log = WarningLog(tmp_path)
    log.write(3, "sink", "one")
    log.append_lines(b'{"step": 4, "ki\n' + b"[" * 100_000 + b'\n{"step": "x", "kind": "", "text": ""}\n')
    log.write(5, "trace", "two")
    assert [warning["text"] for warning in read_warnings(tmp_path)] == ["one", "two"]
    assert WarningLog(tmp_path, resume_after_tick=5).said == {"sink", "trace"}
