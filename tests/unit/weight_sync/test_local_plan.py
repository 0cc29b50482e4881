"""A rank's own part of the plan, worked out alone, against the plan of all ranks."""

from __future__ import annotations

import json
import math
import random
from collections import Counter

import numpy as np
import pytest

from llamarl.errors import PlanError
from llamarl.models.parallel import EXPERT_SHARD, EXPERTS, SHARD, Cut, ParallelLayout, ParameterShard, shard_box
from llamarl.weight_sync.layout import ParameterSpec, Shard, mesh_layout
from llamarl.weight_sync.local_plan import copies_from_source, copies_to_sink
from llamarl.weight_sync.mesh_layout import JoinedLayout, MeshLayout, RankSet
from llamarl.weight_sync.plan import plan_transfer
from llamarl.weight_sync.trainer_layout import layout_of_shards

W = {"w": ParameterSpec((8, 4), "float32")}


def random_model(rng: random.Random) -> tuple[dict[str, ParameterSpec], dict[str, int], int]:
    """A decoder's parameters with small, odd sizes; the dimension that tensor parallelism cuts; its key-value heads."""
    hidden, kv_heads, experts = rng.randint(3, 9), rng.choice([1, 2, 4]), rng.choice([0, 0, 4, 8])
    heads, middle, words = kv_heads * rng.choice([1, 2]) * 2, rng.randint(4, 11), rng.randint(9, 23)
    shapes: dict[str, tuple[tuple[int, ...], int | None]] = {"embed": ((words, hidden), 0)}
    for layer in range(rng.randint(1, 4)):
        shapes |= {
            f"{layer}.q": ((heads * 3, hidden), 0),
            f"{layer}.k": ((kv_heads * 3, hidden), 0),
            f"{layer}.o": ((hidden, heads * 3), 1),
            f"{layer}.norm": ((hidden,), None),
        }
        if experts:
            shapes[f"{layer}.experts"] = ((experts, middle, hidden), 0)
        else:
            shapes |= {f"{layer}.up": ((middle, hidden), 0), f"{layer}.down": ((hidden, middle), 1)}
    shapes |= {"norm": ((hidden,), None), "scale": ((), None)}
    if rng.random() < 0.5:
        shapes["head"] = ((words, hidden), 0)
    dtype = rng.choice(["float32", "bfloat16"])
    return (
        {name: ParameterSpec(shape, dtype) for name, (shape, _) in shapes.items()},
        {name: dim for name, (_, dim) in shapes.items() if dim is not None},
        kv_heads,
    )


def random_side(
    rng: random.Random, specs: dict[str, ParameterSpec], tp_dims: dict[str, int], kv_heads: int, *, trains: bool
) -> MeshLayout:
    """pp x fsdp or replicas x expert ranks x tp, in any order of the axes; the ends of the model tied over stages at times."""
    sizes = {
        "pp": rng.choice([1, 1, 2, 3]),
        "fsdp": rng.choice([1, 2, 3]),
        "ep": rng.choice([1, 1, 2]),
        "tp": rng.choice([1, 2, 4, kv_heads * 2]),
    }
    axes = rng.sample(list(sizes), len(sizes))
    cuts: dict[str, tuple[Shard, ...]] = {}
    stages: dict[str, tuple[int, ...]] = {}
    tied = "head" not in specs and rng.random() < 0.8
    for name, spec in specs.items():
        of_name = []
        if name in tp_dims:
            axis = "ep" if name.endswith("experts") and rng.random() < 0.5 else "tp"
            of_name.append(Shard(axis, tp_dims[name], kv_heads if name.endswith(".k") else None))
        if trains and spec.shape:
            of_name.append(Shard("fsdp", 0))
        cuts[name] = tuple(of_name)
        last = sizes["pp"] - 1
        if sizes["pp"] > 1:
            layer = name.split(".")[0]
            if layer.isdigit():
                stages[name] = (min(last, int(layer)),)
            elif name == "embed":
                stages[name] = (0, last) if tied else (0,)
            elif name != "scale":
                stages[name] = (last,)
    return MeshLayout(specs, {axis: sizes[axis] for axis in axes}, cuts, stages)


