"""A job as a dataflow graph with delays, and what can be proved about it before it runs.

An edge with delay ``d`` gives its sink, at tick k, the token its source made at tick k - d; the first d tokens lie on
the edge at start. An edge of capacity ``c`` holds at most c tokens, which is the same as a reverse edge that carries
c - d tokens of "room". With these reverse edges the graph is a marked graph, so (Commoner et al., 1971):

- it never deadlocks  <=>  every cycle carries at least one token  <=>  the edges that carry none form no cycle;
- it is bounded       <=>  every edge lies on a cycle, which the reverse edges give for free.

docs/asynchrony.md proves what follows for staleness and for checkpoints.

``llamarl_graph`` is the standard job's: the roles that a recipe asks for, and the channels between them (``llamarl.roles``).
Once it is known where its ranks will be, ``choose_transports`` says how the weights travel on it, and what that holds in
memory, before anything is allocated.
"""

from __future__ import annotations

import math
import platform
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import RunConfig
from llamarl.errors import ConfigError, GraphError
from llamarl.executors.base import ExecutorSpec
from llamarl.plural import format_bytes, plural
from llamarl.roles import Reads, Role, carries_version, present_roles
from llamarl.runtime.placement import ColocatedGroup, available_cuda_devices
from llamarl.transports.table import transport_kind

__all__ = [
    "Graph",
    "Place",
    "WeightEdge",
    "check_graph",
    "choose_transport",
    "choose_transports",
    "colocated_group",
    "group_backends",
    "llamarl_graph",
    "versions_held",
]


@dataclass(frozen=True)
class Graph:
    """Executors and the channels between them. Checked when made.

    Raises:
        GraphError: The graph would deadlock, or is not well-formed; the message names the edge or executor.
    """

    executors: tuple[ExecutorSpec, ...]
    channels: tuple[ChannelSpec, ...]

    def __post_init__(self) -> None:
        check_graph(self.executors, self.channels)

    @cached_property
    def inputs(self) -> dict[str, tuple[ChannelSpec, ...]]:
        """Executor name -> channels that end there."""
        return {e.name: tuple(c for c in self.channels if c.sink == e.name) for e in self.executors}

    @cached_property
    def outputs(self) -> dict[str, tuple[ChannelSpec, ...]]:
        """Executor name -> channels that start there."""
        return {e.name: tuple(c for c in self.channels if c.source == e.name) for e in self.executors}

    def describe(self) -> str:
        """The graph as text, one channel a line."""
        width = max((len(c.name) for c in self.channels), default=0)
        ends = [f"{c.source} -> {c.sink}" for c in self.channels]
        ends_width = max(map(len, ends), default=0)
        return "\n".join(
            f"{c.name:<{width}}  {end:<{ends_width}}  {c.kind.name:<9}  delay {c.delay}  capacity {c.capacity}"
            for c, end in zip(self.channels, ends, strict=True)
        )


def check_graph(executors: Sequence[ExecutorSpec], channels: Sequence[ChannelSpec]) -> None:
    """Prove that a graph is well-formed, live and bounded.

    Raises:
        GraphError: Naming the first edge, executor or cycle at fault, and the fix.
    """
    names = [e.name for e in executors]
    if not names:
        raise GraphError("a job needs at least one executor")
    for name in names:
        if names.count(name) > 1:
            raise GraphError(f"two executors are named {name!r}: names must be unique")
    for channel in channels:
        _check_channel(channel, names)
    producers: dict[str, str] = {}
    for channel in channels:
        if channel.name in producers:
            raise GraphError(
                f"channel {channel.name!r} has two producers, {producers[channel.name]!r} and {channel.source!r}: "
                f"a channel has one source and one sink; give the second edge its own name"
            )
        producers[channel.name] = channel.source
    _check_connected(names, channels)
    _check_live(names, channels)


def _check_channel(channel: ChannelSpec, names: Sequence[str]) -> None:
    for role, executor in (("source", channel.source), ("sink", channel.sink)):
        if executor not in names:
            raise GraphError(
                f"channel {channel.name!r}: its {role} {executor!r} is no executor; known: {', '.join(names)}"
            )
    if channel.delay < 0:
        raise GraphError(f"channel {channel.name!r}: delay must be >= 0 ticks, got {channel.delay}")
    if channel.capacity < max(1, channel.delay):
        raise GraphError(
            f"channel {channel.name!r}: capacity {channel.capacity} cannot hold the {channel.delay} tokens that lie on "
            f"it at start; set capacity >= {max(1, channel.delay)}"
        )


