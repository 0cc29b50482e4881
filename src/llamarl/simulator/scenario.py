"""What is simulated: a schedule, the sizes of a tick, and what everything costs. One frozen value."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from llamarl.config import RunConfig, validate
from llamarl.controller.graph import Graph
from llamarl.controller.standard_graph import llamarl_graph
from llamarl.errors import PlanError
from llamarl.planner.lengths import Lengths, constant
from llamarl.simulator.links import Distances
from llamarl.simulator.tick_costs import (
    GeneratorCost,
    LinearGeneratorCost,
    RewardCost,
    TrainerCost,
    Variation,
)
from llamarl.tick_shares import smallest_quota

__all__ = ["Failures", "ReplicaKind", "Scenario", "durations_scenario", "weights_policy"]


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
class ReplicaKind:
    """Generator replicas that are alike: what is their own in a job of several kinds, as ``[[generator.replicas]]``."""

    cost: GeneratorCost
    """Of one of them."""
    replicas: int = 1
    share: float = 1.0
    """Of a tick's prompts, for each of them; only ratios count."""
    slots: int = 1 << 20
    """Sequences that one decodes at once."""
    weights_load_s: float = 0.0
    """As of a scenario."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise PlanError(f"a replica needs at least 1 slot, got {self.slots}")
        if not 0.0 <= self.weights_load_s < math.inf:
            raise PlanError(f"weights_load_s must be >= 0 seconds, got {self.weights_load_s}")


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
    weights: Literal["exact", "latest"] = "exact"
    """As ``schedule.weights``."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """As ``generator.kv_on_update``; only ``latest`` simulates "keep"."""
    max_segments: int = 1
    oversubscription: float = 1.0
    parts: int = 1
    """Into how many parts a tick's groups are cut, in the order in which they are complete: each is judged and its gradients are
    computed while later groups are still being decoded."""
    longest_first: bool = False
    """Groups that a tick admits start in the order of their longest response, as if it were known; else as they come. It matters
    where there are fewer slots than sequences."""
    replicas: int = 1
    slots: int = 1 << 20
    """Sequences that a replica decodes at once."""
    kinds: tuple[ReplicaKind, ...] = ()
    """Unlike replicas, kind by kind, in place of ``replicas`` with ``slots`` and ``weights_load_s``, which cost ``generator`` each."""
    generator_devices: int = 1
    trainer_devices: int = 1
    weights_latency_s: float = 0.0
    """A version is on the way that long after the trainer's tick, while both ends work on."""
    distances: Distances = field(default_factory=Distances)
    """What links between hosts add."""
    weights_load_s: float = 0.0
    """The generator cannot decode that long at the start of a tick, while it takes a version."""
    variation: Variation = field(default_factory=Variation)
    failures: Failures | None = None
    num_ticks: int = 100
    seed: int = 0
    planned_step_s: float | None = None
    """The planner's forecast, to be shown beside the simulated step."""

    def __post_init__(self) -> None:
        if self.num_ticks < 1:
            raise PlanError(f"a simulation needs at least 1 tick, got {self.num_ticks}")
        _ = self.of_kinds  # which check themselves
        most = int(smallest_quota(self.shares, self.prompts_per_step)[1])
        if not 1 <= self.parts <= most:
            raise PlanError(f"a tick of {most} groups a replica is cut into 1 to {most} parts, got {self.parts}")
        if self.parts > 1 and self.weights == "latest":
            raise PlanError(
                'parts are simulated with weights "exact" only: under "latest", versions that arrive within a tick change which '
                "groups leave it"
            )
        if not 0.0 <= self.weights_latency_s < math.inf:
            raise PlanError(f"weights_latency_s must be >= 0 seconds, got {self.weights_latency_s}")
        if self.weights == "exact" and self.kv_on_update == "keep":
            raise PlanError('kv_on_update "keep" is simulated with weights "latest" only')
        _ = self.config  # a schedule that no run could have is refused by the run's own checks

    @property
    def of_kinds(self) -> tuple[ReplicaKind, ...]:
        """The generator replicas, kind by kind; those that are all alike are of one."""
        alike = ReplicaKind(
            cost=self.generator, replicas=self.replicas, slots=self.slots, weights_load_s=self.weights_load_s
        )
        return self.kinds or (alike,)

    @property
    def num_replicas(self) -> int:
        return sum(kind.replicas for kind in self.of_kinds)

    @property
    def shares(self) -> tuple[float, ...]:
        """[replicas] of a tick's prompts."""
        return tuple(kind.share for kind in self.of_kinds for _ in range(kind.replicas))

    @property
    def config(self) -> RunConfig:
        """The recipe of the simulated schedule.

        Raises:
            ConfigError: No run could have it; every mistake in one message.
        """
        return validate(
            {
                "run": {"num_ticks": self.num_ticks, "seed": self.seed},
                "schedule": {
                    "prompts_per_step": self.prompts_per_step,
                    "max_staleness": self.max_staleness,
                    "weights": self.weights,
                },
                "generator": {
                    "group_size": self.group_size,
                    "kv_on_update": self.kv_on_update,
                    "max_segments": self.max_segments,
                    "oversubscription": float(self.oversubscription),
                    **(
                        {"replicas": [{"dp": kind.replicas, "share": float(kind.share)} for kind in self.kinds]}
                        if self.kinds
                        else {"dp": self.replicas}
                    ),
                    "device": "cpu",
                },
                "trainer": {"device": "cpu"},
                "algorithm": {"advantage": "reward"} if self.group_size == 1 else {},
                "evaluation": {"every": 0, "device": "cpu"},
            }
        )

    @property
    def graph(self) -> Graph:
        """The graph of a real run of this schedule, its executors replaced by ones that only take time."""
        real = llamarl_graph(self.config)
        executors = tuple(
            dataclasses.replace(spec, factory=_FACTORIES[spec.name], config=self) for spec in real.executors
        )
        return Graph(executors, real.channels)

    @property
    def devices(self) -> int:
        return self.generator_devices + self.trainer_devices


