"""One hand-over inside one process: bits, casts, slots, and every fault that must never be served."""

import pickle
from typing import Any

import pytest
import torch
from slow_reads import slow_reads
from whole_versions import read_all

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.errors import ChannelError, DeadlineExceeded, WeightSyncError
from llamarl.transports.checksum import BLOCK_BYTES
from llamarl.transports.slots import PAGE, SlotState, Word
from llamarl.weight_sync.layout import MeshLayout, ParameterSpec, Shard


def ends(sources: int = 1, sinks: int = 1, capacity: int = 1) -> tuple[list[WeightsSender], list[WeightsReceiver]]:
    spec = ChannelSpec(
        name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator", delay=1, capacity=capacity
    )
    kw = {"num_source_ranks": sources, "num_sink_ranks": sinks}
    return [WeightsSender(spec, rank=r, **kw) for r in range(sources)], [
        WeightsReceiver(spec, rank=r, **kw) for r in range(sinks)
    ]


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(2500, 300, generator=g),  # 3 MB: several blocks
        "norm": torch.randn(300, generator=g),
        "scale": torch.randn((), generator=g),
        "up": torch.randn(300, 7, generator=g),
    }


def zeros_like(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(t.shape, dtype=dtype or t.dtype) for name, t in tensors.items()}


def assert_bits_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in got:
        assert got[name].dtype == expected[name].dtype and torch.equal(got[name], expected[name]), name


def flip(sender: WeightsSender, handle: Any, offset: int, mask: int = 1) -> None:
    """Flip bits of a byte of the data that lies in the slot of ``handle``."""
    sender._slots[handle.slot].buffer.data[offset] ^= mask


def test_fp32_arrives_bit_for_bit_with_its_version() -> None:
    (sender,), (receiver,) = ends()
    sent = model() | {"special": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])}
    version = receiver.receive((sender.send(0, WeightsPayload(version=7, tensors=sent)),), 5.0)
    got = zeros_like(sent)
    pulled = version.load_into(got)
    assert version.version == 7
    assert all(got[n].numpy().tobytes() == sent[n].numpy().tobytes() for n in sent)
    assert pulled >= sum(t.numel() * 4 for t in sent.values())


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, None], ids=["at the source", "at the sink"])
def test_a_cast_equals_torch_rounding(wire_dtype: torch.dtype | None) -> None:
    (sender,), (receiver,) = ends()
    sent = model()
    handle = sender.send(0, WeightsPayload(version=1, tensors=sent, wire_dtype=wire_dtype))
    got = zeros_like(sent, torch.bfloat16)
    receiver.receive((handle,), 5.0).load_into(got)
    assert_bits_equal(got, {n: t.to(torch.bfloat16) for n, t in sent.items()})


def test_source_may_change_its_tensors_after_send() -> None:
    (sender,), (receiver,) = ends()
    sent = model()
    expected = {n: t.clone() for n, t in sent.items()}
    handle = sender.send(0, WeightsPayload(version=1, tensors=sent))
    for tensor in sent.values():
        tensor.zero_()
    assert_bits_equal(read_all(receiver.receive((handle,), 5.0)), expected)


def test_handle_is_small_for_many_parameters() -> None:
    (sender,), _ = ends()
    tensors = {f"layer.{i}.weight": torch.zeros(10) for i in range(2000)}
    assert len(pickle.dumps(sender.send(0, WeightsPayload(version=0, tensors=tensors)))) < 1000


@pytest.mark.parametrize(("capacity", "every", "slots"), [(2, 3, 1), (2, 2, 1), (3, 2, 2), (4, 1, 4)])
def test_ticks_without_a_version_take_no_slot(capacity: int, every: int, slots: int) -> None:
    """A version is wanted for ``capacity`` ticks, so of those that come every n-th tick ceil(capacity / n) lie at once."""
    (sender,), (receiver,) = ends(capacity=capacity)
    handles: dict[int, Any] = {}
    for tick in range(12):
        due = tick % every == 0
        handle = sender.send(tick, WeightsPayload(version=tick, tensors=model(tick)) if due else None)
        handles |= {tick: handle} if due else {}
        for old in (t for t in handles if t > tick - capacity):
            assert_bits_equal(read_all(receiver.receive((handles[old],), 5.0)), model(old))
    assert len({handle.address for handle in handles.values()}) == slots


