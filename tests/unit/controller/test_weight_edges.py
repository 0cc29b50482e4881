"""Transport and memory of the weights edges, settled before a run."""

import dataclasses
from pathlib import Path

import pytest
import torch

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.ends import make_receiver, make_sender
from llamarl.channels.weights import WeightsPayload
from llamarl.config import RunConfig, load_config
from llamarl.controller.graph import Graph, WeightEdge, choose_transports, llamarl_graph, versions_held
from llamarl.controller.prepare import plan_run
from llamarl.errors import ConfigError
from llamarl.models.precision import resolve_precision
from llamarl.settings.job import TRANSPORTS
from llamarl.transports.table import transport_kind

TINY_BYTES = 4 * 559_360  # fp32 parameters of the bundled model


def settled(config: RunConfig, devices: dict[str, str]) -> tuple[Graph, dict[str, WeightEdge]]:
    config = resolve_precision(config)
    graph = llamarl_graph(config)
    executors = tuple(dataclasses.replace(e, device=devices.get(e.name, "cpu")) for e in graph.executors)
    graph, edges = choose_transports(config, Graph(executors, graph.channels))
    return graph, {edge.channel: edge for edge in edges}


def test_transport_follows_the_devices_and_reaches_the_channel() -> None:
    graph, edges = settled(load_config(None), {"trainer": "cuda:0", "generator": "cuda:1"})
    assert (edges["weights"].transport, edges["eval_weights"].transport) == ("cuda_ipc", "shared_memory")
    assert {c.name: c.transport for c in graph.channels if c.kind is ChannelKind.WEIGHTS} == {
        "weights": "cuda_ipc",
        "eval_weights": "shared_memory",
    }
    _, edges = settled(load_config(None), {})
    assert edges["weights"].transport == "shared_memory"


def test_ends_that_share_a_process_use_no_handles_of_gpu_memory() -> None:
    config = load_config(None, ["--run.runtime", "inline"])
    _, edges = settled(config, {"trainer": "cuda:0", "generator": "cuda:0", "evaluator": "cuda:0"})
    assert {edge.transport for edge in edges.values()} == {"shared_memory"}
    assert edges["weights"].reason.startswith("source and sink are one process of host")


def test_ranks_on_several_hosts_take_tcp_and_the_hosts_are_named() -> None:
    config = resolve_precision(load_config(None))
    graph = llamarl_graph(config)
    hosts = {e.name: ["b" if e.name == "generator" else "a"] * e.num_ranks for e in graph.executors}
    graph, found = choose_transports(config, graph, hosts=hosts)
    edges = {edge.channel: edge for edge in found}
    assert (edges["weights"].transport, edges["weights"].reason) == ("tcp", "ranks lie on 2 hosts (a, b)")
    assert edges["eval_weights"].transport == "shared_memory"
    with pytest.raises(ConfigError, match="'cuda_ipc' stays on one host, and ranks lie on 2 hosts"):
        choose_transports(
            dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, transport="cuda_ipc")),
            graph,
            hosts=hosts,
        )


def test_colocated_roles_leave_no_copy_of_the_weights_on_the_device() -> None:
    together = ["--schedule.max_staleness", "0", "--schedule.colocated", "true"]
    config = resolve_precision(load_config(None, [*together, "--schedule.transport", "cuda_ipc"]))
    with pytest.raises(ConfigError, match="another copy on the device: set it to 'auto'"):
        choose_transports(config, llamarl_graph(config))


