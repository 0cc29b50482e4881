"""The roles of the standard job: one entry each, and everybody who must know of a role reads it here.

    generator ── completions ──▶ reward ── scored ──▶ [reference ── referenced ──▶] [critic ── valued ──▶] trainer
        ▲                                                                                                   │ │
        └────────────────────────── weights, delay max_staleness + 1 ◀──────────────────────────────────────┘ │
                                                                          evaluator ◀── eval_weights ──────────┘

With a reward model or a judge, ``completions`` pass them before the reward executor (``rated``,
``judged``): the latter adds all verdicts up, and what it does with the sum (rollouts, limits on
failures, dynamic sampling) needs no second place. With a curriculum it tells the generator of them
(``outcomes``, with the delay of the weights); a policy that teaches itself comes to the reference so
(``teacher_weights``).

Reference and critic stand one after the other, not side by side: each edge has one producer, a
group travels whole with all that is known of it, and the critic can charge rewards with the
reference's KL. Their edges have delay 0, so the proofs of docs/asynchrony.md hold as they are; a
station more lengthens the one long cycle by its own duration, which asynchrony hides.

Graph, placement, preflight, console, weights edges, the run's products, resume and simulator
iterate ``present_roles``: those of ``ROLES`` that a recipe asks for, as its ``[executors.NAME]``
change them, and executors of the user's own. No torch here, and no configuration at run time: the
configuration itself asks.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llamarl.errors import Mistake

if TYPE_CHECKING:
    from llamarl.model_support import Use
    from llamarl.settings.executors import ExecutorConfig

__all__ = [
    "MODEL_SECTIONS",
    "ROLES",
    "Model",
    "Product",
    "Reads",
    "Role",
    "carries_version",
    "present_roles",
    "wiring_mistakes",
    "with_settings",
]

_OWN = "executors."
"""Begins the section of an executor of the user's own."""

MODEL_SECTIONS = ("model", "reference", "critic", "reward_model", "judge")
"""Sections whose ``path`` names a model: where an executor of the user's own has one in its
``settings``, that is looked up like those of the recipe."""

_EVALUATION_ROOM = 2
"""Ticks by which the trainer may be ahead of the evaluator, at least; else the ticks from one
evaluation to the next. Only ticks that are due carry a version, so that much room costs one copy of
the weights in shared memory, or two if every tick is due."""

JobConfig = Any
"""A ``config.RunConfig``, which imports this file and so has no name here."""


@dataclass(frozen=True, kw_only=True)
class Reads:
    """A channel as its reader sees it: the reader says how its ranks share what arrives, and how late it may be."""

    channels: tuple[str, ...]
    """Names, best first: it reads the first that anybody of the job writes."""
    kind: Literal["gather", "scatter", "broadcast", "weights"]
    """Of ``channels.base.ChannelKind``."""
    delay: Callable[[JobConfig], int] = lambda config: 0
    """Ticks by which what it reads is older than its own tick."""
    capacity: Callable[[JobConfig], int] = lambda config: config.schedule.max_staleness + 1
    """Most tokens on the channel at once."""
    latest: Callable[[JobConfig], bool] = lambda config: False
    """Whether it may take newer tokens than that of its tick."""
    due: Callable[[JobConfig, int], bool] = lambda config, tick: True
    """Whether a tick's token carries anything."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model that a role holds."""

    key: str = "model.path"
    """Key of the recipe that names it; where that is empty it is the policy's."""
    uses: Callable[[JobConfig], tuple[Use, ...]]
    """What it is used for, in the words of ``model_support``."""
    trained: bool = False
    """Whether it learns: then it is part of checkpoints, and a folder of the run at its end."""
    own_tokens: bool = False
    """Whether it reads text through a tokenizer of its own; any other model reads the policy's tokens."""

    def path(self, config: JobConfig) -> str:
        """As the recipe has it, the policy's where it has none."""
        section, _, name = self.key.partition(".")
        return str(getattr(getattr(config, section), name) or config.model.path)

    def named_itself(self, config: JobConfig) -> bool:
        """Whether the recipe gives it a path of its own, other than the policy's key."""
        section, _, name = self.key.partition(".")
        return section != "model" and bool(getattr(getattr(config, section), name))


