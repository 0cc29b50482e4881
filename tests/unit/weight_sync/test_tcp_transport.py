"""Weights over the tcp transport: equal bytes from another space, mapped in the same one, and every fault told as elsewhere."""

import pytest
import torch
from other_space import being_at, place

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.ends import make_receiver, make_sender
from llamarl.errors import WeightSyncError
from llamarl.transports.checksum import BLOCK_BYTES
from llamarl.transports.table import transport_kind
from llamarl.transports.tcp import TcpSink, TcpSource
from llamarl.weight_sync.sink import Puller
from llamarl.weight_sync.slot import SlotHandle
from llamarl.weight_sync.source import Publisher, WeightsPayload

A, B = place("a"), place("b")

pytestmark = pytest.mark.usefixtures("alone")


def tensors(seed: int = 0, blocks: float = 5.5) -> dict[str, torch.Tensor]:
    """Several blocks in all: a large tensor, and small ones that share a block."""
    generator = torch.Generator().manual_seed(seed)
    rows = int(blocks * BLOCK_BYTES) // 4096
    large = torch.randn(rows, 1024, generator=generator)
    return {"large": large, "a": torch.randn(3, 5, generator=generator), "b": torch.randn(7, generator=generator)}


def published(source: dict[str, torch.Tensor], version: int = 1) -> tuple[Publisher, SlotHandle]:
    publisher = Publisher(rank=0, num_source_ranks=1, num_slots=1, transport=TcpSource())
    with being_at(A):
        return publisher, publisher.publish(WeightsPayload(version=version, tensors=source))


def empty_like(source: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in source.items()}


def assert_equal(one: dict[str, torch.Tensor] | None, other: dict[str, torch.Tensor]) -> None:
    assert one is not None and one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_versions_come_whole_from_another_space_and_cannot_be_mapped() -> None:
    source = tensors()
    publisher, handle = published(source)
    puller = Puller(rank=0, num_sink_ranks=1, transport=TcpSink())
    live = empty_like(source)
    for version in (1, 2, 3):
        with being_at(B):
            opened = puller.open([handle], 10.0)
            assert opened.map_tensors() is None
            opened.load_into(live)
        assert_equal(live, source)
        source = tensors(seed=version)
        with being_at(A):
            handle = publisher.publish(WeightsPayload(version=version + 1, tensors=source))
    puller.close()
    publisher.close()


def test_a_block_altered_at_the_source_is_pulled_again_and_then_refused() -> None:
    source = tensors()
    publisher, handle = published(source)
    slot = publisher._slots[0]
    slot.blocks[2][17] ^= 1
    with being_at(B), pytest.raises(WeightSyncError, match="large: the bytes pulled 3 times do not match"):
        Puller(rank=0, num_sink_ranks=1, transport=TcpSink()).open([handle], 10.0).load_into(empty_like(source))
    slot.blocks[2][17] ^= 1
    live = empty_like(source)
    with being_at(B):
        Puller(rank=0, num_sink_ranks=1, transport=TcpSink()).open([handle], 10.0).load_into(live)
    assert_equal(live, source)
    publisher.close()


def test_a_source_that_ends_is_named_as_on_one_host() -> None:
    source = tensors()
    publisher, handle = published(source)
    with being_at(B):
        puller = Puller(rank=0, num_sink_ranks=1, transport=TcpSink())
        opened = puller.open([handle], 10.0)
        publisher.close()
        with pytest.raises(WeightSyncError, match="its owner has closed it or restarted.*this version is not served"):
            opened.load_into(empty_like(source))


def test_on_one_machine_tcp_is_shared_memory() -> None:
    source = tensors()
    publisher = Publisher(
        rank=0, num_source_ranks=1, num_slots=1, transport=transport_kind("tcp").source(num_sink_ranks=1)
    )
    handle = publisher.publish(WeightsPayload(version=1, tensors=source))
    assert handle.address.space == ""
    opened = Puller(rank=0, num_sink_ranks=1, transport=transport_kind("tcp").sink(rank=0)).open([handle], 10.0)
    assert_equal(opened.map_tensors(), source)
    publisher.close()


@pytest.mark.parametrize("kind", [ChannelKind.GATHER, ChannelKind.SCATTER, ChannelKind.BROADCAST])
def test_data_channels_mix_spaces_pair_by_pair(kind: ChannelKind) -> None:
    spec = ChannelSpec(name="c", kind=kind, source="s", sink="t")
    counts = {"num_source_ranks": 2, "num_sink_ranks": 2}
    senders = []
    for rank, where in enumerate((A, B)):
        with being_at(where):
            senders.append(make_sender(spec, rank=rank, **counts))
    payloads = [[torch.full((5000,), float(rank)).numpy(), f"from {rank}"] for rank in range(2)]
    handles = []
    for rank, where in enumerate((A, B)):
        with being_at(where):
            handles.append(senders[rank].send(0, payloads[rank]))
    seen: list[list[str]] = []
    for rank, where in enumerate((A, place("c"))):  # maps from a and reads from b; reads from both
        with being_at(where):
            receiver = make_receiver(spec, rank=rank, **counts)
            items = receiver.receive(tuple(handles), 10.0)
            seen.append(sorted(item for item in items if isinstance(item, str)))
            assert all(float(item[4999]) in (0.0, 1.0) for item in items if not isinstance(item, str))
            receiver.close()
    if kind is ChannelKind.GATHER:
        assert seen == [["from 0", "from 1"]] * 2
    elif kind is ChannelKind.BROADCAST:
        assert seen == [["from 0"]] * 2
    else:
        assert sorted(seen[0] + seen[1]) == ["from 0", "from 1"]
    for sender in senders:
        sender.close()
