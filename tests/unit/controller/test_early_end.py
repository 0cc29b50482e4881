"""A run whose held-out loss no longer falls: its last tick is a function of the losses, and nobody has begun it."""

import json
import math
from pathlib import Path

import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import validate
from llamarl.controller.early_end import EarlyEnd, most_ahead
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking
from llamarl.controller.products import tick_of_products
from llamarl.controller.saving import Saving
from llamarl.executors.base import ExecutorSpec
from llamarl.settings.executors import EvaluationConfig


def told(losses: dict[int, float], *, patience: int, every: int = 5, num_ticks: int = 100, ahead: int = 3):
    """What each tick's loss led to, and the best tick."""
    watch = EarlyEnd(EvaluationConfig(every=every, patience=patience), num_ticks=num_ticks, ahead=ahead)
    return [watch.note(tick, loss) for tick, loss in losses.items()], watch.best


def test_it_ends_at_the_first_evaluation_that_lies_far_enough_ahead() -> None:
    losses = {0: 1.0, 4: 3.0, 9: 2.0, 14: 2.0, 19: 2.5}
    assert told(losses, patience=2) == ([None, None, None, None, 24], 9)
    assert told(losses, patience=2, ahead=6) == ([None, None, None, None, 29], 9)
    assert told(losses, patience=1) == ([None, None, None, 19, None], 9), "an equal loss is no fall; it is told once"
    assert told(losses, patience=3) == ([None] * 5, 9)


def test_what_it_would_end_at_or_after_is_left_to_the_run_itself() -> None:
    losses = {4: 2.0, 9: 3.0}
    assert told(losses, patience=1, num_ticks=15) == ([None, None], 4)
    assert told(losses, patience=1, num_ticks=16) == ([None, 14], 4)


def test_a_loss_that_is_no_number_is_no_fall_and_the_first_version_is_the_best_of_one() -> None:
    assert told({0: 0.1, 4: math.nan, 9: math.nan}, patience=3) == ([None, None, None], 4)
    assert told({0: 0.1, 4: 2.0, 9: math.nan, 14: 1.0}, patience=3) == ([None] * 4, 14)


def test_rows_from_before_a_resume_count_as_reports_do() -> None:
    watch = EarlyEnd(EvaluationConfig(every=5, patience=2), num_ticks=100, ahead=3)
    watch.note_rows([{"step": 4, "eval/loss": 1.0}, {"step": 5}, {"step": 9, "eval/loss": 2.0}], {4, 9})
    assert watch.best == 4 and watch.last is None and watch.note(14, 3.0) == watch.last == 19


def test_best_is_only_what_a_checkpoint_holds_while_every_loss_counts_towards_the_end() -> None:
    """Of a fork, which begins with the newest checkpoint of a run whose best was tick 4."""
    watch = EarlyEnd(EvaluationConfig(every=5, patience=3), num_ticks=100, ahead=3)
    rows = [{"step": 4, "eval/loss": 1.0}, {"step": 9, "eval/loss": 3.0}, {"step": 14, "eval/loss": 2.5}]
    watch.note_rows(rows, {14})
    assert watch.best == 14
    assert watch.note(19, 2.0) == 24 and watch.best == 19


@pytest.mark.parametrize(("place", "best", "last"), [(0, 2, 9), (1, 3, None), (2, 2, 9), (3, 2, 9), (4, 2, 9)])
def test_rows_tell_a_loss_that_is_no_number_as_reports_do(place: int, best: int, last: int | None) -> None:
    losses: list[float | None] = [3.0, 2.0, 2.1, 2.2, 2.3]
    losses[place] = None  # as metrics.jsonl has it
    live, resumed = (EarlyEnd(EvaluationConfig(every=1, patience=4), num_ticks=100, ahead=3) for _ in range(2))
    for tick, loss in enumerate(losses, start=1):
        assert live.note(tick, math.nan if loss is None else loss) is None
    resumed.note_rows(({"step": tick, "eval/loss": loss} for tick, loss in enumerate(losses, start=1)), range(1, 6))
    assert [(one.best, one.note(6, 9.0)) for one in (live, resumed)] == [(best, last)] * 2


@pytest.mark.parametrize("capacities", [(1,), (3,), (2, 2), (1, 4)])
def test_no_executor_of_a_chain_can_have_begun_the_tick_that_is_named(capacities: tuple[int, ...]) -> None:
    names = ["source", *(f"middle{i}" for i in range(len(capacities) - 1)), "trainer"]
    channels = tuple(
        ChannelSpec(name=f"edge{i}", kind=ChannelKind.SCATTER, source=names[i], sink=names[i + 1], capacity=capacity)
        for i, capacity in enumerate(capacities)
    )
    graph = Graph(tuple(ExecutorSpec(name=name, factory="tests:none") for name in names), channels)
    marking = Marking(graph, num_ticks=50)
    outputs = {name: {c.name: () for c in graph.outputs[name]} for name in names}
    for _ in range(200):  # everybody is as far ahead of the trainer as can be, which then ends tick 9
        ahead = [firing for firing in marking.ready() if firing.executor != "trainer"]
        for firing in ahead:
            marking.complete(firing.executor, firing.tick, outputs[firing.executor])
        if not ahead and marking.done_ticks["trainer"] == 9:
            break
        if not ahead:
            marking.complete("trainer", marking.busy["trainer"].tick, outputs["trainer"])
    marking.complete("trainer", 9, outputs["trainer"])
    last = 9 + most_ahead(channels)
    Saving(graph).end_after(marking, last)  # refuses a tick that has begun
    assert marking.num_ticks == last + 1


@pytest.mark.parametrize(("patience", "newest", "expected"), [(0, 14, 14), (2, 14, 9), (2, 9, 9), (2, 4, 4), (2, 3, 3)])
def test_what_is_written_of_a_run_is_of_the_lowest_loss_up_to_its_newest_checkpoint(
    patience: int, newest: int, expected: int, tmp_path: Path
) -> None:
    losses = {0: 1.0, 4: 3.0, 9: 2.0, 14: 2.5, 19: 0.5}
    rows = [{"step": tick, **({"eval/loss": losses[tick]} if tick in losses else {})} for tick in range(20)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    imitates = {"algorithm": {"name": "sft"}, "task": {"name": "demonstrations", "data": "rows.jsonl"}}
    config = validate({**imitates, "evaluation": {"every": 5, "patience": patience}})
    for tick in (4, 9, 14):
        (tmp_path / "checkpoints" / f"tick_{tick:06d}").mkdir(parents=True)
    assert tick_of_products(tmp_path, config, newest) == expected
    for tick in (4, 9):  # of a fork they lie with the run that it comes from
        (tmp_path / "checkpoints" / f"tick_{tick:06d}").rmdir()
    assert tick_of_products(tmp_path, config, 14) == 14
