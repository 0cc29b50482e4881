"""Where ranks go when a job has hosts, by hand; and what a user may write of them."""

import pytest

from llamarl.config import load_config, validate
from llamarl.controller.graph import llamarl_graph
from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.host_placement import Machine, layouts, spread, unlike
from llamarl.runtime.placement import ColocatedGroup, place, share_of, stand_in
from llamarl.settings.job import host_settings, hosts_named

FACTS = {"llamarl": "1", "python": "3.11.7", "torch": "2.13", "processor": "x86 avx2"}


def spec(name: str, num_ranks: int = 1, device: str = "cpu", threads: int = 1) -> ExecutorSpec:
    return ExecutorSpec(name=name, factory="m:f", num_ranks=num_ranks, device=device, threads=threads)


def machine(name: str, cores: int = 8, cuda_devices: int = 0, **facts: str) -> Machine:
    return Machine(name, cores, cuda_devices, {**FACTS, **facts})


def test_ranks_fill_a_host_before_the_next_and_tensor_parallel_peers_stay_together() -> None:
    where = spread([spec("g", 6)], 3, {"g": (0, 2)}, tensor_parallel={"g": 2})
    assert where == {"g": (0, 0, 0, 0, 2, 2)}
    assert spread([spec("t", 3)], 2, {"t": (1, 0)}, tensor_parallel={}) == {"t": (1, 1, 0)}
    assert spread([spec("t", 2)], 2, {"t": (0, 1)}, tensor_parallel={"t": 2}) == {"t": (0, 1)}


def test_unlike_replicas_stay_whole_and_each_kind_may_have_hosts_of_its_own() -> None:
    kinds = {"g": ((2, 2), (1, 3))}  # ranks 0-1, 2-3, then 4, 5, 6
    three, executors = {"g": (0, 1)}, [spec("g", 7), spec("t")]
    assert spread(executors[:1], 2, three, tensor_parallel=kinds) == {"g": (0, 0, 0, 0, 1, 1, 1)}
    own = {"g_0": (2, 0), "g_1": (1,), "t": (0,)}
    assert spread(executors, 3, own, tensor_parallel=kinds) == {"g": (2, 2, 0, 0, 1, 1, 1), "t": (0,)}
    # kind 1 alone has hosts: the other goes, whole, where fewest ranks are
    assert spread(executors, 3, {"g_1": (1,), "t": (0,)}, tensor_parallel=kinds)["g"] == (0, 0, 0, 0, 1, 1, 1)
    with pytest.raises(ConfigError, match="hosts.on.g_2: there is no such executor, there are g, t, g_0, g_1"):
        spread(executors, 3, {"g_2": (1,)}, tensor_parallel=kinds)


def test_an_executor_without_hosts_goes_where_fewest_ranks_are() -> None:
    where = spread([spec("a"), spec("b", 2), spec("c"), spec("d")], 3, {"b": (1,)}, tensor_parallel={})
    assert where == {"a": (0,), "b": (1, 1), "c": (2,), "d": (0,)}


def test_an_executor_that_may_be_on_gpus_goes_to_a_host_with_enough_of_them_where_there_is_one() -> None:
    executors = [spec("g", 2, "auto"), spec("t", 4, "cuda"), spec("r"), spec("big", 9, "auto")]
    where = spread(executors, 3, {}, tensor_parallel={}, cuda_devices=[0, 4, 2])
    assert where == {"g": (1, 1), "t": (1,) * 4, "r": (0,), "big": (2,) * 9}
    where = spread(executors[:2], 3, {"g": (2,)}, tensor_parallel={}, cuda_devices=[4, 4, 4])
    assert where == {"g": (2, 2), "t": (0,) * 4}, "where they are free"
    assert spread(executors[:1], 3, {}, tensor_parallel={}) == {"g": (0, 0)}, "nobody has any"


