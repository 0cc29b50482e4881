"""Scenarios out of what a user has: a plan, a recipe, a run that was measured."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamarl.config import RunConfig
from llamarl.errors import LlamaRLError, PlanError
from llamarl.observability.metrics import read_metrics
from llamarl.planner.choices import Options, Workload
from llamarl.planner.costs import GeneratorLayout, weight_sync_s
from llamarl.planner.hardware import Hardware
from llamarl.planner.lengths import read_lengths
from llamarl.planner.search import Plan
from llamarl.planner.training import TrainerDemand, TrainerLayout, TrainerTime, trainer_tick
from llamarl.simulator.costs import LinearGeneratorCost, RewardCost, RooflineGeneratorCost, TrainerCost
from llamarl.simulator.scenario import Scenario

__all__ = [
    "FittedCosts",
    "fit_runs",
    "scenario_from_plan",
    "scenario_from_recipe",
    "scenario_from_run",
    "weights_policy",
]

_WARM_UP = 2
"""First ticks of a run that a fit leaves out."""


def scenario_from_plan(plan: Plan, work: Workload, hardware: Hardware, options: Options, **changes: Any) -> Scenario:
    """The plan's layout, concurrency and rooflines, with lengths drawn for each response.

    Raises:
        PlanError: The plan shares devices between roles, which no graph of executors describes.
    """
    if plan.system != "separate":
        raise PlanError("only plans with separate generator and trainer are simulated: give at least 2 devices")
    g, t = plan.generator, plan.trainer
    tokens = work.sequences * (work.prompt_tokens + work.response.mean)
    scenario = Scenario(
        title=f"{work.model.name}, {plan.devices} x {hardware.device.title}",
        prompts_per_step=work.prompts_per_step,
        group_size=work.group_size,
        lengths=work.response,
        prompt_tokens=work.prompt_tokens,
        generator=RooflineGeneratorCost(hardware=hardware, model=work.model, layout=g.layout),
        trainer=_trainer_cost(t.time, tokens),
        reward=RewardCost(tick_s=work.reward_s),
        max_staleness=plan.max_staleness,
        max_segments=g.demand.max_segments if g.demand.partial else 1,
        oversubscription=options.oversubscription if g.demand.partial else 1.0,
        replicas=g.replicas,
        slots=g.demand.slots,
        generator_devices=g.devices,
        trainer_devices=t.layout.devices,
        weights_load_s=plan.sync_s,  # as the planner counts it: in the generator's tick
        planned_step_s=plan.step_s,
    )
    return dataclasses.replace(scenario, **changes)


def _trainer_cost(time: TrainerTime, tokens: float) -> TrainerCost:
    fixed = time.optimizer_s + time.other_s
    return TrainerCost(tick_s=fixed, token_s=(time.total_s - fixed) / tokens)


def scenario_from_recipe(
    config: RunConfig, work: Workload, hardware: Hardware, threads: Mapping[str, int], **changes: Any
) -> Scenario:
    """A recipe's own layout under the planner's rooflines; a role's threads work as one device without loss.

    Args:
        threads: CPU threads of generator and trainer as a run would pin them; 1 on GPUs.
    """
    g, t = config.generator, config.trainer
    precision = g.quantization if g.quantization != "none" else hardware.device.train_precision
    if precision not in hardware.device.matmul_flops:
        precision = hardware.device.train_precision
    layout = GeneratorLayout(g.tp, 1, precision, runnable=True)
    sequence = work.prompt_tokens + work.response.mean
    trainer = TrainerLayout(
        tp=t.tp,
        fsdp=t.fsdp,
        micro_batch=max(1, round(t.max_tokens_per_microbatch / sequence)),
        recompute=t.activation_checkpointing != "none",
        runnable=True,
    )
    demand = TrainerDemand(lengths=work.response, prompt_tokens=work.prompt_tokens, sequences=work.sequences)
    cost = _trainer_cost(trainer_tick(hardware, work.model, trainer, demand), work.tokens)
    speed = float(threads["trainer"])
    scenario = Scenario(
        title=f"{work.model.name}, as the recipe says, {hardware.device.title}",
        prompts_per_step=work.prompts_per_step,
        group_size=work.group_size,
        lengths=work.response,
        prompt_tokens=work.prompt_tokens,
        generator=RooflineGeneratorCost(
            hardware=hardware, model=work.model, layout=layout, speed=float(threads["generator"])
        ),
        trainer=TrainerCost(tick_s=cost.tick_s / speed, token_s=cost.token_s / speed),
        reward=RewardCost(tick_s=work.reward_s),
        max_staleness=config.schedule.max_staleness,
        **weights_policy(config),
        max_segments=g.max_segments,
        oversubscription=g.oversubscription,
        replicas=g.dp,
        slots=g.engine.max_sequences,
        generator_devices=g.dp * g.tp * threads["generator"],
        trainer_devices=t.fsdp * t.tp * threads["trainer"],
        weights_load_s=weight_sync_s(
            hardware, work.model, trainer_devices=trainer.devices, replicas=g.dp, layout=layout
        ),
        num_ticks=config.run.num_ticks,
        seed=config.run.seed,
    )
    return dataclasses.replace(scenario, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedCosts:
    """What runs on this machine measured, as straight lines."""

    generator: LinearGeneratorCost
    trainer: TrainerCost
    reward: RewardCost
    round_s: float
    """Seconds of a synchronous round that are no executor's tick: messages, hand-over. 0 where no run was synchronous."""
    prompt_tokens: int
    num_ticks: int
    """Measured ticks that went into the fit."""
    errors: Mapping[str, float]
    """Role -> median relative error of the fitted line over those ticks."""


