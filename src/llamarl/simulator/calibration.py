"""What a recipe costs on this machine: two short runs of the real job, and the constants that they give.

    in turn   (staleness 0)  each role alone ─▶ decode step, prefill, training token, reward, overheads, lengths
    together  (staleness 1)  roles at work at once ─▶ how much each slows the other (contention.py)

The executors are the recipe's own (``probes.py``), in the recipe's runtime, with a learning rate next to nothing, so that
response lengths stay what they are under the initial policy. A forecast then simulates any schedule from these constants.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamarl.config import RunConfig, to_plain, validate
from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.controller.job import llamarl_graph
from llamarl.errors import PlanError
from llamarl.observability.rollouts import read_rollouts
from llamarl.planner.calibrate import calibration_path
from llamarl.planner.lengths import grouped
from llamarl.runtime.base import Report
from llamarl.runtime.factory import make_runtime
from llamarl.runtime.placement import available_cores, place
from llamarl.simulator.contention import Contention
from llamarl.simulator.costs import EvaluationCost, LinearGeneratorCost, RewardCost, TrainerCost, Variation
from llamarl.simulator.scenario import Scenario

__all__ = [
    "RecipeCalibration",
    "RoleCosts",
    "calibrate_recipe",
    "calibrated_scenario",
    "kept_calibration",
    "keep_calibration",
    "recipe_calibration_path",
    "settled_threads",
]

_FORMAT = 1
_WARM_UP = 1
"""First ticks of a calibration run that are left out."""
_MAX_GROUPS = 512
"""Measured groups that a kept calibration holds at most."""

Log = Callable[[str], None]
Rows = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RoleCosts:
    """A role's constants at one thread count (and precision), and how far they are from what was measured."""

    cost: LinearGeneratorCost | TrainerCost
    jitter: float
    """Standard deviation of the logarithm of (measured tick / fitted tick)."""
    ticks: int


@dataclass(frozen=True, kw_only=True)
class RecipeCalibration:
    """What decides a recipe's step on this machine."""

    cores: int
    generators: Mapping[str, RoleCosts]
    """``THREADS:QUANTIZATION`` -> decode and prefill as straight lines, and the tick's overhead."""
    trainers: Mapping[str, RoleCosts]
    """``THREADS`` -> a tick's overhead and seconds a batch token: shared prompts and skipped samples are in it."""
    reward_s: float
    round_s: float
    """Seconds of a synchronous round that belong to no executor's tick: messages and hand-over."""
    slowdowns: Mapping[str, Mapping[str, float]]
    """``GENERATOR_THREADS+TRAINER_THREADS`` -> role -> how many times as long it takes beside the other."""
    groups: tuple[tuple[int, ...], ...]
    """Response lengths, group by group."""
    prompt_tokens: int

    def describe(self) -> list[str]:
        """For people, one line a constant."""
        lengths = grouped(self.groups)
        lines = [f"responses  {lengths.label}; prompts {self.prompt_tokens} tokens"]
        for name, found in self.generators.items():
            g = found.cost
            assert isinstance(g, LinearGeneratorCost)
            lines.append(
                f"generator  threads:precision {name}: tick {g.tick_s * 1e3:.1f} ms, decode step {g.step_s * 1e3:.3g} ms + "
                f"{g.sequence_s * 1e6:.3g} us a sequence + {g.cache_token_s * 1e9:.3g} ns a cached token, prompt token "
                f"{g.prefill_token_s * 1e6:.3g} us (ticks differ by {found.jitter:.1%})"
            )
        for name, found in self.trainers.items():
            t = found.cost
            assert isinstance(t, TrainerCost)
            lines.append(
                f"trainer    threads {name}: tick {t.tick_s * 1e3:.1f} ms + {t.token_s * 1e6:.3g} us a token of the batch "
                f"(ticks differ by {found.jitter:.1%})"
            )
        lines.append(
            f"reward     {self.reward_s * 1e3:.1f} ms a tick; messages and hand-over {self.round_s * 1e3:.1f} ms"
        )
        for name, factors in self.slowdowns.items():
            both = ", ".join(f"{role} takes {factor:.2f} times as long" for role, factor in factors.items())
            lines.append(f"together   threads {name}: {both}")
        return lines


# -- measuring --------------------------------------------------------------------------------------------------------


