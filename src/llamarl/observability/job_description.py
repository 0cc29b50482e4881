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
from dataclasses import asdict, dataclass, field
from pathlib import Path

import llamarl
from llamarl.determinism import platform_facts
from llamarl.observability.writing import replace_file, writes
from llamarl.plural import plural

__all__ = ["JOB_FILE", "Edge", "JobDescription", "Lane", "edge_lines", "head", "write_job"]

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
