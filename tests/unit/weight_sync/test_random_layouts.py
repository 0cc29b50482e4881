"""Random layouts on both sides: the plan, and the real hand-over, against gather-then-slice."""

import math
import random
from dataclasses import dataclass

import numpy as np
import torch

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.weight_sync.layout import STAGE_AXIS, AnyLayout, Box, MeshLayout, ParameterSpec, Shard, dtype_bytes
from llamarl.weight_sync.plan import copies_to_sink

NUM_HAND_OVERS = 24


def random_specs(rng: random.Random, dtype: str = "float32") -> dict[str, ParameterSpec]:
    """One to five parameters of 0 to 3 dimensions; sizes down to 1, so that shards come out uneven and empty."""
    return {
        f"p{i}": ParameterSpec(tuple(rng.randint(1, 9) for _ in range(rng.choice([0, 1, 2, 2, 2, 3]))), dtype)
        for i in range(rng.randint(1, 5))
    }


def random_layout(rng: random.Random, specs: dict[str, ParameterSpec], *, stages: bool = False) -> MeshLayout:
    """A mesh of up to three axes; each parameter cut along some of them, into a part a rank or fewer that neighbours share.
    With stages, the places of one more axis have some of the parameters each, or two places the same."""
    axes = [f"a{i}" for i in range(rng.randint(1, 2 if stages else 3))]
    mesh = {axis: rng.choice([1, 2, 3, 4]) for axis in axes}
    cuts = {
        name: tuple(random_cut(rng, axis, mesh[axis], spec) for axis in rng.sample(axes, rng.randint(0, len(axes))))
        for name, spec in specs.items()
        if spec.shape
    }
    if not stages:
        return MeshLayout(specs, mesh, cuts)
    of = {name: tuple(sorted({rng.randrange(3), rng.randrange(3)})) for name in specs}
    order = rng.sample([*mesh.items(), (STAGE_AXIS, 3)], len(mesh) + 1)
    return MeshLayout(specs, dict(order), cuts, of)


def random_cut(rng: random.Random, axis: str, size: int, spec: ParameterSpec) -> Shard:
    """Sometimes into at most as many parts as go evenly over the ranks, or into more parts than there are ranks."""
    at_most = rng.choice([None, None, *(parts for parts in range(1, size) if size % parts == 0), size + 1])
    return Shard(axis, rng.randrange(len(spec.shape)), at_most)


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


def slice_of_gathered(layout: AnyLayout, rank: int, full: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The slow way: what rank holds if someone gathered the model and cut it."""
    return {p.parameter: np.array(full[p.parameter][slices(p.box)]) for p in layout.pieces_of(rank)}


@dataclass(frozen=True)
class Copied:
    """A copy of the plan, who makes it, and where it is taken from."""

    parameter: str
    box: Box
    source_rank: int
    source_slice: Box
    sink_rank: int
    sink_slice: Box
    nbytes: int


def plan(source: MeshLayout, sink: AnyLayout) -> list[Copied]:
    """What all sink ranks pull."""
    held = [{p.parameter: p.box for p in source.pieces_of(rank)} for rank in range(source.num_ranks)]
    found = []
    for rank in range(sink.num_ranks):
        for copy in copies_to_sink(source, sink, rank):
            corner = [low for low, _ in held[copy.source_rank][copy.parameter]]
            there = tuple((a - low, b - low) for (a, b), low in zip(copy.box, corner, strict=True))
            size = math.prod(b - a for a, b in copy.box) * dtype_bytes(source.parameters[copy.parameter].dtype)
            found.append(Copied(copy.parameter, copy.box, copy.source_rank, there, rank, copy.sink_slice, size))
    return found


def check_plan(source: MeshLayout, sink: AnyLayout, full: dict[str, np.ndarray], seed: int) -> list[Copied]:
    """Every sink element is written exactly once, with the gathered value; returns all copies."""
    held = [slice_of_gathered(source, rank, full) for rank in range(source.num_ranks)]
    found = plan(source, sink)
    for rank in range(sink.num_ranks):
        expected = slice_of_gathered(sink, rank, full)
        got = {name: np.zeros_like(value) for name, value in expected.items()}
        copies = [copy for copy in found if copy.sink_rank == rank]
        for c in copies:  # += so that a second copy of an element is seen
            got[c.parameter][slices(c.sink_slice)] += held[c.source_rank][c.parameter][slices(c.source_slice)]
        for name, value in expected.items():
            np.testing.assert_array_equal(got[name], value, err_msg=f"seed {seed}, rank {rank}, {name}")
        sizes = {name: value.size for name, value in expected.items()}
        assert sum(c.nbytes for c in copies) == sum(
            dtype_bytes(source.parameters[name].dtype) * size for name, size in sizes.items()
        )
    return found


def test_hand_over_equals_gather_then_slice() -> None:
    spec = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator")
    for seed in range(NUM_HAND_OVERS):
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
            expected = slice_of_gathered(sink, rank, full)
            live = {name: torch.zeros(value.shape) for name, value in expected.items()}
            version = receiver.receive(handles, 30.0)
            version.load_into(live, sink, 30.0)
            for name, value in expected.items():
                np.testing.assert_array_equal(live[name].numpy(), value, err_msg=f"seed {seed}, rank {rank}, {name}")
            mapped = version.map_tensors()
            in_one_piece = all(
                value.shape == full[name].shape for name, value in slice_of_gathered(source, 0, full).items()
            )
            if hint is None:
                assert (mapped is not None) is (
                    in_one_piece and slice_of_gathered(source, 0, full).keys() == full.keys()
                )
            for name, value in full.items() if mapped is not None else ():
                np.testing.assert_array_equal(mapped[name].numpy(), value, err_msg=f"seed {seed}, {name}")
            del mapped
            receiver.close()
        for sender in senders:
            sender.close()
