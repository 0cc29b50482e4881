"""Placement on machines worked out by hand."""

import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarl.controller.prepare import plan_run, start_fork_servers
from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime import placement as placement_module
from llamarl.runtime.host_placement import Machine
from llamarl.runtime.placement import ColocatedGroup, Placement, all_gpus, core_quota, memory_limit, place


def executor(name: str, *, num_ranks: int = 1, threads: int = 0, device: str = "auto") -> ExecutorSpec:
    return ExecutorSpec(name=name, factory="m:f", num_ranks=num_ranks, threads=threads, device=device)


def settled(*executors: ExecutorSpec, cores: int = 8, cuda_devices: int = 0) -> dict[str, tuple[int, str]]:
    placement = place(executors, [Machine("", cores, cuda_devices)])
    return {spec.name: (spec.threads, spec.device) for spec in placement.executors}


def test_ranks_that_name_no_threads_share_what_the_others_leave() -> None:
    job = (executor("generator", num_ranks=2), executor("reward", threads=1), executor("trainer"))
    assert settled(*job, cores=11) == {"generator": (3, "cpu"), "reward": (1, "cpu"), "trainer": (3, "cpu")}


def test_every_rank_gets_a_thread_when_cores_are_fewer_than_ranks() -> None:
    job = (executor("generator"), executor("reward", threads=4), executor("trainer"))
    assert [threads for threads, _ in settled(*job, cores=2).values()] == [1, 4, 1]


def test_executors_lie_apart_while_there_are_devices_enough() -> None:
    job = (executor("generator", num_ranks=2), executor("trainer", num_ranks=2, device="cuda"))
    placed = settled(*job, cuda_devices=4)
    assert [device for _, device in placed.values()] == ["cuda:0,cuda:1", "cuda:2,cuda:3"]


def test_a_device_named_by_number_is_left_to_its_executor() -> None:
    job = (executor("generator"), executor("trainer", device="cuda:0"))
    assert [device for _, device in settled(*job, cuda_devices=2).values()] == ["cuda:1", "cuda:0"]


def test_ranks_of_two_executors_never_share_devices_unless_they_take_turns() -> None:
    job = (executor("generator", num_ranks=2), executor("trainer", num_ranks=2))
    for devices in (2, 3):
        with pytest.raises(ConfigError, match="would share cuda:.*lower their ranks to"):
            settled(*job, cuda_devices=devices)
    assert [device for _, device in co_located(*job, cuda_devices=2).values()] == ["cuda:0,cuda:1"] * 2
    assert [device for _, device in settled(*job, cuda_devices=0).values()] == ["cpu", "cpu"]
    assert settled(job[0], executor("judge"), cuda_devices=2)["judge"][1] == "cuda:0"  # a lone rank may


def test_executors_share_a_lone_device_and_the_table_says_so() -> None:
    job = (executor("generator"), executor("reward", device="cpu", threads=1), executor("trainer"))
    placement = place(job, [Machine("", 3, 1)])
    assert [spec.device for spec in placement.executors] == ["cuda:0", "cpu", "cuda:0"]
    assert placement.table().splitlines() == [
        "executor   rank    device  threads",
        "generator  0 of 1  cuda:0  1",
        "reward     0 of 1  cpu     1",
        "trainer    0 of 1  cuda:0  1",
        "",
        "3 threads on 3 cores",
        "cuda:0 is shared by generator, trainer: they take turns, and its memory must hold them all",
    ]


def _with_a_filling_trainer(cores: int, *, generator: int = 0, ranks: int = 1, threads: int = 0) -> Placement:
    trainer = replace(executor("trainer", num_ranks=ranks, threads=threads), fills_cores=True)
    job = [executor("generator", threads=generator), executor("reward", threads=1), trainer]
    return place(job, [Machine("", cores, 0)])


@pytest.mark.parametrize(
    ("cores", "generator", "trainer"),
    [
        (1, 1, 1),
        (2, 1, 2),
        (3, 2, 3),
        (4, 3, 4),
        (5, 2, 2),
        (9, 4, 4),
    ],  # from 5 on the two share what the reward leaves
)
def test_who_fills_cores_gets_a_thread_each_of_a_small_machine_and_the_others_share_them_all(
    cores: int, generator: int, trainer: int
) -> None:
    settled = {spec.name: spec.threads for spec in _with_a_filling_trainer(cores).executors}
    assert settled == {"generator": generator, "reward": 1, "trainer": trainer}


