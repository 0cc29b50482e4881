"""Makes the two ends of a channel from its spec."""

from __future__ import annotations

from llamarl.channels.base import ChannelKind, ChannelSpec, Receiver, Sender
from llamarl.channels.data import DataReceiver, DataSender
from llamarl.channels.weights import WeightsReceiver, WeightsSender

__all__ = ["make_receiver", "make_sender"]


def make_sender(spec: ChannelSpec, *, rank: int, num_source_ranks: int, num_sink_ranks: int) -> Sender:
    """The end of source rank ``rank``."""
    make = WeightsSender if spec.kind is ChannelKind.WEIGHTS else DataSender
    return make(spec, rank=rank, num_source_ranks=num_source_ranks, num_sink_ranks=num_sink_ranks)


def make_receiver(spec: ChannelSpec, *, rank: int, num_source_ranks: int, num_sink_ranks: int) -> Receiver:
    """The end of sink rank ``rank``."""
    make = WeightsReceiver if spec.kind is ChannelKind.WEIGHTS else DataReceiver
    return make(spec, rank=rank, num_source_ranks=num_source_ranks, num_sink_ranks=num_sink_ranks)
