"""A job as a dataflow graph with delays, and what can be proved about it before it runs.

An edge with delay ``d`` gives its sink, at tick k, the token its source made at tick k - d; the first d tokens lie on
the edge at start. An edge of capacity ``c`` holds at most c tokens, which is the same as a reverse edge that carries
c - d tokens of "room". With these reverse edges the graph is a marked graph, so (Commoner et al., 1971):

- it never deadlocks  <=>  every cycle carries at least one token  <=>  the edges that carry none form no cycle;
- it is bounded       <=>  every edge lies on a cycle, which the reverse edges give for free.

docs/asynchrony.md proves what follows for staleness and for checkpoints.

``llamarl_graph`` is the standard job's: the roles that a recipe asks for, and the channels between them (``llamarl.roles``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import RunConfig
from llamarl.errors import GraphError
from llamarl.executors.base import ExecutorSpec
from llamarl.roles import Reads, Role, present_roles
from llamarl.runtime.placement import ColocatedGroup, available_cuda_devices

__all__ = ["Graph", "check_graph", "colocated_group", "llamarl_graph"]


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
    if len(names) == 1:
        return
    neighbours: dict[str, set[str]] = {name: set() for name in names}
    for channel in channels:
        neighbours[channel.source].add(channel.sink)
        neighbours[channel.sink].add(channel.source)
    for name in names:
        if not neighbours[name]:
            raise GraphError(f"executor {name!r} has no channel: connect it or leave it out")
    seen: set[str] = set()
    stack = [names[0]]
    while stack:
        name = stack.pop()
        if name not in seen:
            seen.add(name)
            stack.extend(neighbours[name])
    if missing := [name for name in names if name not in seen]:
        raise GraphError(
            f"executors {', '.join(missing)} are not connected with {names[0]!r}: run them as a job of their own"
        )


def _check_live(names: Sequence[str], channels: Sequence[ChannelSpec]) -> None:
    """Find a cycle without a token by depth-first search over the edges that carry none."""
    empty: dict[str, list[tuple[str, str]]] = {name: [] for name in names}
    for channel in channels:
        if channel.delay == 0:
            empty[channel.source].append(
                (channel.sink, f"{channel.name!r} ({channel.source} -> {channel.sink}, delay 0)")
            )
        if channel.capacity - channel.delay == 0:
            room = f"the room on {channel.name!r} (capacity {channel.capacity} = delay {channel.delay})"
            empty[channel.sink].append((channel.source, room))
    done: set[str] = set()
    for start in names:
        path: list[str] = []
        labels: list[str] = []

        def visit(name: str, path: list[str] = path, labels: list[str] = labels) -> None:
            if name in path:
                cycle = labels[path.index(name) :]
                raise GraphError(
                    f"deadlock: no token on the cycle of {', then '.join(cycle)}; "
                    f"give one of these edges a delay >= 1, or more capacity"
                )
            if name in done:
                return
            path.append(name)
            for sink, label in empty[name]:
                labels.append(label)
                visit(sink)
                labels.pop()
            path.pop()
            done.add(name)

        visit(start)


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
