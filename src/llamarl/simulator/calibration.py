"""What a recipe costs on this machine: two short runs of the real job, and the constants that they give.

    in turn   (staleness 0)  each role alone ─▶ decode step, prefill, training token, reward, overheads, lengths
    together  (staleness 1)  roles at work at once ─▶ how much each slows the other (contention.py)

The executors are the recipe's own (``probes.py``), in the recipe's runtime, with a learning rate next to nothing, so that
response lengths stay what they are under the initial policy. A forecast then simulates any schedule from these constants.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llamarl.config import RunConfig, to_plain, validate
from llamarl.errors import PlanError
from llamarl.planner.lengths import grouped
from llamarl.runtime.placement import available_cores
from llamarl.simulator.contention import Contention
from llamarl.simulator.costs import EvaluationCost, LinearGeneratorCost, RewardCost, TrainerCost, Variation
from llamarl.simulator.kept_calibration import RecipeCalibration, RoleCosts, settled_threads
from llamarl.simulator.scenario import Scenario
from llamarl.simulator.sources import weights_policy
from llamarl.simulator.watched_run import Beside, WatchedRun, slowdown

__all__ = ["calibrate_recipe", "calibrated_scenario", "mean_costs", "only_steps"]

_MAX_GROUPS = 512
"""Measured groups that a kept calibration holds at most."""
_MOST_TICKS = 24

Log = Callable[[str], None]


def calibrate_recipe(
    config: RunConfig,
    *,
    variants: Sequence[tuple[int, str, int]] = (),
    ticks: int = 7,
    enough_s: float = 8.0,
    log: Log = lambda line: None,
) -> RecipeCalibration:
    """Run the recipe's job for a few ticks in turn and together, and fit.

    Where variants are to be compared, each is measured twice, in opposite order: a machine that grows slower meanwhile favours
    none of them, and so is what roles do beside each other.

    Args:
        variants: More (generator threads, quantization, trainer threads) to measure beside the recipe's own.
        ticks: Of a run, at least 4 (about half of them where variants are compared).
        enough_s: Where the first run shows that these do not last that long, it is made again, and the others, with more ticks: 24 at
            most.

    Raises:
        PlanError: Too few ticks.
        LlamaRLError: What ended a run.
    """
    if ticks < 4:
        raise PlanError(f"a calibration needs at least 4 ticks a run, got {ticks}")
    threads, precision = settled_threads(config), config.generator.quantization
    own = (threads["generator"], precision, threads["trainer"])
    order = list(dict.fromkeys([own, *variants]))
    pairs_of_own = {(generator, trainer) for generator, other, trainer in order if other == precision}
    if len(order) > 1:
        ticks = max(4, 1 + (ticks + 1) // 2)
        order += reversed(order)
    generators: dict[str, list[RoleCosts]] = {}
    trainers: dict[str, list[RoleCosts]] = {}
    beside: dict[tuple[int, int], dict[str, list[Beside]]] = {}
    groups: list[tuple[int, ...]] = []
    prompts: list[int] = []
    rewards: list[float] = []
    rounds: list[float] = []
    for i, variant in enumerate(order):
        generator_threads, quantization, trainer_threads = variant
        pair = (generator_threads, trainer_threads)
        changed = _quiet(config, variant)
        with tempfile.TemporaryDirectory() as folder:
            log(f"in turn: threads {_named(pair)}, {quantization}, {ticks} ticks")
            alone = WatchedRun(changed(0, ticks), Path(folder) / "alone")
            if i == 0 and (more := min(_MOST_TICKS, math.ceil(enough_s / alone.tick_s()))) > ticks:
                ticks = more
                log(f"in turn: threads {_named(pair)}, {quantization}, {ticks} ticks, because these are short")
                alone = WatchedRun(changed(0, ticks), Path(folder) / "longer")
            lengths, prompt = alone.lengths()
            groups += lengths
            prompts += prompt
            generator, trainer = alone.generator_costs(), alone.trainer_costs()
            generators.setdefault(f"{generator_threads}:{quantization}", []).append(generator)
            trainers.setdefault(str(trainer_threads), []).append(trainer)
            rewards += alone.durations("reward")
            rounds += alone.rounds()
            if (
                quantization == precision or pair not in pairs_of_own
            ):  # one precision's slow-down is taken for the others'
                log(f"together: threads {_named(pair)}, {quantization}, {ticks} ticks")
                both = WatchedRun(changed(1, ticks), Path(folder) / "together")
                for role, one in both.beside(generator, trainer).items():
                    beside.setdefault(pair, {}).setdefault(role, []).append(one)
    cores = config.run.cores or available_cores()
    return RecipeCalibration(
        cores=cores,
        generators={key: mean_costs(found) for key, found in generators.items()},
        trainers={key: mean_costs(found) for key, found in trainers.items()},
        reward_s=statistics.fmean(rewards),
        round_s=statistics.median(rounds),
        slowdowns={
            _named(pair): {role: slowdown(runs, max(1.0, sum(pair) / cores)) for role, runs in roles.items()}
            for pair, roles in beside.items()
        },
        groups=tuple(groups[:_MAX_GROUPS]),
        prompt_tokens=max(1, round(statistics.fmean(prompts))),
    )


def _named(pair: tuple[int, int]) -> str:
    return f"{pair[0]}+{pair[1]}"


def mean_costs(found: Sequence[RoleCosts]) -> RoleCosts:
    """The mean of each constant, and so of each forecast, over several runs; all are of one role."""
    cost: Any = found[0].cost
    means = {f.name: statistics.fmean(getattr(one.cost, f.name) for one in found) for f in dataclasses.fields(cost)}
    return RoleCosts(
        cost=dataclasses.replace(cost, **means),
        jitter=statistics.fmean(one.jitter for one in found),
        ticks=sum(one.ticks for one in found),
    )


def only_steps(config: RunConfig) -> dict[str, Any]:
    """The recipe's settings by section, of a job that takes its steps, no evaluations or checkpoints, and learns next to nothing.

    So response lengths stay what they are.
    """
    raw = to_plain(config)
    raw["optimizer"] |= {"lr": 1e-12}
    raw["evaluation"]["every"] = 0
    raw["checkpoint"] |= {"every": 0, "at_end": False}
    return raw


def _quiet(config: RunConfig, variant: tuple[int, str, int]) -> Callable[[int, int], RunConfig]:
    """(max_staleness, ticks) -> the recipe with whole batches, those threads, and nothing that a few ticks should not do."""
    raw = only_steps(config)
    raw["generator"] |= {"max_segments": 1, "oversubscription": 1.0, "threads": variant[0], "quantization": variant[1]}
    raw["trainer"]["threads"] = variant[2]

    def at(staleness: int, ticks: int) -> RunConfig:
        turns = config.schedule.colocated and staleness == 0
        run = {**raw["run"], "num_ticks": ticks}
        return validate(
            {**raw, "run": run, "schedule": {**raw["schedule"], "max_staleness": staleness, "colocated": turns}}
        )

    return at


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
        **weights_policy(config),
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
