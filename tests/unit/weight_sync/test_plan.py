"""The transfer plan: by hand on small layouts, and random ones against the plain properties that make it right."""

import json
import random
from collections import defaultdict
from itertools import accumulate

import pytest
from test_random_layouts import Copied, check_plan, full_values, plan, random_layout, random_specs

from llamarl.errors import PlanError
from llamarl.models.parallel import EXPERT_SHARD, EXPERTS, SHARD, Cut, ParallelLayout, ParameterShard, shard_box
from llamarl.weight_sync.catalog import Catalog, build_catalog
from llamarl.weight_sync.layout import (
    AnyLayout,
    JoinedLayout,
    MeshLayout,
    ParameterSpec,
    Shard,
    box_elements,
    chunk_bounds,
    intersect,
)
from llamarl.weight_sync.model_layouts import layout_of_shards
from llamarl.weight_sync.plan import copies_to_sink

W = {"w": ParameterSpec((8, 4), "float32")}


def test_chunks_follow_torch_also_where_some_are_empty() -> None:
    assert [chunk_bounds(10, 4, i) for i in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [chunk_bounds(5, 4, i) for i in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def test_tensor_parallelism_cuts_before_fsdp() -> None:
    source = MeshLayout(W, {"fsdp": 2, "tp": 2}, {"w": (Shard("tp", 0), Shard("fsdp", 0))})
    rows = [source.pieces_of(rank)[0].box[0] for rank in range(4)]
    assert rows == [(0, 2), (4, 6), (2, 4), (6, 8)]  # rank = fsdp * 2 + tp


def test_names_and_shapes_must_agree() -> None:
    v = {"v": ParameterSpec((8, 4), "float32")}
    one, both = MeshLayout(W, {"rank": 1}), MeshLayout(W | v, {"rank": 1})
    with pytest.raises(PlanError, match="source does not send: v"):
        plan(one, both)
    with pytest.raises(PlanError, match="no sink rank holds: v"):
        plan(both, one)
    with pytest.raises(PlanError, match=r"\(8, 4\) at the source, \(4, 8\) at the sink"):
        plan(one, MeshLayout({"w": ParameterSpec((4, 8), "float32")}, {"rank": 1}))


@pytest.mark.parametrize("block", range(4))
def test_each_element_is_written_once_with_its_value_by_ranks_that_take_turns(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        rng = random.Random(seed)
        specs = random_specs(rng, rng.choice(["float32", "bfloat16"]))
        source, *parts = (
            random_layout(rng, specs, stages=rng.random() < 0.5) for _ in range(1 + rng.choice([1, 1, 2, 3]))
        )
        sink = parts[0] if len(parts) == 1 else JoinedLayout(tuple(parts))  # replicas of one size, or of several
        copies = check_plan(source, sink, full_values(specs), seed)
        check_turns(source, sink, copies, seed)


def check_turns(source: MeshLayout, sink: AnyLayout, copies: list[Copied], seed: int) -> None:
    """Of one box of a parameter, the sink ranks of a mesh that want it ask the source ranks that hold it in turn."""
    asked: dict[object, list[Copied]] = defaultdict(list)
    for copy in copies:
        meshes = sink.parts if isinstance(sink, JoinedLayout) else (sink,)
        ends = accumulate(mesh.num_ranks for mesh in meshes)
        mesh = next(number for number, end in enumerate(ends) if copy.sink_rank < end)
        asked[copy.parameter, copy.box, copy.sink_slice, mesh].append(copy)
    for of_box in asked.values():
        holders = source.grids[of_box[0].parameter].holders(of_box[0].source_rank)
        in_order = sorted(of_box, key=lambda copy: copy.sink_rank)
        assert [copy.source_rank for copy in in_order] == [
            holders[turn % len(holders)] for turn in range(len(in_order))
        ], seed


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
        side = random_layout(rng, random_specs(rng), stages=True)
        there = MeshLayout.from_json(side.to_json(), side.parameters)
        assert there.grids == side.grids and there.mesh == side.mesh
        assert MeshLayout.from_json(there.to_json(), side.parameters) == there


def test_ranks_of_a_cell_count_row_by_row() -> None:
    """Stages 0 and 2 of three, the second half of the columns, all of four replicas."""
    layout = MeshLayout(W, {"pp": 3, "tp": 2, "dp": 4}, {"w": (Shard("tp", 1),)}, {"w": (0, 2)})
    holders = (4, 5, 6, 7, 20, 21, 22, 23)
    assert layout.grids["w"].meeting(((0, 3), (2, 4))) == [(((0, 3), (2, 4)), holders)]
    assert all(layout.grids["w"].holders(rank) == holders for rank in holders)


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
    catalog = Catalog.from_bytes(build_catalog(rule, 0, wire_dtypes={"embed": "bfloat16"}).to_bytes())
    assert catalog.layout.grids == rule.grids  # also of experts, which lie along axes of their own
    sink = MeshLayout(rule.parameters, {"rank": 2})
    copies = plan(rule, sink)
    assert sum(c.nbytes for c in copies) == 2 * sum(spec.nbytes for spec in rule.parameters.values())
    check_turns(rule, sink, copies, 0)


def test_a_sink_reads_no_byte_that_it_does_not_want() -> None:
    specs = {"norm": ParameterSpec((8,), "float32"), "down": ParameterSpec((8, 12), "float32"), "up": W["w"]}
    source = MeshLayout(specs, {"fsdp": 2}, dict.fromkeys(specs, (Shard("fsdp", 0),)))
    sink = MeshLayout(specs, {"tp": 4}, {"down": (Shard("tp", 1),), "up": (Shard("tp", 0),)})
    for rank in range(4):
        wanted = copies_to_sink(source, sink, rank)
        read = 0
        for of in range(2):
            boxes = [(copy.parameter, copy.box) for copy in wanted if copy.source_rank == of]
            for block in build_catalog(source, of, sink=sink).blocks:  # as large as all of it
                if any(r.parameter == name and intersect(r.box, box) for r in block.regions for name, box in boxes):
                    read += sum(region.nbytes for region in block.regions)
        assert read == sum(4 * box_elements(copy.box) for copy in wanted)
