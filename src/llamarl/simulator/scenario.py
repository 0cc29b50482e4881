"""What is simulated: a schedule, the sizes of a tick, and what everything costs. One frozen value."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from llamarl.config import RunConfig, validate
from llamarl.controller.graph import Graph
from llamarl.controller.job import llamarl_graph
from llamarl.errors import PlanError
from llamarl.planner.lengths import Lengths, constant
from llamarl.simulator.contention import Contention
from llamarl.simulator.costs import (
    EvaluationCost,
    GeneratorCost,
    LinearGeneratorCost,
    RewardCost,
    TrainerCost,
    Variation,
)

__all__ = ["Failures", "Scenario", "durations_scenario"]


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Devices die at random; the job dies with one and goes on from its last whole checkpoint."""

    device_mtbf_hours: float
    """Mean time between failures of one device."""
    restart_s: float
    """From the death to the first tick after it."""
    checkpoint_every: int = 20
    """Ticks between checkpoints. Writing one takes no time here."""

    def __post_init__(self) -> None:
        if not 0.0 < self.device_mtbf_hours < math.inf:
            raise PlanError(f"the mean time between failures must be above 0 hours, got {self.device_mtbf_hours}")
        if not 0.0 <= self.restart_s < math.inf:
            raise PlanError(f"the time of a restart must be >= 0 s, got {self.restart_s}")
        if self.checkpoint_every < 1:
            raise PlanError(f"checkpoint_every must be at least 1 tick, got {self.checkpoint_every}")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One job to simulate."""

    title: str
    prompts_per_step: int
    group_size: int
    lengths: Lengths
    generator: GeneratorCost
    trainer: TrainerCost
    reward: RewardCost = field(default_factory=RewardCost)
    prompt_tokens: int = 1
    max_staleness: int = 1
    max_segments: int = 1
    oversubscription: float = 1.0
    replicas: int = 1
    slots: int = 1 << 20
    """Sequences that a replica decodes at once."""
    generator_devices: int = 1
    trainer_devices: int = 1
    weights_latency_s: float = 0.0
    """A version is on the way that long after the trainer's tick, while both ends work on."""
    weights_load_s: float = 0.0
    """The generator cannot decode that long at the start of a tick, while it takes a version."""
    variation: Variation = field(default_factory=Variation)
    failures: Failures | None = None
    evaluation: EvaluationCost | None = None
    """None: the job has no evaluator."""
    contention: Contention | None = None
    """How roles slow one another; None: each has devices of its own and none does."""
    num_ticks: int = 100
    seed: int = 0
    planned_step_s: float | None = None
    """The planner's forecast, to be shown beside the simulated step."""

    def __post_init__(self) -> None:
        if self.num_ticks < 1:
            raise PlanError(f"a simulation needs at least 1 tick, got {self.num_ticks}")
        if self.slots < 1:
            raise PlanError(f"a replica needs at least 1 slot, got {self.slots}")
        for name in ("weights_latency_s", "weights_load_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise PlanError(f"{name} must be >= 0 seconds, got {getattr(self, name)}")
        _ = self.config  # a schedule that no run could have is refused by the run's own checks

    @property
    def config(self) -> RunConfig:
        """The recipe of the simulated schedule.

        Raises:
            ConfigError: No run could have it; every mistake in one message.
        """
        return validate(
            {
                "run": {"num_ticks": self.num_ticks, "seed": self.seed},
                "schedule": {"prompts_per_step": self.prompts_per_step, "max_staleness": self.max_staleness},
                "generator": {
                    "group_size": self.group_size,
                    "max_segments": self.max_segments,
                    "oversubscription": float(self.oversubscription),
                    "dp": self.replicas,
                    "device": "cpu",
                },
                "trainer": {"device": "cpu"},
                "algorithm": {"advantage": "reward"} if self.group_size == 1 else {},
                "evaluation": {"every": self.evaluation.every if self.evaluation else 0, "device": "cpu"},
            }
        )

    @property
    def graph(self) -> Graph:
        """The graph of a real run of this schedule, its executors replaced by ones that only take time."""
        real = llamarl_graph(self.config)
        factories = {name: f"llamarl.simulator.costed:Costed{name.capitalize()}" for name in _ROLES}
        factories["evaluator"] = "llamarl.simulator.costed_evaluator:CostedEvaluator"
        executors = tuple(
            dataclasses.replace(spec, factory=factories[spec.name], config=self) for spec in real.executors
        )
        return Graph(executors, real.channels)

    @property
    def devices(self) -> int:
        return self.generator_devices + self.trainer_devices


_ROLES = ("generator", "reward", "trainer")


def durations_scenario(
    *,
    generator_s: float,
    reward_s: float,
    trainer_s: float,
    sync_s: float = 0.0,
    max_staleness: int = 1,
    num_ticks: int = 100,
    **changes: object,
) -> Scenario:
    """Executors whose ticks always last the same: one sequence of one token, a decode step of ``generator_s``."""
    for name, value in (("generator", generator_s), ("reward", reward_s), ("trainer", trainer_s), ("sync", sync_s)):
        if not 0.0 <= value < math.inf:
            raise PlanError(f"{name}: a duration must be >= 0 seconds, got {value}")
    scenario = Scenario(
        title=f"{generator_s:g} s, {reward_s:g} s, {trainer_s:g} s, hand-over {sync_s:g} s",
        prompts_per_step=1,
        group_size=1,
        lengths=constant(1),
        generator=LinearGeneratorCost(step_s=generator_s),
        trainer=TrainerCost(tick_s=trainer_s),
        reward=RewardCost(tick_s=reward_s),
        weights_latency_s=sync_s,
        max_staleness=max_staleness,
        num_ticks=num_ticks,
    )
    return dataclasses.replace(scenario, **changes)  # type: ignore[arg-type]
