"""How long a step takes: the maximum cycle mean of the job's dataflow graph.

A job is a graph of executors that fire once a tick; an edge with delay d hands tick k's sink the token of tick k - d.
In the steady state every executor fires once a period, and the period is

    T = max over cycles of (time along the cycle) / (delays along the cycle)

(Reiter 1968; Baccelli et al., "Synchronization and Linearity", 1992, chapter 2). An executor that
fires one tick at a time is a cycle through itself with delay 1. For the job of docs/asynchrony.md
this becomes

    T = max(T_gen, T_train, T_reward, (T_gen + T_reward + T_train + T_sync) / (max_staleness + 1))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llamarl.errors import GraphError

__all__ = ["Edge", "Period", "closed_form_period", "max_cycle_mean", "reinforcement_learning_graph"]


@dataclass(frozen=True)
class Edge:
    """Tokens from ``source`` to ``sink``, ``delay`` ticks late, ``latency_s`` on the way."""

    source: str
    sink: str
    delay: int
    latency_s: float = 0.0


@dataclass(frozen=True)
class Period:
    """The steady state's time a tick and the cycle that sets it."""

    period_s: float
    cycle: tuple[str, ...]
    """Executors along the critical cycle, in firing order; one name: that executor is never idle."""


def max_cycle_mean(durations: Mapping[str, float], edges: Iterable[Edge]) -> Period:
    """The period of a dataflow graph, exact up to the rounding of sums.

    Newton's iteration on the ratio: begin with a cycle's mean, look for a cycle whose time exceeds ``mean * delay``,
    take its mean, until there is none. Each round names a better cycle, so it ends.

    Args:
        durations: Seconds an executor needs for a tick; it works on one at a time, a cycle of delay 1 through it.

    Raises:
        GraphError: An edge names an unknown executor, a delay or time is negative, or a cycle has no delay (deadlock).
    """
    edges = list(edges)
    for name, seconds in durations.items():
        if not seconds >= 0:
            raise GraphError(f"executor {name!r}: duration must be >= 0 seconds, got {seconds}")
    for edge in edges:
        for end in (edge.source, edge.sink):
            if end not in durations:
                raise GraphError(f"edge {edge.source} -> {edge.sink}: no executor {end!r}; known: {sorted(durations)}")
        if edge.delay < 0 or not edge.latency_s >= 0:
            raise GraphError(f"edge {edge.source} -> {edge.sink}: delay and latency must be >= 0, got {edge}")
    edges += [Edge(name, name, 1) for name in durations]
    arcs = [(e.source, e.sink, durations[e.source] + e.latency_s, e.delay) for e in edges]
    if dead := _positive_cycle(list(durations), [(u, v, 1.0 if delay == 0 else -1e18) for u, v, _, delay in arcs]):
        raise GraphError(f"the cycle {' -> '.join(_names(arcs, dead))} has no delay: every member waits for the others")
    best: Period | None = None
    mean = -1.0
    while True:
        found = _positive_cycle(list(durations), [(u, v, time - mean * delay) for u, v, time, delay in arcs])
        if not found:
            break
        time = sum(arcs[i][2] for i in found)
        delay = sum(arcs[i][3] for i in found)
        if time / delay <= mean:  # a rounding error looked like a better cycle
            break
        mean = time / delay
        best = Period(mean, tuple(arcs[i][0] for i in found))
    assert best is not None, "each executor is a cycle through itself"
    return best


def _names(arcs: Sequence[tuple[str, str, float, int]], cycle: Sequence[int]) -> list[str]:
    return [*(arcs[i][0] for i in cycle), arcs[cycle[0]][0]]


def _positive_cycle(nodes: Sequence[str], arcs: Sequence[tuple[str, str, float]]) -> list[int]:
    """Indices of arcs along some cycle of positive weight, in order; empty when there is none (Bellman and Ford)."""
    scale = max((abs(w) for _, _, w in arcs if w > -1e17), default=1.0)
    tolerance = 1e-12 * max(scale, 1e-300)
    distance = dict.fromkeys(nodes, 0.0)
    via: dict[str, int] = {}
    last: str | None = None
    for _ in range(len(nodes) + 1):
        last = None
        for index, (source, sink, weight) in enumerate(arcs):
            if distance[source] + weight > distance[sink] + tolerance:
                distance[sink] = distance[source] + weight
                via[sink] = index
                last = sink
        if last is None:
            return []
    assert last is not None
    node = last
    for _ in nodes:  # step back until surely on the cycle
        node = arcs[via[node]][0]
    cycle = [via[node]]
    while arcs[cycle[-1]][0] != node:
        cycle.append(via[arcs[cycle[-1]][0]])
    return cycle[::-1]


def reinforcement_learning_graph(
    *, generator_s: float, reward_s: float, trainer_s: float, sync_s: float, max_staleness: int
) -> tuple[dict[str, float], list[Edge]]:
    """Durations and edges of the job that llamarl runs: weights come back ``max_staleness + 1`` ticks later."""
    if max_staleness < 0:
        raise GraphError(f"max_staleness must be >= 0 trainer ticks, got {max_staleness}")
    durations = {"generator": generator_s, "reward": reward_s, "trainer": trainer_s}
    edges = [
        Edge("generator", "reward", 0),
        Edge("reward", "trainer", 0),
        Edge("trainer", "generator", max_staleness + 1, sync_s),
    ]
    return durations, edges


def closed_form_period(
    *, generator_s: float, reward_s: float, trainer_s: float, sync_s: float, max_staleness: int
) -> float:
    """What ``max_cycle_mean`` gives for ``reinforcement_learning_graph``, in one line."""
    around = (generator_s + reward_s + trainer_s + sync_s) / (max_staleness + 1)
    return max(generator_s, reward_s, trainer_s, around)
