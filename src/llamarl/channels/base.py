"""A channel: a directed, named, bounded edge between two executors.

The source's shell turns a payload into a *handle* (where the bytes lie, how many, their checksum); the controller moves
the handle; the sink's shell pulls the payload straight from the source. A handle is small whatever the payload's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from llamarl.transports.table import transport_kind

__all__ = ["ChannelKind", "ChannelSpec", "Handle", "Receiver", "Sender"]

Handle = Any
"""Small and picklable; only the two ends of a channel look inside."""


class ChannelKind(Enum):
    """How the ranks of the two ends relate (LlamaRL, Sec. 4)."""

    GATHER = "gather"
    """Each source rank's items, concatenated in rank order, arrive at every sink rank."""
    SCATTER = "scatter"
    """The source's items are split over the sink's data-parallel ranks, balanced by cost."""
    BROADCAST = "broadcast"
    """Source rank 0's payload arrives at every sink rank."""
    WEIGHTS = "weights"
    """Parameters by DDMA: trainer shards to generator shards, resharded on the way."""


@dataclass(frozen=True, kw_only=True)
class ChannelSpec:
    """One edge of the dataflow graph."""

    name: str
    kind: ChannelKind
    source: str
    sink: str
    delay: int = 0
    """The sink's tick k takes the token the source made at tick k - delay."""
    capacity: int = 1
    """Most tokens on the edge at once, >= max(1, delay). The source waits when the edge is full."""
    latest: bool = False
    """Beside the token of tick k - delay, which it always waits for, the sink may take any later
    one that lies on the edge, and hears of new ones while it works: it gets a
    :class:`llamarl.executors.base.Feed` instead of a payload."""
    transport: str = "shared_memory"
    """What carries it: a name of ``llamarl.transports.table``, or an import path. One on a device
    is for WEIGHTS alone."""
    kept: bool = False
    """Data only: each token gets memory of its own, which is never written again, so that whoever
    holds it may read it at any later time. Else ``capacity + 1`` slots are written in turn."""
    elastic: bool = False
    """GATHER and SCATTER: the source's ranks may be another number from token to token. Their order says all."""
    sink_replicas: int = 1
    """Consecutive sink ranks that receive the same part of a SCATTER: the tensor- and
    context-parallel peers of one data-parallel rank."""
    sink_stages: int = 1
    """How often the sink's ranks go through the parts of a SCATTER: each pipeline stage has all of them."""

    @property
    def fetched_ahead(self) -> bool:
        """Whether the sink hears of a token while it still works on the one before, so that its
        bytes can come meanwhile: weights that travel between hosts."""
        return self.kind is ChannelKind.WEIGHTS and transport_kind(self.transport).between_hosts


class Sender(Protocol):
    """The source's end, one a source rank."""

    def send(self, tick: int, payload: Any) -> Handle:
        """Publish the token of ``tick``. It stays readable until ``capacity`` later tokens have been sent."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The sink's end, one a sink rank."""

    def receive(self, handles: tuple[Handle, ...], deadline_s: float) -> Any:
        """Pull one token whole. ``handles`` holds one a source rank.

        Raises:
            ChannelError: The source is gone, or the bytes do not match the handle.
            DeadlineExceeded: It took longer than ``deadline_s`` seconds.
        """
        ...

    def close(self) -> None: ...
