"""Random layouts on both sides: the plan, and the real hand-over, against gather-then-slice."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from fused_layout import fuse

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.weight_sync.layout import Box, Layout, ParameterSpec, Piece, Shard, box_elements, dtype_bytes, mesh_layout
from llamarl.weight_sync.plan import plan_transfer

NUM_LAYOUTS = 1200
NUM_HAND_OVERS = 60


def random_specs(rng: random.Random) -> dict[str, ParameterSpec]:
    """One to five parameters of 0 to 3 dimensions; sizes down to 1, so that shards come out uneven and empty."""
    return {
        f"p{i}": ParameterSpec(tuple(rng.randint(1, 9) for _ in range(rng.choice([0, 1, 2, 2, 2, 3]))), "float32")
        for i in range(rng.randint(1, 5))
    }


def random_layout(rng: random.Random, specs: dict[str, ParameterSpec]) -> Layout:
    """A mesh of up to three axes; each parameter cut along some of them, into a part a rank or fewer that neighbours share;
    sometimes fused, tied twice, cut irregularly."""
    axes = [f"a{i}" for i in range(rng.randint(1, 3))]
    mesh = {axis: rng.choice([1, 2, 3, 4]) for axis in axes}
    cuts = {
        name: [random_cut(rng, axis, mesh[axis], spec) for axis in rng.sample(axes, rng.randint(0, len(axes)))]
        for name, spec in specs.items()
        if spec.shape
    }
    layout = mesh_layout(specs, mesh, cuts)
    if rng.random() < 0.4:
        layout = fuse_alike(rng, layout)
    if rng.random() < 0.3:
        layout = second_tensor(rng, layout)
    if rng.random() < 0.3:
        layout = irregular(rng, layout)
    return layout


def random_cut(rng: random.Random, axis: str, size: int, spec: ParameterSpec) -> Shard:
    """Sometimes into at most as many parts as go evenly over the ranks, or into more parts than there are ranks."""
    at_most = rng.choice([None, None, *(parts for parts in range(1, size) if size % parts == 0), size + 1])
    return Shard(axis, rng.randrange(len(spec.shape)), at_most)


def fuse_alike(rng: random.Random, layout: Layout) -> Layout:
    """Fuse parameters that agree in all dimensions but one."""
    names = [n for n, s in layout.parameters.items() if len(s.shape) == 2]
    if len(names) < 2:
        return layout
    dim = rng.randrange(2)
    first = rng.choice(names)

    def other(rank: int, name: str) -> list[tuple[int, int]]:
        return [p.box[1 - dim] for p in layout.pieces[rank] if p.parameter == name]

    alike = [n for n in names if all(other(r, n) == other(r, first) for r in range(layout.num_ranks))]
    return fuse(layout, {"fused": alike}, dim=dim) if len(alike) > 1 else layout


def second_tensor(rng: random.Random, layout: Layout) -> Layout:
    """Tied: one parameter lies in two tensors of each rank."""
    name = rng.choice(list(layout.parameters))
    return Layout(
        layout.parameters,
        tuple(
            pieces
            + tuple(
                Piece(p.parameter, p.box, "tied copy", p.origin)
                for p in pieces
                if p.parameter == name and p.tensor == name
            )
            for pieces in layout.pieces
        ),
    )


def irregular(rng: random.Random, layout: Layout) -> Layout:
    """Move a piece inside a larger local tensor, and cut it in two at a random plane."""
    ranks = []
    for pieces in layout.pieces:
        result = []
        for p in pieces:
            dims = [d for d, (a, b) in enumerate(p.box) if b - a > 1]
            if p.tensor != p.parameter or not dims or rng.random() < 0.5:
                result.append(p)
                continue
            d = rng.choice(dims)
            at = rng.randint(p.box[d][0] + 1, p.box[d][1] - 1)
            for box in ((p.box[d][0], at), (at, p.box[d][1])):
                part = (*p.box[:d], box, *p.box[d + 1 :])
                result.append(Piece(p.parameter, part, f"{p.tensor}.{box[0]}", tuple(rng.randint(0, 2) for _ in p.box)))
        ranks.append(tuple(result))
    return Layout(layout.parameters, tuple(ranks))


def full_values(specs: dict[str, ParameterSpec]) -> dict[str, np.ndarray]:
    """Every element of every parameter has a value of its own."""
    start, values = 1, {}
    for name, spec in specs.items():
        size = math.prod(spec.shape)
        values[name] = np.arange(start, start + size, dtype=np.float32).reshape(spec.shape)
        start += size
    return values


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


def local_shapes(layout: Layout, rank: int) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for p in layout.pieces[rank]:
        need = [b for _, b in p.local_box]
        shapes[p.tensor] = [max(a, b) for a, b in zip(shapes.get(p.tensor, need), need, strict=True)]
    return shapes


def slice_of_gathered(layout: Layout, rank: int, full: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The slow way: what rank holds if someone gathered the model and cut it."""
    local = {name: np.zeros(shape, np.float32) for name, shape in local_shapes(layout, rank).items()}
    for p in layout.pieces[rank]:
        local[p.tensor][slices(p.local_box)] = full[p.parameter][slices(p.box)]
    return local


