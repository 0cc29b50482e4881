"""The LlamaRL job as a graph: the roles that a recipe asks for, and the channels between them (``llamarl.roles``)."""

from __future__ import annotations

from collections.abc import Iterator

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import RunConfig
from llamarl.controller.graph import Graph
from llamarl.executors.base import ExecutorSpec
from llamarl.roles import Reads, Role, present_roles
from llamarl.runtime.placement import ColocatedGroup, available_cuda_devices

__all__ = ["colocated_group", "llamarl_graph"]


def llamarl_graph(config: RunConfig) -> Graph:
    """The standard job of a recipe: every role that is present, and a channel for each reader that finds its writer."""
    roles = present_roles(config)
    channels = sorted(_channels(roles, config), key=lambda channel: channel.kind is ChannelKind.WEIGHTS)  # stable
    return Graph(tuple(_executor(role, config) for role in roles), tuple(channels))


def _channels(roles: list[Role], config: RunConfig) -> Iterator[ChannelSpec]:
    """Reader by reader, in the order in which each reads them."""
    writers = {name: role for role in roles for name in role.writes}
    for sink in roles:
        for reads in sink.reads:
            if name := next((name for name in reads.channels if name in writers), ""):
                yield _channel(name, writers[name], sink, reads, config)


def _channel(name: str, source: Role, sink: Role, reads: Reads, config: RunConfig) -> ChannelSpec:
    kind = ChannelKind(reads.kind)
    spread = {name for name in sink.sizes if kind is ChannelKind.SCATTER}
    return ChannelSpec(
        name=name,
        kind=kind,
        source=source.name,
        sink=sink.name,
        delay=reads.delay(config),
        capacity=reads.capacity(config),
        latest=reads.latest(config),
        elastic=source.name == "generator" and config.generator.shards > 0,
        sink_replicas=sink.size_of(config, spread & {"tp", "cp"}),
        sink_stages=sink.size_of(config, spread & {"pp"}),
    )


def _executor(role: Role, config: RunConfig) -> ExecutorSpec:
    settings, change = role.settings(config), config.executors.get(role.name)
    device = settings.device if settings else "cpu"
    if device == "auto":
        device = "cuda" if available_cuda_devices() else "cpu"
    together = max(role.unit_ranks(config)) > 1
    return ExecutorSpec(
        name=role.name,
        factory=role.factory,
        config=config.for_executor(role.name),
        options=change.options if change else {},
        num_ranks=role.num_ranks(config),
        threads=settings.threads if settings else 1,
        fills_cores=device == "cpu" and getattr(settings, "microbatches_at_once", 1) == 0,
        device=device,
        process_group=("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo") if together else "",
    )


def colocated_group(config: RunConfig, graph: Graph) -> ColocatedGroup | None:
    """Who takes turns in a co-located job: of everyone on the one long cycle a single executor works at a time."""
    if not config.schedule.colocated:
        return None
    after, before = _reach(graph, "generator", forward=True), _reach(graph, "trainer", forward=False)
    members = tuple(spec.name for spec in graph.executors if spec.name in after & before)
    return ColocatedGroup(sharing=("generator", "trainer"), members=members)


def _reach(graph: Graph, start: str, *, forward: bool) -> set[str]:
    """Executors that a token of ``start`` reaches within its tick, or whose tokens reach it."""
    found, stack = set[str](), [start]
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            edges = graph.outputs[name] if forward else graph.inputs[name]
            stack += [edge.sink if forward else edge.source for edge in edges if not edge.delay]
    return found
