"""The whole configuration of a run: one frozen, validated tree, from a TOML recipe and command-line overrides.

    recipe.toml ─▶ dict ─▶ + overrides (``--schedule.max_staleness 0``) ─▶ RunConfig (or every mistake, at once)

Each section lies in ``settings/``; this file composes them and checks what concerns two of them.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt
from pydantic.dataclasses import dataclass

from llamarl.errors import ConfigError, FileError, Mistake
from llamarl.other_names import our_name
from llamarl.reading import (
    MAX_DEPTH,
    find_recipe,
    parse_toml,
    read_text,
    read_toml,
    shipped_recipes,
    user_path,
    with_paths_from,
)
from llamarl.roles import ROLES, present_roles, wiring_mistakes
from llamarl.settings.algorithms import PRESETS, AlgorithmConfig
from llamarl.settings.checkpoint import CheckpointConfig, why_no_storage
from llamarl.settings.data import DataConfig
from llamarl.settings.engine import EngineConfig
from llamarl.settings.environments import TaskSection
from llamarl.settings.executors import (
    TASK_PART,
    DynamicSamplingConfig,
    EvaluationConfig,
    ExecutorConfig,
    GeneratorConfig,
    JudgeConfig,
    RewardConfig,
    RewardModelConfig,
)
from llamarl.settings.job import DeadlineConfig, HostsConfig, RecoveryConfig, ScheduleConfig, split_cluster
from llamarl.settings.observability import TRACKERS, ObservabilityConfig
from llamarl.settings.trainer import CriticConfig, LoraConfig, OptimizerConfig, ReferenceConfig, TrainerConfig
from llamarl.strict import NO_BITS, STRICT, Effect, Reader, bounds, is_import_path, list_mistakes, refuse
from llamarl.tick_shares import Dealing, smallest_quota

__all__ = [
    "Check",
    "ModelConfig",
    "RunConfig",
    "RunSection",
    "changed_keys",
    "field_help",
    "key_effects",
    "load_config",
    "meant_key",
    "merge_tables",
    "parse_value",
    "read_settings",
    "begun_in",
    "save_config",
    "section_help",
]

Overrides = Sequence[str] | Mapping[str, Any]
"""Words of the command line, ``--a.b value``, or dotted key -> value."""

_MAX_TICKS = 1_000_000
"""Far beyond any run; what is looked at tick by tick before a run then still takes under a second."""
_RUN_ID = ".run_id"
"""Lies beside the configuration of a run (``checkpoint.storage.RunIdentity``), which says paths as seen from where it began."""
_COUNT_FROM = "# Paths count from "
"""Begins the first line of that configuration, which says where that was."""


def _run_dir(text: str) -> str:
    if not text.strip():
        raise ValueError(f"must name a folder, such as runs/{{name}}, got {text!r}")
    if re.search("[{}]", text.replace("{name}", "")):
        raise ValueError(f"may hold braces only as its one placeholder {{name}}, the recipe's file name; got {text!r}")
    return text


def _mirror(url: str) -> str:
    if url and (why := why_no_storage(url, installed=False)):
        raise ValueError(why)
    return url


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunSection:
    dir: Annotated[str, NO_BITS, AfterValidator(_run_dir)] = "runs/{name}"
    """Folder of the run. "{name}" becomes the recipe's file name. Refused if it already holds a run."""

    mirror: Annotated[str, NO_BITS, AfterValidator(_mirror)] = ""
    """Storage to which the folder is copied while the run goes on, such as s3://bucket/runs/x,
    gs:// or file:///; ``--resume`` takes that address on another machine. Credentials come from the
    environment or the storage's own files, never from here. Empty: none."""

    seed: NonNegativeInt = 0
    """Every random choice of the run derives from it. Same recipe, seed and thread counts: same bits."""

    num_ticks: Annotated[int, NO_BITS, Field(ge=1, le=_MAX_TICKS)] = 100
    """Trainer ticks of the run; each makes one policy version, by ``trainer.minibatches *
    trainer.epochs`` optimizer steps."""

    epochs: Annotated[NonNegativeFloat, NO_BITS] = 0.0
    """Passes over the training data; sets ``num_ticks``, rounded up. 0: ``num_ticks`` counts."""

    runtime: Annotated[Literal["local", "inline"], NO_BITS] = "local"
    """"local": each executor in processes of its own, all at once. "inline": all in this process,
    one after the other."""

    cores: Annotated[NonNegativeInt, NO_BITS] = 0
    """CPU cores to divide among the executors whose ``threads`` is 0; 0 takes what this process may use."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    path: str = "bundled:tiny"
    """The policy to start from: a Hugging Face folder, the id of a model of the Hub (org/name, or
    org/name@REVISION for a branch, tag or commit; the run's config.toml says the commit that it
    was), or "bundled:tiny"."""

    trust_remote_code: bool = False
    """Whether the folder's tokenizer may be Python code of its own, which then runs with all your
    rights in every process that reads text. Code of the model itself never runs: its architecture
    is one that llamarl knows."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    run: RunSection = Field(default_factory=RunSection)
    model: ModelConfig = Field(default_factory=ModelConfig)
    task: TaskSection = Field(default_factory=TaskSection)
    data: DataConfig = Field(default_factory=DataConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = Field(default_factory=RewardModelConfig)
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    dynamic_sampling: DynamicSamplingConfig = Field(default_factory=DynamicSamplingConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    executors: dict[str, ExecutorConfig] = Field(default_factory=dict)
    """Executors of your own, and standard ones rewired: a section [executors.NAME] each, with
    factory, reads, writes, delays, ranks, threads, device, options (docs/executors.md)."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    observability: ObservabilityConfig = Field(default_factory=ObservabilityConfig)
    deadlines: DeadlineConfig = Field(default_factory=DeadlineConfig)
    hosts: HostsConfig = Field(default_factory=HostsConfig)
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)

    def __post_init__(self) -> None:
        refuse(_cross_checks(self))
        refuse(_settings_checks(self))

    @property
    def own_code(self) -> list[tuple[str, str]]:
        """(key, import path) of all code of the user's own that a run of it would execute."""
        named = {
            "task.reward": self.task.reward,
            "task.name": self.task.name if self.task.by_import_path else "",
            "task.environment": self.task.own_environment,
            "algorithm.name": self.algorithm.name,
            "algorithm.advantage": self.algorithm.advantage,
            "optimizer.name": self.optimizer.name,
            "generator.engine.name": self.generator.engine.name,
            "schedule.transport": self.schedule.transport,
            "hosts.cluster": split_cluster(self.hosts.cluster)[0],
            **{f"task.rewards.{part.part}": part.function for part in self.task.rewards},
            **{f"task.mixture.{label}.name": t.name for label, t in self.task.tasks.items() if t.by_import_path},
            **{f"task.mixture.{label}.environment": task.own_environment for label, task in self.task.tasks.items()},
            **{
                f"task.mixture.{label}.reward.{part.part}": part.function
                for label, task in self.task.tasks.items()
                for part in task.judges
            },
            **{f"executors.{name}.factory": own.factory for name, own in self.executors.items()},
        }
        found = [(key, path) for key, path in named.items() if is_import_path(path)]
        found += [("observability.sinks", path) for path in self.observability.sinks if is_import_path(path)]
        for name, own in self.executors.items():
            if own.settings:
                seen = self.for_executor(name).own_code
                found += [(f"executors.{name}.settings.{key}", path) for key, path in seen if (key, path) not in found]
        return found

    @property
    def named_code(self) -> list[tuple[str, str, Literal["import path", "address", "consent"]]]:
        """(key, value, kind) of everything by which a configuration makes a run execute what is not
        llamarl's: the one table of it. ``resume``, ``fork``, ``replay``, and of what they read ``eval``,
        ``generate``, ``doctor`` and ``export`` refuse these where a run's folder says them (``refuse_code_of_a_run``)."""
        found: list[tuple[str, str, Literal["import path", "address", "consent"]]] = []
        found += [(key, path, "import path") for key, path in self.own_code]
        found += self._consents
        for name, own in self.executors.items():
            if own.settings:
                of_own = [one for one in self.for_executor(name)._consents if one not in self._consents]
                found += [(f"executors.{name}.settings.{key}", value, kind) for key, value, kind in of_own]
        return found

    @property
    def _consents(self) -> list[tuple[str, str, Literal["import path", "address", "consent"]]]:
        """What of ``named_code`` no import path of the user's own says, without what executors of one's own set."""
        found: list[tuple[str, str, Literal["import path", "address", "consent"]]] = []
        if self.hosts.cluster not in ("", "auto"):  # it is sent the user's token
            found.append(("hosts.cluster", self.hosts.cluster, "address"))
        if self.run.mirror:  # it is sent the run, with the user's credentials
            found.append(("run.mirror", self.run.mirror, "address"))
        sinks = self.observability.sinks  # rows go to the user's account, into the curves that the folder names
        found += [("observability.sinks", name, "address") for name in sinks if name in TRACKERS]
        if self.judge.url:  # its server is sent the task's data
            found.append(("judge.url", self.judge.url, "address"))
        if self.judge.url and self.judge.api_key_env:  # and what that variable holds
            found.append(("judge.api_key_env", self.judge.api_key_env, "address"))
        if self.model.trust_remote_code:
            found.append(("model.trust_remote_code", "true", "consent"))
        tasks = {f"mixture.{label}.": task for label, task in self.task.tasks.items()} or {"": self.task}
        for label, task in tasks.items():
            if task.name == "code" and task.options.get("box") == "plain":
                found.append((f"task.{label}options.box", "plain", "consent"))  # a data file's programs, in no box
        return found

    def for_executor(self, name: str) -> RunConfig:
        """The recipe as an executor sees it: with the ``settings`` of its own, if it has any.
        Unlike replicas are of the job's own generator alone."""
        own = self.executors.get(name)
        if self.generator.replicas and own is not None and name not in ROLES:
            alike = dataclasses.replace(self.generator, replicas=())
            return dataclasses.replace(self, generator=alike).for_executor(name)
        if own is None or not own.settings:
            return self
        others = {other: dataclasses.replace(one, settings={}) for other, one in self.executors.items()}
        plain = to_plain(dataclasses.replace(self, executors=others))
        named, task = str(own.settings.get("algorithm", {}).get("name")), own.settings.get("task", {})
        if own.factory == ROLES["demonstrations"].factory and (named == "sft" or "rollouts" in task):
            plain = _as_given_rows_see(plain, with_data="data" in task)
        elif named in PRESETS:
            for key in PRESETS[named].means:  # what the name stands for, not what the recipe's own stood for
                del plain["algorithm"][key]
        if "prompts_per_step" in own.settings.get("schedule", {}):  # which no other executor's ranks share
            for section in ("trainer", "reference", "critic", "reward_model"):
                plain[section] = {**plain[section], "fsdp": 1}
            plain["trainer"] |= {"ep": 1, "minibatches": 1}
        return validate(merge_tables(plain, own.settings))

    @property
    def samples(self) -> bool:
        """Whether the job has a generator and judges: else it trains on what is there already."""
        return not self.algorithm.imitates and not self.task.rollouts

    @property
    def trained_temperature(self) -> float:
        """Of the log-probs that are trained, and of a reference's beside them: the one sampled at; rows to imitate have none."""
        return 1.0 if self.algorithm.imitates else self.generator.sampling.temperature

    @property
    def has_reference(self) -> bool:
        """Whether the job has a reference executor."""
        return self.reference.enabled or self.algorithm.kl_coef > 0 or self.algorithm.distills

    @property
    def teaches_itself(self) -> bool:
        """Whether the teacher is the policy, which a template shows the answers."""
        return self.algorithm.distills and not self.reference.path

    @property
    def has_reward_model(self) -> bool:
        """Whether the job has a reward model of its own."""
        return bool(self.reward_model.path)

    @property
    def has_judge(self) -> bool:
        """Whether the job has a judge that is a language model."""
        return self.judge.asked

    @property
    def judge_engine(self) -> EngineConfig:
        """Of a judge that the job runs itself: the generator's, or llamarl's own where that is the user's."""
        engine = self.generator.engine
        return dataclasses.replace(engine, name="native", options={}) if engine.by_import_path else engine

    @property
    def has_critic(self) -> bool:
        """Whether the job has a critic executor."""
        return self.algorithm.has_critic

    @property
    def groups_per_tick(self) -> int:
        """Groups that all generator replicas together deliver a tick."""
        shares = self.generator.shares
        alike = self.generator.num_shards if len(set(shares)) == 1 else 1
        return self.dynamic_sampling.groups_per_tick(self.schedule.prompts_per_step, alike)

    @property
    def dealing(self) -> Dealing:
        """Which prompts of a tick each generator replica gets, or each shard."""
        generator = self.generator
        return Dealing((1.0,) * generator.shards or generator.shares, self.groups_per_tick)

    @property
    def keeps_journal(self) -> bool:
        """Whether the run writes one, and reads one that it finds."""
        return bool(self.recovery.max_restarts) and self.run.runtime == "local"

    @property
    def token_staleness_bound(self) -> int:
        """No token is older than so many policy versions when it is trained."""
        carried = self.dynamic_sampling.carry_ticks if self.dynamic_sampling.enabled else 0
        cut = 0 if self.schedule.weights == "latest" else self.generator.max_segments - 1
        return self.schedule.max_staleness + cut + carried


def _as_given_rows_see(plain: Mapping[str, Any], *, with_data: bool) -> dict[str, Any]:
    """The plain values of a recipe that samples, for an executor that gives rows beside: as of a job that has them alone,
    so without what is of sampling, of judging and of how the trainer takes it."""
    sections = ("generator", "reward_model", "judge", "dynamic_sampling", "trainer", "algorithm", "reference", "critic")
    own = {name: {"factory": one["factory"]} for name, one in plain["executors"].items() if name not in ROLES}
    task = {**plain["task"], "options": {}, "mixture": [], **({"rollouts": ""} if with_data else {})}
    data, schedule = {**plain["data"], "candidates": 1}, {**plain["schedule"], "colocated": False}
    return {
        **plain, **dict.fromkeys(sections, {}), "executors": own, "task": task, "data": data, "schedule": schedule,
    }  # fmt: skip


def _clash(config: RunConfig, key: str, other: str, why: str, *others: str) -> Mistake:
    """Two keys do not go together: what each is, and why or what to do."""
    is_now, other_is = (operator.attrgetter(name)(config) for name in (key, other))
    return Mistake(key, f"is {is_now!r}, but {other} is {other_is!r}: {why}", (other, *others))


def _cross_checks(config: RunConfig) -> Iterator[Mistake]:
    """What is wrong between sections."""
    yield from _task_checks(config)
    yield from _group_checks(config)
    yield from _engine_checks(config)
    yield from _judging_checks(config)
    yield from wiring_mistakes(config)
    if config.schedule.colocated:
        yield from _colocation_checks(config)
    if config.run.runtime == "inline" and config.hosts.wanted:
        why = "inline runs everything in one process: set it to 'local', or leave the cluster out"
        yield _clash(config, "run.runtime", "hosts.cluster", why)


def _task_checks(config: RunConfig) -> Iterator[Mistake]:
    """What algorithm and engine ask of the task."""
    imitates, tasks = config.algorithm.imitates, (config.task, *config.task.tasks.values())
    if imitates and config.task.name != "demonstrations":
        yield _clash(config, "task.name", "algorithm.name", "that imitates rows of data: set it to 'demonstrations'")
    if not imitates and any(task.name == "demonstrations" for task in tasks):
        why = "rows to imitate have no judge: set algorithm.name to 'sft'"
        yield _clash(config, "task.name", "algorithm.name", why)
    without = {
        "schedule.colocated": config.schedule.colocated,
        "dynamic_sampling.enabled": config.dynamic_sampling.enabled,
        "data.candidates": config.data.candidates > 1,
        "reward_model.path": config.has_reward_model,
        "judge": config.has_judge,
    }
    given, named = ("algorithm.name", "algorithm.name 'sft'") if imitates else ("task.rollouts", "task.rollouts")
    for key in (key for key, asked in without.items() if asked and not config.samples):
        yield Mistake(key, f": with {named} nothing is sampled and nothing judged: leave it out", (given,))
    if config.trainer.router == "replay" and not imitates and config.task.rollouts:
        yield Mistake("trainer.router", "is 'replay', but task.rollouts notes no experts: set it to 'live'", (given,))
    yield from _teacher_checks(config)
    yield from _patience_checks(config)


def _teacher_checks(config: RunConfig) -> Iterator[Mistake]:
    template, key = config.reference.template, "reference.template"
    if config.teaches_itself and not template:
        why = "name the teacher, a model with the policy's tokenizer, or set reference.template for the policy to teach itself"
        yield _clash(config, "reference.path", "algorithm.advantage", why)
    if not template:
        return
    if not config.algorithm.distills:
        yield _clash(config, key, "algorithm.advantage", "that has no teacher to be shown answers: leave it out")
    if "{answer}" not in template:
        yield Mistake(
            key, f"is {template!r}, without {{answer}}: the teacher would know nothing that the policy does not"
        )
    if config.task.has_environment:
        yield Mistake(key, ": an environment's episodes have no one answer: leave it out", ("task.environment",))
    if config.teaches_itself and config.reference.fsdp * config.reference.tp > 1:
        why = (
            "it takes each version whole: set reference.fsdp and reference.tp to 1, or name a teacher (reference.path)"
        )
        yield Mistake(key, f": of a policy that teaches itself {why}", ("reference.fsdp", "reference.tp"))
    if config.teaches_itself and config.lora.rank and config.lora.hand_over == "adapter":
        yield _clash(
            config, key, "lora.hand_over", "a policy that teaches itself takes whole weights: set it to 'merged'"
        )


def _patience_checks(config: RunConfig) -> Iterator[Mistake]:
    key, evaluation, checkpoint = "evaluation.patience", config.evaluation, config.checkpoint
    if not evaluation.patience:
        return
    if not config.algorithm.imitates:
        text = f"is of the held-out loss, which algorithm.name {config.algorithm.name!r} does not measure: leave it out"
        yield Mistake(key, text, ("algorithm.name",))
    elif not evaluation.every:
        yield Mistake(key, "counts evaluations, but evaluation.every is 0: set that", ("evaluation.every",))
    elif evaluation.every % (checkpoint.every or 1):
        yield Mistake(
            key,
            f"makes the run's model of the best evaluation's checkpoint, but checkpoint.every is {checkpoint.every}, so that "
            f"not every evaluation has one: leave it out",
            ("checkpoint.every", "evaluation.every"),
        )


def _group_checks(config: RunConfig) -> Iterator[Mistake]:
    """Groups of a tick, among replicas, shards, data-parallel ranks and optimizer steps."""
    generator, advantage, prompts = config.generator, config.algorithm.advantage, config.schedule.prompts_per_step
    if generator.group_size == 1 and advantage in GROUP_BASELINES:
        why = "it compares the responses of a group, so every advantage would be 0; set generator.group_size >= 2"
        yield _clash(config, "generator.group_size", "algorithm.advantage", why)
    if generator.group_size == 1 and config.data.candidates > 1:
        why = "answers to an item differ only where it has several; set generator.group_size >= 2"
        yield _clash(config, "data.candidates", "generator.group_size", why)
    if generator.replicas:
        replica, groups = smallest_quota(generator.shares, config.groups_per_tick)
        if groups < 1:
            yield Mistake(
                "generator.replicas",
                f": replica {replica} of {generator.num_replicas} would get {groups:.2g} of the {config.groups_per_tick} groups of a "
                "tick, and each needs one: raise schedule.prompts_per_step or its share, or take fewer replicas",
                ("schedule.prompts_per_step",),
            )
    else:
        key = "shards" if generator.shards else "dp"
        if prompts % (parts := getattr(generator, key)):
            text = f"({prompts}) must be a multiple of generator.{key} ({parts}): each delivers as many groups a tick"
            yield Mistake("schedule.prompts_per_step", text, (f"generator.{key}",))
    for role in present_roles(config):
        if prompts < (fsdp := getattr(role.settings(config), "fsdp", 1)):
            text = f"({prompts}) must be >= {role.section}.fsdp ({fsdp}): each data-parallel rank needs a group a tick"
            yield Mistake("schedule.prompts_per_step", text, (f"{role.section}.fsdp",))
    if config.trainer.minibatches > prompts:
        why = "a tick's batch cannot be cut into more parts than it has groups: lower it, or raise that"
        yield _clash(config, "trainer.minibatches", "schedule.prompts_per_step", why)
    silent = GROUP_BASELINES - {"gdpo"}  # whose parts may differ where their sums agree
    if config.dynamic_sampling.enabled and advantage not in silent:
        yield Mistake(
            "dynamic_sampling.enabled",
            f"drops groups whose rewards agree, but with algorithm.advantage {advantage!r} such "
            f"groups have a gradient: choose one of {', '.join(sorted(silent))}, or set it to false",
            ("algorithm.advantage",),
        )


def _engine_checks(config: RunConfig) -> Iterator[Mistake]:
    """What the engine cannot do."""
    engine, name = config.generator.engine, "generator.engine.name"
    if config.schedule.weights == "latest" and config.generator.shards:
        why = (
            "each process decides for itself which version it takes, and shards are for any process to decode: set "
            "schedule.weights to 'exact', or generator.shards to 0"
        )
        yield _clash(config, "schedule.weights", "generator.shards", why)
    if config.trainer.router == "replay" and not engine.kind.native:
        why = "the native engine alone notes which experts it chose: set that to 'native', or trainer.router to 'live'"
        yield _clash(config, "trainer.router", name, why)
    for key in ("generator.sampling.temperature", "evaluation.temperature"):
        if why := engine.kind.why_not_at(operator.attrgetter(key)(config)):
            yield _clash(config, key, name, why)
    if config.evaluation.tp > 1 and not engine.kind.native:
        why = "that runs on one rank: set it to 1 and raise evaluation.dp, or engine.name to 'native'"
        yield _clash(config, "evaluation.tp", name, why)


def _settings_checks(config: RunConfig) -> Iterator[Mistake]:
    """Whether the settings of each executor fit a recipe."""
    for name, own in config.executors.items():
        key = f"executors.{name}.settings"
        if own.settings.get("generator", {}).get("replicas"):
            text = ": generator.replicas are of the job's own generator; this one has as many alike replicas as ranks"
            yield Mistake(key, text, ("executors",))
        try:
            config.for_executor(name)
        except ConfigError as error:
            yield Mistake(key, ": " + "; ".join(map(str, error.mistakes)), ("executors",))


def _judging_checks(config: RunConfig) -> Iterator[Mistake]:
    """What is wrong with how verdicts are put together."""
    models = {"reward_model": config.reward_model.name} if config.has_reward_model else {}
    models |= {"judge": config.judge.name} if config.has_judge else {}
    if config.reward.weight == 0 and not models and not config.executors:
        others = ("reward_model.path", "judge.path", "judge.url")
        text = f"is 0, so models alone judge, but there is none: name one in {' or '.join(others)}, or set it to 1"
        yield Mistake("reward.weight", text, others)
    judges = [part for task in (config.task, *config.task.tasks.values()) for part in task.judges]
    if config.algorithm.advantage == "gdpo":
        weights = [("task.rewards", part.part, part.weight) for part in judges]
        weights += [(f"{section}.weight", name, getattr(config, section).weight) for section, name in models.items()]
        for key, name, weight in (one for one in weights if one[2] <= 0):
            yield Mistake(
                key,
                f": {name!r} has the weight {weight:g}, but with algorithm.advantage 'gdpo' parts of a reward count alike and "
                f"with their own sign, so that a penalty would be sought: "
                f"{'turn its sign and its weight' if weight else 'leave it out'}, or choose another advantage",
                ("algorithm.advantage",),
            )
    taken = {TASK_PART, *(part.part for part in judges)}
    for section, name in models.items():
        if name in taken:
            text = f"is {name!r}, which another part of the reward is called: choose another name"
            yield Mistake(f"{section}.name", text, ("task.rewards",))
        taken.add(name)


def _colocation_checks(config: RunConfig) -> Iterator[Mistake]:
    """What must hold for generator and trainer to take turns on the same devices."""
    schedule, generator, key = config.schedule, config.generator, "schedule.colocated"
    if schedule.max_staleness or schedule.weights != "exact":
        yield Mistake(
            key,
            f"lets generator and trainer take turns, but with schedule.max_staleness "
            f"{schedule.max_staleness} and schedule.weights {schedule.weights!r} they may work at the same time: set "
            f"max_staleness to 0 and weights to 'exact', or colocated to false",
            ("schedule.max_staleness", "schedule.weights"),
        )
    if generator.device != config.trainer.device:
        yield Mistake(
            key,
            f"puts generator and trainer on the same devices, but generator.device is "
            f"{generator.device!r} and trainer.device {config.trainer.device!r}: set both to 'auto', 'cpu' or 'cuda'",
            ("generator.device", "trainer.device"),
        )
    if not generator.engine.kind.native:
        why = "an engine must give its memory back: set it to 'native', or colocated to false"
        yield _clash(config, key, "generator.engine.name", why)
    if config.lora.rank and config.lora.hand_over == "adapter":
        why = "adapters alone cannot restore weights that were given back: set it to 'merged', or colocated to false"
        yield _clash(config, key, "lora.hand_over", why)


Check = Callable[[RunConfig], Iterable[Mistake]]
"""A further question to a configuration."""

GROUP_BASELINES = frozenset({"group_mean", "leave_one_out", "group_std", "group_mean_batch_std", "max_rl", "gdpo"})
_READER: Reader[RunConfig] | None = None


def _reader() -> Reader[RunConfig]:
    global _READER
    if _READER is None:
        _READER = Reader(RunConfig)
    return _READER


def load_config(recipe: Path | str | None, overrides: Overrides = (), checks: Sequence[Check] = ()) -> RunConfig:
    """Read a recipe, apply ``--a.b value`` overrides and validate the whole.

    Args:
        overrides: Words of the command line, or dotted key -> value.
        checks: As in ``validate``.

    Raises:
        ConfigError: With every mistake in one message, each naming its key.
    """
    name = "run"
    if recipe is not None:  # it becomes part of run.dir, where braces are placeholders
        name = Path(recipe).stem.replace("{", "").replace("}", "")
    raw = read_settings(recipe, overrides)
    config = validate(raw, checks)
    run_dir = config.run.dir.replace("{name}", name)
    user_path(run_dir, "run.dir")
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=run_dir))