def calibrate_recipe(
    config: RunConfig,
    *,
    variants: Sequence[tuple[int, str, int]] = (),
    ticks: int = 7,
    log: Log = lambda line: None,
) -> RecipeCalibration:
    """Run the recipe's job for a few ticks in turn and together, and fit.

    Args:
        variants: More (generator threads, quantization, trainer threads) to measure beside the recipe's own.
        ticks: Of each run, at least 4.

    Raises:
        PlanError: Too few ticks.
        LlamaRLError: What ended a run.
    """
    if ticks < 4:
        raise PlanError(f"a calibration needs at least 4 ticks a run, got {ticks}")
    threads = settled_threads(config)
    own = (threads["generator"], config.generator.quantization, threads["trainer"])
    generators: dict[str, RoleCosts] = {}
    trainers: dict[str, RoleCosts] = {}
    slowdowns: dict[str, dict[str, float]] = {}
    groups: list[tuple[int, ...]] = []
    prompts: list[int] = []
    rewards: list[float] = []
    rounds: list[float] = []
    for variant in dict.fromkeys([own, *variants]):
        generator_threads, quantization, trainer_threads = variant
        pair = f"{generator_threads}+{trainer_threads}"
        changed = _quiet(config, variant, ticks)
        with tempfile.TemporaryDirectory() as folder:
            log(f"in turn: threads {pair}, {quantization}, {ticks} ticks")
            alone = _Watched(changed(0), Path(folder) / "alone")
            lengths, prompt = alone.lengths()
            groups += lengths
            prompts += prompt
            generator = generators[f"{generator_threads}:{quantization}"] = alone.generator_costs()
            trainer = trainers[str(trainer_threads)] = alone.trainer_costs()
            rewards += alone.durations("reward")
            rounds += alone.rounds()
            if pair not in slowdowns:
                log(f"together: threads {pair}, {quantization}, {ticks} ticks")
                both = _Watched(changed(1), Path(folder) / "together")
                slowdowns[pair] = both.slowdowns(generator, trainer, generator_threads, trainer_threads)
    return RecipeCalibration(
        cores=config.run.cores or available_cores(),
        generators=generators,
        trainers=trainers,
        reward_s=statistics.fmean(rewards),
        round_s=statistics.median(rounds),
        slowdowns=slowdowns,
        groups=tuple(groups[:_MAX_GROUPS]),
        prompt_tokens=max(1, round(statistics.fmean(prompts))),
    )


def _quiet(config: RunConfig, variant: tuple[int, str, int], ticks: int) -> Callable[[int], RunConfig]:
    """max_staleness -> the recipe with whole batches, those threads, and nothing that a few ticks should not do."""
    raw = to_plain(config)
    raw["run"]["num_ticks"] = ticks
    raw["optimizer"] |= {"lr": 1e-12}
    raw["evaluation"]["every"] = 0
    raw["checkpoint"] |= {"every": 0, "at_end": False}
    raw["generator"] |= {"max_segments": 1, "oversubscription": 1.0, "threads": variant[0], "quantization": variant[1]}
    raw["trainer"]["threads"] = variant[2]

    def at(staleness: int) -> RunConfig:
        return validate({**raw, "schedule": {**raw["schedule"], "max_staleness": staleness}})

    return at


class _Watched:
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
        self.ticks = range(_WARM_UP, config.run.num_ticks - 1)  # the last one also writes the policy

    def on_report(self, report: Report) -> None:
        self._reports[report.executor].append(report)

    def durations(self, role: str) -> list[float]:
        return [self._duration(role, tick) for tick in self.ticks]

    def _duration(self, role: str, tick: int) -> float:
        report = self._reports[role][tick]
        return report.finished_s - report.started_s

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

    def slowdowns(
        self, generator: RoleCosts, trainer: RoleCosts, generator_threads: int, trainer_threads: int
    ) -> dict[str, float]:
        """How many times as long each role takes beside the other, turns on too few cores not counted.

        A tick of work W (alone) that lasts D, of which O beside the other role, gives slow-down O / (W - (D - O)).
        """
        assert isinstance(generator.cost, LinearGeneratorCost) and isinstance(trainer.cost, TrainerCost)
        cores = self.config.run.cores or available_cores()
        turns = max(1.0, (generator_threads + trainer_threads) / cores)
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
            factor = overlap / left if left > 0.0 and overlap > 0.0 else turns
            found[role] = min(max(1.0, factor / turns), 99.0)
        return found


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


def settled_threads(config: RunConfig) -> dict[str, int]:
    """CPU threads of each role as a run on this machine would pin them."""
    on_cpu = dataclasses.replace(
        config,
        generator=dataclasses.replace(config.generator, device="cpu"),
        trainer=dataclasses.replace(config.trainer, device="cpu"),
        evaluation=dataclasses.replace(config.evaluation, device="cpu"),
    )
    settled = place(llamarl_graph(on_cpu).executors, cores=config.run.cores or None, cuda_devices=0)
    return {spec.name: spec.threads for spec in settled.executors}


# -- forecasting ------------------------------------------------------------------------------------------------------


