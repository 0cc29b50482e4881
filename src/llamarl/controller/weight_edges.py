"""The weights edges of a job before it runs: which transport each takes, and what it will hold in memory.

Both follow from where the ranks are and from the graph alone, so they are said in ``--dry-run`` and at the start of a run,
before anything is allocated.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import RunConfig
from llamarl.controller.graph import Graph
from llamarl.executors.base import ExecutorSpec
from llamarl.executors.evaluator import evaluation_due
from llamarl.models.folders import resolve_model_path
from llamarl.weight_sync.model_layouts import ModelParameters, fsdp_tp_placements, model_parameters
from llamarl.weight_sync.report import MeshSide, format_bytes, report_transfer
from llamarl.weight_sync.transports.choose import Place, choose_transport

__all__ = ["WeightEdge", "settle_weight_edges", "versions_held"]


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
    """Memory of these versions at the source rank that holds most."""

    def summary(self) -> str:
        """One line for people."""
        held = f"{self.versions} version{'' if self.versions == 1 else 's'}"
        return (
            f"{self.transport} ({self.reason}); holds {held}, {format_bytes(self.bytes_per_rank)} a {self.source} rank"
        )


def settle_weight_edges(config: RunConfig, graph: Graph) -> tuple[Graph, tuple[WeightEdge, ...]]:
    """``graph`` with a transport on each weights edge, and what there is to know of these edges.

    Args:
        graph: With devices settled.
    """
    executors = {spec.name: spec for spec in graph.executors}
    host = platform.node() or "this host"
    num_ticks, every = config.run.num_ticks, config.evaluation.every
    sends: dict[str, Callable[[int], bool]] = {
        "eval_weights": lambda tick: evaluation_due(tick + 1, every=every, num_ticks=num_ticks)
    }
    slot_bytes = _slot_bytes(config)
    channels: list[ChannelSpec] = []
    edges: list[WeightEdge] = []
    for channel in graph.channels:
        if channel.kind is ChannelKind.WEIGHTS:
            source, sink = executors[channel.source], executors[channel.sink]
            name, reason = choose_transport(_places(source, host), _places(sink, host))
            if config.schedule.colocated and name == "cuda_ipc":
                name, reason = "shared_memory", f"the {source.name}'s weights wait in host memory"
            if config.schedule.transport != "auto":
                name, reason = config.schedule.transport, "schedule.transport says so"
            channel = replace(channel, transport=name)
            versions = versions_held(channel.capacity, num_ticks, sends.get(channel.name, lambda tick: True))
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


def _places(spec: ExecutorSpec, host: str) -> list[Place]:
    devices = [device.strip() for device in spec.device.split(",")]
    return [Place(host, devices[rank % len(devices)]) for rank in range(spec.num_ranks)]


def _slot_bytes(config: RunConfig) -> float:
    """Bytes of one version at the trainer rank that holds most of it, as it travels."""
    parameters: ModelParameters = model_parameters(
        resolve_model_path(config.model.path), dtype=config.generator.engine.dtype
    )
    if config.lora.rank and config.lora.hand_over == "adapter":
        adapted = [spec.shape for name, spec in parameters.items() if name.split(".")[-2] in config.lora.targets]
        return float(sum(4 * config.lora.rank * sum(shape) for shape in adapted if len(shape) == 2))
    source = MeshSide(
        mesh={"fsdp": config.trainer.fsdp, "tp": config.trainer.tp}, placements=fsdp_tp_placements(parameters)
    )
    report = report_transfer(parameters, source, MeshSide(mesh={"replica": 1}, placements={}))
    return float(report.source_slot_bytes.max())
