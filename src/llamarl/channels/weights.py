"""The weights channel: a version of the parameters, from trainer shards to generator shards (DDMA).

    WeightsPayload ─▶ WeightsSender.send: copy into a slot, checksum, mark ready ─▶ handle (< 1 kB)
    handle of every source rank ─▶ WeightsReceiver.receive: open slots, prove manifests ─▶ WeightVersion.load_into(tensors)

The bytes never leave the source's memory until a sink pulls them, each sink only the slices it
holds. A channel may also carry nothing at a tick (an evaluator's edge between evaluations): the
payload, and what is received, is then None.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.channels.base import ChannelSpec, Handle
from llamarl.errors import ChannelError
from llamarl.transports.base import SinkTransport, SourceTransport
from llamarl.transports.shared_memory import SharedMemorySink, SharedMemorySource
from llamarl.weight_sync.sink import Puller, WeightVersion
from llamarl.weight_sync.slot import SlotHandle
from llamarl.weight_sync.source import Publisher, WeightsPayload

__all__ = ["WeightVersion", "WeightsPayload", "WeightsReceiver", "WeightsSender"]


class WeightsSender(Publisher):
    """A source rank's end. Holds at most ``capacity`` slots, made when first needed and reused from then on.

    That many are enough: the source fires for token k only when the sink has finished with token k
    - capacity, so no more than ``capacity`` tokens are wanted at once. Ticks that send nothing
    count as tokens and take no slot.
    """

    def __init__(
        self,
        spec: ChannelSpec,
        *,
        rank: int,
        num_source_ranks: int,
        num_sink_ranks: int,
        transport: SourceTransport | None = None,
    ) -> None:
        super().__init__(
            rank=rank,
            num_source_ranks=num_source_ranks,
            num_slots=spec.capacity,
            transport=transport if transport is not None else SharedMemorySource(),
        )
        self._spec = spec

    def send(self, tick: int, payload: WeightsPayload | None) -> Handle:
        """Publish a version; None sends nothing at this tick.

        Raises:
            ValueError: The payload is no ``WeightsPayload``, or its tensors do not fit its layout.
            WeightSyncError: There is no memory for the slots, or the copy of the version before
                failed in the background.
        """
        if payload is None:
            self.skip()
            return None
        if not isinstance(payload, WeightsPayload):
            raise ValueError(
                f"channel {self._spec.name!r} carries WeightsPayload or None, got {type(payload).__name__}"
            )
        return self.publish(payload)


class WeightsReceiver(Puller):
    """A sink rank's end. ``receive`` pulls only manifests; ``WeightVersion.load_into`` pulls the weights."""

    def __init__(
        self,
        spec: ChannelSpec,
        *,
        rank: int,
        num_source_ranks: int,
        num_sink_ranks: int,
        transport: SinkTransport | None = None,
    ) -> None:
        super().__init__(
            rank=rank,
            num_sink_ranks=num_sink_ranks,
            transport=transport if transport is not None else SharedMemorySink(),
            name=f"channel {spec.name!r} ({spec.source} to {spec.sink})",
            fan_out=num_sink_ranks > 1,
        )
        self._spec = spec
        self._num_source_ranks = num_source_ranks

    def receive(self, handles: tuple[Handle, ...], deadline_s: float) -> WeightVersion | None:
        """Open one version.

        Args:
            deadline_s: Longest time for this, and for pulling the version later on unless that is given another.

        Raises:
            WeightSyncError: A source is gone, its slot is stale, or its manifest is torn.
            ChannelError: Some source ranks sent a version and others did not.
        """
        if all(handle is None for handle in handles):
            return None
        for rank, handle in enumerate(handles):
            if handle is None:
                raise ChannelError(f"channel {self._spec.name!r}: source rank {rank} sent no version, others did")
        return self.open(handles, deadline_s)

    def fetch_ahead(self, handles: Sequence[Handle], deadline_s: float) -> None:
        """A version that ``receive`` will be asked for lies at its source: where that is another
        host, its bytes begin to come.

        Any thread; returns at once. What goes wrong is told by ``receive``.
        """
        slots = [handle for handle in handles if isinstance(handle, SlotHandle)]
        if len(slots) == self._num_source_ranks:
            super().fetch_ahead(slots, deadline_s)
