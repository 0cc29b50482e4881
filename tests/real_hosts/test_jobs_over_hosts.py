"""The same recipe and the same bits on machines that share nothing: hosts are namespaces (``make test-hosts``)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosted_jobs import FOR_EVER, SMALL, begin, train, train_words, wait_for_none_left
from namespace_hosts import KEY, NamespaceHost, namespace_hosts, why_not
from same_run import assert_same_run, contents

import llamarl.assets
from llamarl.checkpoint.platform import platform_facts
from llamarl.checkpoint.storage import CheckpointStore
from llamarl.errors import CheckpointError
from llamarl.models.exported import why_incomplete

_WHY_NOT = why_not()
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(bool(_WHY_NOT), reason=f"hosts of namespaces: {_WHY_NOT}"),
    pytest.mark.timeout(900),
]
KEEP_ALL = ("--checkpoint.keep", "0")
ONE_EACH = ("--on", "generator=0", "--on", "reward=1", "--on", "trainer=2", "--on", "evaluator=3")
OTHERS = ("--on", "generator=2", "--on", "reward=3", "--on", "trainer=1", "--on", "evaluator=0")
PARALLEL = ("--generator.dp", "2", "--generator.tp", "2", "--trainer.fsdp", "2", "--trainer.tp", "2")
LATEST = ("--schedule.weights", "latest")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Here and on no host: /tmp of a host is its own."""
    with tempfile.TemporaryDirectory(prefix="llamarl-hosts-", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """Here and on every host, at the same path."""
    with tempfile.TemporaryDirectory(prefix="llamarl-hosts-", dir="/var/tmp") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def key(folder: Path) -> Path:
    path = folder / "key"
    path.write_text(KEY.hex())
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def four() -> Iterator[list[NamespaceHost]]:
    with namespace_hosts(4) as made:
        yield made


@pytest.fixture
def three() -> Iterator[list[NamespaceHost]]:
    """For who harms them."""
    with namespace_hosts(3, "10.86.0") as made:
        yield made


@pytest.fixture(scope="module")
def one_machine(folder: Path) -> Path:
    """The tiny recipe, partial rollouts and evaluations among its ticks."""
    train(folder / "one", "tiny", *SMALL, *KEEP_ALL)
    return folder / "one"


@pytest.fixture(scope="module")
def four_machines(folder: Path, key: Path, four: list[NamespaceHost]) -> Path:
    """The same, an executor a host."""
    done = train(folder / "four", "tiny", *SMALL, *KEEP_ALL, *ONE_EACH, hosts=four, key=key)
    assert "generator on 10.87.0.1" in done.stdout + done.stderr and "it has no folder" in done.stdout + done.stderr
    wait_for_none_left(four)
    return folder / "four"


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


# -- the same bits --


def test_four_hosts_that_share_nothing_give_the_bits_of_one_machine(one_machine: Path, four_machines: Path) -> None:
    assert_same_run(one_machine, four_machines)


def test_a_resume_on_other_hosts_gives_the_same_bits(
    one_machine: Path, four_machines: Path, key: Path, four: list[NamespaceHost], folder: Path
) -> None:
    run_dir = folder / "resumed"
    shutil.copytree(four_machines, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "tick_000003")
    shutil.rmtree(run_dir / "model")
    train(run_dir, "--resume", str(run_dir), *OTHERS, hosts=four, key=key)
    assert_same_run(one_machine, run_dir)


def test_four_by_four_ranks_over_four_hosts_give_the_bits_of_one_machine(
    folder: Path, key: Path, four: list[NamespaceHost]
) -> None:
    sizes = ("tiny", *SMALL, *PARALLEL, "--run.num_ticks", "2")
    train(folder / "one-parallel", *sizes)
    where = ("--on", "generator=0,1", "--on", "trainer=2,3", "--on", "evaluator=1", "--on", "reward=3")
    train(folder / "four-parallel", *sizes, *where, hosts=four, key=key)
    assert_same_run(folder / "one-parallel", folder / "four-parallel")
    state = folder / "four-parallel" / "checkpoints" / "tick_000001" / "trainer" / "state"
    assert len(list(state.glob("*.safetensors"))) == 4


def test_a_run_on_the_latest_weights_is_replayed_over_hosts_and_one_over_hosts_on_one_machine(
    folder: Path, key: Path, four: list[NamespaceHost]
) -> None:
    here, there = folder / "latest-here", folder / "latest-there"
    train(here, "tiny", *SMALL, *LATEST)
    train(folder / "replayed-there", "--replay", str(here), *ONE_EACH, hosts=four, key=key)
    assert len(events(here)) > 4
    assert_same_run(here, folder / "replayed-there")
    train(there, "tiny", *SMALL, *LATEST, *ONE_EACH, hosts=four, key=key)
    train(folder / "replayed-here", "--replay", str(there), "--hosts", "here")
    assert_same_run(there, folder / "replayed-here")


def test_an_adapter_on_a_model_that_the_hosts_lack_is_that_of_one_machine(
    folder: Path, key: Path, four: list[NamespaceHost]
) -> None:
    model = folder / "base"
    shutil.copytree(Path(llamarl.assets.__file__).parent / "tiny", model)
    words = ("tiny", *SMALL, "--model.path", str(model), "--lora.rank", "4", "--run.num_ticks", "2")
    for name, more in (("one-lora", {}), ("four-lora", {"hosts": four, "key": key})):
        train(folder / name, *words, *(ONE_EACH if more else ()), **more)  # type: ignore[arg-type]
    adapter = contents(folder / "one-lora" / "adapter")
    assert adapter == contents(folder / "four-lora" / "adapter")
    assert json.loads(adapter["adapter_config.json"])["base_model_name_or_path"] == str(model)


def test_parallel_ranks_over_hosts_that_share_a_folder_give_the_bits_of_one_machine(
    shared: Path, key: Path, four: list[NamespaceHost]
) -> None:
    sizes = ("tiny", *SMALL, "--generator.dp", "2", "--trainer.fsdp", "2", "--run.num_ticks", "2")
    train(shared / "one", *sizes)
    done = train(shared / "three", *sizes, "--on", "generator=0,1", "--on", "trainer=1,2", hosts=four[:3], key=key)
    assert "shared with" in done.stdout + done.stderr
    assert_same_run(shared / "one", shared / "three")


# -- checkpoints --


def test_checkpoints_of_hosts_are_complete_and_each_damage_to_a_file_is_told_by_its_name(
    four_machines: Path, folder: Path
) -> None:
    store = CheckpointStore(four_machines / "checkpoints")
    paths = store.list()
    assert [path.name for path in paths] == ["tick_000001", "tick_000003"]
    for path in paths:
        manifest = store.verify(path).manifest
        assert dict(manifest.platform) == dict(platform_facts()), "all hosts are this machine"
        written_by = {record.path.split("/")[0] for record in manifest.files}
        assert {"generator", "trainer"} <= written_by
    damaged = folder / "damaged"
    shutil.copytree(four_machines, damaged)
    store = CheckpointStore(damaged / "checkpoints")
    checkpoint = store.list()[-1]
    for record in store.verify(checkpoint).manifest.files:
        path = checkpoint / record.path
        data = path.read_bytes()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        with pytest.raises(CheckpointError, match=re.escape(record.path)):
            store.verify(checkpoint)
        path.unlink()
        with pytest.raises(CheckpointError, match=re.escape(record.path)):
            store.verify(checkpoint)
        path.write_bytes(data)
    store.verify(checkpoint)


def test_the_model_of_hosts_is_complete_and_each_damage_to_a_file_is_told_by_its_name(
    four_machines: Path, folder: Path
) -> None:
    model = folder / "damaged-model"
    shutil.copytree(four_machines / "model", model)
    assert why_incomplete(model) is None
    for name, data in contents(model).items():
        if name == "llamarl.json":
            continue
        (model / name).write_bytes(bytes([data[0] ^ 1]) + data[1:])
        assert name in (why_incomplete(model) or "")
        (model / name).unlink()
        assert name in (why_incomplete(model) or "")
        (model / name).write_bytes(data)
    assert why_incomplete(model) is None


# -- deaths --


def long_job(folder: Path, key: Path, hosts: list[NamespaceHost]) -> subprocess.Popen[str]:
    run_dir = folder / f"long{time.monotonic_ns()}"
    words = ("tiny", *SMALL, *FOR_EVER, "--recovery.max_restarts", "0", "--on", "generator=0", "--on", "trainer=2")
    return begin(train_words(run_dir, *words, hosts=hosts, key=key), run_dir)


def seconds_to_the_end(controller: subprocess.Popen[str], limit_s: float) -> tuple[float, str]:
    began = time.monotonic()
    _, errors = controller.communicate(timeout=limit_s)
    assert controller.returncode == 1, errors
    return time.monotonic() - began, errors


def test_a_killed_rank_ends_the_command_with_its_host_rank_pid_and_tick(
    folder: Path, key: Path, three: list[NamespaceHost]
) -> None:
    controller = long_job(folder, key, three)
    os.kill(max(three[2].ranks()), signal.SIGKILL)
    took_s, errors = seconds_to_the_end(controller, 60.0)
    told = rf"executor 'trainer', rank 0 on host {three[2].at} \(pid \d+\), (?:tick \d+|between two ticks): its process was killed by signal 9"
    assert re.search(told, errors), errors
    print(f"the command ended {took_s:.1f} s after a rank was killed")
    wait_for_none_left(three)


def test_a_host_that_is_cut_off_ends_the_command_and_nothing_is_left_on_either_side(
    folder: Path, key: Path, three: list[NamespaceHost]
) -> None:
    controller = long_job(folder, key, three)
    three[2].cut_off()
    took_s, errors = seconds_to_the_end(controller, 60.0)
    told = rf"executor 'trainer', rank 0 on host {three[2].at} \(pid \d+\), (?:tick \d+|between two ticks): host {three[2].at} does not answer"
    assert re.search(told, errors), errors
    assert took_s < 30.0, took_s  # 8 s of silence, 3 s for its files, the end of the others; room for a loaded machine
    print(f"the command ended {took_s:.1f} s after a host was cut off")
    wait_for_none_left(three)


def test_a_rank_that_is_killed_and_a_host_that_is_cut_off_for_good_change_no_bit_where_there_is_a_spare_one(
    folder: Path, key: Path, three: list[NamespaceHost]
) -> None:
    words = ("tiny", *SMALL, "--run.num_ticks", "9", "--checkpoint.every", "3")
    train(folder / "undisturbed", *words)
    run_dir = folder / "disturbed"
    where = ("--on", "generator=0", "--on", "reward=0", "--on", "trainer=1", "--on", "evaluator=1")
    controller = begin(train_words(run_dir, *words, *where, hosts=three, key=key), run_dir)
    os.kill(max(three[0].ranks()), signal.SIGKILL)
    while (run_dir / "metrics.jsonl").read_text().count("\n") < 5:
        assert controller.poll() is None, controller.communicate()
        time.sleep(0.1)
    three[1].cut_off()
    cut_s = time.monotonic()
    _, errors = controller.communicate(timeout=200.0)
    print(f"the command ended {time.monotonic() - cut_s:.1f} s after a host was cut off")
    assert controller.returncode == 0, errors
    assert_same_run(folder / "undisturbed", run_dir)
    told = [json.loads(line)["text"] for line in (run_dir / "warnings.jsonl").read_text().splitlines()]
    assert len([text for text in told if "does not answer" in text and "brought up again" in text]) == 2, told
    wait_for_none_left(three)


def test_replicas_come_to_a_spare_host_once_it_reaches_the_trainer_and_are_replaced_when_it_is_cut_off(
    folder: Path, key: Path, three: list[NamespaceHost]
) -> None:
    words = ("tiny", *SMALL, "--run.num_ticks", "20", "--generator.shards", "4", "--generator.threads", "1")
    train(folder / "one-replica", *words)
    run_dir = folder / "scaled"
    where = ("--on", "generator=0,2", "--on", "reward=1", "--on", "trainer=1", "--on", "evaluator=0")
    controller = begin(train_words(run_dir, *words, *where, hosts=three, key=key), run_dir)
    spare = three[2].at
    three[2].drop_packets_to(three[1])
    asked = scale(run_dir, 2)
    assert asked.returncode == 2, asked.stderr
    told = rf"host {spare} does not reach others: nothing answers at {three[1].address}:\d+ within 5 s"
    assert re.search(told, asked.stderr), asked.stderr
    three[2].let_packets_pass()
    asked = scale(run_dir, 3)
    assert asked.returncode == 0 and f"(hosts: {three[0].at}, {spare}, " in asked.stdout, asked.stdout + asked.stderr
    three[2].cut_off()
    _, errors = controller.communicate(timeout=200.0)
    assert controller.returncode == 0, errors
    assert_same_run(folder / "one-replica", run_dir)
    texts = [json.loads(line)["text"] for line in (run_dir / "warnings.jsonl").read_text().splitlines()]
    # Either its ranks' connection or the one for their files is the first to say that nobody answers.
    assert len([text for text in texts if f"host {spare}" in text and "brought up again" in text]) == 1, texts
    wait_for_none_left(three)


def scale(run_dir: Path, replicas: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llamarl.cli.main", "scale", str(run_dir), f"generator={replicas}", "--wait", "90"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100.0)


def test_a_killed_controller_leaves_nothing_on_any_host(folder: Path, key: Path, three: list[NamespaceHost]) -> None:
    controller = long_job(folder, key, three)
    assert three[0].ranks() and three[2].ranks()
    controller.kill()
    controller.communicate()
    print(f"no process was left {wait_for_none_left(three):.1f} s after the controller was killed")
