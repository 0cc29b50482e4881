"""What a transport does: one side registers a buffer and writes into it, the other reads it one-sidedly.

    source                                            sink
    buffer = transport.register(nbytes)               remote = transport.open(buffer.address)
    write into buffer.data, then publish the address  remote.read(offset, into)   no code runs at the source

A transport moves bytes and nothing else: versions, checksums and second attempts are the caller's, and so the same for
all of them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Address", "RemoteBuffer", "SinkTransport", "SourceBuffer", "SourceTransport"]

Address = Any
"""Small and picklable: it travels in the channel's handle."""


class SourceBuffer(Protocol):
    """Memory at the source that sinks can read."""

    @property
    def data(self) -> torch.Tensor:
        """uint8 [nbytes], writable; where the source puts its bytes."""
        ...

    @property
    def address(self) -> Address: ...

    def close(self) -> None: ...


class SourceTransport(Protocol):
    """Registers buffers."""

    name: str

    def register(self, nbytes: int) -> SourceBuffer:
        """A zero-filled buffer that sinks can read.

        Raises:
            WeightSyncError: There is not that much memory.
        """
        ...

    def close(self) -> None: ...


class RemoteBuffer(Protocol):
    """A source's buffer as a sink sees it."""

    def view(self) -> torch.Tensor | None:
        """uint8 [nbytes] over the source's own bytes if they are mapped here, else None. Read-only."""
        ...

    def read(self, offset: int, into: torch.Tensor, deadline_s: float) -> None:
        """Copy ``into.numel()`` bytes from ``offset`` into a contiguous uint8 tensor.

        Raises:
            WeightSyncError: The source is gone.
            DeadlineExceeded: It took longer than ``deadline_s`` seconds.
        """
        ...

    def check_source(self) -> None:
        """Raise WeightSyncError if the source is known to be gone. Cheap: asked while waiting for a slow source."""
        ...

    def close(self) -> None: ...


class SinkTransport(Protocol):
    """Opens buffers that a source has registered."""

    name: str

    def open(self, address: Address) -> RemoteBuffer:
        """Connect to a buffer.

        Raises:
            WeightSyncError: The source is gone, or the address now means something else.
        """
        ...

    def close(self) -> None: ...
