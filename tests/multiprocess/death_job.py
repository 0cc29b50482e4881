"""A small job over the real channels whose executors say what they carry, and one run of it under random deaths.

source ─▶ two doublers ─▶ sink ─▶ (two ticks later) source. ``play`` runs in a process that has imported torch, of which ranks are forks.
"""

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import counting_executors
from counting_executors import STEP_S
from forked_command import ENVIRONMENT

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking
from llamarl.controller.recovery import Recovery
from llamarl.controller.saving import Saving
from llamarl.controller.surviving import SurvivingRuntime
from llamarl.determinism import rank_environment
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime import fork_server, local
from llamarl.runtime.base import Report
from llamarl.runtime.fork_server import allow_fork_of_this_process
from llamarl.runtime.processes import ProcessRuntime
from llamarl.runtime.tick_log import TickLog
from llamarl.settings.job import DeadlineConfig

DELAY = 2
NUM_TICKS = 12


def by_hand(num_ticks: int) -> list[int]:
    """The sink's total after each tick."""
    total, back, totals = 0, [0] * DELAY, []
    for tick in range(num_ticks):
        first, second = tick + back[tick], 3 * tick  # source's own total is 3 a tick
        total += 2 * (first + second)
        back.append(total % 1009)
        totals.append(total)
    return totals


def graph() -> Graph:
    here = Path(counting_executors.__file__).resolve()
    return Graph(
        tuple(
            ExecutorSpec(name=name, factory=f"{here}:{kind}", num_ranks=ranks, threads=1)
            for name, kind, ranks in (("source", "Source", 1), ("doubler", "Doubler", 2), ("sink", "Sink", 1))
        ),
        (
            ChannelSpec(name="numbers", kind=ChannelKind.SCATTER, source="source", sink="doubler", capacity=2),
            ChannelSpec(name="doubled", kind=ChannelKind.GATHER, source="doubler", sink="sink", capacity=2),
            ChannelSpec(
                name="back", kind=ChannelKind.BROADCAST, source="sink", sink="source", delay=DELAY, capacity=DELAY
            ),
        ),
    )


class _Totals:
    def __init__(self) -> None:
        self.of: dict[int, int] = {}

    def on_report(self, report: Report) -> None:
        if report.executor == "sink":
            assert report.tick not in self.of, "a tick counted twice"
            self.of[report.tick] = int(report.metrics["sink/total"])


def let_ranks_be_forks(executors: Sequence[ExecutorSpec]) -> None:
    """Of this process, a fork of ``SERVER``; they have one thread."""
    os.environ.update(ENVIRONMENT)
    allow_fork_of_this_process()
    fork_server.shares_imports = local.shares_imports = lambda spec: (
        True
    )  # these import nothing that a fork may not have
    fork_server.start_early(fork_server.shared_modules(executors, 1), rank_environment(1), may_be_a_fork=True)


def play(seed: int, kills: int, out: Path) -> None:
    """One run; to ``out``: the sink's totals after each tick, and how many processes were struck."""
    let_ranks_be_forks(graph().executors)
    totals, struck = _run(seed, kills)
    out.write_text(json.dumps([[totals[tick] for tick in sorted(totals)], struck]))


def _run(seed: int, kills: int) -> tuple[dict[int, int], int]:
    totals, over, struck = _Totals(), threading.Event(), [0]
    runtime = ProcessRuntime(log=TickLog())

    def strike() -> None:
        rng = random.Random(seed)
        while struck[0] < kills and not over.wait(rng.uniform(0.0, 2 * STEP_S * NUM_TICKS / kills)):
            ranks = runtime._ranks  # type: ignore[attr-defined]
            up = [rank.pid for of in (ranks.of.values() if ranks else ()) for rank in of if rank.pid]
            for pid in rng.sample(up, min(len(up), 1 + (rng.random() < 0.2))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    struck[0] += 1

    striking = threading.Thread(target=strike)
    marking, saving = Marking(graph(), num_ticks=NUM_TICKS), Saving(graph())
    surviving = SurvivingRuntime(runtime, marking, Recovery(max_restarts=1000, window_s=60.0), saving)
    deadlines = DeadlineConfig(setup_s=30.0, step_s=30.0)
    striking.start()
    try:
        run_graph(marking, surviving, seed=0, observers=[totals], saving=saving, deadlines=deadlines)
    finally:
        over.set()
        striking.join()
        runtime.close()
    return totals.of, struck[0]