def test_an_executor_for_which_no_host_has_gpus_enough_takes_what_is_free_of_several_in_whole_units() -> None:
    executors = [spec("g", 6, "auto"), spec("t", 10, "auto"), spec("e", device="auto")]
    gpus = [8, 8]
    where = spread(executors, 2, {}, tensor_parallel={"g": ((2, 3),)}, cuda_devices=gpus)
    assert where == {"g": (0,) * 6, "t": (0, 0, *(1,) * 8), "e": (0,)}
    both = spread(
        [spec("g", 16, "auto"), spec("t", 16, "auto")],
        2,
        {},
        tensor_parallel={},
        together=("g", "t"),
        cuda_devices=gpus,
    )
    assert both == {"g": (0,) * 8 + (1,) * 8, "t": (0,) * 8 + (1,) * 8}
    where = spread(
        [spec("g", 10, "auto"), spec("t", 5, "cuda")], 2, {}, tensor_parallel={"g": ((4, 2), (2, 1))}, cuda_devices=gpus
    )
    assert where == {"g": (0,) * 8 + (1,) * 2, "t": (1,) * 5}
    assert spread([spec("t", 12, "auto")], 2, {}, tensor_parallel={"t": 6}, cuda_devices=gpus) == {
        "t": (0,) * 6 + (1,) * 6
    }
    assert spread([spec("t", 17, "auto")], 2, {}, tensor_parallel={}, cuda_devices=gpus) == {"t": (0,) * 17}, (
        "to be refused"
    )


def test_a_host_that_offers_no_cores_gets_only_what_is_put_there() -> None:
    executors = [spec("g", 2, "auto"), spec("r"), spec("t", 1, "auto")]
    where = spread(executors, 3, {}, tensor_parallel={}, cores=[0, 8, 8])
    assert where == {"g": (1, 1), "r": (2,), "t": (2,)}
    where = spread(executors, 3, {"r": (0,)}, tensor_parallel={}, cuda_devices=[8, 2, 0], cores=[0, 8, 8])
    assert where == {"g": (1, 1), "r": (0,), "t": (1,)}
    heads = {0: machine("head", cores=0), 1: machine("a")}
    assert next(layouts(executors, {}, heads, tensor_parallel={}))["r"] == (1,), "a resume too"
    assert spread(executors[1:2], 1, {}, tensor_parallel={}, cores=[0]) == {"r": (0,)}, "which place then refuses"


def test_executors_that_share_devices_are_put_together_or_refused() -> None:
    executors = [spec("generator"), spec("reward"), spec("trainer")]
    together = ("generator", "trainer")
    where = spread(executors, 2, {"trainer": (1,)}, tensor_parallel={}, together=together)
    assert where == {"generator": (1,), "reward": (0,), "trainer": (1,)}
    assert spread(executors, 2, {}, tensor_parallel={}, together=together)["trainer"] == (0,)
    with pytest.raises(ConfigError, match="must give them the same hosts"):
        spread(executors, 2, {"trainer": (1,), "generator": (0,)}, tensor_parallel={}, together=together)


def test_an_executor_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"hosts.on.trainr: there is no such executor, there are a, b"):
        spread([spec("a"), spec("b")], 1, {"trainr": (0,)}, tensor_parallel={})


def test_each_host_gives_its_own_cores_and_devices() -> None:
    executors = [spec("g", 4, "cuda", 0), spec("t", 2, "cuda", 0), spec("r", threads=1)]
    hosts = [machine("a", 4, 2), machine("b", 16, 4), machine("c")]
    placement = place(executors, hosts, {"g": (0, 0, 1, 1), "t": (1, 1), "r": (2,)})
    g, t, r = placement.executors
    assert (g.device, g.threads) == ("cuda:0,cuda:1,cuda:0,cuda:1", 2), "a has least for each: 4 cores for 2 ranks"
    assert (t.device, t.threads) == ("cuda:2,cuda:3", 4)
    assert (r.device, r.threads) == ("cpu", 1)
    assert placement.hosts == {"g": ("a", "a", "b", "b"), "t": ("b", "b"), "r": ("c",)}
    table = placement.table().splitlines()
    assert table[0].split() == ["executor", "rank", "host", "device", "threads"]
    assert table[3].split() == ["g", "2", "of", "4", "b", "cuda:0", "2"]
    assert "a: 4 threads on 4 cores" in table and "b: 12 threads on 16 cores" in table


def test_all_mistakes_are_told_at_once_with_their_machines() -> None:
    executors = [spec("g", 3, "cuda"), spec("t", 1, "cuda:7")]
    hosts = [machine("a", cuda_devices=1), machine("b", cuda_devices=2)]
    with pytest.raises(ConfigError) as caught:
        place(executors, hosts, {"g": (0, 0, 1), "t": (1,)})
    message = str(caught.value)
    assert "a: executor 'g': 2 ranks need as many CUDA devices, this machine has 1" in message
    assert "b: executor 't': there is no cuda:7" in message


