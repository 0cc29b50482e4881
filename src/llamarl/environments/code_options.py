"""``task.options`` of a code task."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from llamarl.environments.sandbox.kinds import KINDS
from llamarl.errors import DataError, Mistake

__all__ = ["CodeOptions"]

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "language": ("python",),
    "score": ("all", "share"),
    "box": ("auto", *KINDS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOptions:
    """How programs are run and scored."""

    language: str = "python"
    """Of the programs; python alone for now."""
    timeout_s: float = 10.0
    """Seconds that all tests of a sample may take together, the start of the boxes included."""
    memory_mb: int = 512
    """MiB that a program may take."""
    score: str = "all"
    """all: 1 where every test passes, else 0. share: the share of the tests that pass."""
    box: str = "auto"
    """auto: bwrap where it works, else namespaces, else the run is refused. A kind by name is that kind; plain, which leaves
    the machine's files readable, is taken only so."""
    packages: bool = True
    """Whether programs and tests can import the installed packages, besides the standard library."""
    trust_operators: bool = False
    """Whether an object of the program's own class may say itself how it compares to plain data (==, <, +, in)."""

    @classmethod
    def read(
        cls, options: Mapping[str, Any], *, pool_timeout_s: float = math.inf, pool_memory_mb: int = 0
    ) -> CodeOptions:
        """Of a recipe.

        Args:
            pool_timeout_s: ``task.pool.timeout_s``, after which the worker would be killed around the box.
            pool_memory_mb: ``task.pool.memory_limit_mb``, which holds for what a worker starts; 0 is no limit.

        Raises:
            DataError: Options that there are not, or values that cannot be; all mistakes at once.
        """
        mistakes = list(_mistakes(cls, options))
        if not mistakes:
            made = cls(**options)
            if made.timeout_s + 1 > pool_timeout_s:
                text = (
                    f"must be at most task.pool.timeout_s ({pool_timeout_s}) less 1, got {made.timeout_s}: a worker over its "
                    "time fails the sample, a program over its time is a wrong answer"
                )
                mistakes.append(Mistake("task.options.timeout_s", text, ("task.pool.timeout_s",)))
            if pool_memory_mb and made.memory_mb > pool_memory_mb:
                text = f"must be at most task.pool.memory_limit_mb ({pool_memory_mb}), got {made.memory_mb}"
                mistakes.append(Mistake("task.options.memory_mb", text, ("task.pool.memory_limit_mb",)))
            if not mistakes:
                return made
        raise DataError("\n".join(map(str, mistakes)), mistakes=mistakes)


def _mistakes(cls: type[CodeOptions], options: Mapping[str, Any]) -> list[Mistake]:
    names = [field.name for field in fields(cls)]
    found = []
    for name, value in options.items():
        key = f"task.options.{name}"
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            found.append(Mistake(key, f"is no option of code; {hint}it has {', '.join(names)}"))
        elif name in _CHOICES:
            if value not in _CHOICES[name]:
                found.append(Mistake(key, f"must be one of {', '.join(_CHOICES[name])}, got {value!r}"))
        elif name in ("packages", "trust_operators"):
            if not isinstance(value, bool):
                found.append(Mistake(key, f"must be true or false, got {value!r}"))
        elif isinstance(value, bool) or not isinstance(value, int if name == "memory_mb" else (int, float)):
            found.append(Mistake(key, f"must be a number, got {value!r}"))
        elif name == "memory_mb" and value < 64:
            found.append(Mistake(key, f"must be >= 64 MiB, which an interpreter takes, got {value}"))
        elif name == "timeout_s" and not 0.5 <= value < math.inf:
            found.append(Mistake(key, f"must be >= 0.5 seconds, got {value}"))
    return found
