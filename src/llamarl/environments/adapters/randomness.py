"""Python's and numpy's global generators, one state an episode: for libraries that draw from them.

A worker holds several episodes and calls them in turn. An environment that draws from ``random`` itself would then depend on the
others; inside ``with own:`` it finds the generators as it left them, and outside nobody notices.
"""

from __future__ import annotations

import random
import sys
from types import TracebackType
from typing import Any

__all__ = ["OwnRandomness"]


class OwnRandomness:
    """The state of the global generators of one episode; entered around each call.

    Args:
        seed: What they are seeded with, any non-negative integer.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed % 2**32
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = None
        self._others: tuple[Any, Any] | None = None

    def __enter__(self) -> None:
        numpy = sys.modules.get("numpy")  # where it was not imported, nothing draws from it
        self._others = (random.getstate(), numpy.random.get_state() if numpy else None)
        random.setstate(self._python)
        if numpy and self._numpy is not None:
            numpy.random.set_state(self._numpy)
        elif numpy:
            numpy.random.seed(self._seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._others is not None
        numpy = sys.modules.get("numpy")
        self._python = random.getstate()
        random.setstate(self._others[0])
        if numpy:
            self._numpy = numpy.random.get_state()
            if self._others[1] is not None:
                numpy.random.set_state(self._others[1])