_FACTORIES = {
    "generator": "llamarl.simulator.costed_generator:CostedGenerator",
    "reward": "llamarl.simulator.costed:CostedReward",
    "trainer": "llamarl.simulator.costed:CostedTrainer",
}


def durations_scenario(
    *,
    generator_s: float,
    reward_s: float,
    trainer_s: float,
    sync_s: float = 0.0,
    max_staleness: int = 1,
    num_ticks: int = 100,
    tokens: int = 1,
    **changes: object,
) -> Scenario:
    """Executors whose ticks always last the same: one sequence, in ``tokens`` decode steps of together ``generator_s``.

    Under ``weights = "latest"`` versions change between decode steps, so there should be many of them.
    """
    for name, value in (("generator", generator_s), ("reward", reward_s), ("trainer", trainer_s), ("sync", sync_s)):
        if not 0.0 <= value < math.inf:
            raise PlanError(f"{name}: a duration must be >= 0 seconds, got {value}")
    scenario = Scenario(
        title=f"{generator_s:g} s, {reward_s:g} s, {trainer_s:g} s, hand-over {sync_s:g} s",
        prompts_per_step=1,
        group_size=1,
        lengths=constant(tokens),
        generator=LinearGeneratorCost(step_s=generator_s / tokens),
        trainer=TrainerCost(tick_s=trainer_s),
        reward=RewardCost(tick_s=reward_s),
        weights_latency_s=sync_s,
        max_staleness=max_staleness,
        num_ticks=num_ticks,
    )
    return dataclasses.replace(scenario, **changes)  # type: ignore[arg-type]


def weights_policy(config: RunConfig) -> dict[str, Any]:
    """The fields of a scenario that say which version makes a batch, as the recipe has them."""
    latest = config.schedule.weights == "latest"
    kv = config.generator.kv_on_update if latest else "recompute"
    return {"weights": config.schedule.weights, "kv_on_update": kv}
