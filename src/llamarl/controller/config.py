"""The job's schedule and its deadlines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from llamarl.algorithms.config import PRESETS
from llamarl.errors import Mistake
from llamarl.roles import ROLES
from llamarl.strict import NO_BITS, STRICT, refuse

if TYPE_CHECKING:
    from llamarl.config import RunConfig

__all__ = ["DeadlineConfig", "RecoveryConfig", "ScheduleConfig", "parts_mistakes", "why_parts_gain_nothing"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScheduleConfig:
    prompts_per_step: PositiveInt = 16
    """Prompt groups consumed by one trainer tick, over all data-parallel ranks."""

    max_staleness: NonNegativeInt = 1
    """Delay of the weights edge less one, in trainer ticks; 0 runs synchronously, 1 is LlamaRL's schedule."""

    weights: Literal["exact", "latest"] = "exact"
    """Which version makes batch k. "exact": always version max(0, k - max_staleness), so a run repeats bit for bit.
    "latest": the newest there is, swapped in between decode steps; no trained token is older than max_staleness. Such a run
    depends on timing; its decisions go to events.jsonl, from which ``llamarl train --replay RUN_DIR`` repeats it."""

    colocated: Annotated[bool, NO_BITS] = False
    """Generator and trainer share their devices and take turns: the one that waits gives its memory back (the generator its
    weights and KV cache, the trainer on GPUs everything, to host memory). Needs max_staleness 0, where they never work at the
    same time; the bits are those of the same run without it. With ``threads`` 0 each gets all cores that are left."""

    parts: PositiveInt = 1
    """Into how many parts a tick's groups are cut, in the order in which they are complete: each is judged and its gradients are
    computed while later groups are still being decoded. Shortens steps at max_staleness 0 where responses differ in length. 1: none
    waits for less than the whole. Bits depend on it, not on when a part arrives (docs/asynchrony.md)."""

    transport: Annotated[Literal["auto", "shared_memory", "cuda_ipc", "tcp"], NO_BITS] = "auto"
    """What carries weight versions. "auto" chooses by where the ranks are and says so at the start: "cuda_ipc" between GPUs
    of one host in processes of their own, "tcp" between hosts, else "shared_memory"."""


