"""Processes on other hosts die, are brought up again there, and the run ends with the bits of one machine that nobody disturbed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import CommandLine, rows, wait_until
from forked_command import Started
from loopback_hosts import KEY, LoopbackHost, loopback_hosts

sys.path.append(str(Path(__file__).resolve().parents[1]))
from holding_sink import HOLD_AT, hold_at, let_go
from killing import ranks
from same_run import assert_same_run

SETTINGS = {
    "run.num_ticks": 9,
    "generator.max_segments": 2,
    "generator.oversubscription": 1.5,
    "generator.shards": 2,
    "generator.threads": 1,
    "checkpoint.every": 3,
    "evaluation.every": 4,
}
ON = {"generator": ["0", "1"], "reward": ["1"], "trainer": ["1"], "evaluator": ["0"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("survival_on_hosts")
    (folder / "key").write_text(KEY.hex())
    (folder / "key").chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    done = CommandLine().train(folder / "undisturbed", SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "undisturbed"


@pytest.fixture
def hosts(folder: Path) -> Iterator[list[LoopbackHost]]:
    with loopback_hosts("ab", environment={"XDG_CACHE_HOME": str(folder / "cache-{name}")}) as hosts:
        yield hosts


def over(hosts: Sequence[LoopbackHost], folder: Path, run_folder: str = "own") -> dict[str, Any]:
    names = [f"127.0.0.1:{host.worker.port}" for host in hosts]
    return {
        **SETTINGS,
        "hosts.workers": json.dumps(names),
        "hosts.key": json.dumps(str(folder / "key")),
        "hosts.run_folder": json.dumps(run_folder),
        **{f"hosts.on.{executor}": json.dumps(on) for executor, on in ON.items()},
    }


def kill(hosts: Sequence[LoopbackHost], *executors: str) -> None:
    up: dict[str, int] = {}

    def there() -> bool:
        for host in hosts:
            up.update(ranks(host.process.pid))
        return all(name in up for name in executors)

    wait_until(there, limit_s=30, what="its processes")
    for name in executors:
        os.kill(up[name], signal.SIGKILL)


def scale(llamarl: CommandLine, run_dir: Path, replicas: int) -> str:
    """Ask for so many replicas; their hosts, by place."""
    told = llamarl.run(["scale", str(run_dir), f"generator={replicas}", "--wait", "60"])
    assert told.returncode == 0, told.stderr
    found = re.search(rf"generator: {replicas} replicas? from tick \d+ on \(hosts: (.*)\)", told.stdout)
    assert found is not None, told.stdout
    return found[1]


def wait_for_rows(run: Started, run_dir: Path, number: int) -> None:
    file = run_dir / "metrics.jsonl"

    def there() -> bool:
        return run.poll() is not None or (file.is_file() and file.read_text().count("\n") >= number)

    wait_until(there, limit_s=120, what=f"{number} rows")


def test_ranks_of_other_hosts_die_and_replicas_come_there_and_every_byte_is_that_of_the_undisturbed_run(
    llamarl: CommandLine, folder: Path, undisturbed: Path, hosts: list[LoopbackHost]
) -> None:
    run_dir = folder / "killed"
    run = llamarl.start(run_dir, over(hosts, folder))
    kills = [(1, ["generator"]), (2, ["trainer"]), (4, ["reward", "evaluator"]), (5, ["trainer", "generator 1"])]
    for number, (num_rows, executors) in enumerate(kills):
        wait_for_rows(run, run_dir, num_rows)
        if num_rows == 4:
            assert scale(llamarl, run_dir, 2) == ", ".join(f"127.0.0.1:{host.worker.port}" for host in hosts)
        time.sleep(0.05 * number)  # another moment of its tick each time
        kill(hosts, *executors)
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    assert len(re.findall(r"died .*SIGKILL.*brought up again", said)) == 6, said
    assert_same_run(run_dir, undisturbed)
    restarts = {key for row in rows(run_dir) for key in row if key.endswith("_restarts")}
    assert restarts >= {"recovery/generator_restarts", "recovery/trainer_restarts"}


@pytest.mark.long  # beside make test-hosts, which cuts links for good
def test_hosts_that_are_gone_are_replaced_by_the_spare_one_and_every_byte_is_that_of_the_undisturbed_run(
    llamarl: CommandLine, folder: Path, undisturbed: Path
) -> None:
    run_dir = folder / "moved"
    with loopback_hosts("cde", environment={"XDG_CACHE_HOME": str(folder / "cache-{name}")}) as three:
        run = llamarl.start(run_dir, over(three, folder))
        wait_for_rows(run, run_dir, 4)
        three[1].kill()  # reward and trainer
        wait_for_rows(run, run_dir, 6)
        three[0].kill()  # generator and evaluator
        said, _ = run.communicate(timeout=240)
        assert run.returncode == 0, said
        assert len(re.findall(r"the worker on host .* has ended, or its host; brought up again", said)) == 4, said
        assert_same_run(run_dir, undisturbed)


@pytest.mark.long  # in short: the first test of this file
def test_replicas_go_from_two_to_one_to_three_over_hosts_one_of_which_is_lost_and_every_byte_is_that_of_one_replica(
    llamarl: CommandLine, folder: Path
) -> None:
    one, run_dir = folder / "one_replica", folder / "scaled"
    elastic = {**SETTINGS, "generator.shards": 4, "run.num_ticks": 12}
    done = llamarl.train(one, elastic)
    assert done.returncode == 0, done.stdout + done.stderr
    with loopback_hosts("cde", environment={"XDG_CACHE_HOME": str(folder / "cache-{name}")}) as three:
        c, _, e = (f"127.0.0.1:{host.worker.port}" for host in three)
        apart = {"hosts.on.generator": '["0", "2"]', "generator.dp": 2}
        run = llamarl.start(run_dir, {**over(three, folder), **elastic, **apart})
        wait_for_rows(run, run_dir, 2)
        assert scale(llamarl, run_dir, 1) == c
        wait_for_rows(run, run_dir, 4)
        assert scale(llamarl, run_dir, 3) in (f"{c}, {e}, {c}", f"{c}, {e}, {e}"), "c may have no core left"
        refused = llamarl.run(["scale", str(run_dir), "generator=5", "--wait", "60"])
        assert (refused.returncode, "5 replicas are more than generator.shards = 4" in refused.stderr) == (2, True), (
            refused.stderr
        )
        wait_for_rows(run, run_dir, 7)
        three[2].kill()
        said, _ = run.communicate(timeout=240)
        assert run.returncode == 0, said
        assert len(re.findall(r"'generator' rank \d died .*the worker on host .* has ended.*again", said)) == 1, said
        assert_same_run(run_dir, one)
        settings = tomllib.loads((run_dir / "config.toml").read_text())
        assert settings["generator"]["dp"] == 3 and set(settings["hosts"]["on"]["generator"]) == {c, e}


@pytest.mark.long  # in short: tests/multiprocess/test_resume_without_hosts.py
def test_a_controller_that_dies_together_with_a_host_goes_on_without_that_host_from_what_is_complete(
    llamarl: CommandLine, folder: Path, undisturbed: Path, hosts: list[LoopbackHost]
) -> None:
    run_dir = folder / "resumed"
    hold_at(run_dir, row=6)  # the trainer has saved its state of tick 5 on its host, from where nobody has taken it yet
    run = llamarl.start(run_dir, {**over(hosts, folder), **HOLD_AT, "hosts.absent_after_s": 1})
    wait_for_rows(run, run_dir, 6)
    os.kill(run.pid, signal.SIGKILL)
    hosts[1].kill()  # reward and trainer
    let_go(run_dir)
    run.communicate(timeout=60)
    done = llamarl.run(["train", "--resume", str(run_dir)])
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    left, gone = (f"127.0.0.1:{host.worker.port}" for host in hosts)
    assert f"left out: host {gone}: no worker at {gone}: Connection refused" in said, said
    assert f"the run goes on without {gone}: reward on {left}; trainer on {left}" in said, said
    unfinished = f"{run_dir / 'checkpoints' / 'tick_000005'} was not finished when the run ended, and is left out; "
    assert f"{unfinished}the newest complete one is tick_000002" in said, said
    told = re.search(r"goes on from its journal: generator after (\d+) ticks?, reward after (\d+) ticks?", said)
    assert told is not None and {int(ticks) for ticks in told.groups()} == {5}, said
    assert_same_run(run_dir, undisturbed)
    assert gone in (run_dir / "config.toml").read_text(), "should it be back, the next resume has it again"