def calibrated_scenario(config: RunConfig, found: RecipeCalibration, **changes: Any) -> Scenario:
    """The schedule of ``config``, its evaluator included, with costs, lengths and contention as measured here.

    Raises:
        PlanError: The calibration lacks the recipe's threads or precision.
    """
    threads = settled_threads(config)
    key = f"{threads['generator']}:{config.generator.quantization}"
    generator = _measured(found.generators, key, "generator threads:quantization").cost
    trainer = _measured(found.trainers, str(threads["trainer"]), "trainer threads")
    assert isinstance(generator, LinearGeneratorCost) and isinstance(trainer.cost, TrainerCost)
    pair = f"{threads['generator']}+{threads['trainer']}"
    slowdown = dict(found.slowdowns.get(pair) or next(iter(found.slowdowns.values())))
    slowdown["evaluator"] = slowdown["generator"]
    evaluation = None
    if config.evaluation.every:
        own = f"{threads['evaluator']}:{config.generator.quantization}"
        cost = found.generators.get(own, found.generators[key]).cost
        assert isinstance(cost, LinearGeneratorCost)
        evaluation = EvaluationCost(
            every=config.evaluation.every,
            prompts=config.evaluation.num_prompts,
            samples_per_prompt=config.evaluation.samples_per_prompt,
            generator=cost,
            slots=config.generator.engine.max_sequences,
        )
    scenario = Scenario(
        title=f"{config.model.path} on {found.cores} cores, calibrated",
        prompts_per_step=config.schedule.prompts_per_step,
        group_size=config.generator.group_size,
        lengths=grouped(found.groups),
        prompt_tokens=found.prompt_tokens,
        generator=generator,
        trainer=trainer.cost,
        reward=RewardCost(tick_s=found.reward_s),
        weights_latency_s=found.round_s,
        max_staleness=config.schedule.max_staleness,
        max_segments=config.generator.max_segments,
        oversubscription=config.generator.oversubscription,
        replicas=config.generator.dp,
        slots=config.generator.engine.max_sequences,
        generator_devices=threads["generator"] * config.generator.dp,
        trainer_devices=threads["trainer"],
        variation=Variation(
            generator_jitter=min(1.0, found.generators[key].jitter), trainer_jitter=min(1.0, trainer.jitter)
        ),
        evaluation=evaluation,
        contention=Contention(
            cores=found.cores,
            threads={role: count for role, count in threads.items() if role != "reward"},
            slowdown=slowdown,
        ),
        num_ticks=config.run.num_ticks,
        seed=config.run.seed,
    )
    return dataclasses.replace(scenario, **changes)


def _measured(costs: Mapping[str, RoleCosts], key: str, what: str) -> RoleCosts:
    if key not in costs:
        raise PlanError(f"this calibration has no {what} {key}, only {', '.join(costs)}: calibrate with that recipe")
    return costs[key]


# -- keeping ----------------------------------------------------------------------------------------------------------


def recipe_calibration_path(config: RunConfig, kept: Path | None = None) -> Path:
    """Where the calibration of a recipe lies: beside the machine's, by what decides its costs."""
    raw = to_plain(config)
    engine = {k: v for k, v in raw["generator"].items() if k not in ("max_segments", "oversubscription", "dp")}
    own = {
        "model": raw["model"], "task": raw["task"], "data": raw["data"], "generator": engine,
        "trainer": raw["trainer"], "algorithm": raw["algorithm"], "cores": raw["run"]["cores"],
        "runtime": raw["run"]["runtime"], "prompts_per_step": raw["schedule"]["prompts_per_step"],
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()[:16]
    base = kept or calibration_path()
    return base.with_name(f"{base.stem}-recipe-{digest}.json")


def keep_calibration(path: Path, found: RecipeCalibration) -> None:
    """Write it whole or not at all.

    Raises:
        PlanError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"format": _FORMAT, **dataclasses.asdict(found)}), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise PlanError(f"calibration file {path} cannot be written: {error}") from error


def kept_calibration(path: Path) -> RecipeCalibration:
    """What ``keep_calibration`` wrote.

    Raises:
        PlanError: No such file, or it is not a calibration of this version.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.pop("format") != _FORMAT:
            raise PlanError(f"calibration file {path} is of another version: calibrate again")
        kinds: dict[str, Callable[..., LinearGeneratorCost | TrainerCost]] = {
            "generators": LinearGeneratorCost,
            "trainers": TrainerCost,
        }
        for role, kind in kinds.items():
            record[role] = {
                key: RoleCosts(cost=kind(**value["cost"]), jitter=value["jitter"], ticks=value["ticks"])
                for key, value in record[role].items()
            }
        record["groups"] = tuple(tuple(group) for group in record["groups"])
        return RecipeCalibration(**record)
    except FileNotFoundError:
        raise PlanError(
            f"calibration file {path} does not exist: make it with llamarl plan RECIPE --calibrate"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"calibration file {path} is not usable ({error!r}): calibrate again") from error
