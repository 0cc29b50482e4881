"""Runs of a small job whose processes are killed at random moments, two at a time now and then, six in the suite and twenty at length;
``make chaos`` kills real ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from counting_executors import LATER_SLOW_TICK, SLOW_TICK
from death_job import NUM_TICKS, by_hand, graph, let_ranks_be_forks, play
from forked_command import SERVER
from rank_processes import run_ranks

from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking
from llamarl.controller.recovery import Recovery, Redo, Stragglers
from llamarl.controller.saving import Saving
from llamarl.controller.surviving import SurvivingRuntime
from llamarl.runtime.base import Report
from llamarl.runtime.processes import ProcessRuntime
from llamarl.runtime.tick_log import TickLog

KILLS = 5


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 20), marks=pytest.mark.long)], ids=str)
def test_runs_under_random_deaths_end_with_what_was_worked_by_hand(tmp_path: Path, seeds: range) -> None:
    all_struck = 0
    for seed in seeds:
        process = SERVER.Process(target=play, args=(seed, KILLS, tmp_path / "out"))
        process.start()
        process.join(60)
        ended = process.exitcode
        process.kill()
        assert ended == 0, seed
        totals, struck = json.loads((tmp_path / "out").read_text())
        assert totals == by_hand(NUM_TICKS), seed
        all_struck += struck
    assert all_struck >= len(seeds) * KILLS / 2  # the others' run had ended


# Slow ticks.


def main() -> None:
    whole = graph()
    kinds = {"source": "Source", "doubler": "SlowDoubler", "sink": "SlowSink"}
    executors = tuple(
        replace(spec, factory=f"counting_executors:{kinds[spec.name]}", num_ranks=1 + (spec.name == "doubler"))
        for spec in whole.executors
    )
    let_ranks_be_forks(executors)
    reports: list[Report] = []
    redos: list[Redo] = []

    class Observe:
        def on_report(self, report: Report) -> None:
            reports.append(report)

    runtime = ProcessRuntime(log=TickLog())
    job = Graph(executors, whole.channels)
    marking, saving = Marking(job, num_ticks=NUM_TICKS), Saving(job)
    recovery, stragglers = Recovery(max_restarts=2, window_s=60.0), Stragglers(multiple=3.0, least_s=0.5)
    surviving = SurvivingRuntime(runtime, marking, recovery, saving, tell=redos.append, stragglers=stragglers)
    try:
        run_graph(marking, surviving, seed=0, observers=[Observe()])
    finally:
        runtime.close()
    totals = [report.metrics["sink/total"] for report in reports if report.executor == "sink"]
    assert totals == by_hand(NUM_TICKS)
    assert [(redo.executor, redo.death.rank, redo.first_tick) for redo in redos] == [
        ("doubler", 0, SLOW_TICK),
        ("sink", 0, LATER_SLOW_TICK),
    ]
    assert all(redo.death.cause == "it gave no answer within 0.5 s" for redo in redos)
    of = {report.tick: report.incarnation for report in reports if report.executor == "doubler"}
    assert of == {tick: int(tick >= SLOW_TICK) for tick in range(NUM_TICKS)}


def test_a_rank_that_does_not_come_to_an_end_is_ended_and_its_tick_done_again_to_the_same_numbers() -> None:
    run_ranks(main, [()], limit_s=60)