def test_one_kind_of_device_an_executor() -> None:
    hosts = [machine("a"), machine("b", cuda_devices=1)]
    with pytest.raises(ConfigError, match="CUDA on some of its hosts and the CPU on others"):
        place([spec("g", 2, "auto")], hosts, {"g": (0, 1)})


def test_a_colocated_pair_shares_the_devices_of_its_host() -> None:
    group = ColocatedGroup(members=("g", "r", "t"), sharing=("g", "t"))
    executors = [spec("g", 1, "cuda", 0), spec("r", threads=1), spec("t", 1, "cuda", 0)]
    placement = place(executors, [machine("a", 4, 2), machine("b")], {"g": (0,), "r": (1,), "t": (0,)}, colocated=group)
    assert [(one.device, one.threads) for one in placement.executors] == [("cuda:0", 4), ("cpu", 1), ("cuda:0", 4)]
    assert any("a: g and t are co-located" in line for line in placement.notes())


def test_unlike_machines_are_refused_unless_allowed_but_never_another_llamarl() -> None:
    alike = [machine("a"), machine("b")]
    assert unlike(alike, allow=False) == []
    odd = [machine("a"), machine("b", processor="arm", torch="2.12")]
    assert unlike(odd, allow=False) == ["processor: a has 'x86 avx2', b 'arm'", "torch: a has '2.13', b '2.12'"]
    assert unlike(odd, allow=True) == []
    assert unlike([machine("a"), machine("b", llamarl="2")], allow=True) == ["llamarl: a has '1', b '2'"]
    assert unlike([machine("a"), machine("b", python="3.11.2")], allow=True) == []
    assert unlike([machine("a"), machine("b", python="3.12.2")], allow=True) != []


def test_nodes_go_by_name_or_by_place() -> None:
    nodes = ["a", "10.0.0.3", "n-1", "d"]
    assert hosts_named(["10.0.0.3", "a"], nodes) == (1, 0)
    assert hosts_named(["0", "2-3"], nodes) == (0, 2, 3)
    assert hosts_named(["n-1"], nodes) == (2,)
    for wrong in (["c"], ["10.0.0.4"], ["7"], ["a", "0"], []):
        with pytest.raises(ValueError, match="nodes"):
            hosts_named(wrong, nodes)


def test_the_flags_say_what_the_section_says() -> None:
    assert host_settings("auto", ["generator=a"]) == {"cluster": "auto", "on": {"generator": ["a"]}}
    assert host_settings("10.0.0.1:6379") == {"cluster": "10.0.0.1:6379", "on": {}}
    assert host_settings("here") == {"cluster": "", "on": {}}
    assert host_settings(None, ["trainer=b"]) == {"on": {"trainer": ["b"]}}
    assert host_settings(None) == {}
    assert host_settings("auto", ["trainer=a, b"]) == host_settings("auto", ["trainer=a,b"])
    with pytest.raises(ValueError, match="EXECUTOR=NODE,NODE"):
        host_settings("auto", ["trainer"])


def test_ranks_take_a_core_a_thread_up_to_all_and_gpus_up_to_the_last_in_use() -> None:
    executors = [spec("g", 2, "cuda:0,cuda:1", 3), spec("t", 1, "cuda:2", 4), spec("r", threads=1)]
    where = {"g": (0, 1), "t": (0,), "r": (1,)}
    assert share_of(0, executors, where, machine("a", 16, 4)) == (7, 3)
    assert share_of(1, executors, where, machine("b", 16, 4)) == (4, 2)
    assert share_of(0, executors, where, machine("a", 4, 4)) == (4, 3), "threads take turns on what there is"
    assert share_of(2, executors, where, machine("c", 16, 4)) == (0, 0)


