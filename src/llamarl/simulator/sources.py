"""Scenarios out of what a user has: a plan, a recipe, a run that was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamarl.config import RunConfig
from llamarl.errors import PlanError
from llamarl.planner.choices import Options, Workload
from llamarl.planner.cores import core_rate
from llamarl.planner.hardware import Hardware
from llamarl.planner.lengths import Lengths, grouped, read_lengths
from llamarl.planner.rooflines import GeneratorLayout, weight_sync_s
from llamarl.planner.search import Plan
from llamarl.planner.training import TrainerDemand, TrainerLayout, TrainerTime, trainer_tick
from llamarl.simulator.calibrate import FittedCosts, RecipeCalibration, settled_threads
from llamarl.simulator.scenario import Scenario, weights_policy
from llamarl.simulator.tick_costs import RewardCost, RooflineGeneratorCost, TrainerCost, Variation

__all__ = ["calibrated_scenario", "recipe_layouts", "scenario_from_plan", "scenario_from_recipe", "scenario_from_run"]


def scenario_from_plan(plan: Plan, work: Workload, hardware: Hardware, options: Options, **changes: Any) -> Scenario:
    """The plan's layout, concurrency and rooflines, with lengths drawn for each response.

    Simulated replicas are alike: where the plan deals some of them a prompt more than others, all get as many as those, and the
    trainer takes its time for the planned ones.

    Raises:
        PlanError: The plan shares devices between roles, which no graph of executors describes.
    """
    if plan.system != "separate":
        raise PlanError("only plans with separate generator and trainer are simulated: give at least 2 devices")
    g, t = plan.generator, plan.trainer
    prompts = work.prompts_per_step if g.is_even else g.replicas * g.demand.sequences // work.group_size
    tokens = prompts * work.group_size * (work.prompt_tokens + work.response.mean)
    more = (
        ""
        if g.is_even
        else f" ({prompts} prompts a tick, as many for each replica, in place of {work.prompts_per_step})"
    )
    scenario = Scenario(
        title=f"{work.model.name}, {plan.devices} x {hardware.device.title}{more}",
        prompts_per_step=prompts,
        group_size=work.group_size,
        lengths=work.response,
        prompt_tokens=work.prompt_tokens,
        generator=RooflineGeneratorCost(hardware=hardware, model=work.model, layout=g.layout),
        trainer=_trainer_cost(t.time, tokens),
        reward=RewardCost(tick_s=work.reward_s),
        max_staleness=plan.max_staleness,
        parts=1 if t.core_s else plan.parts,  # parts on shared cores slow the generator's tail, which is not simulated
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


def recipe_layouts(config: RunConfig, hardware: Hardware, mean_tokens: float) -> tuple[GeneratorLayout, TrainerLayout]:
    """A replica of the recipe's generator and its trainer, as the rooflines take them.

    Args:
        mean_tokens: Of a sequence, prompt included.
    """
    g, t = config.generator, config.trainer
    precision = g.quantization if g.quantization != "none" else hardware.device.train_precision
    if precision not in hardware.device.matmul_flops:
        precision = hardware.device.train_precision
    trainer = TrainerLayout(
        tp=t.tp,
        pp=t.pp,
        fsdp=t.fsdp,
        cp=t.cp,
        ep=t.ep,
        micro_batch=max(1, round(t.max_tokens_per_microbatch / mean_tokens)),
        recompute=t.activation_checkpointing != "none",
        runnable=True,
    )
    return GeneratorLayout(g.tp, g.pp, precision, runnable=True, cp=g.cp), trainer


def scenario_from_recipe(
    config: RunConfig, work: Workload, hardware: Hardware, threads: Mapping[str, int], **changes: Any
) -> Scenario:
    """A recipe's own layout under the planner's rooflines; a role's threads work as one device without loss.

    Args:
        threads: CPU threads of generator and trainer as a run would pin them; 1 on GPUs.
    """
    g, t = config.generator, config.trainer
    layout, trainer = recipe_layouts(config, hardware, work.prompt_tokens + work.response.mean)
    demand = TrainerDemand(
        lengths=work.response,
        prompt_tokens=work.prompt_tokens,
        sequences=work.sequences,
        together=work.group_size,
    )
    cost = _trainer_cost(trainer_tick(hardware, work.model, trainer, demand), work.tokens)
    speed = core_rate(threads["trainer"])
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
        parts=config.schedule.parts,
        **weights_policy(config),
        max_segments=g.max_segments,
        oversubscription=g.oversubscription,
        replicas=g.dp,
        slots=g.engine.max_sequences,
        generator_devices=g.dp * g.tp * g.pp * g.cp * threads["generator"],
        trainer_devices=t.num_ranks * threads["trainer"],
        weights_load_s=weight_sync_s(
            hardware, work.model, trainer_devices=trainer.devices, replicas=g.dp, layout=layout
        ),
        num_ticks=config.run.num_ticks,
        seed=config.run.seed,
    )
    return dataclasses.replace(scenario, **changes)


def calibrated_scenario(config: RunConfig, found: RecipeCalibration, **changes: Any) -> Scenario:
    """The schedule of ``config`` with the costs, their spread and the lengths that short runs of it measured here."""
    costs, threads = found.at(config.schedule.max_staleness), settled_threads(config)
    title = f"{config.model.path} on {found.cores} cores, calibrated"
    scenario = dataclasses.replace(
        _measured_scenario(config, title, costs, grouped(found.groups)),
        weights_latency_s=found.in_turn.round_s,
        generator_devices=threads["generator"] * config.generator.dp,
        trainer_devices=threads["trainer"],
        variation=Variation(
            generator_jitter=min(1.0, costs.jitter["generator"]), trainer_jitter=min(1.0, costs.jitter["trainer"])
        ),
    )
    return dataclasses.replace(scenario, **changes)


def scenario_from_run(config: RunConfig, run_dir: Path, costs: FittedCosts, **changes: Any) -> Scenario:
    """The schedule of ``config`` with costs that were measured and the lengths that ``run_dir`` kept."""
    scenario = _measured_scenario(config, f"{run_dir}, as measured", costs, read_lengths(run_dir / "rollouts"))
    return dataclasses.replace(scenario, **changes)


def _measured_scenario(config: RunConfig, title: str, costs: FittedCosts, lengths: Lengths) -> Scenario:
    return Scenario(
        title=title,
        prompts_per_step=config.schedule.prompts_per_step,
        group_size=config.generator.group_size,
        lengths=lengths,
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
