"""Nodes, ranks and controllers of a job on a Ray cluster die; what is told, when, and with which bits it ends (``make test-cluster``)."""

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosted_jobs import ON_A_CLUSTER, SMALL, begin, controllers, left_on, run_dir_of, train, wait_for_none_left
from namespace_hosts import NamespaceHost
from ray_hosts import RayHosts, ray_hosts
from same_run import assert_same_run

pytestmark = ON_A_CLUSTER
TICKS = 14
TINY = ("tiny", *SMALL, "--run.num_ticks", str(TICKS), "--checkpoint.every", "4")
APART = ("--on", "generator=n1", "--on", "reward=n0", "--on", "trainer=n2", "--on", "evaluator=n0")


@pytest.fixture(scope="module")
def one_machine(folder: Path) -> Path:
    train(None, folder / "one", *TINY)
    return folder / "one"


@pytest.fixture
def four() -> Iterator[RayHosts]:
    """The last node is a spare."""
    with ray_hosts(4, "10.84.0") as made:
        yield made


@pytest.fixture
def three() -> Iterator[RayHosts]:
    with ray_hosts(3, "10.83.0") as made:
        yield made


def rows(run_dir: Path) -> int:
    return (run_dir / "metrics.jsonl").read_text().count("\n")


def wait_for_row(cluster: RayHosts, name: str, count: int, controller: subprocess.Popen[str]) -> None:
    while rows(run_dir_of(cluster, name)) < count:
        assert controller.poll() is None, controller.communicate()[1]
        time.sleep(0.05)


def told(cluster: RayHosts, name: str) -> list[str]:
    """What the run has told its user."""
    path = run_dir_of(cluster, name) / "warnings.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [line["text"] for line in lines if line["kind"] != "mostly_cut"]


def wait_until_told(cluster: RayHosts, name: str, words: str, limit_s: float, after: int = 0) -> float:
    """Seconds until a line with ``words`` is there, beyond the first ``after``."""
    began = time.monotonic()
    while not any(re.search(words, text) for text in told(cluster, name)[after:]):
        assert time.monotonic() - began < limit_s, told(cluster, name)
        time.sleep(0.02)
    return time.monotonic() - began


def ends_well(controller: subprocess.Popen[str], limit_s: float = 250.0) -> str:
    _, errors = controller.communicate(timeout=limit_s)
    assert controller.returncode == 0, errors
    return errors


def rank_of(host: NamespaceHost, executor: str) -> int:
    """The process of a rank itself, not its guard; 0: it is not there."""
    return max(host.named(executor), default=0)


@pytest.mark.parametrize(("way", "limit_s"), [("kill", 3.0), ("cut_off", 10.0)])
def test_a_node_that_is_gone_is_told_and_its_ranks_go_on_with_the_same_bits_on_a_spare_one(
    four: RayHosts, one_machine: Path, way: str, limit_s: float
) -> None:
    controller = begin(four, way, *TINY, *APART)
    wait_for_row(four, way, 6, controller)
    getattr(four.hosts[2], way)()
    took_s = wait_until_told(four, way, r"node n2 is gone", 30.0)
    print(f"{way}: told after {took_s:.2f} s")
    ends_well(controller)
    assert_same_run(one_machine, run_dir_of(four, way))
    print(f"{way}: {told(four, way)}")
    wait_for_none_left([four.hosts[number] for number in (0, 1, 3)])
    assert took_s < limit_s


def test_without_a_node_to_spare_the_run_ends_and_a_resume_on_what_is_left_gives_the_same_bits(
    three: RayHosts, one_machine: Path
) -> None:
    words = (*TINY, "--recovery.max_restarts", "0")
    controller = begin(three, "ends", *words, *APART)
    wait_for_row(three, "ends", 6, controller)
    three.hosts[2].kill()
    began = time.monotonic()
    _, errors = controller.communicate(timeout=60.0)
    print(f"ended {time.monotonic() - began:.1f} s after its node was killed: {errors.strip().splitlines()[-3:]}")
    assert controller.returncode == 1 and "node n2 is gone" in errors, errors
    wait_for_none_left(three.hosts[:2])
    done = subprocess.run(
        three.llamarl("train", "--resume", "/tmp/ends"), capture_output=True, text=True, timeout=250.0
    )
    assert done.returncode == 0, done.stderr
    assert "n2 is no node of the cluster any more" in done.stderr and "the run goes on without n2" in done.stderr
    assert_same_run(one_machine, run_dir_of(three, "ends"))
    wait_for_none_left(three.hosts[:2])