@pytest.mark.parametrize("block", range(4))
def test_local_parts_are_the_whole_plan_and_write_each_element_once(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        rng = random.Random(seed)
        model = random_model(rng)
        source = random_side(rng, *model, trains=True)
        alike = tuple(random_side(rng, *model, trains=False) for _ in range(rng.choice([1, 1, 2, 3])))
        sink = alike[0] if len(alike) == 1 else JoinedLayout(alike)  # replicas alike, or not
        whole = plan_transfer(source.listed(), sink.listed())
        pulled = [copies_to_sink(source, sink, rank) for rank in range(sink.num_ranks)]
        assert [copy for copies in pulled for copy in copies] == sorted(
            whole.copies, key=lambda copy: copy.sink_rank
        ), seed
        sent = [copies_from_source(source, sink, rank) for rank in range(source.num_ranks)]
        for rank, copies in enumerate(sent):
            assert list(copies) == [copy for copy in whole.copies if copy.source_rank == rank], (seed, rank)
        for rank, copies in enumerate(pulled):
            writes = {p.parameter: np.zeros([b - a for a, b in p.box], int) for p in sink.pieces_of(rank)}
            for copy in copies:
                assert source.grids[copy.parameter].held(copy.source_rank) is not None
                writes[copy.sink_tensor][tuple(slice(a, b) for a, b in copy.sink_slice)] += 1
            assert all((count == 1).all() for count in writes.values()), (seed, rank)
            received = sum(math.prod(np.shape(count)) for count in writes.values())
            assert sum(copy.nbytes for copy in copies) == received * (4 if model[0]["norm"].dtype == "float32" else 2)


def test_pieces_of_a_rank_are_those_of_the_listed_mesh() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        specs, tp_dims, kv_heads = random_model(rng)
        side = random_side(rng, specs, tp_dims, kv_heads, trains=True)
        if side.stages:
            continue
        assert side.listed() == mesh_layout(specs, side.mesh, side.cuts), seed


def test_ranks_that_hold_the_same_take_turns_by_hand() -> None:
    """Three sources hold all; two sinks: the two copies of the matrix first, by sink, then those of the two vectors."""
    specs = {
        "a": ParameterSpec((4,), "float32"),
        "w": ParameterSpec((4, 4), "float32"),
        "b": ParameterSpec((4,), "float32"),
    }
    source, sink = MeshLayout(specs, {"rank": 3}), MeshLayout(specs, {"rank": 2})
    turns = {(c.parameter, c.sink_rank): c.source_rank for r in range(2) for c in copies_to_sink(source, sink, r)}
    assert turns == {("w", 0): 0, ("w", 1): 1, ("a", 0): 2, ("a", 1): 0, ("b", 0): 1, ("b", 1): 2}


def test_turns_do_not_depend_on_how_many_others_are_looked_at() -> None:
    """512 whole sources and 512 whole sinks: a rank works out its own part, and each source sends as many of each size."""
    specs = {f"w{i}": ParameterSpec((4, 1 + i % 3), "bfloat16") for i in range(30)}
    source, sink = MeshLayout(specs, {"rank": 512}), MeshLayout(specs, {"rank": 512})
    some = (0, 1, 77, 511)
    sent = {rank: copies_from_source(source, sink, rank) for rank in some}
    assert {rank: sum(c.nbytes for c in copies) for rank, copies in sent.items()} == dict.fromkeys(
        some, 10 * 8 * (1 + 2 + 3)
    )
    copy = sent[77][5]
    assert copy in copies_to_sink(source, sink, copy.sink_rank)
    assert Counter(c.parameter for c in copies_to_sink(source, sink, 300)) == Counter(list(specs))


def test_sides_that_do_not_fit_are_named() -> None:
    source, sink = MeshLayout(W, {"rank": 1}), MeshLayout(W | {"v": ParameterSpec((2,), "float32")}, {"rank": 1})
    with pytest.raises(PlanError, match="does not send: v"):
        copies_to_sink(source, sink, 0)
    with pytest.raises(PlanError, match="no sink rank holds: v"):
        copies_from_source(sink, source, 0)
    assert len(copies_to_sink(sink, source, 0, allow_unused=True)) == 1


@pytest.mark.parametrize(
    ("mesh", "cuts", "stages"),
    [
        ({"tp": 2}, {"w": (Shard("fsdp", 0),)}, {}),
        ({"tp": 2}, {"w": (Shard("tp", 2),)}, {}),
        ({"tp": 3}, {"w": (Shard("tp", 0, 2),)}, {}),
        ({"tp": 2}, {"w": (Shard("tp", 0), Shard("tp", 1))}, {}),
        ({"tp": 2}, {}, {"w": (0,)}),
        ({"pp": 2}, {}, {"w": (2,)}),
        ({"pp": 2}, {}, {"w": ()}),
        ({"pp": 2}, {}, {"w": (1, 0)}),
    ],
)
def test_what_cannot_be_cut_so_is_refused(
    mesh: dict[str, int], cuts: dict[str, tuple[Shard, ...]], stages: dict[str, tuple[int, ...]]
) -> None:
    with pytest.raises(PlanError, match="'w' of shape"):
        MeshLayout(W, mesh, cuts, stages)


def test_a_layout_travels_as_plain_values() -> None:
    rng = random.Random(3)
    for _ in range(20):
        side = random_side(rng, *random_model(rng), trains=True)
        there = MeshLayout.from_json(side.to_json(), side.parameters)
        assert there.grids == side.grids and there.mesh == side.mesh
        assert MeshLayout.from_json(there.to_json(), side.parameters) == there


def test_ranks_of_a_cell_count_row_by_row() -> None:
    ranks = RankSet.of(((0, 2), range(1, 2), range(4)), (3, 2, 4))
    assert [ranks[i] for i in range(len(ranks))] == [4, 5, 6, 7, 20, 21, 22, 23]
    assert [ranks.index(rank) for rank in (4, 7, 22)] == [0, 3, 6]
    with pytest.raises(IndexError):
        ranks[8]
    assert (
        ranks
        == RankSet.of(((0, 2), range(4, 8)), (3, 8))
        == RankSet.of(((0, 2), range(1, 2), range(2), range(2)), (3, 2, 2, 2))
    )
    assert [ranks.moved(10)[0], ranks.moved(10).index(33)] == [14, 7]


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 4, "tp": 2, "ep": 2},
        {"fsdp": 2, "cp": 2, "tp": 2, "ep": 4, "pp": 2},
        {"fsdp": 3, "cp": 1, "tp": 1, "ep": 3},
        {"fsdp": 3, "cp": 2, "tp": 4, "pp": 3},
    ],
)
def test_a_trainers_rule_gives_each_rank_what_it_says_of_itself(sizes: dict[str, int]) -> None:
    """Also where experts lie along axes of their own, and rows do not divide over the ranks."""
    layout = ParallelLayout(mesh=None, **{"fsdp": 1, "tp": 1, **sizes})
    experts = (Cut(EXPERTS, 0), Cut(EXPERT_SHARD, 0)) if layout.ep > 1 else (Cut("tp", 0), Cut(SHARD, 0))
    kinds: dict[str, tuple[tuple[int, ...], tuple[Cut, ...]]] = {
        "embed": ((50, 8), (Cut("tp", 0, size=50), Cut(SHARD, 0))),
        "k": ((16, 8), (Cut("tp", 0, 2), Cut(SHARD, 0))),
        "o": ((10, 16), (Cut("tp", 1), Cut(SHARD, 0))),
        "experts": ((24, 6, 8), experts),
        "norm": ((10,), (Cut(SHARD, 0),)),
    }
    last = layout.pp - 1
    stages = {name: (0, last) if name == "embed" and last else (last,) for name in kinds}

    def said_by(rank: int) -> dict[str, ParameterShard]:
        return {
            name: ParameterShard(
                shape, "float32", shard_box(shape, cuts, layout, rank, stages[name]), cuts, stages[name]
            )
            for name, (shape, cuts) in kinds.items()
        }

    rule = layout_of_shards(said_by(0), layout)
    again = MeshLayout.from_json(json.loads(json.dumps(rule.to_json())), rule.parameters)
    assert again.grids == rule.grids
    for rank in range(layout.num_ranks):
        boxes = {name: shard.box for name, shard in said_by(rank).items() if all(a < b for a, b in shard.box)}
        assert {piece.parameter: piece.box for piece in rule.pieces_of(rank)} == boxes, rank
    sink = MeshLayout(rule.parameters, {"rank": 2})
    whole = plan_transfer(rule.listed(), sink.listed())
    assert [c for rank in range(2) for c in copies_to_sink(rule, sink, rank)] == sorted(
        whole.copies, key=lambda copy: copy.sink_rank
    )