def read_settings(recipe: Path | str | None, overrides: Overrides = ()) -> dict[str, Any]:
    """What a recipe and ``--a.b value`` overrides set, as nested plain values; nothing is filled in.

    Raises:
        ConfigError: There is no such file, it is not TOML, it is a run's own and of another version of llamarl, or an
            override is not of the form ``--section.key value``.
    """
    given = overrides if isinstance(overrides, Mapping) else _parse_overrides(overrides)
    raw: dict[str, Any] = {}
    if recipe is not None:
        path = find_recipe(recipe)
        try:
            raw = read_toml(path)
        except FileError as error:
            if error.missing:
                raise ConfigError(
                    f"recipe {path} does not exist; those that ship with llamarl go by name: {', '.join(shipped_recipes())}"
                ) from error
            own = f"; a run's own is {path}/config.toml" if os.path.isdir(path) else ""
            if str(path).endswith((".yaml", ".yml", ".json")):
                own = "; a recipe is TOML, lines of key = value below [section]: llamarl recipes tiny prints one"
            raise ConfigError(f"recipe {error}{own}") from error
        if of_run := (path.parent / _RUN_ID).exists():
            _refuse_of_another_version(raw, path)
        folder = begun_in(path) if of_run else path.parent
        if folder != (Path.cwd() if of_run else Path()):
            raw = with_paths_from(folder, raw)
    return _merge(_one_task_section(raw), given)


