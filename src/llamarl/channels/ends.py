"""Makes the two ends of a channel from its spec.

In a job on several hosts what is ``shared_memory`` on one goes by ``tcp``, which maps what lies
here and reads the rest over a socket, pair by pair.
"""

from __future__ import annotations

from llamarl.channels.base import ChannelKind, ChannelSpec, Receiver, Sender
from llamarl.channels.data import DataReceiver, DataSender
from llamarl.channels.weights import WeightsReceiver, WeightsSender
from llamarl.transports.table import name_here, transport_kind

__all__ = ["make_receiver", "make_sender", "num_parts"]


def make_sender(spec: ChannelSpec, *, rank: int, num_source_ranks: int, num_sink_ranks: int) -> Sender:
    """The end of source rank ``rank``."""
    kind = WeightsSender if spec.kind is ChannelKind.WEIGHTS else DataSender
    return kind(
        spec,
        rank=rank,
        num_source_ranks=num_source_ranks,
        num_sink_ranks=num_parts(spec, num_sink_ranks),
        transport=transport_kind(name_here(spec.transport)).source(num_sink_ranks=num_sink_ranks),
    )


def make_receiver(spec: ChannelSpec, *, rank: int, num_source_ranks: int, num_sink_ranks: int) -> Receiver:
    """The end of sink rank ``rank``."""
    kind = WeightsReceiver if spec.kind is ChannelKind.WEIGHTS else DataReceiver
    parts = num_parts(spec, num_sink_ranks)
    return kind(
        spec,
        rank=rank // spec.sink_replicas % parts if spec.kind is ChannelKind.SCATTER else rank,
        num_source_ranks=num_source_ranks,
        num_sink_ranks=parts,
        transport=transport_kind(name_here(spec.transport)).sink(rank=rank),
    )


def num_parts(spec: ChannelSpec, num_sink_ranks: int) -> int:
    """Sink ranks that differ in what they receive; tensor- and context-parallel peers and pipeline
    stages count once."""
    if spec.kind is not ChannelKind.SCATTER:
        return num_sink_ranks
    return num_sink_ranks // (spec.sink_replicas * spec.sink_stages)