REWARD = """
import subprocess
_child = subprocess.Popen(["sleep", "54321"], start_new_session=True)

def exact(prompt, response, answer):
    return float(response.strip().endswith(answer))
"""


def test_a_killed_controller_leaves_nothing_on_any_node_and_the_next_job_begins(three: RayHosts, folder: Path) -> None:
    (run_dir_of(three, "reward.py")).write_text(REWARD)
    (folder / "reward.py").write_text(REWARD)
    words = (*TINY, "--task.reward", "{}/reward.py:exact")
    here = [word.format(folder) if word.startswith("{}") else word for word in words]
    train(None, folder / "detached", *here)
    there = [word.format("/tmp") if word.startswith("{}") else word for word in words]
    controller = begin(three, "lost", *there, "--on", "generator=n1", "--on", "reward=n2", "--on", "trainer=n2")
    wait_for_row(three, "lost", 5, controller)
    assert any("sleep 54321" in line for line in three.hosts[2].commands().values()), "a grandchild that called setsid"
    for pid in controllers(three.hosts[0]):
        os.kill(pid, signal.SIGKILL)
    controller.communicate()

    def left() -> list[str]:
        lines = [line for host in three.hosts for line in host.commands().values() if "sleep 54321" in line]
        return lines + [line for host in three.hosts for line in left_on(host)]

    began = time.monotonic()
    while found := left():
        assert time.monotonic() - began < 10.0, found
        time.sleep(0.1)
    print(f"nothing was left {time.monotonic() - began:.1f} s after the controller was killed")
    assert three.alive() == 3
    done = subprocess.run(
        three.llamarl("train", "--resume", "/tmp/lost"), capture_output=True, text=True, timeout=250.0
    )
    assert done.returncode == 0, done.stderr
    assert_same_run(folder / "detached", run_dir_of(three, "lost"))
    wait_for_none_left(three.hosts)


def test_ranks_that_are_killed_at_twenty_random_moments_change_no_bit(three: RayHosts, folder: Path) -> None:
    words = ("tiny", *SMALL, "--run.num_ticks", "240", "--checkpoint.every", "15", "--recovery.max_restarts", "100")
    train(None, folder / "long", *words)
    random_ = random.Random(5)
    controller = begin(three, "killed", *words, *APART)
    where = {"generator": 1, "reward": 0, "trainer": 2, "evaluator": 0}
    times: list[tuple[str, float, float]] = []
    names = list(where) + random_.choices(list(where), k=16)
    for name in names:
        time.sleep(random_.uniform(0.3, 1.2))
        if controller.poll() is not None:
            break
        before = len(told(three, "killed"))
        while not (pid := rank_of(three.hosts[where[name]], name)):
            assert controller.poll() is None, controller.communicate()[1]
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        told_s = wait_until_told(three, "killed", rf"{name}.*killed by signal 9", 30.0, before)
        while rank_of(three.hosts[where[name]], name) in (0, pid) and controller.poll() is None:
            time.sleep(0.02)
        times.append((name, told_s, time.monotonic() - killed_s))
    ends_well(controller)
    for name, told_s, back_s in times:
        print(f"{name}: told after {told_s:.2f} s, another process after {back_s:.2f} s")
    assert len(times) == 20, "all fell while it ran"
    assert_same_run(folder / "long", run_dir_of(three, "killed"))
    wait_for_none_left(three.hosts)
    assert max(told_s for _, told_s, _ in times) < 1.0 and max(back_s for *_, back_s in times) < 4.0


def test_a_rank_that_is_stopped_for_thirty_seconds_is_not_dead_and_past_its_deadline_it_is_replaced(
    three: RayHosts, one_machine: Path
) -> None:
    controller = begin(three, "stopped", *TINY, *APART)
    wait_for_row(three, "stopped", 4, controller)
    pid = rank_of(three.hosts[1], "generator")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(30.0)
    os.kill(pid, signal.SIGCONT)
    ends_well(controller)
    assert not told(three, "stopped")
    assert_same_run(one_machine, run_dir_of(three, "stopped"))
    controller = begin(three, "replaced", *TINY, *APART, "--deadlines.step_s", "10")
    wait_for_row(three, "replaced", 4, controller)
    os.kill(rank_of(three.hosts[1], "generator"), signal.SIGSTOP)
    ends_well(controller)
    assert any("it was stopped (SIGSTOP)" in text for text in told(three, "replaced")), told(three, "replaced")
    assert_same_run(one_machine, run_dir_of(three, "replaced"))
    wait_for_none_left(three.hosts)