def test_a_recipe_may_bring_a_transport_of_its_own(tmp_path: Path) -> None:
    path = f"{tmp_path / 'own.py'}:Own"
    (tmp_path / "own.py").write_text(
        "from llamarl.transports.tcp import Tcp\n\n\nclass Own(Tcp):\n    pass\n", encoding="utf-8"
    )
    config = resolve_precision(load_config(None, ["--schedule.transport", path]))
    assert ("schedule.transport", path) in config.own_code
    graph, _ = choose_transports(config, llamarl_graph(config))
    (channel,) = (c for c in graph.channels if c.name == "weights")
    assert channel.transport == path and channel.fetched_ahead
    sender = make_sender(channel, rank=0, num_source_ranks=1, num_sink_ranks=1)
    receiver = make_receiver(channel, rank=0, num_source_ranks=1, num_sink_ranks=1)
    handle = sender.send(0, WeightsPayload(version=3, tensors={"w": torch.arange(6.0)}))
    got = {"w": torch.zeros(6)}
    receiver.receive((handle,), 10.0).load_into(got)
    assert torch.equal(got["w"], torch.arange(6.0))
    receiver.close()
    sender.close()


def test_every_transport_of_the_table_may_be_named() -> None:
    for name in TRANSPORTS:
        assert load_config(None, ["--schedule.transport", name]).schedule.transport == name
    with pytest.raises(ConfigError, match="'tpc' is unknown; did you mean 'tcp'"):
        load_config(None, ["--schedule.transport", "tpc"])


def test_co_located_weights_go_through_host_memory_where_they_wait() -> None:
    config = load_config(None, ["--schedule.max_staleness", "0", "--schedule.colocated", "true"])
    _, edges = settled(config, {"trainer": "cuda:0", "generator": "cuda:0", "evaluator": "cuda:1"})
    assert {edge.transport for edge in edges.values()} == {"shared_memory"}
    assert edges["weights"].reason == "the trainer's weights wait in host memory"


def test_recipe_may_name_the_transport() -> None:
    config = load_config(None, ["--schedule.transport", "shared_memory"])
    _, edges = settled(config, {"trainer": "cuda:0", "generator": "cuda:1"})
    assert edges["weights"].transport == "shared_memory" and edges["weights"].reason == "schedule.transport says so"


@pytest.mark.parametrize(("staleness", "versions"), [(0, 1), (1, 2), (4, 5)])
def test_memory_is_the_versions_on_the_edge_times_a_ranks_shards(staleness: int, versions: int) -> None:
    _, edges = settled(load_config(None, ["--schedule.max_staleness", str(staleness)]), {})
    assert (edges["weights"].versions, edges["weights"].bytes_per_rank) == (versions, versions * TINY_BYTES)
    assert edges["eval_weights"].versions == 1  # one evaluation in ten ticks


def test_half_precision_and_sharding_take_less() -> None:
    config = load_config(None, ["--generator.engine.dtype", "bfloat16", "--trainer.fsdp", "2"])
    _, edges = settled(config, {})
    assert edges["weights"].bytes_per_rank == pytest.approx(2 * TINY_BYTES / 4, rel=0.01)


@pytest.mark.parametrize(
    ("capacity", "due", "versions"), [(2, {0, 1, 2}, 2), (2, {0, 4, 9}, 1), (3, {0, 2, 9}, 2), (2, {8, 9}, 2)]
)
def test_versions_held_are_the_most_in_a_window(capacity: int, due: set[int], versions: int) -> None:
    assert versions_held(capacity, 10, lambda tick: tick in due) == versions


def test_dry_run_says_transport_reason_and_memory(tmp_path: Path) -> None:
    text = plan_run(load_config(None, ["--run.dir", f"{tmp_path}/r", "--trainer.device", "cpu"]))
    section = text.split("# weight hand-over\n")[1]
    for part in (
        "weights (trainer to generator): shared_memory (all ranks lie on host",
        "holds 2 versions, about 4.47 MB",
    ):
        assert part in section


def test_unknown_transport_is_named_with_the_nearest() -> None:
    spec = ChannelSpec(
        name="w", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator", transport="shared-memory"
    )
    for make in (make_sender, make_receiver):
        with pytest.raises(ValueError, match="'shared-memory' is unknown.*did you mean 'shared_memory'"):
            make(spec, rank=0, num_source_ranks=1, num_sink_ranks=1)


def test_a_transport_of_ones_own_that_is_none_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="schedule.transport 'pathlib:Path' lacks source, sink, on_device, between_hosts"
    ):
        transport_kind("pathlib:Path")
