"""What a job consists of, in words: the head of the console, the names of the trace's lanes, and ``RUN/job.json``.

The file says what ran where, for whoever looks at the run later: executors, channels, facts,
machine, versions. It is written when a run starts and when it is resumed, so it tells of the last
start. Nothing of a run depends on it.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llamarl
from llamarl.determinism import platform_facts
from llamarl.observability.writing import replace_file, writes
from llamarl.plural import plural

if TYPE_CHECKING:
    from llamarl.channels.base import ChannelSpec
    from llamarl.executors.base import ExecutorSpec

__all__ = ["JOB_FILE", "Edge", "JobDescription", "Lane", "describe_job", "edge_lines", "head", "write_job"]

JOB_FILE = "job.json"


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
    executors: Sequence[ExecutorSpec],
    channels: Sequence[ChannelSpec],
    *,
    details: Mapping[str, str],
    facts: Mapping[str, str],
    version_bytes: Mapping[str, float],
) -> JobDescription:
    """The description of a graph.

    Args:
        details: Executor -> what it does, in a few words.
        version_bytes: Weights channel -> bytes of one version at a source rank, if all hold as much.
    """
    lanes = tuple(Lane(**_shared(Lane, spec), detail=details.get(spec.name, "")) for spec in executors)
    edges = tuple(Edge(**_shared(Edge, spec), version_bytes=version_bytes.get(spec.name)) for spec in channels)
    return JobDescription(title=title, lanes=lanes, edges=edges, facts=dict(facts))


def _shared(kind: type[Lane | Edge], spec: Any) -> dict[str, Any]:
    """The fields of a part of the job that its description has too."""
    return {field.name: getattr(spec, field.name) for field in fields(kind) if hasattr(spec, field.name)}


def write_job(run_dir: str | os.PathLike[str], job: JobDescription) -> None:
    """Write ``job.json``.

    Raises:
        LlamaRLError: The folder cannot be written.
    """
    path = Path(run_dir) / JOB_FILE
    record = {
        "title": job.title,
        "executors": [asdict(lane) for lane in job.lanes],
        "channels": [asdict(edge) for edge in job.edges],
        "facts": dict(job.facts),
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
            **platform_facts(),
        },
    }
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    with writes(path):
        replace_file(path, text.encode("utf-8", "backslashreplace"))


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


def head(job: JobDescription, num_ticks: int, done: int = 0) -> list[str]:
    """What runs where."""
    lines = [
        "",
        f"llamarl {llamarl.__version__} · {job.title} · {plural(num_ticks, 'tick')}"
        + (f", {done} done" if done else ""),
    ]
    lines.append("")
    name = max((len(lane.name) for lane in job.lanes), default=0)
    places = {
        lane.name: f"{plural(lane.num_ranks, 'rank')} × {plural(lane.threads, 'thread')} on {lane.device}"
        for lane in job.lanes
    }
    place = max((len(text) for text in places.values()), default=0)
    lines += [f"  {lane.name:<{name}}   {places[lane.name]:<{place}}   {lane.detail}" for lane in job.lanes]
    arrows = edge_lines(job.edges)
    if arrows:
        lines += ["", *(f"  {line}" for line in arrows)]
    if job.facts:
        label = max(len(fact) for fact in job.facts)
        lines += ["", *(f"  {fact:<{label}}   {text}" for fact, text in job.facts.items())]
    return lines
