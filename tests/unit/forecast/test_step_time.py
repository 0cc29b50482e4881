"""Maximum cycle mean: against the closed form, against brute force, and against firing the graph."""

import itertools
import random

import pytest

from llamarl.errors import GraphError
from llamarl.forecast.step_time import Edge, closed_form_period, max_cycle_mean, reinforcement_learning_graph


def test_closed_form_is_the_cycle_mean_of_the_job() -> None:
    rng = random.Random(0)
    for _ in range(500):
        times = {
            f"{role}_s": rng.choice([0.0, rng.random(), 10 * rng.random()])
            for role in ("generator", "reward", "trainer", "sync")
        }
        staleness = rng.randrange(9)
        durations, edges = reinforcement_learning_graph(**times, max_staleness=staleness)
        period = max_cycle_mean(durations, edges)
        assert period.period_s == pytest.approx(
            closed_form_period(**times, max_staleness=staleness), rel=1e-9, abs=1e-12
        )


def test_the_paper_cases_sum_and_max() -> None:
    times = dict(generator_s=5.0, reward_s=1.0, trainer_s=3.0, sync_s=0.5)
    durations, edges = reinforcement_learning_graph(**times, max_staleness=0)
    assert max_cycle_mean(durations, edges).period_s == pytest.approx(9.5)
    assert set(max_cycle_mean(durations, edges).cycle) == {"generator", "reward", "trainer"}
    durations, edges = reinforcement_learning_graph(**times, max_staleness=1)
    period = max_cycle_mean(durations, edges)
    assert (period.period_s, period.cycle) == (pytest.approx(5.0), ("generator",))


def _fire(durations: dict[str, float], edges: list[Edge], ticks: int) -> float:
    """Mean time between ticks of the last quarter when every executor fires as soon as it may."""
    order: list[str] = []
    while len(order) < len(durations):  # topological order of the zero-delay edges
        order += [n for n in durations if n not in order
                  and all(e.source in order for e in edges if e.sink == n and e.delay == 0)]  # fmt: skip
    end: dict[tuple[str, int], float] = {}
    for tick in range(ticks):
        for name in order:
            ready = [end.get((e.source, tick - e.delay), 0.0) + (e.latency_s if tick >= e.delay else 0.0)
                     for e in edges if e.sink == name]  # fmt: skip
            end[name, tick] = max([*ready, end.get((name, tick - 1), 0.0)]) + durations[name]
    last, mid = ticks - 1, ticks - 1 - ticks // 4
    return max(end[n, last] for n in durations) / (last - mid) - max(end[n, mid] for n in durations) / (last - mid)


def test_random_graphs_fire_at_the_cycle_mean() -> None:
    rng = random.Random(1)
    for _ in range(60):
        names = [f"n{i}" for i in range(rng.randint(2, 5))]
        durations = {n: float(rng.randint(0, 9)) for n in names}
        edges = [Edge(a, b, 0 if names.index(a) < names.index(b) else rng.randint(1, 3), float(rng.randint(0, 2)))
                 for a, b in itertools.permutations(names, 2) if rng.random() < 0.6]  # fmt: skip
        edges += [
            Edge(names[i], names[(i + 1) % len(names)], 0 if i + 1 < len(names) else 2) for i in range(len(names))
        ]
        exact = max_cycle_mean(durations, edges).period_s
        # The steady state repeats every so many ticks (a divisor of 60 here); 240 ticks average whole repeats.
        assert _fire(durations, edges, 960) == pytest.approx(exact, rel=1e-6, abs=1e-9)


def test_a_cycle_without_delay_is_a_deadlock() -> None:
    with pytest.raises(GraphError, match="a -> b -> a|b -> a -> b"):
        max_cycle_mean({"a": 1.0, "b": 1.0}, [Edge("a", "b", 0), Edge("b", "a", 0)])


@pytest.mark.parametrize(
    ("durations", "edges", "message"),
    [
        ({"a": -1.0}, [], "duration"),
        ({"a": 1.0}, [Edge("a", "b", 1)], "no executor 'b'"),
        ({"a": 1.0}, [Edge("a", "a", -1)], "delay"),
    ],
)
def test_broken_graphs_are_named(durations: dict[str, float], edges: list[Edge], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        max_cycle_mean(durations, edges)
