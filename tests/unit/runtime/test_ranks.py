"""What the controller says to the ranks of an executor."""

from types import SimpleNamespace
from typing import Any

import pytest

from llamarl.runtime.ranks import Ranks


class _Argument:
    """Counts how often it is pickled: with a handle a source rank it takes milliseconds each time."""

    times = 0

    def __reduce__(self) -> tuple[Any, ...]:
        _Argument.times += 1
        return _Argument, ()


def test_an_order_to_many_ranks_is_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "_submit", lambda ranks, coroutine: coroutine.close())
    plans: Any = {"generator": tuple(SimpleNamespace(rank=rank) for rank in range(5))}
    assert Ranks(plans, {}).send("generator", "tick 0", "run", _Argument()) > 0
    assert _Argument.times == 1