def test_who_goes_onto_a_gpu_fills_no_cores() -> None:
    trainer = replace(executor("trainer"), fills_cores=True)
    job = [executor("generator", device="cpu"), executor("reward", threads=1, device="cpu"), trainer]
    placement = place(job, [Machine("", 4, 1)])
    settled = {spec.name: (spec.threads, spec.device, spec.fills_cores) for spec in placement.executors}
    assert settled == {"generator": (1, "cpu", False), "reward": (1, "cpu", False), "trainer": (1, "cuda:0", False)}


def test_a_number_of_threads_and_several_ranks_are_left_as_they_are() -> None:
    one = {spec.name: spec.threads for spec in _with_a_filling_trainer(2, threads=1).executors}
    assert one == {"generator": 1, "reward": 1, "trainer": 1}
    two = {spec.name: spec.threads for spec in _with_a_filling_trainer(4, ranks=2).executors}
    assert two == {"generator": 1, "reward": 1, "trainer": 1}


def test_the_table_says_who_uses_what_the_others_leave() -> None:
    assert _with_a_filling_trainer(2).notes()[0] == "4 threads on 2 cores: trainer uses what the others leave"
    crowded = _with_a_filling_trainer(2, generator=2).notes()[0]
    assert crowded == "5 threads on 2 cores: executors that work at the same time take turns"


@pytest.mark.parametrize(
    ("spec", "cuda_devices", "message"),
    [
        (executor("trainer", device="cuda"), 0, "no CUDA device; set device cpu"),
        (executor("trainer", device="cuda:2"), 2, "there is no cuda:2, this machine has 2 CUDA devices"),
        (executor("trainer", num_ranks=4, device="cuda"), 2, "4 ranks need as many CUDA devices, this machine has 2"),
        (executor("trainer", num_ranks=4), 2, "4 ranks need as many CUDA devices, this machine has 2"),
        (executor("trainer", num_ranks=2, device="cuda:0"), 2, "2 ranks cannot share cuda:0"),
        (executor("trainer", num_ranks=2, device="cuda:0,cuda:0"), 2, "ranks of one executor cannot share a device"),
        (executor("trainer", num_ranks=3, device="cuda:0,cuda:1"), 2, "3 ranks and 2 devices"),
        (executor("trainer", num_ranks=2, device="auto,cpu"), 2, "a list names a GPU for each rank"),
        (executor("trainer", num_ranks=2, device="cuda:0,cuda"), 2, "a list names a GPU for each rank"),
        (executor("trainer", num_ranks=2, device="cpu,cpu"), 0, "a list names a GPU for each rank"),
        (executor("trainer", device="gpu"), 1, "device 'gpu' is unknown, expected auto, cpu, cuda or cuda:N"),
        (executor("trainer", threads=-1), 0, "threads must be >= 1, or 0 for a share of the cores, got -1"),
        (executor("trainer", num_ranks=0), 0, "num_ranks must be >= 1, got 0"),
    ],
)
def test_what_cannot_be_met_is_refused_with_the_fix(spec: ExecutorSpec, cuda_devices: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        place([spec], [Machine("", 4, cuda_devices)])
    assert f"executor 'trainer': {message}" in str(caught.value) or message in str(caught.value)


def test_what_a_driver_says_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_module, "_ASK", "raise RuntimeError('the driver is too old')")
    with pytest.raises(ConfigError, match="do not say what they are: RuntimeError: the driver is too old$"):
        all_gpus()


IN_TURN = ColocatedGroup(sharing=("generator", "trainer"), members=("generator", "reward", "trainer"))


def co_located(*executors: ExecutorSpec, cores: int = 8, cuda_devices: int = 0) -> dict[str, tuple[int, str]]:
    placement = place(executors, [Machine("", cores, cuda_devices)], colocated=IN_TURN)
    return {spec.name: (spec.threads, spec.device) for spec in placement.executors}


