"""A short run of a recipe's own job, and the constants that its executors' reports give."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llamarl.config import RunConfig
from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.controller.job import llamarl_graph
from llamarl.observability.rollouts import read_rollouts
from llamarl.runtime.base import Report
from llamarl.runtime.factory import make_runtime
from llamarl.runtime.placement import place
from llamarl.simulator.costs import LinearGeneratorCost, TrainerCost
from llamarl.simulator.kept_calibration import RoleCosts

__all__ = ["Beside", "WatchedRun", "non_negative_line", "slowdown", "warm_up_ticks"]

_WARM_UP_S = 1.5
"""After the first tick, up to two more that began within this time are left out too: they took 1.2 and 1.1 times as long as later ones,
in four runs of the tiny recipe."""

Rows = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A role's ticks at the time when the other was at work too.

    Ticks of work W (alone) that last D, of which O beside the other role, do W - (D - O) of it in O.
    """

    overlap_s: float
    work_s: float
    """What they did meanwhile, in seconds that it would take alone."""


class WatchedRun:
    """A short run of the job with probed executors, and what its reports say."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        folder.mkdir(parents=True)
        probes = {"generator": "ProbedGenerator"}
        if config.schedule.max_staleness == 0:
            probes["trainer"] = "ProbedTrainer"
        graph = llamarl_graph(config)
        placed = place(graph.executors, cores=config.run.cores or None).executors
        executors = tuple(
            dataclasses.replace(spec, factory=f"llamarl.simulator.probes:{probes[spec.name]}")
            if spec.name in probes
            else spec
            for spec in placed
        )
        self._reports: dict[str, list[Report]] = {spec.name: [] for spec in executors}
        runtime = make_runtime(config.run.runtime)
        try:
            run_graph(
                Graph(executors, graph.channels),
                runtime,
                num_ticks=config.run.num_ticks,
                seed=config.run.seed,
                run_dir=folder,
                deadlines=config.deadlines,
                observers=[self],
            )
        finally:
            runtime.close()
        starts = [report.started_s for report in self._reports["generator"]]
        self.ticks = range(warm_up_ticks(starts), config.run.num_ticks - 1)  # the last one also writes the policy

    def on_report(self, report: Report) -> None:
        self._reports[report.executor].append(report)

    def durations(self, role: str) -> list[float]:
        return [self._duration(role, tick) for tick in self.ticks]

    def _duration(self, role: str, tick: int) -> float:
        report = self._reports[role][tick]
        return report.finished_s - report.started_s

    def tick_s(self) -> float:
        """Mean seconds from one trainer tick's end to the next."""
        ends = [report.finished_s for report in self._reports["trainer"]]
        return (ends[self.ticks[-1]] - ends[self.ticks[0] - 1]) / len(self.ticks)

    def rounds(self) -> list[float]:
        """Seconds between trainer ticks that no role worked (only meaningful in turn)."""
        ends = [report.finished_s for report in self._reports["trainer"]]
        roles = ("generator", "reward", "trainer")
        return [max(0.0, ends[k] - ends[k - 1] - sum(self._duration(role, k) for role in roles)) for k in self.ticks]

    def lengths(self) -> tuple[list[tuple[int, ...]], list[int]]:
        """(response lengths by group, prompt lengths), over all ticks."""
        found: dict[tuple[int, int], list[int]] = {}
        prompts: dict[tuple[int, int], int] = {}
        for rollout in read_rollouts(self.folder):
            key = (rollout.tick, rollout.response.prompt_index)
            found.setdefault(key, []).append(max(1, len(rollout.response.tokens)))
            prompts[key] = len(rollout.prompt_tokens)
        return [tuple(lengths) for lengths in found.values()], list(prompts.values())

    def _steps(self, tick: int) -> Rows:
        from llamarl.simulator.probes import read_steps

        return np.array(read_steps(self.folder, tick), dtype=np.float64)

    def _batch_tokens(self, tick: int) -> float:
        return float(sum(len(r.response.tokens) + len(r.prompt_tokens) for r in read_rollouts(self.folder, tick)))

    def generator_costs(self) -> RoleCosts:
        """Decode and prefill from the engine's steps; what is left of a tick is its overhead."""
        steps = {tick: self._steps(tick) for tick in self.ticks}
        rows = np.concatenate(list(steps.values()))
        features = np.column_stack([np.ones(len(rows)), rows[:, :3]])
        step, sequence, cached, prefill = non_negative_line(features, rows[:, 3])
        overhead = [self._duration("generator", tick) - float(steps[tick][:, 3].sum()) for tick in self.ticks]
        cost = LinearGeneratorCost(
            tick_s=max(0.0, statistics.median(overhead)),
            step_s=step,
            sequence_s=sequence,
            cache_token_s=cached,
            prefill_token_s=prefill,
        )
        fitted = [self.generator_work(cost, tick) for tick in self.ticks]
        return RoleCosts(cost=cost, jitter=_spread(self.durations("generator"), fitted), ticks=len(self.ticks))

    def generator_work(self, cost: LinearGeneratorCost, tick: int) -> float:
        """Seconds that a tick would take alone."""
        sampled, cached, prompt = self._steps(tick)[:, :3].T
        decode = cost.step_s * len(sampled) + cost.sequence_s * sampled.sum() + cost.cache_token_s * cached.sum()
        return cost.tick_s + float(decode + cost.prefill_token_s * prompt.sum())

    def trainer_costs(self) -> RoleCosts:
        """A tick's overhead and a computed token's time; then a batch token's, by how many of them are computed."""
        computed = np.array([self._reports["trainer"][tick].metrics["tokens/computed"] for tick in self.ticks])
        seconds = np.array(self.durations("trainer"))
        features = np.column_stack([np.ones(len(computed)), computed])
        tick_s, token_s = non_negative_line(features, seconds)
        whole = [i for i, tick in enumerate(self.ticks) if tick % 2 == 0]
        share = sum(computed[i] for i in whole) / sum(self._batch_tokens(self.ticks[i]) for i in whole)
        jitter = _spread(seconds.tolist(), (features @ np.array([tick_s, token_s])).tolist())
        return RoleCosts(
            cost=TrainerCost(tick_s=tick_s, token_s=token_s * float(share)), jitter=jitter, ticks=len(self.ticks)
        )

    def beside(self, generator: RoleCosts, trainer: RoleCosts) -> dict[str, Beside]:
        """What each role did beside the other, given what its work would take alone."""
        assert isinstance(generator.cost, LinearGeneratorCost) and isinstance(trainer.cost, TrainerCost)
        work = {
            "generator": [self.generator_work(generator.cost, tick) for tick in self.ticks],
            "trainer": [trainer.cost.batch_s(self._batch_tokens(tick)) for tick in self.ticks],
        }
        found = {}
        for role, other in (("generator", "trainer"), ("trainer", "generator")):
            beside = [(r.started_s, r.finished_s) for r in self._reports[other]]
            overlap, left = 0.0, 0.0
            for tick, seconds in zip(self.ticks, work[role], strict=True):
                report = self._reports[role][tick]
                common = sum(
                    max(0.0, min(end, report.finished_s) - max(start, report.started_s)) for start, end in beside
                )
                overlap += common
                left += seconds - (self._duration(role, tick) - common)
            found[role] = Beside(overlap_s=overlap, work_s=left)
        return found