def fit_runs(runs: Sequence[tuple[RunConfig, Path]]) -> FittedCosts:
    """Costs from the metrics and rollouts of measured runs.

    A generator's tick is ``tick_s + step_s * decode steps + sequence_s * tokens``; a trainer's ``tick_s + token_s * tokens``. Steps
    are those of the longest response (or of the slots' schedule), so the runs must finish every response in its tick.
    Two runs of different batch sizes tell the terms apart; from one run only their sum is well known.

    Raises:
        PlanError: A run has partial rollouts, too few ticks, or rollouts were not kept.
    """
    rows_g: list[tuple[float, float, float]] = []
    rows_t: list[tuple[float, float]] = []
    generator_s: list[float] = []
    trainer_s: list[float] = []
    reward_s: list[float] = []
    round_s: list[float] = []
    prompts: list[int] = []
    for config, folder in runs:
        if config.generator.max_segments != 1:
            raise PlanError(
                f"{folder}: a fit needs a run that finishes every response in its tick, and this one has "
                f"generator.max_segments {config.generator.max_segments}: simulate its recipe with the lengths that it measured, "
                f"llamarl simulate {folder / 'config.toml'} --response-tokens file:{folder / 'rollouts'}, or run it with "
                "--generator.max_segments 1 --generator.oversubscription 1.0"
            )
        for row in _metrics(folder)[_WARM_UP:]:
            file = folder / "rollouts" / f"tick_{int(row['step'] or 0):06d}.jsonl"
            if not file.is_file():
                continue
            lengths, prompt_tokens = _tick_lengths(file)
            steps = _decode_steps(lengths, config)
            rows_g.append((1.0, steps, float(lengths.sum()) / config.generator.dp))
            rows_t.append((1.0, float(lengths.sum() + prompt_tokens.sum())))
            generator_s.append(float(row["time/generator_s"] or 0.0))
            trainer_s.append(float(row["time/trainer_s"] or 0.0))
            reward_s.append(float(row["time/reward_s"] or 0.0))
            prompts.extend(prompt_tokens.tolist())
            if config.schedule.max_staleness == 0:
                ticks = generator_s[-1] + trainer_s[-1] + reward_s[-1]
                round_s.append(max(0.0, float(row["time/step_s"] or 0.0) - ticks))
    if len(rows_g) < 4:
        raise PlanError(
            f"a fit needs at least 4 ticks after {_WARM_UP} of warm-up with their rollouts, got {len(rows_g)} in "
            f"{', '.join(str(folder) for _, folder in runs)}: let the runs last longer"
        )
    g = _non_negative(np.array(rows_g), np.array(generator_s))
    t = _non_negative(np.array(rows_t), np.array(trainer_s))
    return FittedCosts(
        generator=LinearGeneratorCost(tick_s=g[0], step_s=g[1], sequence_s=g[2]),
        trainer=TrainerCost(tick_s=t[0], token_s=t[1]),
        reward=RewardCost(tick_s=float(np.median(reward_s))),
        round_s=float(np.median(round_s)) if round_s else 0.0,
        prompt_tokens=max(1, round(float(np.mean(prompts)))),
        num_ticks=len(rows_g),
        errors={
            "generator": _median_error(np.array(rows_g), g, generator_s),
            "trainer": _median_error(np.array(rows_t), t, trainer_s),
        },
    )


