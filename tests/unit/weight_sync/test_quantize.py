"""Weights that travel as codes and scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender, WeightVersion
from llamarl.errors import WeightSyncError
from llamarl.weight_sync.layout import Layout, ParameterSpec, Shard, mesh_layout
from llamarl.weight_sync.quantize import (
    QuantizedKind,
    dequantize,
    load_dequantized,
    quantize,
    quantize_shards,
    quantized_layout,
)

SPEC = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator")


def test_int8_codes_and_scales_by_hand() -> None:
    weight = torch.tensor([[127.0, -64.0, 0.5, 0.25, 10.0], [0.0, 0.0, -2.0, 1.0, 0.0]])
    codes, scale = quantize(weight, "int8", group=2)
    assert codes.tolist() == [[127, -64, 127, 64, 127], [0, 0, -127, 64, 0]]  # 0.25 / (0.5 / 127) = 63.5 -> 64
    torch.testing.assert_close(scale, torch.tensor([[1.0, 0.5 / 127, 10.0 / 127], [0.0, 2.0 / 127, 0.0]]))
    back = dequantize(codes, scale, 2, torch.float32)
    torch.testing.assert_close(back[0, [0, 1, 4]], weight[0, [0, 1, 4]])


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.5 / 127), ("fp8", 1 / 16)])
def test_error_is_at_most_half_a_step(kind: str, bound: float) -> None:
    weight = torch.randn(33, 70, generator=torch.Generator().manual_seed(0))
    codes, scale = quantize(weight, kind, group=16)  # type: ignore[arg-type]
    error = (dequantize(codes, scale, 16, torch.float32) - weight).abs()
    groups = torch.nn.functional.pad(weight, (0, 10)).view(33, 5, 16)
    largest = groups.abs().amax(dim=2).repeat_interleave(16, dim=1)[:, :70]
    limit = largest * bound if kind == "int8" else weight.abs() * bound + largest * 2**-16
    assert bool((error <= limit * 1.0001).all())


def test_stacked_matrices_are_quantized_one_by_one() -> None:
    stack = torch.randn(3, 8, 10, generator=torch.Generator().manual_seed(2))
    codes, scale = quantize(stack, "int8", group=4)
    assert codes.shape == (3, 8, 10) and scale.shape == (3, 8, 3)
    for index in range(3):
        one, its_scale = quantize(stack[index], "int8", group=4)
        assert torch.equal(codes[index], one) and torch.equal(scale[index], its_scale)
    assert torch.equal(dequantize(codes, scale, 4, torch.float32)[1], dequantize(codes[1], scale[1], 4, torch.float32))
    edge = Edge()
    tensors, layout = quantize_shards(
        {"experts": stack}, None, rank=0, num_ranks=1, kind="int8", group=4, chosen=lambda name, spec: True
    )
    live = {"experts": torch.zeros_like(stack)}
    load_dequantized(edge.hand_over(tensors, layout), live, group=4)
    assert torch.equal(live["experts"], dequantize(codes, scale, 4, torch.float32))


def test_shards_hand_over_as_codes_at_a_quarter_of_the_bytes() -> None:
    specs = {"w": ParameterSpec((64, 256), "float32"), "norm": ParameterSpec((64,), "float32")}
    full = {n: torch.randn(s.shape, generator=torch.Generator().manual_seed(1)) for n, s in specs.items()}
    source = mesh_layout(specs, {"fsdp": 2}, {n: [Shard("fsdp", 0)] for n in specs})
    sink = mesh_layout(specs, {"tp": 2}, {"w": [Shard("tp", 1)]})
    counts = {"num_source_ranks": 2, "num_sink_ranks": 2}
    handles = []
    senders = [WeightsSender(SPEC, rank=r, **counts) for r in range(2)]
    for rank, sender in enumerate(senders):
        shards = {n: t.chunk(2)[rank].clone() for n, t in full.items()}
        tensors, layout = quantize_shards(
            shards, source, rank=rank, num_ranks=2, kind="int8", group=64, chosen=lambda name, spec: name == "w"
        )
        assert tensors["w"].dtype == torch.int8 and tensors["norm"] is shards["norm"]
        hint = quantized_layout(sink, {"w"}, kind="int8", group=64)
        handles.append(sender.send(0, WeightsPayload(version=1, tensors=tensors, layout=layout, sink_layout=hint)))
    expected = dequantize(*quantize(full["w"], "int8", 64), 64, torch.float32)
    for rank in range(2):
        version = WeightsReceiver(SPEC, rank=rank, **counts).receive(tuple(handles), 5.0)
        assert version is not None
        live = {"w": torch.zeros(64, 128), "norm": torch.zeros(64)}
        pulled = load_dequantized(version, live, sink, rank=rank, group=64)
        assert torch.equal(live["w"], expected.chunk(2, dim=1)[rank]) and torch.equal(live["norm"], full["norm"])
        assert (
            pulled < 64 * 256 + 2000
        )  # both ranks' codes, scales and norms in one small block each; float32 is 65,536


class Edge:
    """One trainer rank to one generator rank."""

    def __init__(self) -> None:
        ends = {"rank": 0, "num_source_ranks": 1, "num_sink_ranks": 1}
        self.sender, self.receiver = WeightsSender(SPEC, **ends), WeightsReceiver(SPEC, **ends)

    def hand_over(
        self, tensors: dict[str, torch.Tensor], layout: Layout | None = None, **changes: Any
    ) -> WeightVersion:
        handle = self.sender.send(0, WeightsPayload(version=1, tensors=tensors, layout=layout, **changes))
        version = self.receiver.receive((handle,), 5.0)
        assert version is not None
        return version


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_wire_dtype_casts_the_rest_and_neither_codes_nor_scales(kind: QuantizedKind) -> None:
    full = {n: torch.randn(64, c, generator=torch.Generator().manual_seed(c)) for n, c in (("w", 256), ("embed", 8))}
    tensors, layout = quantize_shards(
        full, None, rank=0, num_ranks=1, kind=kind, group=64, chosen=lambda name, spec: name == "w"
    )
    edge = Edge()
    version = edge.hand_over(tensors, layout, wire_dtype=torch.bfloat16)
    dtypes = {name: spec.dtype for name, spec in version.parameters.items()}
    codes = {"int8": "int8", "fp8": "float8_e4m3fn"}[kind]
    assert dtypes == {"w": codes, "w.scale": "float32", "embed": "bfloat16"}
    live = {name: torch.zeros_like(t) for name, t in full.items()}
    load_dequantized(version, live, group=64)
    assert torch.equal(live["w"], dequantize(*quantize(full["w"], kind, 64), 64, torch.float32))
    assert torch.equal(live["embed"], full["embed"].bfloat16().float())


def test_codes_of_an_unknown_kind_are_named() -> None:
    edge, sent = Edge(), {"w": torch.zeros(4, 64, dtype=torch.uint8), "w.scale": torch.ones(4, 1)}
    with pytest.raises(
        WeightSyncError, match=r"1 quantized parameters \(w, ...\) as uint8; known .*int8, float8_e4m3fn"
    ):
        load_dequantized(edge.hand_over(sent), {"w": torch.zeros(4, 64)}, group=64)


def test_float8_without_scales_is_no_wire_dtype() -> None:
    with pytest.raises(WeightSyncError, match="without scales .* quantize the tensors instead"):
        Edge().hand_over({"a": torch.tensor([1.0, 1000.0])}, wire_dtype=torch.float8_e4m3fn)


def test_group_that_straddles_two_ranks_is_refused() -> None:
    specs = {"w": ParameterSpec((4, 100), "float32")}
    layout = mesh_layout(specs, {"tp": 2}, {"w": [Shard("tp", 1)]})
    with pytest.raises(ValueError, match="columns 0 to 50 of 100, which cuts a group of 32"):
        quantized_layout(layout, {"w"}, kind="int8", group=32)
