"""What is simulated: a schedule, the sizes of a tick, and what everything costs. One frozen value,
made from a recipe or a finished run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from llamarl.config import RunConfig, validate
from llamarl.controller.graph import Graph, llamarl_graph
from llamarl.errors import PlanError
from llamarl.forecast.calibrate import Fit, replica_layout, shares_cores, trainer_layout
from llamarl.forecast.costs import GeneratorLayout, decode_step_s, prefill_s, turns_s, weight_sync_s
from llamarl.forecast.hardware import Hardware
from llamarl.forecast.lengths import Lengths
from llamarl.forecast.memory import trainer_memory
from llamarl.forecast.model import ModelSpec
from llamarl.forecast.search import Workload, trainer_demand
from llamarl.forecast.ticks import TrainerTime, trainer_tick

__all__ = ["Failures", "GeneratorCost", "Scenario", "TrainerCost", "Variation", "scenario_from_recipe"]

Floats = npt.NDArray[np.float64]


# -- costs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneratorCost:
    """Time of one generator replica, by its rooflines. Arrays go in, an array of the same shape comes out."""

    hardware: Hardware
    model: ModelSpec
    layout: GeneratorLayout

    def decode_step_s(self, active: Floats, context: Floats) -> Floats:
        """Seconds in which each of ``active`` sequences, at mean ``context`` tokens, gains one token."""
        step = decode_step_s(self.hardware, self.model, self.layout, active, context)
        return np.asarray(step, dtype=np.float64)

    def prefill_s(self, tokens: Floats, context: Floats) -> Floats:
        """Seconds in which the cache of ``tokens`` tokens is filled; each attends to ``context`` on average. Between sizes
        that are powers of two the rooflines are interpolated."""
        sizes, values, attention = self._prefill_table
        if tokens.size and tokens.max() > sizes[-1]:
            raise PlanError(f"a replica would fill {tokens.max():.3g} tokens of cache in one tick: use more replicas")
        return np.interp(tokens, sizes, values) + attention * tokens * context

    @cached_property
    def _prefill_table(self) -> tuple[Floats, Floats, float]:
        sizes = np.array([0.0, *(2.0**i for i in range(41))])
        values = np.array([prefill_s(self.hardware, self.model, self.layout, float(t), 0.0) for t in sizes])
        attention = self.model.attention_flops(1.0) * self.model.layers / self.layout.tp
        return sizes, values, self.hardware.efficiency.generator_scale * attention / self.hardware.attention_rate


@dataclass(frozen=True, kw_only=True)
class TrainerCost:
    """An optimizer step over a batch, on all trainer ranks together."""

    tick_s: float = 0.0
    """Seconds of a tick that do not depend on its batch."""
    token_s: float = 0.0
    """More for each token of the batch, prompts included."""

    @classmethod
    def of(cls, time: TrainerTime, tokens: float) -> TrainerCost:
        """A forecast tick over ``tokens`` as a line."""
        return cls(tick_s=time.optimizer_s + time.host_s, token_s=time.of_batch_s / tokens)

    def batch_s(self, tokens: float) -> float:
        return self.tick_s + self.token_s * tokens


@dataclass(frozen=True, kw_only=True)
class Variation:
    """What differs between replicas and from tick to tick, besides lengths."""

    generator_jitter: float = 0.0
    """Standard deviation of the logarithm of a factor of mean 1, drawn for each replica and tick."""
    trainer_jitter: float = 0.0
    """The same for the trainer, drawn each tick."""

    def __post_init__(self) -> None:
        for name in ("generator_jitter", "trainer_jitter"):
            if not 0.0 <= getattr(self, name) <= 3.0:
                raise PlanError(f"{name} must be 0 to 3, got {getattr(self, name)}")


# -- the scenario -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Devices die at random; the job dies with one and goes on from its last whole checkpoint."""

    device_mtbf_hours: float
    """Mean time between failures of one device."""
    restart_s: float = 300.0
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
    reward_s: float = 0.0
    """Of judging a tick."""
    prompt_tokens: int = 1
    max_staleness: int = 1
    max_segments: int = 1
    oversubscription: float = 1.0
    replicas: int = 1
    slots: int = 1 << 20
    """Sequences that a replica decodes at once."""
    generator_devices: int = 1
    trainer_devices: int = 1
    in_turns: bool = False
    """Both roles have the same devices (``schedule.colocated``)."""
    weights_latency_s: float = 0.0
    """A version is on the way that long after the trainer's tick, while both ends work on."""
    weights_load_s: float = 0.0
    """The generator cannot decode that long at the start of a tick, while it takes a version."""
    variation: Variation = field(default_factory=Variation)
    failures: Failures | None = None
    num_ticks: int = 100
    seed: int = 0
    estimated: bool = True
    """Times rest on constants that nobody measured."""

    def __post_init__(self) -> None:
        if self.num_ticks < 1:
            raise PlanError(f"a simulation needs at least 1 tick, got {self.num_ticks}")
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
        both = (self.generator_devices, self.trainer_devices)
        return max(both) if self.in_turns else sum(both)