def _refuse_of_another_version(raw: Mapping[str, Any], path: Path) -> None:
    _, mistakes = _reader().read(_one_task_section(raw), ())
    unknown = [one for one in mistakes if not any(f"{one.key}.".startswith(f"{key}.") for key in known_keys())]
    if unknown:
        raise ConfigError(
            f"{list_mistakes(unknown, str(path))}\nAnother version of llamarl wrote that file, or somebody has changed it. "
            "Use the version that wrote it; or, where CHANGELOG.md says that a key is gone, remove its line there."
        )


def begun_in(path: Path) -> Path:
    """From where the paths of a run's own configuration count; the working directory where it does not say so."""
    first = read_text(path).partition("\n")[0] if path.is_file() else ""
    return Path(first.removeprefix(_COUNT_FROM)) if first.startswith(_COUNT_FROM) else Path.cwd()


def validate(raw: Mapping[str, Any], checks: Sequence[Check] = ()) -> RunConfig:
    """A ``RunConfig`` from plain values, whose types must be those of TOML.

    Args:
        checks: What else is asked, of files for example, once values agree with each other.

    Raises:
        ConfigError: With every mistake in one message, each naming its key.
    """
    config, mistakes = _reader().read(_one_task_section(raw), checks)
    if mistakes:
        raise ConfigError(list_mistakes(mistakes), mistakes=mistakes)
    return config


