"""The whole configuration of a run: one frozen, validated tree, from a TOML recipe and command-line overrides.

    recipe.toml ─▶ dict ─▶ + overrides (``--schedule.max_staleness 0``) ─▶ RunConfig (or every mistake, at once)

Each section is owned by its package's ``config.py``; this file composes them and checks what concerns two of them.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field
from pydantic.dataclasses import dataclass

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.checkpoint.config import CheckpointConfig
from llamarl.controller.config import DeadlineConfig, ScheduleConfig
from llamarl.data.config import DataConfig
from llamarl.environments.config import TaskConfig
from llamarl.errors import ConfigError
from llamarl.executors.config import DynamicSamplingConfig, EvaluationConfig, GeneratorConfig
from llamarl.mistakes import Reader, list_mistakes
from llamarl.observability.config import ObservabilityConfig
from llamarl.strict import STRICT, at_least, refuse
from llamarl.trainer.config import CriticConfig, LoraConfig, OptimizerConfig, ReferenceConfig, TrainerConfig

__all__ = [
    "Check",
    "ModelConfig",
    "RunConfig",
    "RunSection",
    "apply_overrides",
    "field_help",
    "load_config",
    "save_config",
]

_MOST_TICKS = 1_000_000
"""Far beyond any run; what is looked at tick by tick before a run then still takes under a second."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunSection:
    dir: str = "runs/{name}"
    """Folder of the run. "{name}" becomes the recipe's file name. Refused if it already holds a run."""

    seed: int = 0
    """Every random choice of the run derives from it. Same recipe, seed and thread counts: same bits."""

    num_ticks: int = 100
    """Trainer ticks of the run; each makes one policy version, by ``trainer.minibatches * trainer.epochs`` optimizer steps."""

    runtime: Literal["monarch", "inline"] = "monarch"
    """"monarch": each executor in processes of its own, all at once. "inline": all in this process, one after the other."""

    cores: int = 0
    """CPU cores to divide among the executors whose ``threads`` is 0; 0 takes what this process may use."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if not self.dir.strip():
            yield f"dir must name a folder, such as runs/{{name}}, got {self.dir!r}"
        if re.search("[{}]", self.dir.replace("{name}", "")):
            yield (
                f"dir may hold braces only as its one placeholder {{name}}, the recipe's file name; got {self.dir!r}"
            )
        yield from at_least(self, 1, "num_ticks", what="trainer tick")
        if self.num_ticks > _MOST_TICKS:
            yield f"num_ticks must be <= {_MOST_TICKS:,} trainer ticks, got {self.num_ticks}"
        yield from at_least(self, 0, "seed")
        yield from at_least(self, 0, "cores", what="(0 takes what there is)")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    path: str = "bundled:tiny"
    """Hugging Face folder of the policy to start from, or "bundled:tiny"."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    run: RunSection = Field(default_factory=RunSection)
    model: ModelConfig = Field(default_factory=ModelConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    dynamic_sampling: DynamicSamplingConfig = Field(default_factory=DynamicSamplingConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    observability: ObservabilityConfig = Field(default_factory=ObservabilityConfig)
    deadlines: DeadlineConfig = Field(default_factory=DeadlineConfig)

    def __post_init__(self) -> None:
        refuse(_cross_checks(self))

    @property
    def has_reference(self) -> bool:
        """Whether the job has a reference executor."""
        return self.reference.enabled or self.algorithm.kl_coef > 0

    @property
    def has_critic(self) -> bool:
        """Whether the job has a critic executor."""
        return self.algorithm.advantage == "gae"

    @property
    def groups_per_tick(self) -> int:
        """Groups that all generator replicas together deliver a tick."""
        return self.dynamic_sampling.groups_per_tick(self.schedule.prompts_per_step, self.generator.dp)

    @property
    def token_staleness_bound(self) -> int:
        """No token is older than so many policy versions when it is trained."""
        carried = self.dynamic_sampling.carry_ticks if self.dynamic_sampling.enabled else 0
        cut = 0 if self.schedule.weights == "latest" else self.generator.max_segments - 1
        return self.schedule.max_staleness + cut + carried


def _cross_checks(config: RunConfig) -> Iterator[str]:
    group_size, advantage = config.generator.group_size, config.algorithm.advantage
    if group_size == 1 and advantage in GROUP_BASELINES:
        yield (
            f"generator.group_size is 1, but algorithm.advantage {advantage!r} compares the responses of a group: "
            f"every advantage would be 0 and nothing learned; set generator.group_size >= 2"
        )
    if config.schedule.prompts_per_step % config.generator.dp:
        yield (
            f"schedule.prompts_per_step ({config.schedule.prompts_per_step}) must be a multiple of generator.dp "
            f"({config.generator.dp}): each replica delivers the same number of groups a tick"
        )
    ranks = {"trainer.fsdp": config.trainer.fsdp}
    if config.has_reference:
        ranks["reference.fsdp"] = config.reference.fsdp
    if config.has_critic:
        ranks["critic.fsdp"] = config.critic.fsdp
    for key, fsdp in ranks.items():
        if config.schedule.prompts_per_step < fsdp:
            yield (
                f"schedule.prompts_per_step ({config.schedule.prompts_per_step}) must be >= {key} "
                f"({fsdp}): each data-parallel rank needs at least one group a tick"
            )
    if config.dynamic_sampling.enabled and advantage not in GROUP_BASELINES:
        yield (
            f"dynamic_sampling.enabled drops groups whose rewards agree, but with algorithm.advantage {advantage!r} such "
            f"groups have a gradient: choose one of {', '.join(sorted(GROUP_BASELINES))}, or set it to false"
        )
    if config.schedule.weights == "latest" and config.generator.tp > 1:
        yield (
            f"schedule.weights is 'latest', which each generator process decides for itself, but generator.tp is "
            f"{config.generator.tp}: set schedule.weights to 'exact', or generator.tp to 1"
        )
    if config.lora.rank and config.lora.hand_over == "adapter" and config.generator.tp > 1:
        yield (
            f"lora.hand_over is 'adapter', which a generator merges into whole matrices, but generator.tp is "
            f"{config.generator.tp}: set lora.hand_over to 'merged', or generator.tp to 1"
        )
    if config.lora.rank and config.trainer.fsdp * config.trainer.tp > 1:
        yield (
            f"lora.rank {config.lora.rank} trains on one rank, but trainer.fsdp is {config.trainer.fsdp} and trainer.tp "
            f"{config.trainer.tp}: set both to 1, or lora.rank to 0"
        )
    yield from _batch_checks(config)
    if config.schedule.colocated:
        yield from _colocation_checks(config)


def _colocation_checks(config: RunConfig) -> Iterator[str]:
    """What must hold for generator and trainer to take turns on the same devices."""
    schedule, generator = config.schedule, config.generator
    if schedule.max_staleness or schedule.weights != "exact":
        yield (
            f"schedule.colocated lets generator and trainer take turns, but with schedule.max_staleness "
            f"{schedule.max_staleness} and schedule.weights {schedule.weights!r} they may work at the same time: set "
            f"max_staleness to 0 and weights to 'exact', or colocated to false"
        )
    if generator.device != config.trainer.device:
        yield (
            f"schedule.colocated puts generator and trainer on the same devices, but generator.device is "
            f"{generator.device!r} and trainer.device {config.trainer.device!r}: set both to 'auto', 'cpu' or 'cuda'"
        )
    if generator.kv_on_update == "keep":
        yield (
            "schedule.colocated gives the KV cache back at the end of each tick, but generator.kv_on_update is 'keep': set "
            "it to 'recompute', or colocated to false"
        )
    if generator.engine.name != "native":
        yield (
            f"schedule.colocated needs an engine that gives its memory back, but generator.engine.name is "
            f"{generator.engine.name!r}: set it to 'native', or colocated to false"
        )
    if config.lora.rank and config.lora.hand_over == "adapter":
        yield (
            "schedule.colocated gives the generator's weights back, which adapters alone cannot restore, but "
            "lora.hand_over is 'adapter': set it to 'merged', or colocated to false"
        )
    if schedule.transport == "cuda_ipc":
        yield (
            "schedule.colocated keeps the weights in host memory between the ticks, but schedule.transport is 'cuda_ipc', "
            "which would hold another copy on the device: set it to 'auto'"
        )


def _batch_checks(config: RunConfig) -> Iterator[str]:
    """What concerns the optimizer steps of a tick and what they train on."""
    trainer, group_size = config.trainer, config.generator.group_size
    selection, prompts = trainer.selection, config.schedule.prompts_per_step
    if 2 * selection.pairs > group_size:
        yield (
            f"trainer.selection.pairs is {selection.pairs}, but a group of generator.group_size = {group_size} responses "
            f"makes at most {group_size // 2} pairs"
        )
    units = prompts * selection.pairs if selection.pairs else prompts * (group_size if selection.tokens_per_step else 1)
    if trainer.minibatches > units:
        yield (
            f"trainer.minibatches ({trainer.minibatches}) is more than the {units} parts that a tick's batch can be cut "
            f"into: lower it or raise schedule.prompts_per_step"
            + (" or generator.group_size" if selection.tokens_per_step and not selection.pairs else "")
        )
    longest = config.generator.sampling.max_new_tokens * (2 if selection.pairs else 1)
    if 0 < selection.tokens_per_step < longest:
        yield (
            f"trainer.selection.tokens_per_step ({selection.tokens_per_step}) must hold the longest "
            f"{'pair' if selection.pairs else 'response'} ({longest} tokens), or it would never train: raise it or lower "
            f"generator.sampling.max_new_tokens"
        )


Check = Callable[[RunConfig], Iterable[str]]
"""A further question to a configuration: gives messages, each beginning with the key at fault."""

GROUP_BASELINES = frozenset({"group_mean", "leave_one_out", "group_std", "group_mean_batch_std"})
_READER: Reader[RunConfig] | None = None


def _reader() -> Reader[RunConfig]:
    global _READER
    if _READER is None:
        _READER = Reader(RunConfig)
    return _READER


def load_config(recipe: Path | str | None, overrides: Sequence[str] = (), checks: Sequence[Check] = ()) -> RunConfig:
    """Read a recipe, apply ``--a.b value`` overrides and validate the whole.

    Args:
        checks: As in ``validate``.

    Raises:
        ConfigError: With every mistake in one message, each naming its key.
    """
    given = _parse_overrides(overrides)
    raw: dict[str, Any] = {}
    name = "run"
    if recipe is not None:
        path = Path(recipe)
        name = path.stem.replace("{", "").replace("}", "")  # it becomes part of run.dir, where braces are placeholders
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(
                f"recipe {path} does not exist; recipes that ship with llamarl lie in recipes/"
            ) from error
        except IsADirectoryError as error:
            raise ConfigError(
                f"recipe {path} is a folder; give a TOML file (a run's own is {path}/config.toml)"
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe {path} is not valid TOML: {error}") from error
    raw = _merge(raw, given)
    config = validate(raw, checks)
    run_dir = config.run.dir.replace("{name}", name)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=run_dir))


def validate(raw: Mapping[str, Any], checks: Sequence[Check] = ()) -> RunConfig:
    """A ``RunConfig`` from plain values, whose types must be those of TOML.

    Args:
        checks: What else is asked, of files for example, once values agree with each other.

    Raises:
        ConfigError: With every mistake in one message, each naming its key.
    """
    judged = _reader().read(raw, checks)
    if judged.mistakes or judged.config is None:
        raise ConfigError(list_mistakes(judged.mistakes))
    return judged.config


def known_keys() -> dict[str, Any]:
    """Every key of a recipe, dotted -> pydantic's field."""
    return _reader().keys


def apply_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """``["--a.b", "3", "--c.d=x"]`` merged into nested plain values; a value is TOML, or else text.

    Raises:
        ConfigError: An override is not of the form ``--section.key value``.
    """
    return _merge(raw, _parse_overrides(overrides))


def _parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Dotted key -> value."""
    given: dict[str, Any] = {}
    items = list(words)
    while items:
        flag = items.pop(0)
        if not flag.startswith("--") or "." not in flag.split("=")[0]:
            last = flag.removeprefix("--").partition("=")[0].replace("-", "_")
            homes = [f"--{known}" for known in known_keys() if flag.startswith("--") and known.endswith(f".{last}")]
            raise ConfigError(
                f"unexpected argument {flag!r}: "
                + (
                    f"did you mean {' or '.join(homes[:3])}?"
                    if homes
                    else "overrides look like --schedule.max_staleness 0"
                )
            )
        key, equals, value = flag[2:].partition("=")
        if not equals:
            if not items:
                raise ConfigError(f"override --{key} has no value: write --{key} VALUE")
            value = items.pop(0)
        given[key.replace("-", "_")] = _parse(value)
    return given


def _merge(raw: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = _copy(raw)
    for key, value in given.items():
        *path, last = key.split(".")
        node = merged
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override --{key}: {part} is a value in the recipe, not a section")
        node[last] = value
    return merged


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
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


def save_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration as TOML; ``load_config`` of it gives an equal ``RunConfig``."""
    path.write_text(tomli_w.dumps(to_plain(config)), encoding="utf-8")


def field_help() -> str:
    """Every key with its default and meaning, for ``--help``."""
    lines = []
    section = None
    for key, info in known_keys().items():
        head = key.rsplit(".", 1)[0]
        if head != section:
            section = head
            lines.append(f"\n[{section}]")
        default = "required" if info.is_required() else repr(info.get_default(call_default_factory=True))
        lines.append(f"  --{key}  (default {default})")
        lines += [f"      {line.strip()}" for line in (info.description or "").strip().splitlines()]
    return "\n".join(lines)
