"""What a transport does: one side registers a buffer and writes into it, the other reads it one-sidedly.

    source                                            sink
    buffer = transport.register(control, data bytes)  remote = transport.open(buffer.address)
    write into buffer.data, then publish the address  remote.read(offset, into)   no code runs at the source

A buffer has two parts that follow each other in one space of offsets: *control* (header, catalog, checksums), always in
host memory, and *data*, on whatever device the transport serves.

A transport moves bytes and nothing else: versions, checksums and second attempts are the caller's, and so the same for
all of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch

from llamarl.transports.checksum import ChecksumKind
from llamarl.transports.deadline import Clock

__all__ = ["Address", "RemoteBuffer", "SinkTransport", "SourceBuffer", "SourceTransport", "Transport"]

Address = Any
"""Small and picklable: it travels in the channel's handle."""


class SourceBuffer(Protocol):
    """Memory at the source that sinks can read."""

    @property
    def control(self) -> torch.Tensor:
        """uint8 [control_bytes] in host memory, writable."""
        ...

    @property
    def data(self) -> torch.Tensor:
        """uint8 [data_bytes], writable; where the source puts the payload."""
        ...

    @property
    def address(self) -> Address: ...

    def close(self) -> None: ...


class SourceTransport(Protocol):
    """Registers buffers."""

    name: str
    checksum: ChecksumKind
    """What runs at memory speed where the data lies."""
    block_bytes: int
    """Bytes copied and checksummed at a time."""

    def register(self, control_bytes: int, data_bytes: int) -> SourceBuffer:
        """A zero-filled buffer that sinks can read.

        Raises:
            ChannelError: There is not that much memory.
        """
        ...

    def close(self) -> None:
        return  # each buffer is closed by who registered it


class RemoteBuffer(Protocol):
    """A source's buffer as a sink sees it. Methods with a body are those of one whose every read
    looks at the source's memory."""

    def view(self) -> torch.Tensor | None:
        """uint8 over all of the source's bytes if they are mapped in host memory here, else None. Read-only."""
        return None

    def read(self, offset: int, into: torch.Tensor, deadline_s: float, *, fresh: bool = False) -> None:
        """Copy ``into.numel()`` bytes from ``offset`` into a contiguous uint8 tensor.

        ``into`` lies in host memory for the control part, on the sink transport's ``device`` for the data part.

        Args:
            fresh: The source's bytes of this moment. Otherwise they may be those of an earlier ``expect``.

        Raises:
            ChannelError: The source is gone.
            DeadlineExceeded: It took longer than ``deadline_s`` seconds.
        """
        ...

    def expect(self, offset: int, nbytes: int, deadline_s: float) -> bool:
        """The bytes will be the next ``read`` that is not ``fresh``, after those expected before: a
        transport may have them sent while something else is done. False if it will not now.

        Raises: As ``read``.
        """
        return False

    def join_chain(
        self, mirror: Address, deadline_s: float, gone: Address | None = None
    ) -> tuple[bool, Address | None]:
        """Ask who reads this buffer for a host, and from whom (:mod:`llamarl.transports.segment_server`).

        Args:
            mirror: Where this process would keep its copy.
            gone: The copy that it was told of before, and that is not there any more.

        Returns:
            Whether this process reads for its host, and the copy that it reads; None: the buffer itself.

        Raises: As ``read``.
        """
        return False, None

    def forget(self) -> None:
        """Drop what was read and kept: another version is asked for from now on."""
        return

    def check_source(self) -> None:
        """Raise ChannelError if the source is known to be gone. Cheap: asked while waiting for a slow source."""
        ...

    def close(self) -> None: ...


class SinkTransport(Protocol):
    """Opens buffers that a source has registered."""

    name: str
    device: torch.device
    """Where the data part is read to, and proved."""

    def pulling(self, clock: Clock) -> AbstractContextManager[None]:
        """Around a whole pull: enters the stream to copy on; when left, what was pulled is in place.

        Raises:
            DeadlineExceeded: The clock ran out.
        """
        return nullcontext()

    def is_elsewhere(self, address: Address) -> bool:
        """Whether a buffer lies on another host, so that it is worth reading once and passing on."""
        return False

    def open(self, address: Address, deadline_s: float) -> RemoteBuffer:
        """Connect to a buffer.

        Raises:
            ChannelError: The source is gone, or the address now means something else.
            DeadlineExceeded: It took longer than ``deadline_s`` seconds.
        """
        ...

    def close(self) -> None:
        return


class Transport(Protocol):
    """A kind of transport, as a table or a recipe names it: makes its two ends in the process of a rank."""

    on_device: ClassVar[bool] = False
    """Whether versions lie in the device's memory, in buffers that are made for as many sinks as there are."""
    between_hosts: ClassVar[bool] = False
    """Whether a sink may lie on another host, and so gains by hearing of a version while it still works."""

    @staticmethod
    def source(*, num_sink_ranks: int) -> SourceTransport:
        """The end of a source rank.

        Raises:
            ChannelError: The transport does not work here.
        """
        ...

    @staticmethod
    def sink(*, rank: int) -> SinkTransport:
        """The end of sink rank ``rank``; otherwise as ``source``."""
        ...
