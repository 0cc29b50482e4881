"""Which task is trained on, and how its answers are judged. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from llamarl.strict import STRICT, refuse

__all__ = ["RewardPoolConfig", "TaskConfig"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardPoolConfig:
    """The worker processes that judge responses."""

    num_workers: int = 1
    """Worker processes; each judges one sample at a time."""

    timeout_s: float = 20.0
    """Wall-clock seconds that one sample may take; after that its worker is killed and the sample is failed."""

    startup_timeout_s: float = 120.0
    """Seconds that a worker may take to start: interpreter, imports, the task's data."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if self.num_workers < 1:
            yield f"num_workers must be >= 1, got {self.num_workers}"
        if self.timeout_s <= 0:
            yield f"timeout_s must be > 0 seconds, got {self.timeout_s}"
        if self.startup_timeout_s <= 0:
            yield f"startup_timeout_s must be > 0 seconds, got {self.startup_timeout_s}"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TaskConfig:
    """One task: where its questions come from and who judges the answers."""

    name: str = "steps"
    """steps (the bundled model's), reasoning_gym:DATASET, math, or function (JSONL data and a reward of your own)."""

    options: dict[str, Any] = field(default_factory=dict)
    """The task's own options: those of the reasoning_gym dataset, or of steps (min_terms, max_terms)."""

    train_file: str = ""
    """JSONL file of training items, for math and function."""

    eval_file: str = ""
    """JSONL file of held-out items. Empty: eval_fraction of the training file's distinct questions are held out."""

    eval_fraction: float = 0.1
    """Share of distinct questions kept for evaluation only, chosen by a hash of the question; procedural tasks too."""

    answer_from: Literal["auto", "tag", "boxed", "last_number", "last_line", "whole"] = "auto"
    """Where in a response reasoning_gym tasks look for the answer; see docs/environments.md."""

    reward: str = ""
    """Import path of a function reward(prompt, response, answer) -> float that judges instead of the task:
    package.module:function or path/to/file.py:function. Required for function."""

    pool: RewardPoolConfig = field(default_factory=RewardPoolConfig)
    """The worker processes that judge."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if not 0.0 <= self.eval_fraction < 1.0:
            yield f"eval_fraction must be in [0, 1), got {self.eval_fraction}"
        kind = self.name.partition(":")[0]
        if kind not in ("steps", "reasoning_gym", "math", "function"):
            yield f"name must be steps, reasoning_gym:DATASET, math or function, got {self.name!r}"
        if kind == "reasoning_gym" and not self.name.partition(":")[2]:
            yield "name reasoning_gym needs a dataset, such as reasoning_gym:chain_sum"
        if kind != "reasoning_gym" and ":" in self.name:
            yield f"name {self.name!r}: only reasoning_gym takes a dataset after the colon"
        if kind in ("math", "function") and not self.train_file:
            yield f"train_file must name a JSONL file, as name is {self.name!r}"
        if kind not in ("math", "function") and (self.train_file or self.eval_file):
            yield f"train_file and eval_file must be empty, as name is {self.name!r}, which makes its own questions"
        if kind in ("math", "function") and self.options:
            yield f"options must be empty, as name is {self.name!r}, got {sorted(self.options)}"
        if kind == "function" and not self.reward:
            yield "reward must name a function, as name is 'function', such as my_rewards.py:score"
        if self.reward and ":" not in self.reward:
            yield f"reward must be module:function or file.py:function, got {self.reward!r}"
