"""What the graph checks refuse, and what they let pass."""

import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.controller.graph import Graph
from llamarl.errors import GraphError
from llamarl.executors.base import ExecutorSpec


def executor(name: str) -> ExecutorSpec:
    return ExecutorSpec(name=name, factory="tests:none")


def edge(name: str, source: str, sink: str, *, delay: int = 0, capacity: int = 1) -> ChannelSpec:
    return ChannelSpec(name=name, kind=ChannelKind.GATHER, source=source, sink=sink, delay=delay, capacity=capacity)


TRIO = tuple(executor(n) for n in ("generator", "reward", "trainer"))
DATA = (edge("completions", "generator", "reward"), edge("scored", "reward", "trainer"))


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_the_llamarl_job_is_live_at_every_delay(delay: int) -> None:
    graph = Graph(TRIO, (*DATA, edge("weights", "trainer", "generator", delay=delay, capacity=delay)))
    assert [c.name for c in graph.inputs["generator"]] == ["weights"]
    assert [c.name for c in graph.outputs["generator"]] == ["completions"]


def test_a_weights_edge_without_delay_deadlocks_and_the_cycle_is_named() -> None:
    with pytest.raises(GraphError, match="deadlock.*'completions'.*'scored'.*'weights'"):
        Graph(TRIO, (*DATA, edge("weights", "trainer", "generator")))


def test_a_cycle_through_full_edges_deadlocks() -> None:
    """trainer -> evaluator is full at start, and the evaluator also needs this tick's batch: neither can move."""
    channels = (edge("batch", "trainer", "evaluator"), edge("weights", "trainer", "evaluator", delay=1, capacity=1))
    with pytest.raises(GraphError, match="deadlock.*room on 'weights'"):
        Graph((executor("trainer"), executor("evaluator")), channels)


@pytest.mark.parametrize(
    ("executors", "channels", "message"),
    [
        ((), (), "at least one executor"),
        ((executor("a"), executor("a")), (), "two executors are named 'a'"),
        ((executor("a"), executor("b")), (edge("x", "a", "c"),), "channel 'x': its sink 'c' is no executor"),
        ((executor("a"), executor("b")), (edge("x", "a", "b"), edge("x", "b", "a", delay=1)), "'x' has two producers"),
        ((executor("a"), executor("b")), (edge("x", "a", "b", delay=-1),), "channel 'x': delay must be >= 0"),
        ((executor("a"), executor("b")), (edge("x", "a", "b", delay=3, capacity=2),), "set capacity >= 3"),
        (
            (executor("a"), executor("b"), executor("c")),
            (edge("x", "a", "b"),),
            "executors c are not connected with 'a'",
        ),
        (
            tuple(executor(n) for n in "abcd"),
            (edge("x", "a", "b"), edge("y", "c", "d")),
            "executors c, d are not connected with 'a'",
        ),
    ],
)
def test_a_malformed_graph_is_refused_by_name(executors: tuple, channels: tuple, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Graph(executors, channels)


def test_one_executor_alone_is_a_job() -> None:
    assert Graph((executor("solo"),), ()).inputs == {"solo": ()}
