"""A version that an engine computes with where it lies: the same bits, nothing copied, and never a torn one."""

import dataclasses
from typing import Any

import pytest
import torch
from engine_runs import run

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.errors import DeadlineExceeded, WeightSyncError
from llamarl.executors.version_loader import serve
from llamarl.settings.engine import EngineConfig
from llamarl.transports.slots import SlotState, Word
from llamarl.weight_sync.layout import MeshLayout, ParameterSpec, Shard

SPEC = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator")
ENDS = {"rank": 0, "num_source_ranks": 1, "num_sink_ranks": 1}


def engine(quantization: str = "none") -> NativeEngine:
    return NativeEngine("bundled:tiny", EngineConfig(), quantization=quantization)


def weights(of: NativeEngine, version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in of.parameters_for_sync().items()}


def sampled(by: NativeEngine) -> tuple[list[int], list[float]]:
    params = SamplingParams(max_new_tokens=12, temperature=1.0)
    sequence = Sequence(prompt_index=0, sample_index=0, prompt_tokens=[3, 5, 7], params=params, seed=11)
    run(by, [sequence])
    return sequence.tokens, sequence.logprobs


class Edge:
    """One trainer rank to one generator rank."""

    def __init__(self) -> None:
        self.sender, self.receiver = WeightsSender(SPEC, **ENDS), WeightsReceiver(SPEC, **ENDS)

    def hand_over(self, version: int, tensors: dict[str, torch.Tensor], **changes: Any) -> Any:
        handle = self.sender.send(version, WeightsPayload(version=version, tensors=tensors, **changes))
        return self.receiver.receive((handle,), 60.0)

    @property
    def slot(self) -> torch.Tensor:
        slot = self.sender._slots[0]
        return slot.buffer.data


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_serving_in_place_gives_the_bits_of_serving_a_copy(quantization: str) -> None:
    edge, in_place, copying = Edge(), engine(quantization), engine(quantization)
    initial = sampled(copying)
    for version in (1, 2):
        tensors = weights(copying, version)
        served = serve(edge.hand_over(version, tensors), in_place)
        assert served.in_place is not None and in_place.policy_version == version
        for name, tensor in copying.parameters_for_sync().items():
            tensor.copy_(tensors[name])
        copying.weights_updated(version)
        expected = sampled(copying)
        assert sampled(in_place) == expected and expected != initial
        served.check()


class ShardedEdge:
    """A trainer of two FSDP ranks to one generator rank that holds the whole model."""

    def __init__(self) -> None:
        ends = {"num_source_ranks": 2, "num_sink_ranks": 1}
        self.senders = [WeightsSender(SPEC, rank=rank, **ends) for rank in range(2)]
        self.receiver = WeightsReceiver(SPEC, rank=0, **ends)

    def hand_over(self, version: int, tensors: dict[str, torch.Tensor]) -> Any:
        specs = {name: ParameterSpec(tuple(t.shape), "float32") for name, t in tensors.items()}
        layout = MeshLayout(specs, {"fsdp": 2}, {name: [Shard("fsdp", 0)] for name in specs})
        handles = []
        for rank, sender in enumerate(self.senders):
            held = {p.parameter: tensors[p.parameter][slice(*p.box[0])].clone() for p in layout.pieces_of(rank)}
            handles.append(sender.send(version, WeightsPayload(version=version, tensors=held, layout=layout)))
        return self.receiver.receive(tuple(handles), 60.0)


def test_weights_cut_over_ranks_go_into_the_engines_own_parameters_without_new_memory() -> None:
    edge, of = ShardedEdge(), engine()
    where = {name: t.data_ptr() for name, t in of.parameters_for_sync().items()}
    for version in (1, 2):
        sent = weights(of, version)
        assert serve(edge.hand_over(version, sent), of).in_place is None
        live = of.parameters_for_sync()
        assert {name: t.data_ptr() for name, t in live.items()} == where
        assert all(torch.equal(live[name], tensor) for name, tensor in sent.items())


