"""When a tick takes too long, and where there is room for it a second time."""

from __future__ import annotations

import pytest

from llamarl.config import RunConfig, validate
from llamarl.controller.config import RecoveryConfig
from llamarl.controller.graph import Graph
from llamarl.controller.standard_graph import colocated_group, llamarl_graph
from llamarl.controller.stragglers import Stragglers, straggles_after_s
from llamarl.controller.twins import never_twice
from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.placement import place


def test_a_tick_takes_too_long_beyond_a_multiple_of_the_median_and_not_below_the_floor() -> None:
    assert straggles_after_s([5.0, 1.0, 6.0, 5.0], multiple=3.0, least_s=1.0) == 15.0
    assert straggles_after_s([5.0, 1.0, 6.0, 5.0], multiple=3.0, least_s=20.0) == 20.0


def test_before_three_ticks_have_been_seen_none_takes_too_long() -> None:
    assert straggles_after_s([1.0, 1.0], multiple=2.0, least_s=0.1) is None
    assert straggles_after_s([1.0, 1.0, 1.0], multiple=2.0, least_s=0.1) == 2.0


def test_the_last_twenty_ticks_decide() -> None:
    assert straggles_after_s([100.0] * 30 + [1.0] * 20, multiple=2.0, least_s=0.1) == 2.0


def test_ticks_of_one_kind_do_not_decide_about_another() -> None:
    stragglers = Stragglers(multiple=2.0, least_s=0.1)
    for _ in range(5):
        stragglers.note(("evaluator", False), 0.0)
    stragglers.note(("evaluator", True), 60.0)
    assert stragglers.after_s(("evaluator", False)) == 0.1
    assert stragglers.after_s(("evaluator", True)) is None


def test_a_second_attempt_has_room_where_cores_are_left_and_no_other_one_has_them() -> None:
    specs = [ExecutorSpec(name=name, factory="tests:none", num_ranks=2, threads=1) for name in ("generator", "reward")]
    placement = place(specs, cores=6, cuda_devices=0)
    assert placement.why_no_room("reward") == ""
    assert placement.why_no_room("reward", ["generator"]) == (
        "that needs 2 cores, and 0 of 6 are left (run.cores, threads)"
    )


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


def never(config: RunConfig, cuda_devices: int = 0) -> dict[str, str]:
    graph = llamarl_graph(config)
    placed = place(graph.executors, cores=8, cuda_devices=cuda_devices, colocated=colocated_group(config, graph))
    return never_twice(Graph(placed.executors, graph.channels), placed.colocated)


def test_who_is_never_started_a_second_time_is_known_before_the_run_with_the_reason() -> None:
    threads = {"generator": {"threads": 1}, "trainer": {"threads": 1}}
    assert never(validate(threads)) == {}
    latest = never(validate({**threads, "schedule": {"weights": "latest"}}))
    assert latest.keys() == {"generator"} and "newest weights" in latest["generator"]
    turns = {"colocated": True, "max_staleness": 0}
    assert "it takes turns" in never(validate({**threads, "schedule": turns}))["generator"]
    assert (
        "it is on GPUs"
        in never(validate({"generator": {"device": "cuda"}, "trainer": {"device": "cuda"}}), 4)["generator"]
    )


def test_inline_where_nothing_could_be_started_a_second_time_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"recovery.straggler_multiple.*run.runtime is 'inline'"):
        validate({"run": {"runtime": "inline"}, "recovery": {"straggler_multiple": 3.0}})
