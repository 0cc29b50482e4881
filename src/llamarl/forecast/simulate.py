"""Run a scenario through the real controller on a virtual clock, and measure what a run would.

    Scenario ─▶ llamarl's graph, costed executors ─▶ run_graph ─▶ reports ─▶ step time, idle shares, staleness

Beside the simulated step stands what the theory says of it: the maximum cycle mean of the mean
durations. Where durations vary, the simulated step is the longer one; the difference is what
waiting for the slowest costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llamarl.controller.config import DeadlineConfig
from llamarl.controller.controller import run_graph
from llamarl.controller.marking import Marking
from llamarl.forecast.costed import STALENESS_METRIC
from llamarl.forecast.scenario import Scenario
from llamarl.forecast.step_time import closed_form_period
from llamarl.forecast.virtual_clock import VirtualClockRuntime
from llamarl.observability.trace import idle_share
from llamarl.runtime.base import Report

__all__ = ["SimulationResult", "simulate"]

_FOREVER = DeadlineConfig(setup_s=1e18, step_s=1e18)
"""A simulated tick has no deadline: a slow one is a result."""


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """What a simulated run measured. Means are over the steady state: from ``first_steady_tick`` to the last tick."""

    scenario: Scenario
    reports: tuple[Report, ...]
    """Every finished firing, in order."""
    first_steady_tick: int
    step_s: float
    """Mean time between trainer ticks."""
    theory_s: float
    """Maximum cycle mean of the roles' mean durations."""
    role_s: Mapping[str, float]
    """Mean duration of a tick of each role."""
    idle: Mapping[str, float]
    """Share of the time in which a role has no tick to work on."""
    replica_idle: float
    """Share of the generator replicas' time in which they have nothing to decode, waits inside a tick included."""
    device_idle: float
    """The same over all devices of generator and trainer, by their numbers."""
    tokens_per_s: float
    """Trained response tokens by time."""
    staleness: Mapping[int, int]
    """Staleness in versions -> trained response tokens, over the whole run."""
    total_s: float

    @property
    def staleness_mean(self) -> float:
        return sum(lag * tokens for lag, tokens in self.staleness.items()) / sum(self.staleness.values())


class _Collect:
    def __init__(self) -> None:
        self.reports: list[Report] = []

    def on_report(self, report: Report) -> None:
        self.reports.append(report)


def simulate(scenario: Scenario) -> SimulationResult:
    """Run ``scenario`` to its last tick."""
    collect = _Collect()
    runtime = VirtualClockRuntime(latency_s={"weights": scenario.weights_latency_s})
    marking = Marking(scenario.graph, num_ticks=scenario.num_ticks)
    run_graph(marking, runtime, seed=scenario.seed, deadlines=_FOREVER, observers=[collect])
    runtime.close()
    return _measure(scenario, collect.reports)


def _measure(scenario: Scenario, reports: list[Report]) -> SimulationResult:
    last = {(report.executor, report.tick): report for report in reports}
    final = scenario.num_ticks - 1
    warm = min(2 * (scenario.max_staleness + 1) + scenario.max_segments, scenario.num_ticks // 3)
    rounds = (scenario.num_ticks - warm) // (scenario.max_staleness + 1)
    if rounds:  # ticks of one round may come in a burst: measure whole rounds
        warm = scenario.num_ticks - rounds * (scenario.max_staleness + 1)

    total_s = max(report.finished_s for report in reports)

    def window(role: str) -> tuple[float, float]:
        if not warm:  # no tick of its own to begin after: the whole run, what the role waits at its end included
            return 0.0, total_s
        return last[role, warm - 1].finished_s, last[role, final].finished_s

    roles = ("generator", "reward", "trainer")
    steady = {role: [last[role, tick] for tick in range(warm, final + 1)] for role in roles}
    role_s = {
        role: sum(report.finished_s - report.started_s for report in found) / len(found)
        for role, found in steady.items()
    }
    idle = {
        role: idle_share([(r.started_s, r.finished_s) for r in reports if r.executor == role], window(role))
        for role in roles
    }
    begin, end = window("generator")
    replicas_busy = sum(
        r.metrics["busy_replica_s"] for r in reports if r.executor == "generator" and r.started_s >= begin
    )
    replica_idle = max(0.0, 1.0 - replicas_busy / (end - begin)) if end > begin else 0.0
    start, finish = window("trainer")
    step_s = (finish - start) / len(steady["trainer"])
    staleness: dict[int, int] = {}
    for (role, _), report in last.items():
        for key, tokens in report.metrics.items() if role == "trainer" else ():
            if key.startswith(STALENESS_METRIC):
                lag = int(key.removeprefix(STALENESS_METRIC))
                staleness[lag] = staleness.get(lag, 0) + int(tokens)
    trained = sum(report.metrics["tokens/trained"] for report in steady["trainer"])
    around = {**{f"{role}_s": seconds for role, seconds in role_s.items()}, "sync_s": scenario.weights_latency_s}
    theory_s = closed_form_period(**around, max_staleness=scenario.max_staleness)
    return SimulationResult(
        scenario=scenario,
        reports=tuple(reports),
        first_steady_tick=warm,
        step_s=step_s,
        theory_s=theory_s,
        role_s=role_s,
        idle=idle,
        replica_idle=replica_idle,
        device_idle=(replica_idle * scenario.generator_devices + idle["trainer"] * scenario.trainer_devices)
        / scenario.devices,
        tokens_per_s=trained / (finish - start) if finish > start else 0.0,
        staleness=dict(sorted(staleness.items())),
        total_s=total_s,
    )
