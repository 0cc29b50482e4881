"""``task.options`` of a code task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llamarl.environments.config import TaskConfig, TaskSection
from llamarl.errors import DataError, Mistake
from llamarl.mistakes import Reader
from llamarl.strict import STRICT

__all__ = ["CodeOptions", "warning_of_no_box"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CodeOptions:
    """How programs are run and scored."""

    timeout_s: Annotated[float, Field(ge=0.5)] = 10.0
    """Seconds that all tests of a sample may take together, the start of the boxes included."""

    memory_mb: Annotated[int, Field(ge=64)] = 512
    """MiB that a program may take; an interpreter takes some 30."""

    score: Literal["all", "share"] = "all"
    """all: 1 where every test passes, else 0. share: the share of the tests that pass."""

    box: Literal["auto", "bwrap", "plain"] = "auto"
    """auto and bwrap: bubblewrap; where it does not work the run is refused. plain is no box, and is taken only by name:
    limits hold, but programs can read what the user can."""

    packages: bool = True
    """Whether programs and tests can import the installed packages, besides the standard library."""

    @classmethod
    def read(
        cls, options: Mapping[str, Any], *, pool_timeout_s: float = math.inf, pool_memory_mb: int = 0
    ) -> CodeOptions:
        """Options of a recipe.

        Args:
            pool_timeout_s: ``task.pool.timeout_s``, after which the worker would be killed around the box.
            pool_memory_mb: ``task.pool.memory_limit_mb``, which holds for what a worker starts; 0 is no limit.

        Raises:
            DataError: Options that there are not, or values that cannot be; all mistakes at once.
        """
        made, found = Reader(cls).read(options)
        mistakes = [Mistake(f"task.options.{one.key}", one.text) for one in found]
        if made.timeout_s + 1 > pool_timeout_s:
            text = (
                f"must be at most task.pool.timeout_s ({pool_timeout_s}) less 1, got {made.timeout_s}: a worker over its "
                "time fails the sample, a program over its time is a wrong answer"
            )
            mistakes.append(Mistake("task.options.timeout_s", text, ("task.pool.timeout_s",)))
        if pool_memory_mb and made.memory_mb > pool_memory_mb:
            text = f"must be at most task.pool.memory_limit_mb ({pool_memory_mb}), got {made.memory_mb}"
            mistakes.append(Mistake("task.options.memory_mb", text, ("task.pool.memory_limit_mb",)))
        if mistakes:
            raise DataError("\n".join(map(str, mistakes)), mistakes=mistakes)
        return made


def warning_of_no_box(config: TaskConfig) -> str:
    """Say what a recipe gives up that runs programs in no box; empty for all others."""
    tasks = list(config.tasks.values()) if isinstance(config, TaskSection) else []
    if not any(task.name == "code" and task.options.get("box") == "plain" for task in tasks or [config]):
        return ""
    return (
        "task.options.box = 'plain' is NO BOX: programs that the policy writes can read, and send to other processes of this "
        "machine, whatever the user who runs them can (docs/code.md)"
    )
