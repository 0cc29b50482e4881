"""Nodes that a run was given and that are gone when it is gone on with: where their ranks go, what is said; by hand."""

from collections.abc import Collection, Mapping

from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.host_placement import Machine, layouts, what_changed, why_no_room

FACTS = {"llamarl": "1", "processor": "x86"}
B, C = "b is no node of the cluster any more", "c is no node of the cluster any more"


def spec(name: str, num_ranks: int = 1, device: str = "cpu") -> ExecutorSpec:
    return ExecutorSpec(name=name, factory="m:f", num_ranks=num_ranks, device=device, threads=1)


def tried(
    executors: list[ExecutorSpec],
    on: Mapping[str, tuple[int, ...]],
    there: Mapping[int, Machine],
    together: Collection[str] = (),
) -> list[dict[str, tuple[int, ...]]]:
    return list(layouts(executors, on, there, tensor_parallel={}, together=tuple(together)))


def machine(cuda_devices: int = 0, processor: str = "x86") -> Machine:
    return Machine("", 8, cuda_devices, {**FACTS, "processor": processor})


def test_the_spare_one_gets_all_ranks_of_a_host_that_is_absent() -> None:
    executors, on = [spec("g", 2), spec("r"), spec("t", 2)], {"g": (0,), "r": (1,), "t": (1,)}
    first, *_ = tried(executors, on, {0: machine(), 2: machine()})
    assert first == {"g": (0, 0), "r": (2,), "t": (2, 2)}


def test_two_absent_hosts_and_no_spare_leave_all_to_the_one_that_is_left() -> None:
    executors, on = [spec("g", 2), spec("t")], {"g": (0, 1), "t": (2,)}
    first, *_ = tried(executors, on, {1: machine()})
    assert first == {"g": (1, 1), "t": (1,)}


def test_a_spare_unlike_the_others_gets_nothing() -> None:
    executors, on = [spec("g"), spec("t")], {"g": (0,), "t": (1,)}
    first, *_ = tried(executors, on, {0: machine(), 2: machine(processor="arm"), 3: machine()})
    assert first == {"g": (0,), "t": (3,)}


def test_executors_go_to_what_is_left_of_their_own_hosts_and_then_to_wherever_there_is_room() -> None:
    executors, on = [spec("g", 4, "cuda"), spec("t", 4, "cuda")], {"g": (0, 1), "t": (2,)}
    there = {0: machine(4), 2: machine(8), 3: machine(4), 4: machine(4)}
    assert tried(executors, on, there) == [{"g": (0,) * 4, "t": (2,) * 4}, {"g": (0,) * 4, "t": (2,) * 4}]
    del there[0], there[2]
    assert tried(executors, on, there) == [{"g": (3,) * 4, "t": (4,) * 4}]
    only_one = {0: machine(8)}
    assert tried([spec("g", 4, "cuda"), spec("t", 4, "cuda")], {"g": (0,), "t": (1,)}, only_one)[0] == {
        "g": (0,) * 4,
        "t": (0,) * 4,
    }


def test_where_all_named_hosts_are_gone_each_kind_of_the_others_is_tried_not_only_that_of_the_first() -> None:
    executors, on = [spec("g", 2, "cuda"), spec("t", 2, "auto"), spec("r")], {"g": (4,), "t": (4,)}
    there = {0: machine(processor="arm"), 1: machine(processor="other"), 2: machine(2), 3: machine(2)}
    assert tried(executors, on, there) == [
        {"g": (2, 2), "t": (3, 3), "r": (2,)},
        {"g": (0, 0), "t": (0, 0), "r": (0,)},
        {"g": (1, 1), "t": (1, 1), "r": (1,)},
    ]
    there[4] = machine(2, processor="other")
    assert tried(executors, {"g": (4,)}, there)[0] == {"g": (4, 4), "t": (4, 4), "r": (1,)}, (
        "like the one that is named"
    )


def test_executors_that_share_devices_stay_together() -> None:
    executors = [spec("g", 2, "cuda"), spec("t", 2, "cuda")]
    for where in tried(executors, {"t": (0,)}, {1: machine(2)}, together=("g", "t")):
        assert where == {"g": (1, 1), "t": (1, 1)}


def test_what_is_told_names_who_is_left_out_and_where_its_ranks_are() -> None:
    whole, now = {"g": (0, 0), "r": (1,), "t": (1, 2)}, {"g": (0, 0), "r": (2,), "t": (2, 2)}
    assert what_changed({"b": B}, whole, now, ["a", "b", "c"]).splitlines() == [
        "left out: b is no node of the cluster any more",
        "the run goes on without b: r on c; t on c",
    ]
    assert what_changed({"c": C}, {"g": (0,)}, {"g": (0,)}, "abc").endswith(
        "goes on without c: no rank was to be there"
    )
    assert what_changed({}, whole, whole, "abc") == ""


def test_a_refusal_for_want_of_room_names_hosts_cause_and_what_to_do() -> None:
    assert why_no_room(
        {"b": B}, ["a", "b", "c"], "a: executor 't': 4 ranks need as many CUDA devices"
    ).splitlines() == [
        "the run was given nodes that are gone, and the others have no room for their ranks:",
        "  - b is no node of the cluster any more",
        "a: executor 't': 4 ranks need as many CUDA devices",
        "Start them again, or others (left are a, c): ray start --address HEAD:PORT; or resume by --cluster here, on this machine.",
    ]
