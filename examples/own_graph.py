"""A dataflow graph of your own: three executors, one delayed edge. Run: python examples/own_graph.py

    source ──numbers──▶ doubler ──doubled──▶ collector
       ▲                                         │
       └──────────── feedback, delay 2 ◀─────────┘

Each executor runs in a process of its own; the controller fires whoever has its input tokens. With ``delay = 2`` the
source may be two ticks ahead of the collector, no more: change it and watch the order of the lines.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking
from llamarl.executors.base import BaseExecutor, ExecutorSpec, StepResult
from llamarl.runtime.base import Report
from llamarl.runtime.inline import InlineRuntime
from llamarl.runtime.processes import ProcessRuntime


class Source(BaseExecutor):
    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        numbers = [10 * tick + i for i in range(self.config["count"])]
        return StepResult(outputs={"numbers": numbers}, metrics={"feedback": float(inputs["feedback"][0])})


class Doubler(BaseExecutor):
    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        return StepResult(outputs={"doubled": [2 * n for n in inputs["numbers"]]})


class Collector(BaseExecutor):
    def initial_token(self, channel: str, source_tick: int) -> Any:
        return [0]  # what lies on the delayed edge at start

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        total = sum(inputs["doubled"])
        return StepResult(outputs={"feedback": [total]}, metrics={"total": float(total)})


class Printer:
    """An observer: hears every report, decides nothing."""

    def on_report(self, report: Report) -> None:
        print(f"tick {report.tick}  {report.executor:<10} {dict(report.metrics)}", flush=True)


def build(delay: int = 2) -> Graph:
    here = str(Path(__file__).resolve())
    room = max(1, delay)
    return Graph(
        (
            ExecutorSpec(name="source", factory=f"{here}:Source", config={"count": 3}),
            ExecutorSpec(name="doubler", factory=f"{here}:Doubler"),
            ExecutorSpec(name="collector", factory=f"{here}:Collector"),
        ),
        (
            ChannelSpec(name="numbers", kind=ChannelKind.GATHER, source="source", sink="doubler", capacity=room),
            ChannelSpec(name="doubled", kind=ChannelKind.GATHER, source="doubler", sink="collector", capacity=room),
            ChannelSpec(
                name="feedback",
                kind=ChannelKind.BROADCAST,
                source="collector",
                sink="source",
                delay=delay,
                capacity=room,
            ),
        ),
    )


def main(runtime_name: str = "local") -> None:
    graph = build()
    print(graph.describe())
    runtime = {"local": ProcessRuntime, "inline": InlineRuntime}[runtime_name]()
    try:
        run_graph(Marking(graph, num_ticks=5), runtime, seed=0, observers=[Printer()])
    finally:
        runtime.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