@dataclass(frozen=True, kw_only=True)
class Product:
    """A folder of the run that is made of a role's part of a checkpoint, at the run's end."""

    folder: str
    writer: str
    """Import path; called as ``writer(checkpoint, config, folder)``."""
    wanted: Callable[[JobConfig], bool] = lambda config: True


@dataclass(frozen=True, kw_only=True)
class Role:
    """One executor of the standard job."""

    name: str
    factory: str
    """Import path; called as ``factory(config, context)`` in each of its processes."""
    does: str
    """In a few words, for the console."""
    reads: tuple[Reads, ...] = ()
    writes: tuple[str, ...] = ()
    """Channels; one that nobody reads is left out."""
    section: str = ""
    """Of the recipe, which holds its ``threads``, ``device`` and ``sizes``; empty: one rank with
    one thread on the CPU."""
    sizes: tuple[str, ...] = ()
    """Keys of the section whose product are its ranks, the data-parallel one first."""
    model_sizes: tuple[str, ...] = ()
    """Those of ``sizes`` over which one model is spread. Where their product is above 1 the ranks
    share a process group."""
    close: tuple[str, ...] = ("tp",)
    """Those of ``sizes`` whose neighbouring ranks talk most: in every layer."""
    model: Model | None = None
    products: tuple[Product, ...] = ()
    reshards: bool = False
    """Whether other ``sizes`` and threads go on from its checkpoints (``checkpoint.reshard``)."""
    present: Callable[[JobConfig], bool] = lambda config: True

    def settings(self, config: JobConfig) -> Any:
        """Its section; None where it has none."""
        if self.section.startswith(_OWN):
            return config.executors[self.name]
        return getattr(config, self.section) if self.section else None

    def size_of(self, config: JobConfig, names: Iterable[str]) -> int:
        """Product of these keys of its section."""
        return math.prod(getattr(self.settings(config), name) for name in names)

    def num_ranks(self, config: JobConfig) -> int:
        return sum(self.unit_ranks(config)) if self._has_unlike(config) else self.size_of(config, self.sizes)

    def unit_ranks(self, config: JobConfig) -> tuple[int, ...]:
        """Ranks of each unit of it that one model is spread over, in their order."""
        if self._has_unlike(config):
            return tuple(self.settings(config).replica_ranks)
        unit = self.size_of(config, self.model_sizes)
        return (unit,) * (self.size_of(config, self.sizes) // unit)

    def units(self, config: JobConfig) -> int | tuple[tuple[int, int], ...]:
        """Neighbouring ranks that talk most, by ``close``; of unlike replicas (how many ranks, how
        often) of each kind."""
        settings = self.settings(config)
        if self._has_unlike(config):
            return tuple((kind.tp or settings.tp, kind.dp) for kind in settings.replicas)
        return math.prod(int(getattr(settings, name, 1)) for name in self.close)

    def _has_unlike(self, config: JobConfig) -> bool:
        return bool(getattr(self.settings(config), "replicas", ()))


def _generates(config: JobConfig) -> tuple[Use, ...]:
    generator = config.generator
    if generator.engine.by_import_path:
        return ()  # what it can do, it knows itself
    uses: tuple[Use, ...] = (generator.engine.kind.use or "generate",)
    return uses if generator.quantization == "none" else (*uses, generator.quantization)


def _trains(config: JobConfig) -> tuple[Use, ...]:
    asked: dict[Use, bool] = {"lora": config.lora.rank > 0, "router_replay": config.trainer.router == "replay"}
    return ("train", *(use for use, wanted in asked.items() if wanted))


def _scores(config: JobConfig) -> tuple[Use, ...]:
    """On one rank any classifier of transformers does; over several it takes one that is known here."""
    return ("reward_model",) if ROLES["reward_model"].num_ranks(config) > 1 else ()


def _judges(config: JobConfig) -> tuple[Use, ...]:
    """One behind a URL is no model of this job."""
    if not config.judge.path:
        return ()
    return (config.judge_engine.kind.use or "generate",)


ROLES: Mapping[str, Role] = {
    role.name: role
    for role in (
        Role(
            name="generator",
            present=lambda config: config.samples,
            factory="llamarl.executors.generator:GeneratorExecutor",
            does="samples groups of responses",
            reads=(
                Reads(
                    channels=("weights",),
                    kind="weights",
                    delay=lambda config: config.schedule.max_staleness + 1,
                    latest=lambda config: config.schedule.weights == "latest",
                ),
            ),
            writes=("completions",),
            section="generator",
            sizes=("dp", "tp"),
            model_sizes=("tp",),
            close=("tp",),
            model=Model(uses=_generates),
        ),
        Role(
            name="reward_model",
            factory="llamarl.executors.reward_model:RewardModelExecutor",
            does="a frozen classifier's score of each response",
            reads=(Reads(channels=("completions",), kind="scatter"),),
            writes=("rated",),
            section="reward_model",
            sizes=("fsdp", "tp"),
            model_sizes=("fsdp", "tp"),
            model=Model(key="reward_model.path", uses=_scores, own_tokens=True),
            present=lambda config: config.has_reward_model,
        ),
        Role(
            name="judge",
            factory="llamarl.executors.judge:JudgeExecutor",
            does="a language model's verdict on each response",
            reads=(Reads(channels=("rated", "completions"), kind="gather"),),
            writes=("judged",),
            section="judge",
            model=Model(key="judge.path", uses=_judges, own_tokens=True),
            present=lambda config: config.has_judge,
        ),
        Role(
            name="reward",
            factory="llamarl.executors.reward:RewardExecutor",
            does="judges them in worker processes",
            reads=(Reads(channels=("judged", "rated", "completions"), kind="gather"),),
            writes=("scored",),
            present=lambda config: config.samples,
        ),
        Role(
            name="demonstrations",
            factory="llamarl.executors.demonstrations:DemonstrationsExecutor",
            does="reads what there is to train on",
            writes=("scored",),
            present=lambda config: not config.samples,
        ),
        Role(
            name="reference",
            factory="llamarl.executors.critic:ReferenceExecutor",
            does="a frozen model's log-probs of every token",
            reads=(Reads(channels=("scored",), kind="scatter"),),
            writes=("referenced",),
            section="reference",
            sizes=("fsdp", "tp"),
            model_sizes=("fsdp", "tp"),
            model=Model(key="reference.path", uses=lambda config: ("train",)),
            present=lambda config: config.has_reference,
        ),
        Role(
            name="critic",
            factory="llamarl.executors.critic:CriticExecutor",
            does="estimates returns, and learns to",
            reads=(Reads(channels=("referenced", "scored"), kind="scatter"),),
            writes=("valued",),
            section="critic",
            sizes=("fsdp", "tp"),
            model_sizes=("fsdp", "tp"),
            model=Model(key="critic.path", uses=lambda config: ("critic",), trained=True),
            products=(Product(folder="critic", writer="llamarl.trainer.checkpoint_export:write_critic"),),
            present=lambda config: config.has_critic,
        ),
        Role(
            name="trainer",
            factory="llamarl.executors.trainer:TrainerExecutor",
            does="updates the policy, hands over weights",
            reads=(Reads(channels=("valued", "referenced", "scored"), kind="scatter"),),
            writes=("weights", "eval_weights", "teacher_weights"),
            section="trainer",
            sizes=("fsdp", "tp", "pp", "cp"),
            model_sizes=("fsdp", "tp", "pp", "cp"),
            model=Model(uses=_trains, trained=True),
            products=(
                Product(
                    folder="adapter",
                    writer="llamarl.trainer.checkpoint_export:write_adapter",
                    wanted=lambda config: config.lora.rank > 0,
                ),
                Product(
                    folder="model",
                    writer="llamarl.trainer.checkpoint_export:export_checkpoint",
                    wanted=lambda config: not config.lora.rank or config.lora.export_merged,
                ),
            ),
            reshards=True,
        ),
        Role(
            name="evaluator",
            factory="llamarl.executors.evaluator:EvaluatorExecutor",
            does="scores versions on held-out prompts",
            reads=(
                Reads(
                    channels=("eval_weights",),
                    kind="weights",
                    capacity=lambda config: max(_EVALUATION_ROOM, config.evaluation.every),
                    due=lambda config, tick: config.evaluation.is_due(tick + 1, config.run.num_ticks),
                ),
            ),
            section="evaluation",
            sizes=("dp", "tp"),
            model_sizes=("dp", "tp"),  # replicas bring their verdicts together
            model=Model(uses=_generates),
            present=lambda config: config.evaluation.every > 0 and not config.algorithm.imitates,
        ),
    )
}
"""By name, in the order in which executors are listed and started. A role of the standard job more
is an entry here and a class in ``executors/``."""


def present_roles(config: JobConfig) -> list[Role]:
    """Those that a recipe asks for, rewired as it says, then those of the user's own."""
    standard = [_fed_back(_rewired(role, config), config) for role in ROLES.values() if role.present(config)]
    return [*standard, *(_own(name, config) for name in config.executors if name not in ROLES)]


def with_settings(config: JobConfig, changes: Mapping[str, Mapping[str, Any]]) -> JobConfig:
    """``config`` with other values in the sections of its roles, all at once: between two of them
    it might be no configuration.

    Args:
        changes: Role -> key of its section -> value.
    """
    sections: dict[str, Any] = {"executors": dict(config.executors)}
    for role in present_roles(config):
        if role.name in changes:
            changed = dataclasses.replace(role.settings(config), **changes[role.name])
            if role.section.startswith(_OWN):
                sections["executors"][role.name] = changed
            else:
                sections[role.section] = changed
    return dataclasses.replace(config, **sections)


def _rewired(role: Role, config: JobConfig) -> Role:
    """As ``[executors.NAME]`` has it; how it reads stays, whatever the channel is called."""
    change = config.executors.get(role.name)
    if change is None:
        return role
    reads = tuple(dataclasses.replace(role.reads[0], channels=(name,)) for name in change.reads)
    return dataclasses.replace(
        role,
        factory=change.factory or role.factory,
        reads=reads or role.reads,
        writes=change.writes or role.writes,
        does=f"{role.does}, by {change.factory}" if change.factory else role.does,
    )


def _fed_back(role: Role, config: JobConfig) -> Role:
    """With the edge by which a curriculum hears of verdicts, as late as weights: so whatever the generator waits for at
    a tick, it has waited for the weights already. And with that by which a policy that teaches itself comes to its
    teacher, as late too: it scores what it has written."""
    if config.data.candidates > 1 and role.name == "generator":
        heard = Reads(channels=("outcomes",), kind="broadcast", delay=lambda config: config.schedule.max_staleness + 1)
        return dataclasses.replace(role, reads=(*role.reads, heard))
    if config.teaches_itself and role.name == "reference":
        taught = Reads(
            channels=("teacher_weights",), kind="weights", delay=lambda config: config.schedule.max_staleness + 1
        )
        return dataclasses.replace(role, reads=(*role.reads, taught))
    if config.data.candidates > 1 and role.name == "reward":
        return dataclasses.replace(role, writes=(*role.writes, "outcomes"))
    return role


def carries_version(config: JobConfig, reader: str, tick: int) -> bool:
    """Whether what the trainer sends ``reader`` at the end of a tick is a version: to the evaluator
    only where one is due."""
    return reader not in ROLES or all(reads.due(config, tick) for reads in ROLES[reader].reads)


def _own(name: str, config: JobConfig) -> Role:
    own = config.executors[name]
    trainer = _rewired(ROLES["trainer"], config)

    def reads(channel: str) -> Reads:
        weights = channel in trainer.writes
        delay = own.delays.get(channel, config.schedule.max_staleness + 1 if weights else 0)
        return Reads(
            channels=(channel,),
            kind="weights" if weights else "gather" if own.ranks == 1 else "scatter",
            delay=lambda config: delay,
            capacity=lambda config: max(config.schedule.max_staleness + 1, delay),
        )

    return Role(
        name=name,
        factory=own.factory,
        does=f"your own, {own.factory}",
        reads=tuple(reads(channel) for channel in own.reads),
        writes=own.writes,
        section=f"{_OWN}{name}",
        sizes=("ranks",),
    )


def wiring_mistakes(config: JobConfig) -> Iterator[Mistake]:
    """What is wrong with the executors that a recipe brings or rewires, in which any of them may be at fault. Whether a
    cycle lacks a delay the graph itself tells."""
    if not config.executors:
        return
    for name, own in config.executors.items():
        yield from _own_mistakes(name, own, config)
        yield from _weights_mistakes(name, own, config)
    roles = present_roles(config)
    writers: dict[str, Role] = {}
    readers: dict[str, Role] = {}
    for role, channel in ((one, name) for one in roles for name in one.writes):
        if channel in writers:
            other = f"channel {channel!r} is written by {writers[channel].name} already"
            yield _wrong(role.name, "writes", f": {other}; a channel has one writer: give it another name")
        writers.setdefault(channel, role)
    for role, reads in ((one, read) for one in roles for read in one.reads):
        channel = next((name for name in reads.channels if name in writers), "")
        if not channel:
            near = difflib.get_close_matches(reads.channels[0], writers, n=1, cutoff=0.6)
            meant = f"did you mean {near[0]!r}? " if near else ""
            wanted = " or ".join(map(repr, reads.channels))
            yield _wrong(role.name, "reads", f": nobody writes {wanted}; {meant}there are {', '.join(writers)}")
            continue
        source = writers[channel]
        carried, read = (
            "weights" if is_it else "groups" for is_it in (_writes_weights(source), reads.kind == "weights")
        )
        if carried != read:
            other = f"{channel!r}, which {source.name} writes, carries {carried}"
            yield _wrong(role.name, "reads", f": {other}, and {role.name} reads {read}")
        if channel in readers:
            other = readers[channel].name
            yield _wrong(
                role.name,
                "reads",
                f": channel {channel!r} is read by {other} already; a channel has one reader: let {role.name} read what {other} "
                f"writes, or {source.name} write a second channel ([executors.{source.name}] writes), which then carries the same",
            )
        readers.setdefault(channel, role)
    for channel, role in writers.items():
        standard = role.name in ROLES and channel in ROLES[role.name].writes and _writes_weights(role)
        if channel not in readers and not standard:
            such = f"name it in the reads of an executor, such as [executors.trainer] reads = [{channel!r}]"
            yield _wrong(role.name, "writes", f": nobody reads {channel!r}: {such}")


def _wrong(name: str, key: str, text: str) -> Mistake:
    """Of wiring, which looks at the sections of all executors."""
    return Mistake(f"executors.{name}{key and '.'}{key}", text, ("executors",))


def _own_mistakes(name: str, own: ExecutorConfig, config: JobConfig) -> Iterator[Mistake]:
    if name not in ROLES:
        if not name.isidentifier() or not name.isascii():
            yield _wrong(name, "", ": an executor's name is of letters, digits and underscores")
        if not own.factory:
            near = difflib.get_close_matches(name, ROLES, n=1, cutoff=0.6)
            meant = f", or did you mean executors.{near[0]}?" if near else ""
            yield _wrong(name, "factory", f"is empty: give the import path of its class{meant}")
        return
    role = ROLES[name]
    if not role.present(config):
        yield _wrong(name, "", f": this job has no {name}; see section [{role.section or name}]")
    where = f"set it in section [{role.section}]" if role.section else "it has one rank with one thread on the CPU"
    for key, default, what in (
        ("ranks", 1, where),
        ("threads", 1, where),
        ("device", "cpu", where),
        ("settings", {}, "the recipe's own sections are its settings"),
        ("delays", {}, "what it reads has the delay of the standard job"),
    ):
        if (given := getattr(own, key)) != default:
            yield _wrong(name, key, f"is {given!r}, but {name} is an executor of the standard job: {what}")


def _weights_mistakes(name: str, own: ExecutorConfig, config: JobConfig) -> Iterator[Mistake]:
    """What is wrong with how an executor of the user's own reads the trainer's weights."""
    read = [channel for channel in own.reads if channel in _rewired(ROLES["trainer"], config).writes]
    if name in ROLES or not read:
        return
    key, most = f"executors.{name}", config.schedule.max_staleness + 1
    if late := {channel: delay for channel, delay in own.delays.items() if channel in read and delay > most}:
        yield Mistake(
            f"{key}.delays",
            f": {late} ticks are more than schedule.max_staleness + 1 = {most}: the trainer keeps no older weights",
            ("schedule.max_staleness", "executors"),
        )
    if config.schedule.weights == "latest":
        yield Mistake(
            f"{key}.reads",
            f": {', '.join(map(repr, read))} carries the version of a tick, but schedule.weights is 'latest': set that to "
            "'exact'",
            ("schedule.weights", "executors"),
        )
    path = own.settings.get("model", {}).get("path", config.model.path)
    if path != config.model.path:
        yield Mistake(
            f"{key}.settings",
            f": model.path is {path!r}, but {', '.join(map(repr, read))} carries weights of the policy, "
            f"{config.model.path!r}: leave out one of the two; without such reads the model stays as it is",
            ("model.path", "executors"),
        )


def _writes_weights(role: Role) -> bool:
    """The trainer's channels carry weights, everyone else's groups."""
    return role.name == "trainer"
