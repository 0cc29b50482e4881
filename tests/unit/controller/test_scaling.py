"""Another number of replicas: how it is asked for, when it is taken, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl.channels.base import ChannelKind
from llamarl.config import RunConfig, validate
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking
from llamarl.controller.scaling import Scaled, Scaling, Sources, answer_to, ask, rescaled, why_not_scale, withdraw
from llamarl.controller.standard_graph import llamarl_graph
from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.placement import place
from llamarl.transports.segments import SegmentHandle


def config(**sections: Any) -> RunConfig:
    generator = {"dp": 2, "shards": 4, "threads": 1, "device": "cpu", **sections.pop("generator", {})}
    return validate(
        {
            "schedule": {"prompts_per_step": 8},
            "generator": generator,
            "trainer": {"threads": 1, "device": "cpu"},
            "evaluation": {"every": 0},
            **sections,
        }
    )


def placed(settings: RunConfig) -> Graph:
    graph = llamarl_graph(settings)
    return Graph(place(graph.executors, cores=4, cuda_devices=0).executors, graph.channels)


GRAPH = placed(config())
COLOCATED = {"colocated": True, "max_staleness": 0, "prompts_per_step": 8}


def marking(version: Any = None) -> Marking:
    tokens: Mapping[int, tuple[Any]] = {-2: (None,), -1: (version,)}
    return Marking(GRAPH, first_tick=0, num_ticks=2, initial_tokens={"weights": tokens})


class Run:
    def __init__(self, run_dir: Path) -> None:
        self.said: list[str] = []
        self.effects: list[tuple[int, int]] = []
        self.marking = marking()
        self.held = {"generator": 0}
        self.scaling = Scaling(run_dir, self.plan, self.took_effect, self.said.append)

    def plan(self, replicas: int, sources: Sources) -> Scaled:
        return rescaled(config(), GRAPH, replicas)

    def took_effect(self, scaled: Scaled, tick: int) -> None:
        self.effects.append((scaled.config.generator.dp, tick))

    def due(self) -> int | None:
        spec = self.scaling.due(self.marking, lambda: self.held)
        return None if spec is None else spec.num_ranks


def test_a_request_is_taken_once_and_answered_with_the_tick(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.due() is None
    run.marking.ready()
    request = ask(tmp_path, "generator", 3)
    run.marking.complete("generator", 0, {"completions": ()})
    assert (run.due(), run.effects) == (3, [(3, 1)])
    answer = answer_to(tmp_path, request)
    assert answer is not None and (answer.replicas, answer.tick, answer.refused) == (3, 1, "")
    assert run.due() is None and run.said == ["scale generator=3: from tick 1 on"]


def test_the_last_request_counts_and_one_that_was_withdrawn_does_not(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first, second = ask(tmp_path, "generator", 3), ask(tmp_path, "generator", 4)
    withdraw(tmp_path, first)  # another one's stays
    assert run.due() == 4
    assert answer_to(tmp_path, first) is None and answer_to(tmp_path, second) is not None
    withdraw(tmp_path, ask(tmp_path, "generator", 1))
    assert run.due() is None


def test_a_request_that_lies_there_when_a_run_begins_is_not_of_it(tmp_path: Path) -> None:
    ask(tmp_path, "generator", 3)
    assert Run(tmp_path).due() is None


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ('{"id": "x", "executor": "generator", "replicas": 5}', "5 replicas are more than generator.shards = 4"),
        ('{"id": "x", "executor": "generator", "replicas": 0}', "at least one replica must be left"),
        ('{"id": "x", "executor": "trainer", "replicas": 2}', "not of 'generator'"),
        ('{"id": "x", "executor": "generator", "replicas": "2"}', "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_and_the_run_goes_on_as_it_is(tmp_path: Path, asked: str, why: str) -> None:
    run = Run(tmp_path)
    (tmp_path / "scale.json").write_text(asked)
    assert run.due() is None and not run.effects
    assert why in json.loads((tmp_path / "scale.jsonl").read_text())["refused"]
    assert run.due() is None and len(run.said) == 1


def test_a_request_that_cannot_be_removed_is_told_of_once_and_ends_the_looking(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "scale.json" / "inside").mkdir(parents=True)
    assert [run.due(), run.due()] == [None, None]
    assert len(run.said) == 1 and "scale.json cannot be removed" in run.said[0]
    assert Run(tmp_path).due() is None


def test_who_is_done_or_holds_what_nobody_else_does_stays_as_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.held = {}
    request = ask(tmp_path, "generator", 1)
    assert run.due() is None
    answer = answer_to(tmp_path, request)
    assert answer is not None and answer.refused == "what 'generator' holds is not held elsewhere, or its host is gone"
    run.marking.done_ticks["generator"] = 2
    request = ask(tmp_path, "generator", 1)
    assert run.due() is None
    answer = answer_to(tmp_path, request)
    assert answer is not None and answer.refused == "'generator' has done all its ticks"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"generator": {"shards": 0}}, "generator.shards is 0"),
        ({"generator": {"tp": 2}}, "generator.tp is 2"),
        ({"run": {"runtime": "inline"}}, "run.runtime is 'inline'"),
        ({"hosts": {"cluster": "auto"}, "schedule": COLOCATED}, "schedule.colocated puts it on the hosts of others"),
        ({"recovery": {"max_restarts": 0}}, "recovery.max_restarts is 0"),
        (
            {"executors": {"generator": {"factory": "mine.py:Generator"}}},
            "executors.generator.factory is mine.py:Generator",
        ),
    ],
)
def test_a_run_that_cannot_be_scaled_says_why(changes: dict[str, Any], why: str) -> None:
    assert why_not_scale(config(**changes), "generator").startswith(why)


def test_a_job_on_hosts_is_scaled_where_its_weights_go_by_sockets_and_its_ranks_go_where_the_hosts_say(
    tmp_path: Path,
) -> None:
    assert why_not_scale(config(hosts={"cluster": "auto"}), "generator") == ""
    channels = tuple(replace(c, transport="tcp") if c.kind is ChannelKind.WEIGHTS else c for c in GRAPH.channels)
    graph = Graph(GRAPH.executors, channels)

    class Hosts:
        def place_rescaled(
            self, executors: Sequence[ExecutorSpec], spec: ExecutorSpec
        ) -> tuple[ExecutorSpec, tuple[int, ...]]:
            assert executors == graph.executors
            if spec.num_ranks == 4:
                raise ConfigError("no host has room")
            return replace(spec, device="cuda:0"), (0,) * spec.num_ranks

        def names(self, ranks: Sequence[int]) -> str:
            return ", ".join("ab"[host] for host in ranks)

        def why_unreached(self, executor: str, ranks: Sequence[int], sources: Sources) -> str:
            return "" if executor == "generator" and sources == (("10.0.0.3", 4242),) else "it is not reached"

    run = Run(tmp_path)
    run.plan = lambda replicas, sources: rescaled(config(), graph, replicas, Hosts(), sources)  # type: ignore[method-assign]
    run.scaling = Scaling(tmp_path, run.plan, run.took_effect, run.said.append)
    request = ask(tmp_path, "generator", 3)
    assert run.due() is None
    answer = answer_to(tmp_path, request)
    assert answer is not None and answer.refused == "it is not reached"
    there = SegmentHandle(1, 2, 3, b"n" * 16, space="c", endpoint=("10.0.0.3", 4242))
    run.marking = marking(SimpleNamespace(address=there))
    ask(tmp_path, "generator", 3)
    assert run.due() == 3
    request = ask(tmp_path, "generator", 4)
    assert run.due() is None
    answer = answer_to(tmp_path, request)
    assert answer is not None and answer.refused == "no host has room"
    assert run.said == [
        "scale generator=3: stays as it is: it is not reached",
        "scale generator=3: from tick 0 on (hosts: a, a, a)",
        "scale generator=4: stays as it is: no host has room",
    ]
    scaled = rescaled(config(), graph, 1, Hosts(), (("10.0.0.3", 4242),))
    assert (scaled.spec.num_ranks, scaled.spec.device, scaled.hosts, scaled.on) == (1, "cuda:0", (0,), "a")


def test_only_generators_are_scaled() -> None:
    assert why_not_scale(config(), "generator") == ""
    assert why_not_scale(config(), "trainer").startswith("'trainer' has the ranks that it has")


def test_nobody_but_the_generator_is_another_afterwards() -> None:
    scaled = rescaled(config(), GRAPH, 4)
    assert (scaled.spec.num_ranks, scaled.spec.threads, scaled.spec.device) == (4, 1, "cpu")
    assert scaled.spec.config == scaled.config == replace(config(), generator=replace(config().generator, dp=4))


def test_weights_that_go_by_memory_of_a_gpu_know_their_sinks() -> None:
    channels = tuple(replace(c, transport="cuda_ipc") if c.kind is ChannelKind.WEIGHTS else c for c in GRAPH.channels)
    with pytest.raises(ConfigError, match="channel 'weights' goes by cuda_ipc"):
        rescaled(config(), Graph(GRAPH.executors, channels), 4)
