"""The weights edges of a job before it runs: which transport each takes, and what it will hold in memory.

Both follow from where the ranks are and from the graph alone, so they are said in ``--dry-run`` and
at the start of a run, before anything is allocated.
"""

from __future__ import annotations

import math
import platform
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import RunConfig
from llamarl.controller.graph import Graph
from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorSpec
from llamarl.models.loading import parameter_shapes
from llamarl.plural import format_bytes, plural
from llamarl.roles import carries_version
from llamarl.transports.table import transport_kind

__all__ = ["Place", "WeightEdge", "choose_transport", "choose_transports", "versions_held"]


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
    checkpoint_copies: int = 0
    """Earlier versions that the source also copies near checkpoints, at most at once, in float32."""
    checkpoint_bytes_per_rank: float = 0.0
    """Host memory of these copies, likewise."""

    def summary(self) -> str:
        """One line for people."""
        line = (
            f"{self.transport} ({self.reason}); holds {plural(self.versions, 'version')}, about {format_bytes(self.bytes_per_rank)} a "
            f"{self.source} rank"
        )
        if self.checkpoint_copies:
            size = format_bytes(self.checkpoint_bytes_per_rank)
            line += f"; near checkpoints copies of at most {plural(self.checkpoint_copies, 'version')} more, {size}"
        return line


def choose_transports(
    config: RunConfig,
    graph: Graph,
    *,
    hosts: Mapping[str, Sequence[str]] | None = None,
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
    slot_bytes = _version_bytes(config, config.generator.served_dtype)  # as it travels
    copies = _copies_for_checkpoints(config)
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
            keeps = bool(channel.delay) and not any(
                edge.checkpoint_copies for edge in edges
            )  # one copy serves them all
            versions = versions_held(channel.capacity, num_ticks, _carries(config, channel))
            edges.append(
                WeightEdge(
                    channel=channel.name,
                    source=channel.source,
                    ends=f"{channel.source} to {channel.sink}",
                    transport=name,
                    reason=reason,
                    versions=versions,
                    bytes_per_rank=versions * slot_bytes,
                    checkpoint_copies=copies if keeps else 0,
                    checkpoint_bytes_per_rank=copies * _version_bytes(config, "float32") if keeps else 0.0,
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


def _carries(config: RunConfig, channel: ChannelSpec) -> Callable[[int], bool]:
    """Whether the token that the source makes at a tick carries a version."""
    return lambda tick: carries_version(config, channel.sink, tick)


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


def _copies_for_checkpoints(config: RunConfig) -> int:
    """Most earlier versions that a trainer rank copies to host memory at once, for checkpoints to hold them.

    The checkpoint after tick c holds versions c + 1 - staleness .. c + 1, the last from the weights themselves. A copy
    is kept for ``staleness`` ticks, in which those of the next checkpoint may be made.
    """
    staleness, checkpoint = config.schedule.max_staleness, config.checkpoint
    saves = checkpoint.every or checkpoint.every_minutes or checkpoint.at_end
    return staleness + 1 if staleness and saves else 0


def _places(spec: ExecutorSpec, hosts: Sequence[str], process: str) -> list[Place]:
    devices = [device.strip() for device in spec.device.split(",")]
    return [Place(hosts[rank], devices[rank % len(devices)], process) for rank in range(spec.num_ranks)]


def _version_bytes(config: RunConfig, dtype: str) -> float:
    """Bytes of one version in ``dtype`` at a trainer rank, if all hold as much."""
    shapes, trainer = parameter_shapes(config.model.path), config.trainer
    if config.lora.rank and config.lora.hand_over == "adapter":
        return 4.0 * config.lora.num_parameters(shapes)
    parts = trainer.pp * trainer.fsdp * trainer.cp * trainer.tp
    return (4.0 if dtype == "float32" else 2.0) * sum(map(math.prod, shapes.values())) / parts


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

    Raises:
        ValueError: A side has no ranks.
    """
    if not sources or not sinks:
        raise ValueError(f"a weights channel needs ranks on both sides, got {len(sources)} and {len(sinks)}")
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