@pytest.mark.parametrize("capacity", [1, 3])
def test_versions_on_the_edge_stay_readable_and_older_ones_are_refused(capacity: int) -> None:
    (sender,), (receiver,) = ends(capacity=capacity)
    handles = []
    for version in range(3 * capacity):
        handles.append(sender.send(version, WeightsPayload(version=version, tensors=model(version))))
        for old in range(max(0, version - capacity + 1), version + 1):
            assert_bits_equal(read_all(receiver.receive((handles[old],), 5.0)), model(old))
        if version >= capacity:
            stale = version - capacity
            with pytest.raises(WeightSyncError, match=rf"version {stale} from source rank 0 .*raise the capacity"):
                receiver.receive((handles[stale],), 5.0)


def test_slot_overwritten_between_receive_and_load_is_refused() -> None:
    (sender,), (receiver,) = ends()
    version = receiver.receive((sender.send(0, WeightsPayload(version=0, tensors=model(0))),), 5.0)
    version.check_current()
    sender.send(1, WeightsPayload(version=1, tensors=model(1)))
    for use in (lambda: read_all(version), version.map_tensors, version.check_current):
        with pytest.raises(WeightSyncError, match="expected ready, version 0, generation 1"):
            use()


def test_a_version_that_is_served_outlives_its_source_also_when_the_next_comes_from_a_process_in_its_place() -> None:
    """Under the latest weights a generator serves what the trainer's former process wrote when its stand-in's
    first version comes, in the same slot."""
    (former,), (receiver,) = ends()
    served = receiver.receive((former.send(0, WeightsPayload(version=4, tensors=model(4))),), 5.0)
    views = served.map_tensors()
    assert views is not None
    former.close()
    (stand_in,), _ = ends()
    following = receiver.receive((stand_in.send(0, WeightsPayload(version=5, tensors=model(5))),), 5.0)
    served.check_current()
    assert_bits_equal(views, model(4))
    assert_bits_equal(read_all(following), model(5))
    assert_bits_equal(read_all(served), model(4))


def test_half_written_slot_is_refused() -> None:
    (sender,), (receiver,) = ends()
    handle = sender.send(0, WeightsPayload(version=4, tensors=model()))
    sender._slots[handle.slot].words[Word.STATE] = SlotState.WRITING
    with pytest.raises(WeightSyncError, match="is writing with version 4"):
        receiver.receive((handle,), 5.0)


@pytest.mark.parametrize("offset", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES + 17, 1_199_999])
def test_single_flipped_bit_is_named_and_never_served(offset: int) -> None:
    (sender,), (receiver,) = ends()
    handle = sender.send(0, WeightsPayload(version=5, tensors=model()))
    flip(sender, handle, offset, mask=0x10)
    version = receiver.receive((handle,), 5.0)
    with pytest.raises(WeightSyncError, match=r"version 5 from source rank 0 .*embed.*not served"):
        version.load_into(zeros_like(model()))


def test_swapped_blocks_are_found() -> None:
    (sender,), (receiver,) = ends()
    handle = sender.send(0, WeightsPayload(version=5, tensors=model()))
    data = sender._slots[handle.slot].buffer.data
    rows = sender._catalog.blocks
    assert rows[0].nbytes == rows[1].nbytes
    size = rows[0].nbytes
    first = data[:size].clone()
    data[:size] = data[size : 2 * size]
    data[size : 2 * size] = first
    with pytest.raises(WeightSyncError, match="embed"):
        read_all(receiver.receive((handle,), 5.0))


def test_altered_catalog_and_altered_checksums_are_found() -> None:
    for where in ("catalog", "checksums"):
        (sender,), (receiver,) = ends()
        handle = sender.send(0, WeightsPayload(version=5, tensors=model()))
        memory = sender._slots[handle.slot].buffer.control
        memory[(PAGE if where == "catalog" else handle.checksums_offset) + 3] ^= 1
        with pytest.raises(
            WeightSyncError, match=f"its {'catalog' if where == 'catalog' else 'manifest'} does not match"
        ):
            receiver.receive((handle,), 5.0)


def test_passing_fault_is_healed_by_another_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamarl.transports import shared_memory

    (sender,), (receiver,) = ends()
    handle = sender.send(0, WeightsPayload(version=5, tensors=model()))
    read, faults = shared_memory._Remote.read, []

    def torn(self: Any, offset: int, into: torch.Tensor, deadline_s: float, *, fresh: bool = False) -> None:
        read(self, offset, into, deadline_s, fresh=fresh)
        if offset >= handle.data_offset and len(faults) < 2:
            faults.append(offset)
            into[5] ^= 1

    monkeypatch.setattr(shared_memory._Remote, "read", torn)
    assert_bits_equal(read_all(receiver.receive((handle,), 5.0)), model())
    assert faults == [handle.data_offset] * 2


