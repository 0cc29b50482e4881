"""What a job consists of, in words: the head of the console and the names of the trace's lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Edge", "JobDescription", "Lane", "describe_job", "edge_lines"]


class _ExecutorLike(Protocol):
    """What is read of an ``ExecutorSpec``."""

    @property
    def name(self) -> str: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def device(self) -> str: ...


class _ChannelLike(Protocol):
    """What is read of a ``ChannelSpec``."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def sink(self) -> str: ...
    @property
    def delay(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def transport(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One executor and where it runs."""

    name: str
    num_ranks: int = 1
    threads: int = 1
    device: str = "cpu"
    detail: str = ""
    """What it does in this job, in a few words."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One channel."""

    name: str
    source: str
    sink: str
    delay: int = 0
    capacity: int | None = None
    """Most tokens on it at once; None: not known."""
    transport: str = ""
    """Of weights: how they travel."""
    version_bytes: float | None = None
    """Of weights: one version at the source rank that holds most of it."""


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """Everything that the head of the console says."""

    title: str
    lanes: tuple[Lane, ...]
    edges: tuple[Edge, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """Further lines, label -> text (model, task, algorithm, run folder)."""


def describe_job(
    title: str,
    executors: Sequence[_ExecutorLike],
    channels: Sequence[_ChannelLike],
    *,
    details: Mapping[str, str] | None = None,
    facts: Mapping[str, str] | None = None,
    version_bytes: Mapping[str, float] | None = None,
) -> JobDescription:
    """The description of a graph made of ``ExecutorSpec`` and ``ChannelSpec``.

    Args:
        details: Executor -> what it does, in a few words.
        version_bytes: Weights channel -> bytes of one version at the source rank that holds most of it.
    """
    words, sizes = details or {}, version_bytes or {}
    return JobDescription(
        title=title,
        lanes=tuple(
            Lane(name=e.name, num_ranks=e.num_ranks, threads=e.threads, device=e.device, detail=words.get(e.name, ""))
            for e in executors
        ),
        edges=tuple(
            Edge(
                name=c.name,
                source=c.source,
                sink=c.sink,
                delay=c.delay,
                capacity=c.capacity,
                transport=c.transport,
                version_bytes=sizes.get(c.name),
            )
            for c in channels
        ),
        facts=dict(facts or {}),
    )


def edge_lines(edges: Sequence[Edge]) -> list[str]:
    """The graph as arrows: chains of edges without delay, then each edge with a delay."""
    rest = [edge for edge in edges if edge.delay == 0]
    lines = []
    while rest:
        sinks = {edge.sink for edge in rest}
        edge = next((edge for edge in rest if edge.source not in sinks), rest[0])
        rest.remove(edge)
        line = f"{edge.source} ──{edge.name}──▶ {edge.sink}"
        while following := next((other for other in rest if other.source == edge.sink), None):
            edge = following
            rest.remove(edge)
            line += f" ──{edge.name}──▶ {edge.sink}"
        lines.append(line)
    for edge in edges:
        if edge.delay:
            late = f"{edge.delay} tick{'s' if edge.delay > 1 else ''} later"
            lines.append(f"{edge.source} ══{edge.name}, {late}══▶ {edge.sink}")
    return lines
