"""A host that is gone: all its ranks, and whatever is asked of the job's hosts, are with another one from then on."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from other_space import place

from llamarl.config import load_config
from llamarl.controller import graph, prepare
from llamarl.controller.graph import llamarl_graph
from llamarl.controller.job_hosts import JobHosts
from llamarl.errors import ConfigError, TransferError
from llamarl.executors.base import ExecutorSpec
from llamarl.models.folders import resolve_model_path
from llamarl.runtime.host_placement import Machine
from llamarl.runtime.placement import Gpu, all_gpus
from llamarl.runtime.placement import place as settle
from llamarl.transports.network import Network


class Launcher:
    def __init__(self, *lost: int) -> None:
        self.lost = set(lost)


class Files:
    """The part of ``JobFiles`` that sends."""

    def __init__(self, launcher: Launcher) -> None:
        self.sent: list[tuple[str, Path | None, tuple[int, ...]]] = []
        self.takes_down: int | None = None
        self._launcher = launcher

    def send_to_new_hosts(self, executor: str, load_from: Path | None, hosts: tuple[int, ...]) -> None:
        self.sent.append((executor, load_from, hosts))
        if self.takes_down is not None:
            self._launcher.lost |= {self.takes_down} - {-1}
            raise TransferError("it did not come")


class Hosts(JobHosts):
    def network(self, host: int) -> Network:
        return place(("a", "b", "c")[host])


def places(
    where: dict[str, tuple[int, ...]],
    launcher: Launcher,
    files: Files | None = None,
    told_s: float = 0.0,
    full: dict[int, str] | None = None,
) -> JobHosts:
    machines = [Machine(name, 8, 0, {"llamarl": "1"}) for name in "abc"]
    specs = [
        ExecutorSpec(name=name, factory="m:f", num_ranks=len(ranks), device="cpu", threads=1)
        for name, ranks in where.items()
    ]
    cluster: Any = SimpleNamespace(
        told_s=told_s / 2, take=lambda more, within_s: "".join((full or {}).get(host, "") for host in more)
    )
    unchecked: Any = {"launcher": launcher, "files": files}
    return Hosts(
        cluster,
        config=load_config(None),
        named=["a", "b", "c"],
        where=where,
        machines=machines,
        placement=settle(specs, machines, where),
        **unchecked,
    )


def test_all_ranks_of_a_host_that_is_gone_move_together_and_others_stay() -> None:
    where = {"generator": (0, 1), "trainer": (1, 1), "reward": (0,)}
    launcher = Launcher()
    found = places(where, launcher)
    assert found.relocate("trainer") == [place("b"), place("b")], "nothing is gone"
    launcher.lost.add(1)
    assert all(found.has_place(name) for name in where)
    assert found.relocate("trainer") == [place("c"), place("c")]
    assert where == {"generator": (0, 2), "trainer": (2, 2), "reward": (0,)}
    assert found.relocate("generator") == [place("a"), place("c")]


@pytest.mark.parametrize(
    ("on", "where"),
    [
        ({}, {"generator": (1,), "trainer": (2,), "reward": (1,)}),
        ({"trainer": ["b"]}, {"generator": (1,), "trainer": (2,), "reward": (1,)}),
        ({"trainer": ["head"]}, {"generator": (0,), "trainer": (0,), "reward": (0,)}),
        ({"trainer": ["b"], "reward": ["head"]}, None),
    ],
)
def test_a_head_of_another_processor_gets_what_is_put_there_and_refuses_no_job_otherwise(
    on: dict[str, list[str]], where: dict[str, tuple[int, ...]] | None
) -> None:
    kinds = {"head": "arm", "a": "x86", "b": "x86"}
    nodes = [Node(name, processor) for name, processor in kinds.items()]
    cluster: Any = SimpleNamespace(nodes=nodes, left_out={}, here=0)
    config = load_config(None, {"hosts.cluster": "auto", "hosts.on": on})
    found = JobHosts(cluster, config, named=list(kinds))
    executors = [ExecutorSpec(name=name, factory="m:f", threads=1) for name in ("generator", "trainer", "reward")]
    if where is None:
        with pytest.raises(ConfigError, match="processor: head has 'arm', b 'x86'"):
            found.place(executors, None)
        return
    found.place(executors, None)
    assert found.where == where


class Node(Machine):
    def __init__(self, name: str, processor: str) -> None:
        super().__init__(name, 8, 0, {"processor": processor})
        object.__setattr__(self, "address", name)


def test_where_no_host_is_left_only_those_without_ranks_on_it_have_a_place() -> None:
    found = places({"generator": (0,), "trainer": (1,), "reward": (2,)}, Launcher(0, 1))
    assert [found.has_place(name) for name in ("generator", "trainer", "reward")] == [True, True, True]
    found = places({"generator": (0,), "trainer": (1,), "reward": (2,)}, Launcher(0, 1), full={2: "others hold it"})
    assert [found.has_place(name) for name in ("generator", "trainer", "reward")] == [False, False, True]


def test_what_others_hold_and_nodes_that_are_gone_refuse_for_now_alone(tmp_path: Path) -> None:
    found = places({"trainer": (0,)}, Launcher(), full={0: "others hold it"})
    with pytest.raises(ConfigError, match="others hold it") as refused:
        found.open_files(tmp_path, "run", (), None)
    gone = found.no_room(ConfigError("a: too few GPUs"))
    assert refused.value.exit_code == gone.exit_code == 1, "a loop that resumes goes on at 1, and ends at 2"


def test_a_host_that_has_no_room_is_passed_over_and_one_that_was_taken_is_kept() -> None:
    where = {"generator": (0,), "trainer": (0,)}
    launcher = Launcher(0)
    found = places(where, launcher, full={1: "others hold it"})
    assert found.has_place("generator") and found.has_place("trainer")
    assert found.relocate("trainer") == [place("c")]
    assert where == {"generator": (2,), "trainer": (2,)}, "all of a host's ranks go to one"
    launcher.lost.add(2)
    assert not found.has_place("generator"), "b had no room"


def test_a_host_that_goes_while_files_are_sent_to_it_is_gone_like_any_other(tmp_path: Path) -> None:
    launcher = Launcher()
    files = Files(launcher)
    found = places({"trainer": (1,)}, launcher, files)
    found.prepare("trainer", tmp_path)
    assert files.sent == [("trainer", tmp_path, (1,))]
    files.takes_down = -1
    with pytest.raises(TransferError):  # it is there, and cannot take them
        found.prepare("trainer", tmp_path)
    files.takes_down = 1
    with pytest.raises(ConnectionError, match="it did not come"):
        found.prepare("trainer", tmp_path)


def test_files_that_break_off_before_the_host_is_known_to_be_gone_are_a_loss_once_it_is(tmp_path: Path) -> None:
    launcher = Launcher()
    files = Files(launcher)
    files.takes_down = -1
    found = places({"trainer": (1,)}, launcher, files, told_s=30.0)
    threading.Timer(0.1, launcher.lost.add, (1,)).start()
    with pytest.raises(ConnectionError, match="it did not come"):
        found.prepare("trainer", tmp_path)


def test_a_host_that_goes_after_it_was_asked_whether_there_is_another_keeps_its_ranks_which_then_do_not_start() -> None:
    where: dict[str, tuple[int, ...]] = {"generator": (0, 1)}
    assert places(where, Launcher(0, 1, 2)).relocate("generator") == [place("a"), place("b")]
    assert where == {"generator": (0, 1)}


def test_a_device_that_is_left_open_is_what_the_nodes_have_not_what_the_controllers_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph, "available_cuda_devices", lambda: 0)
    recipe = ["--trainer.fsdp", "2", "--generator.tp", "2", "--evaluation.every", "0"]
    config = load_config(None, [*recipe, "--hosts.cluster", "auto"])
    facts = {"llamarl": "1", "python": "3.11", "processor": "x86_64"}

    asked: list[int] = []

    def call(number: int, within_s: float, work: Any) -> list[Gpu]:
        assert work is all_gpus
        asked.append(number)
        return [Gpu("large", 80e9), Gpu("small", 24e9)]

    def placed(gpus: int) -> dict[str, ExecutorSpec]:
        nodes = [Machine("head", 8, 0, facts), Machine("node", 8, gpus, facts)]
        cluster: Any = SimpleNamespace(nodes=nodes, left_out={}, here=0, call=call)
        hosts = JobHosts(cluster, config, ["head", "node"])
        made = prepare._place_executors(
            config, config, resolve_model_path(config.model.path), llamarl_graph(config), hosts
        )
        assert made.config.trainer.device == ("cuda" if gpus else "cpu")
        assert made.config.trainer.max_tokens_per_microbatch == (16384 if gpus else 4096)
        lines = [line.split(" of ")[0].split(": ")[0] for line in made.gpu_memory.splitlines()]
        assert lines == [f"cuda:{i}@node" for i in range(gpus)]
        assert made.facts == (facts | {"gpu": "large or small"} if gpus else facts)
        assert made.gpu_memory.count(" of 24.00 GB") == gpus, "the smallest: which are ours is not known yet"
        return {spec.name: spec for spec in made.graph.executors}

    there = placed(4)
    assert (there["generator"].device, there["trainer"].device) == ("cuda:0,cuda:1", "cuda:2,cuda:3")
    assert there["trainer"].process_group == there["generator"].process_group == "cpu:gloo,cuda:nccl"
    assert there["reward"].device == "cpu"
    none = placed(0)
    assert (none["trainer"].device, none["trainer"].process_group) == ("cpu", "gloo")
    assert asked == [1]


def test_gpus_that_do_not_say_what_they_hold_are_told_since_sizes_are_then_small(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def call(number: int, within_s: float, work: Any) -> list[Gpu]:
        raise TransferError("node b: Ray: GetTimeoutError")

    cluster: Any = SimpleNamespace(nodes=[Machine("b", 8, 1)], call=call)
    hosts = JobHosts(cluster, load_config(None, []), ["b"])
    trainer = ExecutorSpec(name="trainer", factory="m:f", device="cuda:0")
    hosts.placement = settle([trainer], cluster.nodes, {"trainer": (0,)})
    assert hosts.gpus() == {}
    said = capsys.readouterr().err
    assert "(node b: Ray: GetTimeoutError)" in said and "give generator.engine.kv_cache_bytes and" in said
