"""The transfer plan on layouts small enough to work out by hand."""

from __future__ import annotations

import pytest
from fused_layout import fuse

from llamarl.errors import PlanError
from llamarl.weight_sync.layout import (
    Layout,
    ParameterSpec,
    Piece,
    Shard,
    chunk_bounds,
    mesh_layout,
    replicated_layout,
    subtract,
)
from llamarl.weight_sync.plan import plan_transfer

W = {"w": ParameterSpec((8, 4), "float32")}


def test_rows_of_two_shards_to_three() -> None:
    source = mesh_layout(W, {"fsdp": 2}, {"w": [Shard("fsdp", 0)]})
    sink = mesh_layout(W, {"tp": 3}, {"w": [Shard("tp", 0)]})
    copies = [
        (c.source_rank, c.sink_rank, c.box[0], c.source_slice[0], c.sink_slice[0])
        for c in plan_transfer(source, sink).copies
    ]
    assert copies == [
        (0, 0, (0, 3), (0, 3), (0, 3)),
        (0, 1, (3, 4), (3, 4), (0, 1)),
        (1, 1, (4, 6), (0, 2), (1, 3)),
        (1, 2, (6, 8), (2, 4), (0, 2)),
    ]


def test_rows_to_columns_meet_in_every_pair() -> None:
    source = mesh_layout(W, {"fsdp": 2}, {"w": [Shard("fsdp", 0)]})
    sink = mesh_layout(W, {"tp": 2}, {"w": [Shard("tp", 1)]})
    plan = plan_transfer(source, sink)
    assert [(c.source_rank, c.sink_rank, c.box) for c in plan.copies] == [
        (0, 0, ((0, 4), (0, 2))),
        (1, 0, ((4, 8), (0, 2))),
        (0, 1, ((0, 4), (2, 4))),
        (1, 1, ((4, 8), (2, 4))),
    ]
    assert plan.sent_bytes() == [64, 64] and plan.received_bytes() == [64, 64]
    assert plan.link_bytes() == {(0, 0): 32, (0, 1): 32, (1, 0): 32, (1, 1): 32}


