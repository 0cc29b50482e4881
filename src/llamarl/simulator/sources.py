"""Scenarios out of what a user has: a plan, a recipe, a run that was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamarl.config import RunConfig
from llamarl.errors import PlanError
from llamarl.executors.config import GeneratorConfig
from llamarl.planner.choices import Options, Workload, trainer_demand
from llamarl.planner.cores import core_rate, core_share, finished_s
from llamarl.planner.hardware import Hardware
from llamarl.planner.lengths import Lengths, grouped, read_lengths
from llamarl.planner.model_spec import ModelSpec
from llamarl.planner.rooflines import GeneratorLayout, weight_syncs_s
from llamarl.planner.search import Plan
from llamarl.planner.shared_prompts import sequences_within
from llamarl.planner.training import TrainerLayout, TrainerTime, trainer_tick
from llamarl.plural import plural
from llamarl.simulator.calibrate import RecipeCalibration, settled_threads
from llamarl.simulator.fitted_costs import FittedCosts
from llamarl.simulator.scenario import ReplicaKind, Scenario, weights_policy
from llamarl.simulator.simulate import simulate
from llamarl.simulator.tick_costs import GeneratorCost, RewardCost, RooflineGeneratorCost, TrainerCost, Variation

__all__ = [
    "calibrated_scenario",
    "on_shared_cores",
    "replica_layout",
    "scenario_from_plan",
    "scenario_from_recipe",
    "scenario_from_run",
    "trainer_layout",
]

_TICKS = 50
"""Simulated to learn how long a role's tick is."""
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


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


def replica_layout(generator: GeneratorConfig, hardware: Hardware) -> GeneratorLayout:
    """A replica of a recipe's generator, as the rooflines take it. A precision without a rate there counts as the trainer's.

    Args:
        generator: Of replicas that are alike: of unlike ones the section as one kind sees it.
    """
    known = hardware.device.matmul_flops
    dtype = _PRECISIONS.get(generator.engine.dtype, hardware.device.train_precision)
    precision = generator.quantization if generator.quantization in known else dtype
    if precision not in known:
        precision = hardware.device.train_precision
    return GeneratorLayout(generator.tp, generator.pp, precision, runnable=True, cp=generator.cp)


def trainer_layout(
    config: RunConfig, model: ModelSpec, *, prompt_tokens: float, response_tokens: float
) -> TrainerLayout:
    """The recipe's trainer, as the rooflines take it.

    Args:
        prompt_tokens, response_tokens: Of a sequence, on average.
    """
    t = config.trainer
    share = t.share_prompts and model.shares_prompts
    together = config.generator.group_size if share else 1
    return TrainerLayout(
        tp=t.tp,
        pp=t.pp,
        fsdp=t.fsdp,
        cp=t.cp,
        ep=t.ep,
        micro_batch=sequences_within(t.max_tokens_per_microbatch, prompt_tokens, response_tokens, together),
        share_prompts=share,
        recompute=t.activation_checkpointing != "none",
        runnable=True,
    )