def test_a_vllm_over_two_gpus_takes_the_one_behind_its_last_rank_too_and_is_refused_where_there_is_none() -> None:
    engine = {"name": "vllm", "options": {"tensor_parallel_size": 2}}
    plain = {"generator": {"dp": 2, "device": "cuda:0,cuda:2", "engine": engine}, "evaluation": {"every": 0}}
    made = {one.name: one for one in llamarl_graph(validate(plain)).executors}
    assert (made["generator"].gpus, made["trainer"].gpus) == (2, 1)
    assert share_of(0, [made["generator"]], {"generator": (0, 0)}, machine("a", 16, 8))[1] == 4
    with pytest.raises(ConfigError, match="there is no cuda:3, this machine has 3 CUDA devices"):
        place([made["generator"]], [machine("a", 16, 3)])


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"hosts.on": {"trainer": ["b"]}}, "hosts.on"),
        ({"hosts.cluster": "ray://10.0.0.1:10001"}, "hosts.cluster"),
        ({"hosts.cluster": "gpu-3"}, "hosts.cluster"),
        ({"hosts.cluster": "auto", "hosts.port_range": "9-7"}, "hosts.port_range"),
        ({"hosts.cluster": "auto", "run.runtime": "inline"}, "run.runtime"),
    ],
)
def test_a_mistake_in_the_hosts_names_its_key(given: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, given)
    assert key in [mistake.key for mistake in caught.value.mistakes]


FOUR = [machine(name) for name in "abcd"]
BUSY = [spec("g", 2), spec("t"), spec("r")], {"g": (0, 1), "t": (1,), "r": (2,)}
OTHER = [machine("a"), machine("b", processor="arm"), machine("c")]
APART = [spec("g"), spec("t")], {"g": (0,), "t": (2,)}
GPUS = [machine("a", cuda_devices=4), machine("b", cuda_devices=2), machine("c", cuda_devices=4), machine("d")]
ON_GPUS = [spec("g", 2, "cuda:1,cuda:2"), spec("t", 1, "cuda:0"), spec("r")], {"g": (0, 0), "t": (1,), "r": (3,)}
LOW = [spec("g", 2, "cuda:0,cuda:1"), spec("t"), spec("r")], {"g": (0, 0), "t": (1,), "r": (3,)}


@pytest.mark.parametrize(
    ("why", "hosts", "job", "lost", "gone", "taken"),
    [
        ("d has no rank", FOUR, BUSY, 1, {1}, 3),
        ("a and c have one each", FOUR, BUSY, 1, {1, 3}, 0),
        ("c is left", FOUR, BUSY, 1, {0, 1, 3}, 2),
        ("none is left", FOUR, BUSY, 1, {0, 1, 2, 3}, None),
        ("b has no rank, but another processor", OTHER, APART, 0, {0}, 2),
        ("b has another processor", OTHER, APART, 0, {0, 2}, None),
        ("b has too few GPUs and another executor's rank on one, and d has none", GPUS, ON_GPUS, 0, {0}, 2),
        ("as before, and c is gone", GPUS, ON_GPUS, 0, {0, 2}, None),
        ("ranks without a GPU go anywhere", GPUS, ON_GPUS, 3, {3}, 2),
        ("b has the two devices that are in use, and nobody on them", GPUS, LOW, 0, {0, 2}, 1),
    ],
)
def test_the_place_of_a_host_that_is_gone_is_taken_by_a_like_one_with_room_and_fewest_ranks(
    why: str,
    hosts: list[Machine],
    job: tuple[list[ExecutorSpec], dict[str, tuple[int, ...]]],
    lost: int,
    gone: set[int],
    taken: int | None,
) -> None:
    executors, where = job
    assert stand_in(lost, place(executors, hosts, where), hosts, where, gone=gone) == taken, why


def test_a_host_that_may_differ_takes_the_place_of_another() -> None:
    executors, where = APART
    assert stand_in(0, place(executors, OTHER, where), OTHER, where, gone={0}, allow_unlike=True) == 1


def test_executors_that_take_turns_on_one_device_move_together() -> None:
    hosts = [machine(name, cuda_devices=2) for name in "ab"]
    executors = [spec("g", 2, "cuda:0,cuda:1"), spec("t", 2, "cuda:0,cuda:1")]
    where, both = {"g": (0, 0), "t": (0, 0)}, ("g", "t")
    turns = place(executors, hosts, where, colocated=ColocatedGroup(both, both))
    assert stand_in(0, turns, hosts, where, gone={0}) == 1


def test_a_crowd_on_one_device_is_told_with_its_host() -> None:
    with pytest.raises(
        ConfigError, match=r"on these hosts:\n  - a: executors 'g' \(2 ranks\) and 't' \(2 ranks\) would share"
    ):
        place([spec("g", 2, "cuda"), spec("t", 2, "cuda")], [machine("a", 8, 2)], {"g": (0, 0), "t": (0, 0)})