_COLLECTIVE_MORE_S = 30.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeadlineConfig:
    """Every wait has a limit; when it runs out, the error names who waited for whom and since when."""

    setup_s: Annotated[PositiveFloat, NO_BITS] = 600.0
    """Seconds until every executor stands ready (model loaded, pools up)."""

    step_s: Annotated[PositiveFloat, NO_BITS] = 1800.0
    """Seconds one executor may spend on one tick. One that takes longer hangs: it is ended and brought up again, as far as
    recovery allows it. Judges get nine tenths of it for all samples of a tick; in an evaluation what sampling leaves of these, so
    that a short one loses verdicts there (eval/failed)."""

    disk_s: Annotated[NonNegativeFloat, NO_BITS] = 600.0
    """Seconds for which the run waits for a disk that refuses its records (metrics, rollouts, events, verdicts): full, read-only or
    out of reach. Then it ends, since a run whose records are lost must not go on. 0: at once."""

    host_silence_s: Annotated[float, NO_BITS, Field(ge=2.0)] = 8.0
    """Seconds after which a host that gives no sign of itself counts as gone, and the job ends. Kernels answer for it: a process
    that is stopped, busy or swapping is not silent. Raise it where networks pause for longer, such as while a router restarts or a
    virtual machine moves."""

    @property
    def collective_s(self) -> float:
        """Seconds for which a rank waits for others of its executor in a collective: a little longer than the controller waits for
        the executor, since that tells where each rank is and may bring the executor up again, and a rank's own error does neither."""
        return max(self.setup_s, self.step_s) + _COLLECTIVE_MORE_S


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RecoveryConfig:
    """What happens when a process dies in the middle of a run (docs/survival.md)."""

    max_restarts: Annotated[NonNegativeInt, NO_BITS] = 8
    """Executors that are brought up again within window_s before a death ends the run; the tick that was lost is done again, to
    the same bits (trainer and critic repeat those since their last checkpoint). 0: every death ends the run."""

    window_s: Annotated[PositiveFloat, NO_BITS] = 3600.0
    """Seconds over which restarts are counted."""

    straggler_multiple: Annotated[NonNegativeFloat, NO_BITS] = 0.0
    """A rank whose tick takes longer than so many times the median of its executor's last ticks, and 10 s at least, is ended, and the
    tick done again as after any death, to the same bits. 0: none is. Not trainer and critic, which would repeat earlier ticks."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[Mistake]:
        if self.straggler_multiple and self.straggler_multiple <= 1.0:
            yield Mistake("straggler_multiple", f"must be 0 or more than 1, got {self.straggler_multiple:g}")
        if self.straggler_multiple and not self.max_restarts:
            yield Mistake("straggler_multiple", "needs max_restarts >= 1: without, no state is held", ("max_restarts",))


def parts_mistakes(config: RunConfig) -> Iterator[Mistake]:
    """What a recipe asks for that cannot be done part by part, where ``schedule.parts`` is above 1."""
    parts, found = config.schedule.parts, dict[str, str]()
    if parts == 1:
        return
    groups = int(min(config.dealing.quotas))
    if groups < parts:
        replicas = config.generator.shards or config.generator.num_replicas
        each = f", {groups} for each of {replicas} generator {'shards' if config.generator.shards else 'replicas'}"
        yield Mistake(
            "schedule.parts",
            f"is {parts}, but schedule.prompts_per_step is {config.schedule.prompts_per_step} groups a tick"
            f"{each if replicas > 1 else ''}, and each part needs one: set schedule.parts to at most {groups}, or raise "
            "schedule.prompts_per_step",
            ("schedule.prompts_per_step",),
        )
    if config.algorithm.advantage in ("batch_std", "group_mean_batch_std"):
        found["algorithm.advantage"] = f"is {config.algorithm.advantage!r}, which looks at the groups of all parts"
    trainer = config.trainer
    cuts = {"minibatches": trainer.minibatches > 1, "epochs": trainer.epochs > 1, "selection": trainer.plans_steps}
    if key := next((name for name, asked in cuts.items() if asked), ""):
        found[f"trainer.{key}"] = "cuts a tick into optimizer steps of its own"
    if key := next((name for name in ("fsdp", "tp", "pp", "cp") if getattr(trainer, name) > 1), ""):
        found[f"trainer.{key}"] = f"is {getattr(trainer, key)}, and several ranks pack each step together"
    if config.dynamic_sampling.enabled:
        found["dynamic_sampling.enabled"] = "chooses groups when all are judged"
    if config.schedule.weights == "latest":
        found["schedule.weights"] = "is 'latest', under which the groups of a tick are known at its end"
    if config.schedule.colocated:
        found["schedule.colocated"] = "has generator and trainer work in turn"
    kl_coef = config.algorithm.kl_coef
    preset = next((f", as in {name!r}" for name, one in PRESETS.items() if one.constants["kl_coef"] == kl_coef), "")
    between = {
        "reference.enabled": "asks for a reference" if config.reference.enabled else "",
        "algorithm.kl_coef": f"is {kl_coef:g}{preset}, which asks for a reference" if kl_coef > 0 else "",
        "algorithm.advantage": f"is {config.algorithm.advantage!r}, which asks for a critic"
        if config.has_critic
        else "",
        "reward_model.path": "asks for a reward model" if config.has_reward_model else "",
        "judge.path": "asks for a judge" if config.judge.path else "",
        "judge.url": "asks for a judge" if config.judge.url else "",
    }
    found |= {
        key: f"{asked}, an executor between generator and trainer that takes whole ticks"
        for key, asked in between.items()
        if asked
    }
    weights = {*ROLES["trainer"].writes, *(config.executors["trainer"].writes if "trainer" in config.executors else ())}
    for name, own in config.executors.items():
        if {*own.reads, *own.writes} - weights:
            found[f"executors.{name}"] = (
                "changes the way of the groups from generator to trainer, which takes whole ticks"
            )
    for key, why in found.items():
        yield Mistake("schedule.parts", f"is {parts}, but {key} {why}: change that, or set schedule.parts to 1", (key,))


def why_parts_gain_nothing(config: RunConfig) -> str:
    """Why no step of this job gets shorter by ``schedule.parts``; empty: it may, or is not asked to."""
    schedule = config.schedule
    if schedule.parts == 1:
        return ""
    if config.run.runtime == "inline":
        return "run.runtime is 'inline', which passes no parts on"
    if config.hosts.wanted:
        return "parts are not passed on between hosts"
    return (
        f"at schedule.max_staleness {schedule.max_staleness} nobody waits for a part" if schedule.max_staleness else ""
    )