def warm_up_ticks(starts: Sequence[float]) -> int:
    """How many first ticks to leave out: 1 to 3, while three ticks stay.

    Args:
        starts: Seconds at which each tick began.
    """
    early = sum(start - starts[0] < _WARM_UP_S for start in starts)
    return max(1, min(early, 3, len(starts) - 3))


def slowdown(runs: Sequence[Beside], turns: float) -> float:
    """How many times as long a role takes beside another, over several runs; 1 to 99.

    Args:
        turns: Threads of both roles by cores, at least 1: how many times as long both take by waiting for a core alone.
    """
    overlap, work = sum(run.overlap_s for run in runs), sum(run.work_s for run in runs)
    factor = overlap / work if work > 0.0 and overlap > 0.0 else turns
    return min(max(1.0, factor / turns), 99.0)


def non_negative_line(features: Rows, seconds: npt.NDArray[np.float64]) -> list[float]:
    """Coefficients >= 0 that fit in relative error, scaled so that the sum of all seconds is met exactly.

    Of all subsets of columns the best whose coefficients are all above 0: a measured cost can be nothing, never less.
    """
    weight = 1.0 / np.maximum(seconds, 1e-9)
    best: tuple[float, Rows] = (math.inf, np.zeros(features.shape[1]))
    for mask in range(1, 1 << features.shape[1]):
        used = [i for i in range(features.shape[1]) if mask >> i & 1]
        scale = np.maximum(np.abs(features[:, used]).max(axis=0), 1e-30)
        part, *_ = np.linalg.lstsq(features[:, used] / scale * weight[:, None], seconds * weight, rcond=None)
        if (part < 0).any():
            continue
        found = np.zeros(features.shape[1])
        found[used] = part / scale
        error = float((((features @ found) * weight - 1.0) ** 2).sum())
        if error < best[0]:
            best = (error, found)
    total = float((features @ best[1]).sum())
    return [float(value) for value in best[1] * (seconds.sum() / total if total > 0 else 1.0)]


def _spread(measured: Sequence[float], fitted: Sequence[float]) -> float:
    logs = [math.log(max(m, 1e-9) / max(f, 1e-9)) for m, f in zip(measured, fitted, strict=True)]
    return statistics.pstdev(logs)