def test_executors_that_take_turns_each_get_all_cores_that_the_others_leave() -> None:
    job = (executor("generator"), executor("reward", threads=1), executor("trainer"), executor("evaluator", threads=2))
    assert [threads for threads, _ in co_located(*job).values()] == [6, 1, 6, 2]
    assert [threads for threads, _ in co_located(*job[:3], cores=2).values()] == [2, 1, 2]


def test_ranks_of_one_that_takes_turns_divide_its_cores() -> None:
    job = (executor("generator", num_ranks=3), executor("reward", threads=1), executor("trainer"))
    assert [threads for threads, _ in co_located(*job).values()] == [2, 1, 8]


def test_one_beside_them_that_asks_for_threads_gets_a_share_of_the_largest() -> None:
    job = (executor("generator", num_ranks=2), executor("trainer"), executor("evaluator"))
    assert [threads for threads, _ in co_located(*job, cores=8).values()] == [3, 6, 2]  # three sharers, rounded down


def test_thread_counts_that_are_given_stand() -> None:
    job = (executor("generator", threads=3), executor("trainer", threads=5), executor("evaluator"))
    assert [threads for threads, _ in co_located(*job).values()] == [3, 5, 3]


def test_co_located_executors_share_devices_from_the_first_on() -> None:
    job = (executor("generator", num_ranks=2), executor("reference"), executor("trainer"), executor("evaluator"))
    placed = co_located(*job, cuda_devices=4)
    assert [device for _, device in placed.values()] == ["cuda:0,cuda:1", "cuda:2", "cuda:0", "cuda:3"]


def test_table_says_what_a_shared_device_must_hold() -> None:
    job = (executor("generator"), executor("reward", device="cpu", threads=1), executor("trainer"))
    assert place(job, [Machine("", 4, 1)], colocated=IN_TURN).notes() == [
        "4 threads on 4 cores, one at a time of generator, reward, trainer",
        "generator and trainer are co-located: the one that waits gives its memory back",
        "cuda:0 is shared by generator, trainer: its memory must hold the larger of generator and trainer",
    ]
    crowded = place((*job, executor("evaluator", threads=1)), [Machine("", 4, 1)], colocated=IN_TURN).notes()
    assert crowded[-1].endswith(
        "generator, trainer, evaluator: its memory must hold evaluator and the larger of generator and trainer"
    )


def test_the_time_of_cores_that_control_groups_leave(tmp_path: Path) -> None:
    def limit(folder: str, **files: str) -> None:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / folder / name.replace("_", ".", 1)).write_text(text)

    assert core_quota("", tmp_path) == core_quota("0::/absent\n", tmp_path) == float("inf")
    limit(".", cpu_max="max 100000\n")
    limit("pods", cpu_max="600000 100000\n")
    limit("pods/one", cpu_max="250000 100000\n")
    assert core_quota("0::/\n", tmp_path) == float("inf")
    assert core_quota("0::/pods\n", tmp_path) == 6
    assert core_quota("0::/pods/one\n", tmp_path) == 2.5
    assert core_quota("0::/pods/other\n", tmp_path) == 6  # as those above it
    assert core_quota("0::/of/the/host\n", tmp_path) == float("inf")
    limit("cpu", cpu_cfs_quota_us="-1\n", cpu_cfs_period_us="100000\n")
    limit("cpu/docker", cpu_cfs_quota_us="150000\n", cpu_cfs_period_us="100000\n")
    first = "4:memory:/docker\n3:cpu,cpuacct:{}\n0::/\n"
    assert core_quota(first.format("/"), tmp_path) == float("inf")
    assert core_quota(first.format("/docker"), tmp_path) == 1.5


def test_the_memory_that_control_groups_leave(tmp_path: Path) -> None:
    def limit(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert memory_limit("0::/pods\n", tmp_path) == float("inf")
    limit("pods/memory.max", "8589934592\n")
    limit("pods/one/memory.max", "max\n")
    assert memory_limit("0::/pods/one\n", tmp_path) == 8 * 2**30
    limit("memory/docker/memory.limit_in_bytes", "1073741824\n")
    assert memory_limit("4:memory:/docker\n3:cpu,cpuacct:/\n0::/pods\n", tmp_path) == 2**30


def test_another_system_is_told_before_anything_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    nothing: Any = None
    for begins in (start_fork_servers, plan_run):
        with pytest.raises(ConfigError, match="runs need Linux, and this is Darwin"):
            begins(nothing)