def _check_connected(names: Sequence[str], channels: Sequence[ChannelSpec]) -> None:
    seen = {names[0]}
    while new := {end for c in channels if {c.source, c.sink} & seen for end in (c.source, c.sink)} - seen:
        seen |= new
    if missing := [name for name in names if name not in seen]:
        raise GraphError(
            f"executors {', '.join(missing)} are not connected with {names[0]!r}: give them a channel, leave them out, or run "
            "them as a job of their own"
        )


def _check_live(names: Sequence[str], channels: Sequence[ChannelSpec]) -> None:
    """Find a cycle without a token among the edges that carry none."""
    empty: dict[tuple[str, str], str] = {}
    for c in channels:
        if c.capacity == c.delay:
            empty[c.sink, c.source] = f"the room on {c.name!r} (capacity {c.capacity} = delay {c.delay})"
        if c.delay == 0:
            empty[c.source, c.sink] = f"{c.name!r} ({c.source} -> {c.sink}, delay 0)"
    try:
        TopologicalSorter({name: [source for source, sink in empty if sink == name] for name in names}).prepare()
    except CycleError as error:
        cycle = [empty[edge] for edge in pairwise(error.args[1])]
        raise GraphError(
            f"deadlock: no token on the cycle of {', then '.join(cycle)}; "
            f"give one of these edges a delay >= 1, or more capacity"
        ) from None


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
    if device == "auto" and not config.hosts.wanted:  # else what its nodes have decides, which placement knows
        device = "cuda" if available_cuda_devices() else "cpu"
    together = max(role.unit_ranks(config)) > 1
    samples = role.name in ("generator", "evaluator") or (role.name == "judge" and config.judge.path)
    return ExecutorSpec(
        name=role.name,
        factory=role.factory,
        config=config.for_executor(role.name),
        options=change.options if change else {},
        num_ranks=role.num_ranks(config),
        threads=settings.threads if settings else 1,
        fills_cores=device in ("cpu", "auto") and getattr(settings, "microbatches_at_once", 1) == 0,
        device=device,
        gpus=config.generator.engine.gpus if samples else 1,
        process_group=group_backends(device) if together else "",
    )


def group_backends(device: str) -> str:
    """What ranks on such devices join (``ExecutorSpec.process_group``)."""
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"


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


@dataclass(frozen=True, kw_only=True)
class WeightEdge:
    """One weights edge, settled."""

    channel: str
    source: str
    ends: str
    transport: str
    reason: str
    versions: int
    """That lie at the source at once, at most."""
    bytes_per_rank: float
    """Memory of these versions at a source rank, if all hold as much; the fullest holds a little more."""

    def summary(self) -> str:
        """One line for people."""
        return (
            f"{self.transport} ({self.reason}); holds {plural(self.versions, 'version')}, about {format_bytes(self.bytes_per_rank)} a "
            f"{self.source} rank"
        )


def choose_transports(
    config: RunConfig, graph: Graph, *, hosts: Mapping[str, Sequence[str]] | None = None
) -> tuple[Graph, tuple[WeightEdge, ...]]:
    """``graph`` with a transport on each weights edge, and what there is to know of these edges.

    Args:
        graph: With devices settled.
        hosts: Executor -> the host of each of its ranks; None: all are on this one.

    Raises:
        ConfigError: ``schedule.transport`` asks for what these hosts do not have, or this schedule does not allow.
    """
    executors = {spec.name: spec for spec in graph.executors}
    if hosts is None:
        hosts = {spec.name: [platform.node() or "this host"] * spec.num_ranks for spec in graph.executors}
    num_ticks = config.run.num_ticks
    slot_bytes = _version_bytes(config)
    channels: list[ChannelSpec] = []
    edges: list[WeightEdge] = []
    for channel in graph.channels:
        if channel.kind is ChannelKind.WEIGHTS:
            source, sink = executors[channel.source], executors[channel.sink]
            process = "controller" if config.run.runtime == "inline" else ""
            name, reason = choose_transport(
                _places(source, hosts[source.name], process), _places(sink, hosts[sink.name], process)
            )
            if config.schedule.transport != "auto":
                _check(config, several_hosts=reason if len({*hosts[source.name], *hosts[sink.name]}) > 1 else "")
                name, reason = config.schedule.transport, "schedule.transport says so"
            elif config.schedule.colocated and transport_kind(name).on_device:
                name, reason = "shared_memory", f"the {source.name}'s weights wait in host memory"
            channel = replace(channel, transport=name)
            versions = versions_held(channel.capacity, num_ticks, partial(carries_version, config, channel.sink))
            edges.append(
                WeightEdge(
                    channel=channel.name,
                    source=channel.source,
                    ends=f"{channel.source} to {channel.sink}",
                    transport=name,
                    reason=reason,
                    versions=versions,
                    bytes_per_rank=versions * slot_bytes,
                )
            )
        channels.append(channel)
    return Graph(graph.executors, tuple(channels)), tuple(edges)


