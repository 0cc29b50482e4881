"""Messages on a stream of bytes between two processes of ours: a kind, a length, then so many bytes."""

from __future__ import annotations

import struct

__all__ = ["BrokenFrame", "Frames", "frame"]

_HEAD = struct.Struct("!BQ")


class BrokenFrame(Exception):
    """Bytes that are no message, or one that is too long."""


def frame(kind: int, blob: bytes) -> bytes:
    """A message as it stands on the stream."""
    return _HEAD.pack(kind, len(blob)) + blob


class Frames:
    """Whole messages out of bytes that come in pieces.

    Args:
        most: Bytes of the longest message.
    """

    def __init__(self, most: int = 1 << 62) -> None:
        self._most = most
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> list[tuple[int, bytes]]:
        """The messages that are whole with this piece: the kind of each, and what it says.

        Raises:
            BrokenFrame: A message says that it is longer than any may be.
        """
        self._bytes += piece
        whole, start = [], 0
        while len(self._bytes) - start >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._bytes, start)
            if length > self._most:
                raise BrokenFrame(f"a message of {length} bytes")
            end = start + _HEAD.size + length
            if len(self._bytes) < end:
                break
            whole.append((kind, bytes(self._bytes[start + _HEAD.size : end])))
            start = end
        del self._bytes[:start]
        return whole
