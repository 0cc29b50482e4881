"""The shell joins the ranks of an executor by torch.distributed and pins torch, before the factory is called."""

import os
import re
from collections.abc import Iterator

import pytest
from death_job import let_ranks_be_forks
from rank_processes import run_ranks
from runtime_fakes import HERE, Config

from llamarl.errors import DeadlineExceeded, ExecutorFailed
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.base import JobStart, Order, Report, Runtime
from llamarl.runtime.inline import InlineRuntime
from llamarl.runtime.processes import ProcessRuntime


@pytest.fixture
def local() -> Iterator[Runtime]:
    made = ProcessRuntime(channel_factory=str(HERE), collective_timeout_s=60.0)
    yield made
    made.close()


def reducer(num_ranks: int, config: Config, factory: str, threads: int) -> ExecutorSpec:
    return ExecutorSpec(
        name="reducer",
        factory=f"{HERE}:{factory}",
        config=config,
        num_ranks=num_ranks,
        threads=threads,
        process_group="gloo",
    )


def start(runtime: Runtime, num_ranks: int, config: Config, factory: str = "Reducer", threads: int = 2) -> None:
    spec = reducer(num_ranks, config, factory, threads)
    runtime.start(JobStart(executors=[spec], channels=[], deadline_s=120.0))


def reduce_at(runtime: Runtime, tick: int) -> Report:
    runtime.fire(Order(executor="reducer", tick=tick))
    return runtime.wait(60.0)


def test_ranks_sum_over_gloo_and_one_that_fails_ends_the_job_though_its_peer_waits_for_it(local: Runtime) -> None:
    start(local, 2, Config("raise", trouble_tick=1, trouble_rank=1))
    assert reduce_at(local, 0).metrics == {"sum": 1.0 + 2.0, "threads": 2.0, "deterministic": 1.0}
    with pytest.raises(ExecutorFailed, match=r"'reducer', rank 1 \(pid \d+\), tick 1: ValueError: the answer is 42"):
        reduce_at(local, 1)


def test_a_rank_that_hangs_in_a_group_of_some_ranks_is_named_at_the_deadline_of_the_tick() -> None:
    """Ranks 0 and 1 are such a pair, 2 and 3 another: of the first, one hangs and one waits for it; the second reports."""
    run_ranks(hang_in_a_group_of_some, [()], limit_s=180)


def hang_in_a_group_of_some() -> None:
    """In a process that has imported torch, of which the ranks are forks."""
    config = Config("hang", trouble_tick=1, trouble_rank=1)
    let_ranks_be_forks([reducer(4, config, "MeshReducer", threads=1)])
    local = ProcessRuntime(channel_factory=str(HERE), collective_timeout_s=60.0)
    try:
        _hang_in_a_group_of_some(local, config)
    finally:
        local.close()


def _hang_in_a_group_of_some(local: Runtime, config: Config) -> None:
    start(local, 4, config, factory="MeshReducer", threads=1)
    sums = {"sum_0": 3.0, "sum_1": 3.0, "sum_2": 7.0, "sum_3": 7.0}
    assert reduce_at(local, 0).metrics == {**sums, "limit_s": 60.0}, "these groups wait as long as that of all ranks"
    local.fire(Order(executor="reducer", tick=1))
    with pytest.raises(DeadlineExceeded, match="limit 5 s; orders out:\n'reducer', tick 1") as caught:
        local.wait(5.0)
    waiting, hanging = re.split(r"(?=rank 1 \()", str(caught.value).partition("no report from")[2])
    assert "rank 0 (" in waiting and "all_reduce" in waiting
    assert hanging.endswith("time.sleep(1000)") and "all_reduce" not in hanging
    assert "rank 2" not in str(caught.value) and "rank 3" not in str(caught.value)


def test_a_lone_rank_has_its_group_inline_too_and_torch_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth-of-the-user")

    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    runtime = InlineRuntime(channel_factory=str(HERE))
    try:
        start(runtime, 1, Config())
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "gloo listens, though there is nobody to meet"
        assert reduce_at(runtime, 0).metrics == {"sum": 1.0, "threads": 2.0, "deterministic": 1.0}
    finally:
        runtime.close()
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before
    assert not torch.distributed.is_initialized()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == "eth-of-the-user"