@pytest.mark.parametrize("use", ["in place", "loaded"])
def test_serving_ends_within_the_channels_pull_deadline(use: str) -> None:
    edge, of = Edge(), engine()
    sent = weights(of, 1)
    dtype = None if use == "in place" else torch.bfloat16
    handle = edge.sender.send(1, WeightsPayload(version=1, tensors=sent, wire_dtype=dtype))
    slot = edge.sender._slots[0]
    version = edge.receiver.receive((dataclasses.replace(handle, manifest_checksum=None),), 0.2)
    slot.words[Word.STATE], slot.words[Word.PROGRESS] = SlotState.WRITING, 0  # the source has stopped in the middle
    version._slots[0]._known = 0
    with pytest.raises(DeadlineExceeded, match=r"limit 0\.2 s"):
        serve(version, of)


def test_engine_reads_the_slot_itself() -> None:
    edge, of = Edge(), engine()
    serve(edge.hand_over(1, weights(of, 1)), of)
    name, parameter = next(iter(of._runner._parameters.items()))
    before = parameter.clone()
    edge.slot.zero_()
    assert before.abs().sum() > 0 and not parameter.abs().sum(), name


def test_slot_that_is_written_while_it_is_served_is_found() -> None:
    edge, of = Edge(), engine()
    served = serve(edge.hand_over(1, weights(of, 1)), of)
    served.check()
    edge.hand_over(2, weights(of, 2))
    with pytest.raises(WeightSyncError, match="version 2, generation 2; expected .*version 1, generation 1"):
        served.check()


def test_flipped_byte_is_refused_and_the_engine_keeps_what_it_had() -> None:
    edge, of = Edge(), engine()
    expected = sampled(of)
    version = edge.hand_over(1, weights(of, 1))
    edge.slot[1000] ^= 1
    with pytest.raises(WeightSyncError, match="do not match the manifest's checksum"):
        serve(version, of)
    assert of.policy_version == 0 and sampled(of) == expected


def test_copies_between_gpus_that_arrive_wrong_are_told_with_the_way_round_them() -> None:
    """Where an IOMMU is on, they can be all zeros, in each run anew."""
    edge, of = Edge(), engine()
    version = edge.hand_over(1, weights(of, 1))
    slot = version._slots[0]
    slot.handle = dataclasses.replace(slot.handle, transport="cuda_ipc")
    edge.slot.zero_()
    with pytest.raises(WeightSyncError, match="an IOMMU.*set schedule.transport to shared_memory"):
        serve(version, of)


def test_parameters_asked_for_writing_are_own_copies_again() -> None:
    edge, of = Edge(), engine()
    sent = weights(of, 1)
    serve(edge.hand_over(1, sent), of)
    for tensor in of.parameters_for_sync().values():
        tensor.zero_()
    again = edge.receiver.receive((edge.sender.publish(WeightsPayload(version=2, tensors=sent)),), 60.0)
    assert again is not None and serve(again, of).in_place is not None


def test_other_precision_is_copied_and_cast() -> None:
    edge, of = Edge(), engine()
    sent = weights(of, 1)
    served = serve(edge.hand_over(1, sent, wire_dtype=torch.bfloat16), of)
    assert served.in_place is None
    for name, tensor in of.parameters_for_sync().items():
        assert torch.equal(tensor, sent[name].to(torch.bfloat16).float()), name


def test_parameters_that_do_not_fit_are_named() -> None:
    of = engine()
    tensors = dict(of.parameters_for_sync())
    name = next(iter(tensors))
    with pytest.raises(ValueError, match=f"{name}: the engine holds .*got nothing"):
        of.adopt({k: v for k, v in tensors.items() if k != name})
    assert not of.can_adopt({k: "float32" for k in tensors if k != name})
    assert not of.can_adopt(dict.fromkeys(tensors, "bfloat16"))