_FACTORIES = {
    "generator": "llamarl.forecast.costed:CostedGenerator",
    "reward": "llamarl.forecast.costed:CostedReward",
    "trainer": "llamarl.forecast.costed:CostedTrainer",
}


def scenario_from_recipe(
    config: RunConfig,
    work: Workload,
    hardware: Hardware,
    threads: Mapping[str, int],
    fit: Fit | None = None,
    **changes: Any,
) -> Scenario:
    """A recipe's own layout under the rooflines; on CPU cores a rank's threads are one device.

    Args:
        threads: CPU threads of a generator's and a trainer's rank as a run would pin them; 1 on GPUs.
        fit: What a run measured, whose jitter is then simulated too. Of other threads than its own,
            or of a trainer that shares the generator's cores in one of both alone, times are estimates.

    Raises:
        PlanError: Replicas of several kinds.
    """
    g = config.generator
    if len(g.replicas) > 1:
        raise PlanError(
            f"the recipe has {len(g.replicas)} kinds of [[generator.replicas]], and simulated replicas are all of one: leave the "
            "others out, or set generator.dp"
        )
    own = g.as_of_kind(0) if g.replicas else g
    each = math.ceil(work.prompts_per_step / own.dp)
    cpu = hardware.is_cpu
    cores, shared = hardware.device.devices_per_node, shares_cores(config, threads, hardware)
    has = dict(threads)
    if shared and not fit:  # nobody measured how they share: the trainer has what is left
        has["trainer"] = max(1, min(has["trainer"], cores - own.dp * has["generator"]))
    of_generator, of_trainer = (hardware.joined(has[role]) if cpu else hardware for role in ("generator", "trainer"))
    known = not (hardware.device.assumed or hardware.efficiency.estimates)
    if fit and cpu:
        known = known and (dict(fit.threads), fit.shares_cores) == (dict(threads), shared)
    layout = replica_layout(own, hardware)
    trains = trainer_layout(config, work.model, hardware, work.prompt_tokens, work.response.mean)
    time = trainer_tick(of_trainer, work.model, trains, trainer_demand(work))
    load_s = weight_sync_s(hardware, work.model, trainer_devices=trains.devices, replicas=[(own.dp, layout)])
    if config.schedule.colocated and not cpu:
        memory = trainer_memory(hardware, work.model, trains, trainer_demand(work))
        load_s = turns_s(hardware, work.model, layout, memory["parameters"] + memory["optimizer"], load_s)
    devices = {"generator": own.dp * layout.tp * threads["generator"], "trainer": trains.devices * threads["trainer"]}
    sharing = f"; {sum(devices.values())} threads share {cores} cores" if shared else ""
    scenario = Scenario(
        title=f"{work.model.name}, as the recipe says, {hardware.device.title}{sharing}",
        prompts_per_step=each * own.dp,
        group_size=work.group_size,
        lengths=work.response,
        prompt_tokens=work.prompt_tokens,
        generator=GeneratorCost(hardware=of_generator, model=work.model, layout=layout),
        trainer=TrainerCost.of(time, work.tokens),
        reward_s=work.reward_s,
        max_staleness=config.schedule.max_staleness,
        max_segments=g.max_segments,
        oversubscription=g.oversubscription,
        replicas=own.dp,
        slots=own.engine.max_sequences,
        generator_devices=devices["generator"],
        trainer_devices=devices["trainer"],
        in_turns=config.schedule.colocated,
        weights_load_s=0.0 if fit else load_s,  # a measured tick of the generator has it
        variation=Variation(
            generator_jitter=min(1.0, fit.jitter["generator"]), trainer_jitter=min(1.0, fit.jitter["trainer"])
        )
        if fit
        else Variation(),
        num_ticks=config.run.num_ticks,
        seed=config.run.seed,
        estimated=not known,
    )
    return dataclasses.replace(scenario, **changes)