def scenario_from_recipe(
    config: RunConfig,
    work: Workload,
    hardware: Hardware,
    threads: Mapping[str, int],
    *,
    cores: int | None = None,
    **changes: Any,
) -> Scenario:
    """A recipe's own layout under the planner's rooflines; a rank's threads work as one device without loss, and those of a role share
    the cores. What roles that work at the same time cost each other is added by ``on_shared_cores``.

    Args:
        threads: CPU threads of a generator's and a trainer's rank as a run would pin them; 1 on GPUs.
        cores: That there are; None: every rank has a device.
    """
    g, t = config.generator, config.trainer
    sections = _sections(config)
    layouts = [replica_layout(own, hardware) for own in sections]
    trainer = trainer_layout(config, work.model, prompt_tokens=work.prompt_tokens, response_tokens=work.response.mean)
    demand = trainer_demand(work, together=work.group_size)
    cost = _trainer_cost(trainer_tick(hardware, work.model, trainer, demand), work.tokens)
    num_threads = {
        "generator": sum(g.replica_ranks) * threads["generator"],
        "trainer": t.num_ranks * threads["trainer"],
    }
    share = {role: core_share(count, cores) if cores else 1.0 for role, count in num_threads.items()}
    sharing = ""
    if cores and (wanted := sum(num_threads.values())) > cores:
        sharing = f"; {plural(wanted, 'thread')} share {plural(cores, 'core')}"
    speed = core_rate(threads["trainer"]) * share["trainer"]
    decoding = threads["generator"] * share["generator"]
    generators = [
        RooflineGeneratorCost(hardware=hardware, model=work.model, layout=layout, speed=decoding) for layout in layouts
    ]
    loads = weight_syncs_s(
        hardware,
        work.model,
        trainer_devices=trainer.devices,
        kinds=[(own.dp, layout) for own, layout in zip(sections, layouts, strict=True)],
    )
    scenario = Scenario(
        title=f"{work.model.name}, as the recipe says, {hardware.device.title}{sharing}",
        prompts_per_step=work.prompts_per_step,
        group_size=work.group_size,
        lengths=work.response,
        prompt_tokens=work.prompt_tokens,
        generator=generators[0],
        kinds=_kinds(config, generators, loads),
        trainer=TrainerCost(tick_s=cost.tick_s / speed, token_s=cost.token_s / speed),
        reward=RewardCost(tick_s=work.reward_s),
        max_staleness=config.schedule.max_staleness,
        **weights_policy(config),
        max_segments=g.max_segments,
        oversubscription=g.oversubscription,
        replicas=g.dp,
        slots=g.engine.max_sequences,
        generator_devices=num_threads["generator"],
        trainer_devices=num_threads["trainer"],
        weights_load_s=loads[0],
        num_ticks=config.run.num_ticks,
        seed=config.run.seed,
    )
    return dataclasses.replace(scenario, **changes)


def on_shared_cores(scenario: Scenario, cores: int) -> Scenario:
    """``scenario``, whose devices are threads that share ``cores``, with the trainer's tick as it is beside the generator's.

    The generator's stays as it is alone and the trainer has what that leaves, as the planner counts it (``planner/cores.py``). Where
    the trainer has a thread a core, the step is the same whoever comes first: no core is idle while there is work.
    """
    g, t = min(scenario.generator_devices, cores), min(scenario.trainer_devices, cores)
    if not scenario.max_staleness or g + t <= cores:
        return scenario
    alone = simulate(dataclasses.replace(scenario, num_ticks=min(_TICKS, scenario.num_ticks))).role_s
    work = [(0.0, alone["trainer"] * t)]
    beside_s = finished_s(work, cores=t, held=g + t - cores, held_s=alone["generator"])
    longer, own = beside_s / alone["trainer"], scenario.trainer
    trainer = TrainerCost(tick_s=own.tick_s * longer, token_s=own.token_s * longer)
    return dataclasses.replace(scenario, trainer=trainer)


def calibrated_scenario(config: RunConfig, found: RecipeCalibration, **changes: Any) -> Scenario:
    """The schedule of ``config`` with the costs, their spread and the lengths that short runs of it measured here."""
    costs, threads = found.at(config.schedule.max_staleness), settled_threads(config)
    title = f"{config.model.path} on {found.cores} cores, calibrated"
    scenario = dataclasses.replace(
        _measured_scenario(config, title, costs, grouped(found.groups)),
        weights_latency_s=found.in_turn.round_s,
        generator_devices=threads["generator"] * sum(config.generator.replica_ranks),
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
        generator=costs.of_kinds[0],
        kinds=_kinds(config, costs.of_kinds),
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


def _sections(config: RunConfig) -> list[GeneratorConfig]:
    """[generator] as each kind of its replicas sees it; as it is where all are alike."""
    generator = config.generator
    return [generator.as_of_kind(kind) for kind in range(max(1, len(generator.replicas)))]


def _kinds(
    config: RunConfig, generators: Sequence[GeneratorCost], loads: Sequence[float] | None = None
) -> tuple[ReplicaKind, ...]:
    """The kinds of unlike replicas; none where all are alike.

    Args:
        generators: Cost of one replica of each kind.
        loads: Seconds in which one of each takes a version; None: that is in its cost.
    """
    replicas = config.generator.replicas
    if not replicas:
        return ()
    load_s = loads or [0.0] * len(replicas)
    return tuple(
        ReplicaKind(
            cost=cost, replicas=kind.dp, share=kind.share, slots=own.engine.max_sequences, weights_load_s=seconds
        )
        for kind, own, cost, seconds in zip(replicas, _sections(config), generators, load_s, strict=True)
    )
