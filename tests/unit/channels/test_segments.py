"""Shared memory segments: what a reader sees, and how a wrong segment is told from the right one."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from llamarl.errors import ChannelError
from llamarl.transports.segments import Segment, open_segment, tensor_over


@pytest.fixture
def segment() -> Segment:
    return Segment(1000)


def test_reader_sees_what_the_owner_writes_without_a_copy(segment: Segment) -> None:
    reader = open_segment(segment.handle)
    segment.bytes[3] = 7
    assert reader.bytes[3] == 7
    tensor = tensor_over(reader.bytes)
    segment.bytes[999] = 9
    assert int(tensor[999]) == 9
    assert len(reader.bytes) == 1000


def test_reader_cannot_write(segment: Segment) -> None:
    with pytest.raises(ValueError, match="read-only"):
        open_segment(segment.handle).bytes[0] = 1


def test_other_nonce_is_refused(segment: Segment) -> None:
    stale = dataclasses.replace(segment.handle, nonce=bytes(16))
    with pytest.raises(ChannelError, match="not the one the handle names"):
        open_segment(stale)


def test_larger_size_than_the_file_is_refused(segment: Segment) -> None:
    with pytest.raises(ChannelError, match="replaced"):
        open_segment(dataclasses.replace(segment.handle, size=1 << 20))


def test_closed_segment_cannot_be_opened_but_open_readers_keep_their_pages(segment: Segment) -> None:
    reader = open_segment(segment.handle)
    segment.bytes[0] = 5
    segment.close()
    segment.close()
    with pytest.raises(ChannelError, match="segment of process"):
        open_segment(segment.handle)
    assert reader.bytes[0] == 5


def test_descriptor_recycled_for_another_segment_is_refused() -> None:
    first = Segment(64)
    handle = first.handle
    first.close()
    second = Segment(64)
    assert second.handle.fd == handle.fd, "the kernel hands out the lowest free descriptor"
    with pytest.raises(ChannelError, match="not the one the handle names"):
        open_segment(handle)
    second.close()


def test_descriptor_recycled_for_a_pipe_is_refused_without_waiting() -> None:
    segment = Segment(64)
    handle = segment.handle
    segment.close()
    read_end, write_end = os.pipe()
    try:
        assert handle.fd in (read_end, write_end)
        with pytest.raises(ChannelError, match="something else"):
            open_segment(handle)
    finally:
        os.close(read_end)
        os.close(write_end)


def open_and_mapped() -> list[str]:
    """Files that this process holds: other processes may use /dev/shm meanwhile."""
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [*opened, *mapped]


def num_in(folder: str, names: list[str]) -> int:
    return sum(name.startswith(folder) for name in names)


def test_dev_shm_is_not_touched() -> None:
    before = open_and_mapped()
    segment = Segment(8 << 20)
    segment.bytes[:] = 1
    reader = open_segment(segment.handle)
    after = open_and_mapped()
    assert num_in("/memfd:llamarl", after) >= num_in("/memfd:llamarl", before) + 2, "the owner's pages, the reader's"
    assert num_in("/dev/shm", after) <= num_in("/dev/shm", before)
    reader.close()
    segment.close()


def test_memory_starts_at_zero() -> None:
    assert not np.any(Segment(4096).bytes)
