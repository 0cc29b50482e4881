"""Over two hosts: a tick that is slow on one of them, or here, is done on the other, with the numbers worked by hand; small executors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from counting_executors import LATER_SLOW_TICK, SLOW_TICK
from death_job import NUM_TICKS, by_hand, graph
from loopback_hosts import loopback_hosts, worker_key, workers
from other_space import alone_again, being_at, place

from llamarl.controller.config import DeadlineConfig
from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.controller.host_places import HostPlaces, Seconds
from llamarl.controller.recovery import Recovery
from llamarl.controller.replacing import Replacing
from llamarl.controller.stragglers import Stragglers
from llamarl.controller.twins import Twins
from llamarl.runtime.base import Report
from llamarl.runtime.host_placement import Machine
from llamarl.runtime.hosts import launcher as launcher_module
from llamarl.runtime.hosts.launcher import HostLauncher
from llamarl.runtime.processes import ProcessRuntime


def test_a_tick_that_is_slow_on_a_host_or_here_is_done_on_another_host_which_keeps_the_executor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher_module, "shares_imports", lambda spec: True)
    whole = graph()
    kinds = {"source": "Source", "doubler": "SlowDoubler", "sink": "SlowSink"}
    executors = tuple(replace(s, factory=f"counting_executors:{kinds[s.name]}") for s in whole.executors)
    where: dict[str, tuple[int, ...]] = {"source": (1,), "doubler": (0, 1), "sink": (-1,)}
    spaces = {-1: "here", 0: "a", 1: "b"}
    machines = {number: Machine(name, 5, 0, {}) for number, name in spaces.items()}
    reports: list[Report] = []
    told: list[str] = []

    class Observe:
        def on_report(self, report: Report) -> None:
            reports.append(report)

    with alone_again(), being_at(place("here")), loopback_hosts("ab") as hosts:
        seconds = Seconds(threads=dict.fromkeys(where, 1), here=machines[-1])
        launcher = HostLauncher(workers(hosts), where, worker_key(), seconds=seconds.where)
        places = HostPlaces(
            where,
            [machines[0], machines[1]],
            (),
            launcher,
            None,
            lambda host: place(spaces[host]),
            allow_unlike=False,
            seconds=seconds,
        )
        runtime = ProcessRuntime(
            launchers=dict.fromkeys(("source", "doubler"), launcher),
            networks={name: [place(spaces[host]) for host in ranks] for name, ranks in where.items()},
            places=places,
            restarts=True,
        )
        rule = Recovery(max_restarts=1, window_s=60.0)
        try:
            run_graph(
                Graph(executors, whole.channels),
                runtime,
                num_ticks=NUM_TICKS,
                seed=0,
                deadlines=DeadlineConfig(setup_s=60.0, step_s=60.0),
                observers=[Observe()],
                replacing=Replacing(rule),
                twins=Twins(
                    rule,
                    Stragglers(multiple=3.0, least_s=0.5),
                    lambda name, others: places.why_no_second(name),
                    lambda tick, text: told.append(text),
                ),
            )
        finally:
            runtime.close()
    totals = [report.metrics["sink/total"] for report in reports if report.executor == "sink"]
    assert totals == by_hand(NUM_TICKS)
    begun, ended, begun_later, ended_later = told
    assert begun.startswith(f"'doubler' has been at tick {SLOW_TICK} for")
    assert begun.endswith("it is started a second time on b, and who is ready first counts")
    assert begun_later.startswith(f"'sink' has been at tick {LATER_SLOW_TICK} for")
    assert begun_later.endswith("it is started a second time on a, and who is ready first counts")
    assert (ended, ended_later) == tuple(
        f"'{name}': the second attempt is ready and counts" for name in ("doubler", "sink")
    )
    assert where == {"source": (1,), "doubler": (1, 1), "sink": (0,)} and not seconds.where
    of = {report.tick: report.incarnation for report in reports if report.executor == "doubler"}
    assert of == {tick: int(tick >= SLOW_TICK) for tick in range(NUM_TICKS)}
