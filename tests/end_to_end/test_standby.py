"""A controller is gone; another host, which holds a copy of the run's folder, goes on with the run to the same bits."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import CommandLine, rows, wait_until
from loopback_hosts import KEY, LoopbackHost, loopback_hosts
from test_survival import what_counts

sys.path.append(str(Path(__file__).resolve().parents[1]))
from holding_sink import HOLD_AT, hold_at, let_go

SETTINGS = {
    "run.num_ticks": 8,
    "generator.max_segments": 2,
    "generator.oversubscription": 1.5,
    "checkpoint.every": 3,
    "evaluation.every": 0,
}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LoopbackHost]:
    with loopback_hosts("b", environment={"XDG_CACHE_HOME": str(tmp_path / "cache")}) as (one,):
        yield one


def standby(host: LoopbackHost, tmp_path: Path) -> list[str]:
    key = tmp_path / "key"
    key.write_text(KEY.hex())
    key.chmod(0o600)
    return ["--standby", f"127.0.0.1:{host.worker.port}", f"--hosts.key={key}", "--hosts.standby_after_s=1"]


def taken_over(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "cache" / "llamarl" / "worker" / "taken_over"
    return list(folder.iterdir()) if folder.is_dir() else []


def test_a_run_whose_controller_is_killed_goes_on_at_its_standby_to_the_same_bits(
    llamarl: CommandLine, tmp_path: Path, host: LoopbackHost
) -> None:
    assert llamarl.train(tmp_path / "undisturbed", SETTINGS).returncode == 0
    hold_at(tmp_path / "run", row=5)
    run = llamarl.start(tmp_path / "run", SETTINGS | HOLD_AT, *standby(host, tmp_path))
    wait_until(lambda: len(rows(tmp_path / "run")) >= 5 or run.poll() is not None, limit_s=120, what="5 rows")
    time.sleep(1.5)  # for the copy, which is a second behind
    assert run.poll() is None and len(rows(tmp_path / "run")) == 5
    os.kill(run.pid, signal.SIGKILL)
    let_go(tmp_path / "run")
    wait_until(lambda: bool(taken_over(tmp_path)), limit_s=60, what="the standby")
    (copy,) = taken_over(tmp_path)
    wait_until(lambda: (copy / "model" / "model.safetensors").exists(), limit_s=200, what="the end of the run")
    wait_until(lambda: len(rows(copy)) == 8, limit_s=30, what="its last row")
    assert what_counts(copy) == what_counts(tmp_path / "undisturbed")
    log = (copy / "standby.log").read_text()
    assert "goes on from its journal" in log, log


def test_nobody_goes_on_with_a_run_that_has_ended(llamarl: CommandLine, tmp_path: Path, host: LoopbackHost) -> None:
    done = llamarl.train(tmp_path / "run", {**SETTINGS, "run.num_ticks": 1}, *standby(host, tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    time.sleep(2.0)
    assert not taken_over(tmp_path)
    assert not list((tmp_path / "cache" / "llamarl" / "worker" / "runs").iterdir())


def test_a_standby_that_lacks_the_runs_data_or_cannot_be_reached_is_refused(
    llamarl: CommandLine, tmp_path: Path, host: LoopbackHost
) -> None:
    words = standby(host, tmp_path)
    nobody = llamarl.train(tmp_path / "run", SETTINGS, *words, "--standby", "127.0.0.1:1")
    assert nobody.returncode == 2 and "hosts.standby: host 127.0.0.1:1" in nobody.stderr, nobody.stderr