def test_chunks_follow_torch_also_where_some_are_empty() -> None:
    assert [chunk_bounds(10, 4, i) for i in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [chunk_bounds(5, 4, i) for i in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def test_uneven_shards_leave_a_rank_without_a_piece() -> None:
    specs = {"w": ParameterSpec((5, 2), "float32")}
    source = mesh_layout(specs, {"fsdp": 4}, {"w": [Shard("fsdp", 0)]})
    assert [len(p) for p in source.pieces] == [1, 1, 1, 0]
    plan = plan_transfer(source, replicated_layout(specs, 1))
    assert [(c.source_rank, c.box[0]) for c in plan.copies] == [(0, (0, 2)), (1, (2, 4)), (2, (4, 5))]


def test_tensor_parallelism_cuts_before_fsdp() -> None:
    source = mesh_layout(W, {"fsdp": 2, "tp": 2}, {"w": [Shard("tp", 0), Shard("fsdp", 0)]})
    assert [p[0].box[0] for p in source.pieces] == [(0, 2), (4, 6), (2, 4), (6, 8)]  # rank = fsdp * 2 + tp


def test_replicated_sources_share_the_load() -> None:
    specs = {f"w{i}": ParameterSpec((4, 4), "float32") for i in range(6)}
    plan = plan_transfer(replicated_layout(specs, 3), replicated_layout(specs, 2))
    assert plan.sent_bytes() == [256, 256, 256]  # 6 parameters x 2 sinks x 64 bytes over 3 sources


def test_fused_sink_takes_its_parts_from_split_parameters() -> None:
    specs = {
        "q": ParameterSpec((8, 4), "float32"),
        "k": ParameterSpec((4, 4), "float32"),
        "v": ParameterSpec((4, 4), "float32"),
    }
    cut = {name: [Shard("tp", 0)] for name in specs}
    sink = fuse(mesh_layout(specs, {"tp": 2}, cut), {"qkv": ["q", "k", "v"]})
    plan = plan_transfer(replicated_layout(specs, 1), sink)
    rank1 = [(c.parameter, c.source_slice[0], c.sink_tensor, c.sink_slice[0]) for c in plan.to_sink(1)]
    assert rank1 == [("q", (4, 8), "qkv", (0, 4)), ("k", (2, 4), "qkv", (4, 6)), ("v", (2, 4), "qkv", (6, 8))]


def test_fused_source_is_split_at_the_sink() -> None:
    specs = {"gate": ParameterSpec((2, 4), "float32"), "up": ParameterSpec((2, 4), "float32")}
    source = fuse(replicated_layout(specs, 1), {"gate_up": ["gate", "up"]})
    plan = plan_transfer(source, replicated_layout(specs, 1))
    assert [(c.parameter, c.source_tensor, c.source_slice[0]) for c in plan.copies] == [
        ("gate", "gate_up", (0, 2)),
        ("up", "gate_up", (2, 4)),
    ]


def test_tied_weight_fills_both_tensors_of_the_sink() -> None:
    box = ((0, 8), (0, 4))
    sink = Layout(W, ((Piece("w", box, "embed", (0, 0)), Piece("w", box, "lm_head", (0, 0))),))
    plan = plan_transfer(replicated_layout(W, 1), sink)
    assert [(c.sink_tensor, c.nbytes) for c in plan.copies] == [("embed", 128), ("lm_head", 128)]


def test_scalar_parameter_is_one_copy() -> None:
    specs = {"scale": ParameterSpec((), "float32")}
    plan = plan_transfer(replicated_layout(specs, 2), replicated_layout(specs, 1))
    assert [(c.box, c.nbytes) for c in plan.copies] == [((), 4)]


def test_subtract_leaves_disjoint_boxes_around_the_hole() -> None:
    rest = subtract(((0, 4), (0, 4)), ((1, 2), (1, 3)))
    assert rest == [((0, 1), (0, 4)), ((2, 4), (0, 4)), ((1, 2), (0, 1)), ((1, 2), (3, 4))]


def test_overlapping_source_boxes_write_each_element_once() -> None:
    held = (Piece("w", ((0, 5), (0, 4)), "w", (0, 0)),), (Piece("w", ((3, 8), (0, 4)), "w", (0, 0)),)
    plan = plan_transfer(Layout(W, held), replicated_layout(W, 1))
    assert [(c.source_rank, c.box[0], c.source_slice[0]) for c in plan.copies] == [
        (0, (0, 5), (0, 5)),
        (1, (5, 8), (2, 5)),
    ]


def test_part_that_nobody_holds_is_named() -> None:
    source = Layout(W, ((Piece("w", ((0, 5), (0, 4)), "w", (0, 0)),),))
    with pytest.raises(PlanError, match=r"\(\(5, 8\), \(0, 4\)\) of 'w'"):
        plan_transfer(source, replicated_layout(W, 1))


def test_names_and_shapes_must_agree() -> None:
    other = {"v": ParameterSpec((8, 4), "float32")}
    with pytest.raises(PlanError, match="source does not send: v"):
        plan_transfer(replicated_layout(W, 1), replicated_layout(other, 1))
    both = W | other
    with pytest.raises(PlanError, match="no sink rank holds: v"):
        plan_transfer(replicated_layout(both, 1), replicated_layout(W, 1))
    assert len(plan_transfer(replicated_layout(both, 1), replicated_layout(W, 1), allow_unused=True).copies) == 1
    with pytest.raises(PlanError, match=r"\(8, 4\) at the source, \(4, 8\) at the sink"):
        plan_transfer(replicated_layout(W, 1), replicated_layout({"w": ParameterSpec((4, 8), "float32")}, 1))


def test_piece_outside_its_parameter_is_refused() -> None:
    with pytest.raises(PlanError, match="rank 0 holds box"):
        Layout(W, ((Piece("w", ((0, 9), (0, 4)), "w", (0, 0)),),))
