"""Run a scenario through the real controller on a virtual clock, and measure what a run would.

    Scenario ─▶ llamarl's graph, costed executors ─▶ run_graph ─▶ reports ─▶ step time, idle shares, staleness

Beside the simulated step stands what the theory says of it: the maximum cycle mean of the mean
durations. Where durations vary, the simulated step is the longer one; the difference is what
waiting for the slowest costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.controller.controller import run_graph
from llamarl.controller.marking import Marking
from llamarl.controller.saving import Saving
from llamarl.errors import ExecutorFailed, PlanError
from llamarl.forecast.costed import STALENESS_METRIC
from llamarl.forecast.scenario import Failures, Scenario
from llamarl.forecast.step_time import step_period
from llamarl.forecast.virtual_clock import Snapshots, VirtualClockRuntime
from llamarl.observability.trace import idle_share
from llamarl.runtime.base import Report
from llamarl.settings.job import DeadlineConfig

__all__ = ["SimulationResult", "simulate"]

_FOREVER = DeadlineConfig(setup_s=1e18, step_s=1e18)
"""A simulated tick has no deadline: a slow one is a result."""

_HOPELESS = 50
"""Failures in a row without a new checkpoint after which a job is called hopeless."""

_FAILURES = 6  # stream of random numbers


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """What a simulated run measured. Means are over the steady state: from the end of a warm-up to the last tick."""

    scenario: Scenario
    reports: tuple[Report, ...]
    """Every finished firing, in order; ticks that a failure undid are in it twice."""
    step_s: float
    """Mean time between trainer ticks, restarts and repeated ticks included."""
    theory_s: float
    """Maximum cycle mean of the roles' mean durations, without failures."""
    role_s: Mapping[str, float]
    """Mean duration of a tick of each role."""
    idle: Mapping[str, float]
    """Share of the time in which a role has no tick to work on."""
    replica_idle: float
    """Share of the generator replicas' time in which they have nothing to decode, waits inside a tick included."""
    tokens_per_s: float
    """Trained response tokens by time."""
    staleness: Mapping[int, int]
    """Staleness in versions -> trained response tokens, over the whole run."""
    num_failures: int
    lost_share: float
    """Share of the run's time that failures cost: from the last tick that was kept to the end of the restart."""
    total_s: float

    @property
    def staleness_mean(self) -> float:
        return sum(lag * tokens for lag, tokens in self.staleness.items()) / sum(self.staleness.values())


class _Collect:
    def __init__(self) -> None:
        self.reports: list[Report] = []

    def on_report(self, report: Report) -> None:
        self.reports.append(report)


class _VirtualCheckpoints:
    """Saves every n-th tick under a name; remembers the last that all executors have saved."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.last: int | None = None

    def due(self, tick: int) -> bool:
        return (tick + 1) % self._every == 0

    def overdue(self) -> bool:
        return False

    def folder_for(self, tick: int) -> Path | None:
        return Path(f"tick_{tick}") if self.due(tick) else None

    def require(self, tick: int) -> None:
        raise AssertionError("a simulated executor never asks to stop")

    def on_saved(self, tick: int, written: Mapping[str, object]) -> None:
        self.last = tick

    def on_unsaved(self, tick: int, why: str) -> None:
        raise AssertionError("a simulated disk never fails")

    def finished(self, *, wait: bool = False) -> tuple[int, Path] | None:
        return None


def simulate(scenario: Scenario) -> SimulationResult:
    """Run ``scenario`` to its last tick.

    Raises:
        PlanError: The job fails so often that it never reaches another checkpoint.
    """
    collect = _Collect()
    failures = scenario.failures
    num_failures, lost_s = 0, 0.0
    if failures is None:
        runtime = _clock(scenario)
        run_graph(
            Marking(scenario.graph, num_ticks=scenario.num_ticks), runtime, seed=scenario.seed, deadlines=_FOREVER,
            observers=[collect],
        )  # fmt: skip
        runtime.close()
    else:
        num_failures, lost_s = _run_with_failures(scenario, failures, collect)
    return _measure(scenario, collect.reports, num_failures, lost_s)


def _clock(scenario: Scenario, **changes: Any) -> VirtualClockRuntime:
    return VirtualClockRuntime(latency_s={"weights": scenario.weights_latency_s}, **changes)


def _run_with_failures(scenario: Scenario, failures: Failures, collect: _Collect) -> tuple[int, float]:
    """The controller's run, again from the last checkpoint after each failure; returns (failures, seconds lost)."""
    rng = np.random.default_rng([scenario.seed, _FAILURES])
    mean_s = failures.device_mtbf_hours * 3600.0 / scenario.devices
    checkpoints = _VirtualCheckpoints(failures.checkpoint_every)
    snapshots: Snapshots = {}
    clock, lost_s, count, in_vain = 0.0, 0.0, 0, 0
    while True:
        began, num_reports = clock, len(collect.reports)
        before = checkpoints.last
        runtime = _clock(scenario, start_s=clock, fail_at_s=clock + float(rng.exponential(mean_s)), snapshots=snapshots)
        try:
            run_graph(
                Marking(scenario.graph, first_tick=0 if before is None else before + 1, num_ticks=scenario.num_ticks),
                runtime, seed=scenario.seed, deadlines=_FOREVER,
                load_from=None if before is None else checkpoints.folder_for(before),
                saving=Saving(scenario.graph, checkpoints), observers=[collect],
            )  # fmt: skip
            return count, lost_s
        except ExecutorFailed:
            count += 1
            clock = runtime.now() + failures.restart_s
            saved = [
                report.finished_s
                for report in collect.reports[num_reports:]
                if report.executor == "trainer" and report.tick == checkpoints.last
            ]
            lost_s += clock - (saved[0] if saved else began)
            in_vain = in_vain + 1 if checkpoints.last == before else 0
            if in_vain >= _HOPELESS:
                reached = (
                    "did not reach its first checkpoint" if before is None else f"got no further than tick {before}"
                )
                raise PlanError(
                    f"{scenario.title}: the job dies every {mean_s:.3g} s in the mean and {reached} "
                    f"in {_HOPELESS} tries: take checkpoints more often than every "
                    f"{failures.checkpoint_every} ticks, or use fewer devices"
                ) from None
        finally:
            runtime.close()


def _measure(scenario: Scenario, reports: list[Report], num_failures: int, lost_s: float) -> SimulationResult:
    last = {(report.executor, report.tick): report for report in reports}  # of a repeated tick, the one that counted
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
    theory_s, _ = step_period(**around, max_staleness=scenario.max_staleness)
    return SimulationResult(
        scenario=scenario,
        reports=tuple(reports),
        step_s=step_s,
        theory_s=theory_s,
        role_s=role_s,
        idle=idle,
        replica_idle=replica_idle,
        tokens_per_s=trained / (finish - start) if finish > start else 0.0,
        staleness=dict(sorted(staleness.items())),
        num_failures=num_failures,
        lost_share=lost_s / total_s if total_s else 0.0,
        total_s=total_s,
    )