@pytest.mark.parametrize("block", range(8))
def test_plan_writes_every_sink_element_exactly_once_with_the_gathered_value(block: int) -> None:
    for seed in range(block * NUM_LAYOUTS // 8, (block + 1) * NUM_LAYOUTS // 8):
        rng = random.Random(seed)
        specs = random_specs(rng)
        source, sink = random_layout(rng, specs), random_layout(rng, specs)
        full = full_values(specs)
        held = [slice_of_gathered(source, rank, full) for rank in range(source.num_ranks)]
        plan = plan_transfer(source, sink)
        for rank in range(sink.num_ranks):
            expected = slice_of_gathered(sink, rank, full)
            got = {name: np.zeros_like(value) for name, value in expected.items()}
            writes = {name: np.zeros(value.shape, int) for name, value in expected.items()}
            for c in plan.to_sink(rank):
                got[c.sink_tensor][slices(c.sink_slice)] = held[c.source_rank][c.source_tensor][slices(c.source_slice)]
                writes[c.sink_tensor][slices(c.sink_slice)] += 1
            for name, value in expected.items():
                np.testing.assert_array_equal(got[name], value, err_msg=f"seed {seed}, rank {rank}, {name}")
                np.testing.assert_array_equal(writes[name], value > 0, err_msg=f"seed {seed}, rank {rank}, {name}")
        assert sum(plan.sent_bytes()) == sum(plan.received_bytes()) == sum(plan.link_bytes().values())
        held = [dtype_bytes(sink.parameters[p.parameter].dtype) * box_elements(p.box) for r in sink.pieces for p in r]
        assert sum(plan.received_bytes()) == sum(held)


def test_replicas_share_the_load_to_within_one_copy() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        specs = random_specs(rng)
        num_sources = rng.randint(2, 5)
        source = mesh_layout(specs, {"replica": num_sources}, {})
        plan = plan_transfer(source, random_layout(rng, specs))
        sent = plan.sent_bytes()
        assert max(sent) - min(sent) <= max(c.nbytes for c in plan.copies), seed


@pytest.mark.parametrize("block", range(4))
def test_hand_over_equals_gather_then_slice(block: int) -> None:
    spec = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator")
    for seed in range(block * NUM_HAND_OVERS // 4, (block + 1) * NUM_HAND_OVERS // 4):
        rng = random.Random(1_000_000 + seed)
        specs = random_specs(rng)
        source, sink = random_layout(rng, specs), random_layout(rng, specs)
        full = full_values(specs)
        hint = sink if rng.random() < 0.5 else None
        counts = {"num_source_ranks": source.num_ranks, "num_sink_ranks": sink.num_ranks}
        senders = [WeightsSender(spec, rank=rank, **counts) for rank in range(source.num_ranks)]
        handles = tuple(
            sender.send(
                0,
                WeightsPayload(
                    version=seed,
                    tensors={n: torch.from_numpy(v) for n, v in slice_of_gathered(source, rank, full).items()},
                    layout=source,
                    sink_layout=hint,
                ),
            )
            for rank, sender in enumerate(senders)
        )
        for rank in range(sink.num_ranks):
            receiver = WeightsReceiver(spec, rank=rank, **counts)
            live = {name: torch.zeros(shape) for name, shape in local_shapes(sink, rank).items()}
            version = receiver.receive(handles, 30.0)
            assert version is not None
            version.load_into(live, sink, 30.0)
            for name, value in slice_of_gathered(sink, rank, full).items():
                np.testing.assert_array_equal(live[name].numpy(), value, err_msg=f"seed {seed}, rank {rank}, {name}")
            mapped = version.map_tensors(sink, 30.0)
            for name, value in slice_of_gathered(sink, rank, full).items():
                held = value > 0  # where a larger local tensor has room between pieces, nothing is promised
                np.testing.assert_array_equal(mapped[name].numpy()[held], value[held], err_msg=f"seed {seed}, {name}")
            del mapped
            receiver.close()
        for sender in senders:
            sender.close()
