"""Which task is trained on, and how its answers are judged. Imports no torch."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from llamarl.errors import Mistake
from llamarl.strict import NO_BITS, STRICT, ListOf, holding, refuse

__all__ = [
    "BUILT_IN",
    "OWN_CODE",
    "MixedTask",
    "RewardPart",
    "RewardPoolConfig",
    "TaskConfig",
    "TaskSection",
    "label_in",
]

BUILT_IN = (
    "steps",
    "reasoning_gym",
    "math",
    "function",
    "gsm8k",
    "countdown",
    "code",
    "episodes",
    "demonstrations",
    "mixture",
)
"""Kinds of tasks that come with this package; another is named by its import path."""

_OF_DATA = ("math", "function", "gsm8k", "code", "demonstrations")
"""Kinds whose questions are in files or tables."""

_OF_TABLES = ("data", "eval_data", "eval_split", "subset", "columns", "template", "split")

OWN_CODE = ("agent", "trl")
"""Kinds of environments that are code of the user's own: behind the colon stands its import path."""

_LEAST_MEMORY_MB = 256
"""Below this a worker does not come to judge: its interpreter and libraries take most of it."""

_Variable = Annotated[
    str,
    holding(lambda name: name.strip() and "=" not in name, "holds names of environment variables without their values"),
]
_Template = Annotated[str, holding(lambda text: not text or "{question}" in text, "must contain {question}")]
_Function = Annotated[str, holding(lambda path: not path or ":" in path, "must be module:function or file.py:function")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardPoolConfig:
    """The worker processes that judge responses."""

    num_workers: Annotated[PositiveInt, NO_BITS] = 1
    """Worker processes; each judges one sample at a time."""

    timeout_s: Annotated[PositiveFloat, NO_BITS] = 20.0
    """Wall-clock seconds that one sample (with task.reward_batch_size, one batch) may take; after that its worker is
    killed and what it judged is failed."""

    memory_limit_mb: Annotated[
        int,
        NO_BITS,
        holding(lambda mb: mb == 0 or mb >= _LEAST_MEMORY_MB, f"must be 0 (no limit) or >= {_LEAST_MEMORY_MB} MiB"),
    ] = 4096
    """MiB of memory of its own that a worker may take, and each process that it starts
    (RLIMIT_DATA); a sample that wants more is failed. 0 is no limit."""

    pass_env: ListOf[_Variable] = ()
    """Environment variables that workers get besides the usual harmless ones, such as
    ["OPENAI_API_KEY"]; a name may hold "*". See docs/environments.md."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardPart:
    """One of several rewards that are added up."""

    function: _Function = ""
    """Import path, as of task.reward."""

    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """What its value is multiplied by in the sum. 0 only logs it; below 0 it is a penalty."""

    name: str = ""
    """Of its part in the metrics (reward/parts/NAME) and in causes; empty is the function's own."""

    @property
    def part(self) -> str:
        """Its name in metrics."""
        return self.name or self.function.rpartition(":")[2]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TaskConfig:
    """One task: where its questions come from and who judges the answers."""

    name: str = "steps"
    """steps (the bundled model's), reasoning_gym:DATASET, math, function (data and a reward of your
    own; need not be said then), code (programs that unit tests judge), gsm8k and countdown (ready made), episodes (no
    data: each prompt is another episode of the environment), demonstrations (rows to imitate, for
    algorithm.name = "sft"), or the import path of a task of your own: package.module:Task or
    path/to/file.py:Task."""

    options: dict[str, Any] = field(default_factory=dict)
    """The task's own options: those of the reasoning_gym dataset, of steps (min_terms, max_terms),
    of code (docs/code.md), or of your own task."""

    data: str = ""
    """Training items, for math, gsm8k, function and code: a file of JSON lines (.jsonl), or with
    the package datasets a file of parquet, arrow, CSV or JSON, a folder of them, or a data set of
    the Hugging Face Hub (org/name, or org/name@REVISION for a branch, tag or commit). The run's
    config.toml says the commit that it was."""

    subset: str = ""
    """Which of the several that a data set consists of, such as main; also called its configuration."""

    split: str = "train"
    """Split of data that is trained on."""

    eval_data: str = ""
    """Held-out items, as data; empty: eval_split of data, or else eval_fraction of its distinct questions."""

    eval_split: str = ""
    """Split of held-out items, of eval_data or of data."""

    columns: dict[str, str] = field(default_factory=dict)
    """What a task calls a column -> what data calls it, such as { question = "problem", answer = "solution" }."""

    template: _Template = ""
    """Wraps each question of a table at {question}, before data.question_template does; empty: as it is."""

    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of distinct questions kept for evaluation only, chosen by a hash of the question, at
    least one of two or more; procedural tasks too. 0: none."""

    reward: _Function = ""
    """Import path of a function reward(prompt, response, answer) -> float that judges instead of the task:
    package.module:function or path/to/file.py:function. answer is text, also where the data has a
    number. It may also take metadata. Required for function."""

    rewards: ListOf[RewardPart] = ()
    """Several instead of reward, whose weighted sum judges: a table [[task.rewards]] each, with
    function, weight and name."""

    reward_batch_size: NonNegativeInt = 0
    """0: reward judges one sample a call. n > 0: reward(prompts, responses, answers) -> list of floats judges up to n
    samples a call; groups stay whole where they fit."""

    environment: str = ""
    """What answers the policy, so that an episode has several turns: the name of one that comes
    with llamarl, your own as package.module:Class or path/to/file.py:Class, or KIND:WHAT
    (docs/games.md). Empty: the policy answers once."""

    environment_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's class."""

    max_turns: PositiveInt = 8
    """Times that the policy may write in one episode; it is then ended, and counts as truncated."""

    max_turn_tokens: NonNegativeInt = 0
    """Tokens that the policy may write in one turn; the environment then gets what there is. 0: as many as are left of
    generator.sampling.max_new_tokens, which is the limit of the whole episode after the prompt."""

    pool: RewardPoolConfig = field(default_factory=RewardPoolConfig)
    """The worker processes that judge, and as many beside each generator replica that hold environments."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    @property
    def judges(self) -> tuple[RewardPart, ...]:
        """The functions of the user's own that judge; of one alone no part is logged."""
        return (RewardPart(function=self.reward),) if self.reward else self.rewards

    @property
    def by_label(self) -> Mapping[str, TaskConfig]:
        """Label -> task; of a lone task the label is empty."""
        return {"": self}

    @property
    def by_import_path(self) -> bool:
        """Whether ``name`` is where a task of the user's own is imported from."""
        module, _, name = self.name.rpartition(":")
        return bool(module and name) and self.name.partition(":")[0] not in BUILT_IN

    @property
    def own_environment(self) -> str:
        """Import path of an environment (or agent) of the user's own; empty where it is none."""
        kind, colon, what = self.environment.partition(":")
        return what if kind in OWN_CODE else self.environment if colon else ""

    def _mistakes(self) -> Iterator[Mistake]:
        for check in (_name_mistakes, _table_mistakes, _reward_mistakes, _environment_mistakes):
            yield from check(self)


def _name_mistakes(task: TaskConfig) -> Iterator[Mistake]:
    kind, colon, dataset = task.name.partition(":")
    if kind == "reasoning_gym" and not dataset:
        yield Mistake("name", "reasoning_gym needs a dataset, such as reasoning_gym:chain_sum")
    elif kind in BUILT_IN and kind != "reasoning_gym" and colon:
        yield Mistake("name", f"{task.name!r}: only reasoning_gym takes a dataset after the colon")
    elif kind not in BUILT_IN and not task.by_import_path:
        near = difflib.get_close_matches(kind, BUILT_IN, n=1, cutoff=0.6)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        if task.name.endswith((".jsonl", ".json", ".csv", ".parquet")):
            meant = "; a file of questions is task.data, and task.reward says how an answer to them is judged"
        text = "must be gsm8k, math, countdown, steps, reasoning_gym:DATASET, function, code, episodes, or a task of your own as"
        yield Mistake("name", f"{text} package.module:Task or file.py:Task, got {task.name!r}{meant}")


def _table_mistakes(task: TaskConfig) -> Iterator[Mistake]:
    kind = task.name.partition(":")[0]
    given = [
        key for key in _OF_TABLES if getattr(task, key) != ("train" if key == "split" else type(getattr(task, key))())
    ]
    if given and kind not in _OF_DATA:
        yield Mistake(
            given[0],
            f"is of a table of questions, but name is {task.name!r}, which makes its own: name what judges them, such as "
            "math, or function (with a reward or an environment of yours)",
            ("name",),
        )
    recorded = kind == "demonstrations" and isinstance(task, TaskSection) and bool(task.rollouts)
    if kind in ("function", "code", "demonstrations") and not task.data and not recorded:
        yield Mistake("data", f"must name a file of JSON lines or another table, as name is {task.name!r}", ("name",))
    if kind in _OF_DATA and kind != "code" and task.options:
        yield Mistake("options", f"must be empty, as name is {task.name!r}, got {sorted(task.options)}", ("name",))


def _reward_mistakes(task: TaskConfig) -> Iterator[Mistake]:
    if task.reward and task.rewards:
        yield Mistake("rewards", f"and reward {task.reward!r}: give one of them", ("reward",))
    for place, part in enumerate(task.rewards):
        if not part.function:
            yield Mistake(f"rewards.{place}.function", "must name one, such as my_rewards.py:format")
    if twice := _repeated(part.part for part in task.rewards):
        yield Mistake("rewards", f": more than one is called {twice!r}; give each a name of its own")
    if task.rewards and not any(part.weight for part in task.rewards):
        yield Mistake("rewards", ": every weight is 0, so that every reward would be")
    if task.name == "function" and not task.judges and not task.environment:
        yield Mistake("reward", "must name a function, as name is 'function', such as my_rewards.py:score", ("name",))
    if task.reward_batch_size and not task.judges:
        text = f"{task.reward_batch_size} is for a reward of your own: set reward, or leave it at 0"
        yield Mistake("reward_batch_size", text, ("reward",))


def _environment_mistakes(task: TaskConfig) -> Iterator[Mistake]:
    if task.name == "episodes" and not task.environment:
        yield Mistake("environment", "must name one, as name is 'episodes', such as my_game.py:Game", ("name",))
    if task.name == "episodes" and task.options:
        yield Mistake("options", "are of a task with questions: set environment_options", ("environment_options",))
    for key, default in (("environment_options", {}), ("max_turns", 8), ("max_turn_tokens", 0)):
        if not task.environment and getattr(task, key) != default:
            yield Mistake(key, "is of an environment, but environment is empty", ("environment",))


def _repeated(names: Iterable[str]) -> str:
    """The first name, in their order as words, that stands more than once; else empty."""
    return min((name for name, count in Counter(names).items() if count > 1), default="")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MixedTask(TaskConfig):
    """One task of a mixture."""

    weight: PositiveFloat = 1.0
    """Share of the prompts that come from it, relative to the other tasks' weights."""

    label: str = ""
    """What its metrics and rollouts call it; empty is its name."""

    def _mistakes(self) -> Iterator[Mistake]:
        yield from super()._mistakes()
        if self.pool != RewardPoolConfig():
            yield Mistake("pool", "is of all tasks together: set task.pool")
        if self.name == "mixture":
            yield Mistake("name", "is 'mixture', which cannot be part of one")

    @property
    def title(self) -> str:
        """Its label."""
        return self.label or self.name


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TaskSection(TaskConfig):
    """The task of a run, or several of them."""

    rollouts: str = ""
    """Folder of a run whose recorded samples are trained on, in place of sampling: by algorithm.name =
    "sft" those of least_reward or more, by another loss all, with the log-probs that were recorded
    (docs/offline.md). Empty: none."""

    least_reward: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Reward from which a sample of rollouts is imitated."""

    mixture: ListOf[MixedTask] = ()
    """Several tasks at once, a table [[task]] each, with the keys of a task and its weight and label."""

    @property
    def tasks(self) -> Mapping[str, TaskConfig]:
        """Label -> task, of a mixture; empty where there is one task."""
        return {task.title: task for task in self.mixture}

    @property
    def by_label(self) -> Mapping[str, TaskConfig]:
        """Label -> task; of a lone task the label is empty."""
        return self.tasks or {"": self}

    @property
    def has_environment(self) -> bool:
        """Whether any task's episodes have several turns."""
        return any(task.environment for task in (self, *self.tasks.values()))

    @property
    def titles(self) -> str:
        """For people."""
        return " + ".join(self.tasks) or self.name

    def _mistakes(self) -> Iterator[Mistake]:
        yield from super()._mistakes()
        if self.rollouts and self.data and self.name == "demonstrations":
            yield Mistake("rollouts", f"and data {self.data!r}: rows to imitate come from one of them", ("data",))
        if (self.name == "mixture") != bool(self.mixture):
            yield Mistake("mixture", "goes with name = 'mixture': write each task as a table [[task]]", ("name",))
        if twice := _repeated(task.title for task in self.mixture):
            yield Mistake("mixture", f": more than one task is called {twice!r}; give each a label of its own")
        defaults = TaskConfig()
        own = ("options", "data", "reward", "rewards", "reward_batch_size", "eval_fraction", "environment")
        for key in own if self.mixture else ():
            if getattr(self, key) != getattr(defaults, key):
                yield Mistake(key, "is of one task: set it in the [[task]] that it is meant for", ("mixture",))


def label_in(tasks: Mapping[str, object], label: str) -> str:
    """Find where the task that a prompt names stands in ``by_label``: a lone one has the empty label there."""
    return "" if "" in tasks else label


for _of_several in (
    MixedTask,
    TaskSection,
):  # pydantic reads the strings under the fields of a class itself, not of its base
    for _name, _field in getattr(TaskConfig, "__pydantic_fields__").items():  # noqa: B009
        getattr(_of_several, "__pydantic_fields__")[_name].description = _field.description  # noqa: B009