def test_parameters_that_do_not_fit_are_named() -> None:
    (sender,), (receiver,) = ends()
    version = receiver.receive((sender.send(0, WeightsPayload(version=1, tensors={"a": torch.ones(2)})),), 5.0)
    with pytest.raises(WeightSyncError, match="does not send: b"):
        version.load_into({"a": torch.zeros(2), "b": torch.zeros(2)})
    with pytest.raises(WeightSyncError, match=r"shape \(2,\) at the source, \(3,\) at the sink"):
        version.load_into({"a": torch.zeros(3)})


def test_different_versions_of_two_ranks_are_refused() -> None:
    senders, (receiver,) = ends(sources=2)
    handles = tuple(s.send(0, WeightsPayload(version=r, tensors={"a": torch.ones(2)})) for r, s in enumerate(senders))
    with pytest.raises(WeightSyncError, match=r"different versions \[0, 1\]"):
        receiver.receive(handles, 5.0)
    with pytest.raises(ChannelError, match="rank 1 sent no version"):
        receiver.receive((handles[0], None), 5.0)


def test_closed_source_is_gone() -> None:
    (sender,), (receiver,) = ends()
    handle = sender.send(0, WeightsPayload(version=1, tensors=model()))
    sender.close()
    with pytest.raises(WeightSyncError, match=r"version 1 from source rank 0 .*restart the source"):
        receiver.receive((handle,), 5.0)


def test_deadline_names_sink_version_and_limit() -> None:
    (sender,), (receiver,) = ends()
    version = receiver.receive((sender.send(0, WeightsPayload(version=3, tensors=model())),), 5.0)
    with pytest.raises(DeadlineExceeded, match=r"sink rank 0 is loading version 3: .*limit 0 s"):
        version.load_into(zeros_like(model()), deadline_s=0.0)


@pytest.mark.parametrize(("block_s", "comes"), [(40.0, True), (61.0, False)])
def test_a_version_may_take_as_long_as_it_must_while_blocks_come(
    monkeypatch: pytest.MonkeyPatch, block_s: float, comes: bool
) -> None:
    now = slow_reads(monkeypatch, block_s)
    (sender,), (receiver,) = ends()
    version = receiver.receive((sender.send(0, WeightsPayload(version=3, tensors=model())),), 60.0)
    got = zeros_like(model())
    if not comes:
        with pytest.raises(DeadlineExceeded, match=r"61\.0 s have passed .*limit 60 s"):
            version.load_into(got)
        return
    version.load_into(got)
    assert_bits_equal(got, model())
    assert now[0] == 160.0  # four blocks


def test_mapped_tensors_are_proved_views_of_the_slot() -> None:
    (sender,), (receiver,) = ends(capacity=2)
    handle = sender.send(0, WeightsPayload(version=0, tensors=model()))
    got = receiver.receive((handle,), 5.0).map_tensors()
    assert_bits_equal(got, model())
    slot = sender._slots[handle.slot].buffer.data
    at = bytes(slot.numpy()).find(model()["norm"].numpy().tobytes())
    slot[at] ^= 1
    assert not torch.equal(got["norm"], model()["norm"]), "the bytes are the source's own"
    with pytest.raises(WeightSyncError, match="embed|norm"):
        receiver.receive((handle,), 5.0).map_tensors()


def test_only_whole_parameters_in_one_piece_are_served_in_place() -> None:
    specs = {"w": ParameterSpec((8, 4), "float32")}
    rows = MeshLayout(specs, {"fsdp": 2}, {"w": [Shard("fsdp", 0)]})
    columns = MeshLayout(specs, {"tp": 2}, {"w": [Shard("tp", 1)]})
    whole = torch.arange(32.0).view(8, 4)
    senders, (receiver,) = ends(sources=2)
    for layout, hint, mapped in ((rows, None, False), (None, columns, False), (None, rows, True), (None, None, True)):
        tensor = whole if layout is None else whole[:4].clone()
        payload = WeightsPayload(version=1, tensors={"w": tensor}, layout=layout, sink_layout=hint)
        views = receiver.receive(tuple(sender.send(0, payload) for sender in senders), 5.0).map_tensors()
        assert (views is not None) is mapped
        assert views is None or torch.equal(views["w"], whole)


def test_layout_of_another_size_is_a_callers_mistake() -> None:
    (sender,), _ = ends()
    specs = {"w": ParameterSpec((8, 4), "float32")}
    layout = MeshLayout(specs, {"fsdp": 2}, {"w": [Shard("fsdp", 0)]})
    with pytest.raises(ValueError, match="counts 2 source ranks, the channel 1"):
        sender.send(0, WeightsPayload(version=1, tensors={"w": torch.ones(4, 4)}, layout=layout))
    with pytest.raises(ValueError, match="carries WeightsPayload or None"):
        sender.send(0, {"w": torch.ones(4, 4)})
