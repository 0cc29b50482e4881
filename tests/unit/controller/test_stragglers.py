"""When a tick takes too long."""

import pytest

from llamarl.config import validate
from llamarl.controller.marking import Firing
from llamarl.controller.recovery import Recovery, Stragglers
from llamarl.errors import ConfigError
from llamarl.settings.job import RecoveryConfig


def firing(tick: int, *, reads: bool = True) -> Firing:
    return Firing("evaluator", tick, {"weights": ("handle" if reads else None,)}, {})


def limit(seconds: list[float], *, multiple: float, least_s: float = 0.1, restarted: int = -1) -> float | None:
    """Of tick 99, after ticks that took so long."""
    stragglers = Stragglers(multiple=multiple, least_s=least_s)
    for tick, each in enumerate(seconds):
        stragglers.note(firing(tick), each)
    stragglers.restarted("evaluator", restarted)
    return stragglers.limits_s({"evaluator": firing(99)}, {"evaluator": 99}).get("evaluator")


def test_a_tick_takes_too_long_beyond_a_multiple_of_the_median_and_not_below_the_floor() -> None:
    assert limit([5.0, 1.0, 6.0, 5.0], multiple=3.0, least_s=1.0) == 15.0
    assert limit([5.0, 1.0, 6.0, 5.0], multiple=3.0, least_s=20.0) == 20.0


def test_before_three_ticks_have_been_seen_none_takes_too_long() -> None:
    assert limit([1.0, 1.0], multiple=2.0) is None
    assert limit([1.0, 1.0, 1.0], multiple=2.0) == 2.0


def test_the_last_twenty_ticks_decide() -> None:
    assert limit([100.0] * 30 + [1.0] * 20, multiple=2.0) == 2.0


def test_the_tick_with_which_new_processes_begin_may_take_its_time() -> None:
    assert limit([1.0] * 3, multiple=2.0, restarted=99) is None
    assert limit([1.0] * 3, multiple=2.0, restarted=98) == 2.0


def test_ticks_of_one_kind_do_not_decide_about_another() -> None:
    stragglers = Stragglers(multiple=2.0, least_s=0.1)
    for tick in range(5):
        stragglers.note(firing(tick, reads=False), 0.0)
    stragglers.note(firing(5), 60.0)
    assert stragglers.limits_s({"evaluator": firing(6, reads=False)}, {"evaluator": 6}) == {"evaluator": 0.1}
    assert stragglers.limits_s({"evaluator": firing(6)}, {"evaluator": 6}) == {}


@pytest.mark.parametrize("replaceable", [{}, {"evaluator": 4}])
def test_who_would_repeat_earlier_ticks_or_cannot_be_brought_up_again_is_not_ended(replaceable: dict[str, int]) -> None:
    stragglers = Stragglers(multiple=2.0, least_s=0.1)
    for tick in range(5):
        stragglers.note(firing(tick), 1.0)
    assert stragglers.limits_s({"evaluator": firing(5)}, {"evaluator": 5}) == {"evaluator": 2.0}
    assert stragglers.limits_s({"evaluator": firing(5)}, replaceable) == {}


def test_nobody_is_ended_for_being_slow_where_no_restart_is_left() -> None:
    assert Recovery(max_restarts=1, window_s=60.0).has_room(0.0)
    assert not Recovery(max_restarts=0, window_s=60.0).has_room(0.0)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"straggler_multiple": 0.5}, "must be 0 or more than 1"),
        ({"straggler_multiple": 3.0, "max_restarts": 0}, "needs max_restarts >= 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RecoveryConfig(**settings)  # type: ignore[arg-type]


def test_inline_where_no_process_could_be_ended_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"recovery.straggler_multiple.*run.runtime is 'inline'"):
        validate({"run": {"runtime": "inline"}, "recovery": {"straggler_multiple": 3.0}})