def _one_task_section(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``raw`` with its tables ``[[task]]``, if it has such, as the one section of a mixture, and with
    the name of a task that goes without saying."""
    tasks = raw.get("task")
    if isinstance(tasks, list):
        return {**raw, "task": {"name": "mixture", "mixture": [_named(task) for task in tasks]}}
    return {**raw, "task": _named(tasks)} if "task" in raw else dict(raw)


def _named(task: Any) -> Any:
    """Data that a reward or an environment of the user's own judges need no ``name``."""
    own = isinstance(task, Mapping) and "data" in task and task.keys() & {"reward", "rewards", "environment"}
    return {"name": "function", **task} if own else task


def known_keys() -> dict[str, Any]:
    """Every key of a recipe, dotted -> pydantic's field."""
    return _reader().keys


def meant_key(word: str, mark: str = "") -> str:
    """What to write instead of a key's last word alone, or another program's name of it; "" where nobody knows it.

    Args:
        mark: What stands before a key there: ``--`` on the command line.
    """
    named = [f"{word}.{last}" for last in ("path", "name")]  # of a section, what is meant by its name alone
    homes = [key for key in known_keys() if key in named] or [key for key in known_keys() if key.endswith(f".{word}")]
    return f"did you mean {' or '.join(mark + key for key in homes[:3])}?" if homes else our_name(word)[1]


def key_effects() -> dict[str, Effect]:
    """Every key of a recipe, dotted -> what another value of it does to a run that has begun."""
    return {
        key: next((mark for mark in info.metadata if isinstance(mark, Effect)), Effect.BITS)
        for key, info in known_keys().items()
    }


def _parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Dotted key -> value."""
    given: dict[str, Any] = {}
    unexpected: list[str] = []
    items = list(words)
    while items:
        flag = items.pop(0)
        if not flag.startswith("--") or "." not in flag.split("=")[0]:
            last = flag.removeprefix("--").partition("=")[0].replace("-", "_")
            advice = meant_key(last, "--") if flag.startswith("--") else ""
            unexpected.append(
                f"unexpected argument {flag!r}: {advice or 'overrides look like --schedule.max_staleness 0'}"
            )
            if advice and "=" not in flag and items and not items[0].startswith("--"):  # its value
                items.pop(0)
            continue
        key, equals, value = flag[2:].partition("=")
        if not equals:
            if not items:
                raise ConfigError(f"override --{key} has no value: write --{key} VALUE")
            value = items.pop(0)
        given[key.replace("-", "_")] = parse_value(value, f"override --{key}")
    if unexpected:
        raise ConfigError("\n".join(unexpected), mistakes=[Mistake("", text) for text in unexpected])
    return given


def _merge(raw: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = _copy(raw)
    for key, value in given.items():
        *path, last = key.split(".")
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"override --{key:.80}...: more than {MAX_DEPTH} sections inside each other")
        node = merged
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override --{key}: {part} is a value in the recipe, not a section")
        node[last] = value
    return merged


def merge_tables(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``given``, table by table."""
    tables = {key: base.get(key) for key, value in given.items() if isinstance(value, Mapping)}
    merged = {key: merge_tables(base[key], given[key]) for key, table in tables.items() if isinstance(table, Mapping)}
    return {**base, **given, **merged}


def parse_value(text: str, where: str) -> Any:
    """Read a value of the command line: TOML, or else text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of the command line that are no text
        raise ConfigError(f"{where}: not UTF-8 text (character {error.start + 1})") from error
    try:
        return parse_toml(f"value = {text}", where)["value"]
    except FileError:
        return text


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def to_plain(config: Any) -> dict[str, Any]:
    """Nested plain values, None left out (TOML has none)."""

    def prune(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: prune(v) for k, v in value.items() if v is not None}
        return [prune(v) for v in value] if isinstance(value, (list, tuple)) else value

    return prune(dataclasses.asdict(config))


def changed_keys(config: RunConfig) -> tuple[dict[str, Any], int]:
    """Nested plain values of the keys that are not at their defaults, and how many keys are."""
    plain = to_plain(config)
    num_default = 0
    for key, info in known_keys().items():
        *sections, name = key.split(".")
        table: Any = plain
        for section in sections:
            table = table.get(section, {}) if isinstance(table, dict) else {}
        if not isinstance(table, dict) or name not in table or info.is_required():
            continue
        default = info.get_default(call_default_factory=True)
        if table[name] == (list(default) if isinstance(default, tuple) else default):
            del table[name]
            num_default += 1
    return _without_empty(plain), num_default


def _without_empty(table: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in table.items()}
    return {key: value for key, value in kept.items() if value != {}}


def save_config(config: RunConfig, path: Path, begun: Path = Path()) -> None:
    """Write the resolved configuration as TOML; ``load_config`` of it gives an equal ``RunConfig``.

    Args:
        begun: Where the run was begun, from where relative paths in it count.
    """
    path.write_text(f"{_COUNT_FROM}{begun.absolute()}\n{tomli_w.dumps(to_plain(config))}", encoding="utf-8")


def field_help(word: str = "") -> str:
    """Keys with their defaults and meanings, for ``--help``.

    Args:
        word: A section, or part of a key or of its meaning; empty: every key.
    """
    inside = [key for key in known_keys() if key.startswith(f"{word}.") or key == word]
    named = [key for key in known_keys() if word.lower() in key]
    meant = [key for key, info in known_keys().items() if word.lower() in (info.description or "").lower()]
    lines = []
    section = None
    for key in inside or named or meant:
        info = known_keys()[key]
        head = key.rsplit(".", 1)[0]
        if head != section:
            section = head
            lines.append(f"\n[{section}]")
        default = "required" if info.is_required() else repr(info.get_default(call_default_factory=True))
        limits = bounds(info.metadata, info.annotation)
        lines.append(f"  --{key}  (default {default}{limits and f', {limits}'})")
        lines += [f"      {line.strip()}" for line in (info.description or "").strip().splitlines()]
    return "\n".join(lines)


def section_help() -> str:
    """The sections of a recipe, with how many keys each has."""
    sizes = Counter(key.partition(".")[0] for key in known_keys())
    return ", ".join(f"{section} ({count})" for section, count in sizes.items())