def scenario_from_run(config: RunConfig, run_dir: Path, costs: FittedCosts, **changes: Any) -> Scenario:
    """The schedule of ``config`` with costs that were measured and the lengths that ``run_dir`` kept."""
    scenario = Scenario(
        title=f"{run_dir}, as measured",
        prompts_per_step=config.schedule.prompts_per_step,
        group_size=config.generator.group_size,
        lengths=read_lengths(run_dir / "rollouts"),
        prompt_tokens=costs.prompt_tokens,
        generator=costs.generator,
        trainer=costs.trainer,
        reward=costs.reward,
        weights_latency_s=costs.round_s,
        max_staleness=config.schedule.max_staleness,
        **weights_policy(config),
        max_segments=config.generator.max_segments,
        oversubscription=config.generator.oversubscription,
        replicas=config.generator.dp,
        slots=config.generator.engine.max_sequences,
        num_ticks=config.run.num_ticks,
        seed=config.run.seed,
    )
    return dataclasses.replace(scenario, **changes)


def weights_policy(config: RunConfig) -> dict[str, Any]:
    """The fields of a scenario that say which version makes a batch, as the recipe has them."""
    latest = config.schedule.weights == "latest"
    kv = config.generator.kv_on_update if latest else "recompute"
    return {"weights": config.schedule.weights, "kv_on_update": kv}


def _metrics(folder: Path) -> list[dict[str, float | int | None]]:
    try:
        return [row for row in read_metrics(folder) if row.get("time/generator_s") is not None]
    except LlamaRLError as error:
        raise PlanError(f"{folder} is no finished run: {error}") from None


def _tick_lengths(file: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(response, prompt) tokens of each sample of a tick."""
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    return (
        np.array([len(record["tokens"]) for record in records], dtype=np.int64),
        np.array([len(record["prompt_tokens"]) for record in records], dtype=np.int64),
    )


def _decode_steps(lengths: npt.NDArray[np.int64], config: RunConfig) -> float:
    """Decode steps of the slowest replica: the longest response, or more where slots are fewer than responses."""
    share = math.ceil(len(lengths) / config.generator.dp)
    waves = lengths.sum() / config.generator.dp / config.generator.engine.max_sequences
    return float(max(lengths.max(), waves) if share > config.generator.engine.max_sequences else lengths.max())


def _non_negative(rows: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> list[float]:
    """Least squares of relative errors with coefficients >= 0: of all subsets of columns, the best that has none below 0."""
    weight = 1.0 / seconds
    best: tuple[float, list[float]] = (math.inf, [])
    columns = rows.shape[1]
    for mask in range(1, 1 << columns):
        used = [i for i in range(columns) if mask >> i & 1]
        found, *_ = np.linalg.lstsq(rows[:, used] * weight[:, None], seconds * weight, rcond=None)
        if (found < 0).any():
            continue
        error = float((((rows[:, used] @ found) * weight - 1.0) ** 2).sum())
        if error < best[0]:
            full = [0.0] * columns
            for i, value in zip(used, found, strict=True):
                full[i] = float(value)
            best = (error, full)
    return best[1]


def _median_error(rows: npt.NDArray[np.float64], found: Sequence[float], seconds: Sequence[float]) -> float:
    return float(np.median(np.abs(rows @ np.array(found) / np.array(seconds) - 1.0)))