def _check(config: RunConfig, *, several_hosts: str) -> None:
    """Refuse a transport that is named and does not fit."""
    name = config.schedule.transport
    if not transport_kind(name).on_device:
        return
    if several_hosts:
        raise ConfigError(f"schedule.transport {name!r} stays on one host, and {several_hosts}: set it to 'auto'")
    if config.schedule.colocated:
        raise ConfigError(
            "schedule.colocated keeps the weights in host memory between the ticks, but schedule.transport is "
            f"{name!r}, which would hold another copy on the device: set it to 'auto'"
        )


def versions_held(capacity: int, num_ticks: int, sends: Callable[[int], bool]) -> int:
    """Most versions among ``capacity`` consecutive ticks: what the source has memory for.

    Args:
        sends: Whether the source sends a version at a tick.
    """
    sent: deque[bool] = deque()
    held = most = 0
    for tick in range(num_ticks):
        sent.append(sends(tick))
        held += sent[-1]
        if len(sent) > capacity:
            held -= sent.popleft()
        most = max(most, held)
    return most


def _places(spec: ExecutorSpec, hosts: Sequence[str], process: str) -> list[Place]:
    devices = [device.strip() for device in spec.device.split(",")]
    return [Place(hosts[rank], devices[rank % len(devices)], process) for rank in range(spec.num_ranks)]


def _version_bytes(config: RunConfig) -> float:
    """Bytes of one version, as it travels, at a trainer rank, if all hold as much."""
    from llamarl.models.loading import parameter_shapes  # which imports torch

    shapes, trainer = parameter_shapes(config.model.path), config.trainer
    if config.lora.rank and config.lora.hand_over == "adapter":
        return 4.0 * config.lora.num_parameters(shapes)
    parts = trainer.pp * trainer.fsdp * trainer.cp * trainer.tp
    return (4.0 if config.generator.served_dtype == "float32" else 2.0) * sum(map(math.prod, shapes.values())) / parts


@dataclass(frozen=True)
class Place:
    """Where one rank runs."""

    host: str
    device: str
    """``cpu`` or ``cuda:0``."""
    process: str = ""
    """Ranks of one host with the same name here run in one process; empty: in one of its own."""


def choose_transport(sources: Sequence[Place], sinks: Sequence[Place]) -> tuple[str, str]:
    """(name, reason): ``shared_memory``, ``cuda_ipc`` or ``tcp``; one for the whole channel.

    Hosts decide first: where any two ranks that may talk sit on different hosts, all use ``tcp``,
    which maps memory between those that share a host. On one host, GPUs on both sides use
    ``cuda_ipc``, anything else ``shared_memory``; so do GPUs of one process, because CUDA opens no
    memory handle in the process that made it, and runs in one process are for looking, not for speed.
    """
    hosts = sorted({place.host for place in (*sources, *sinks)})
    if len(hosts) > 1:
        where = f"ranks lie on {len(hosts)} hosts ({', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''})"
        return "tcp", where
    shared = {place.process for place in sources} & {place.process for place in sinks} - {""}
    if shared:
        return "shared_memory", f"source and sink are one process of host {hosts[0]}"
    if all(place.device.startswith("cuda") for place in (*sources, *sinks)):
        return "cuda_ipc", f"all ranks hold GPUs of host {hosts[0]}"
    return "shared_memory", f"all ranks lie on host {hosts[0]}, and not all hold GPUs"
