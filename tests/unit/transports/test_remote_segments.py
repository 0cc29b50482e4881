"""Segments of another space, read over a socket: the bytes, who is let in, and what a dead or slow owner looks like."""

import dataclasses
import errno
import gc
import mmap
import os
import pickle
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import signed
from other_space import KEY, being_at, place
from waiting import wait_until

from llamarl.errors import ChannelError, ConfigError, DeadlineExceeded
from llamarl.transports import remote_segment
from llamarl.transports.network import TlsFiles
from llamarl.transports.remote_segment import RemoteSegment
from llamarl.transports.run_key import KeyRefused, prove_as_client
from llamarl.transports.segment_server import Limits, SegmentServer, server_here
from llamarl.transports.segments import Segment, SegmentHandle, is_elsewhere, open_segment

A, B = place("a"), place("b")

pytestmark = pytest.mark.usefixtures("alone")


def made(size: int = 1000) -> Segment:
    """A segment of space a, with byte i = i mod 251."""
    with being_at(A):
        segment = Segment(size)
    segment.bytes[:] = np.arange(size) % 251
    return segment


def read(remote: RemoteSegment, offset: int, count: int, deadline_s: float = 5.0) -> list[int]:
    into = np.zeros(count, np.uint8)
    remote.read(offset, into, deadline_s)
    return into.tolist()


def expected(remote: RemoteSegment, offset: int, count: int) -> list[int]:
    into = np.zeros(count, np.uint8)
    remote.read(offset, into, 5.0, fresh=False)
    return into.tolist()


def dial(server: SegmentServer, key: bytes = KEY, purpose: str = "segments") -> socket.socket:
    connection = socket.create_connection(server.endpoint, timeout=5)
    prove_as_client(connection, key, purpose, 5)
    return connection


def test_job_on_one_machine_listens_nowhere_and_its_handles_are_as_small_as_ever() -> None:
    segment = Segment(64)
    assert server_here() is None
    assert (segment.handle.space, segment.handle.endpoint) == ("", ("", 0))
    assert not is_elsewhere(segment.handle)
    blob = pickle.dumps(segment.handle)
    assert pickle.loads(blob) == segment.handle
    assert b"127.0.0.1" not in blob and len(blob) < 110
    with being_at(A):
        assert pickle.loads(pickle.dumps(made().handle)).space == "a"


def test_memory_that_cannot_be_had_is_one_error_and_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refused)
    unraised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ChannelError, match="cannot allocate a shared segment of 4,106 bytes"):
        Segment(10)
    gc.collect()
    assert os.listdir("/proc/self/fd") == before and not unraised


def test_segment_of_another_space_is_read_over_a_socket_as_its_owner_last_wrote_it() -> None:
    segment = made()
    with being_at(B):
        assert is_elsewhere(segment.handle)
        remote = RemoteSegment(segment.handle, 5.0)
        assert read(remote, 250, 3) == [250, 0, 1]
        segment.bytes[251] = 77
        assert read(remote, 250, 3) == [250, 77, 1]
        assert read(remote, 0, 1000)[-1] == 999 % 251
    with being_at(A):
        assert not is_elsewhere(segment.handle)
        assert open_segment(segment.handle).bytes[251] == 77


def test_expected_bytes_come_in_order_also_between_other_reads() -> None:
    segment = made(1 << 16)
    with being_at(B):
        remote = RemoteSegment(segment.handle, 5.0)
        for start in range(0, 700, 100):
            remote.expect(start, 100, 5.0)
        assert read(remote, 5000, 1) == [5000 % 251]  # on a connection of its own
        for start in range(0, 700, 100):
            assert expected(remote, start, 100) == [i % 251 for i in range(start, start + 100)]
        assert remote.num_expected == 0
        remote.expect(0, 100, 5.0)
        remote.forget()
        segment.bytes[:] = 9
        assert expected(remote, 0, 100) == [9] * 100  # and not what was expected before


def test_range_outside_the_segment_is_refused_in_words_and_the_connection_goes_on() -> None:
    segment = made()
    with being_at(B):
        remote = RemoteSegment(segment.handle, 5.0)
        with pytest.raises(ChannelError, match="bytes 990 to 1001 lie outside its 1000"):
            read(remote, 990, 11)
        with pytest.raises(ChannelError, match="outside"):
            read(remote, (1 << 64) - 4, 4)
        assert read(remote, 999, 1) == [999 % 251]


def test_foreign_nonce_reads_nothing() -> None:
    segment = made()
    with being_at(B), pytest.raises(ChannelError, match="closed it or restarted"):
        RemoteSegment(dataclasses.replace(segment.handle, nonce=bytes(16)), 5.0)


def test_closed_segment_is_told_from_one_that_is_held() -> None:
    segment = made()
    with being_at(B):
        remote = RemoteSegment(segment.handle, 5.0)
        remote.check(5.0)
        segment.close()
        with pytest.raises(ChannelError, match="its owner has closed it"):
            remote.check(5.0)
        with pytest.raises(ChannelError, match="its owner has closed it"):
            read(remote, 0, 1)


def test_dead_owner_is_the_same_error_as_on_one_host() -> None:
    segment = made()
    server = server_of(segment)
    with being_at(B):
        remote = RemoteSegment(segment.handle, 5.0)
        server.close()
        with pytest.raises(ChannelError, match="its owner has ended"):
            read(remote, 0, 10)
        with pytest.raises(ChannelError, match="its owner has ended"):
            RemoteSegment(segment.handle, 5.0)


def server_of(segment: Segment) -> SegmentServer:
    assert segment._server is not None
    return segment._server


def test_reader_with_another_key_is_refused() -> None:
    segment = made()
    with being_at(place("b", key=bytes(32))), pytest.raises(ChannelError, match="cannot be opened.*another run's"):
        RemoteSegment(segment.handle, 5.0)
    wait_until(lambda: server_of(segment).num_refused == 3)
    with being_at(B):
        assert read(RemoteSegment(segment.handle, 5.0), 1, 1) == [1]


def test_proof_for_another_purpose_is_refused() -> None:
    segment = made()
    with pytest.raises(KeyRefused):
        dial(server_of(segment), purpose="orders")


def test_owner_that_does_not_answer_runs_into_the_readers_deadline() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    handle = SegmentHandle(1, 3, 100, bytes(16), space="a", endpoint=listener.getsockname()[:2])
    with being_at(B), pytest.raises(DeadlineExceeded, match="connecting"):
        RemoteSegment(handle, 0.2)
    listener.close()


def test_owner_that_stops_in_the_middle_of_an_answer_runs_into_the_readers_deadline() -> None:
    segment = made()
    handle = segment.handle
    with being_at(B):
        remote = RemoteSegment(handle, 5.0)
        connection = remote._owner.idle[0]
        ours, theirs = socket.socketpair()
        connection._socket.close()
        connection._socket = ours
        theirs.sendall(struct.pack("<QQ", 0, 100) + bytes(40))
        ours.settimeout(0.05)
        with pytest.raises(DeadlineExceeded, match="40 of 100 bytes came"):
            read(remote, 0, 100, deadline_s=0.2)
        theirs.close()


def test_half_open_connections_are_ended_and_hold_up_nobody() -> None:
    server = SegmentServer(A, Limits(unproved=4, proof_s=0.3))
    silent = [socket.create_connection(server.endpoint) for _ in range(20)]
    server.register(bytes(16), memoryview(b"abc"))
    connection = dial(server)
    connection.sendall(struct.pack("<16sQQ", bytes(16), 1, 2))
    assert connection.recv(100, socket.MSG_WAITALL)[:18] == struct.pack("<QQ", 0, 2) + b"bc"
    wait_until(lambda: (len(server._unproved), len(server._proved)) == (0, 1))
    for end in silent:
        end.settimeout(5)
        while end.recv(100):  # its challenge, then the end
            pass
        end.close()
    assert server.num_refused == 20
    server.close()


def test_peer_that_takes_nothing_is_ended_and_others_are_served_meanwhile() -> None:
    memory = memoryview(bytes(64 << 20))
    server = SegmentServer(A, Limits(stall_s=0.3))
    server.register(bytes(16), memory)
    lazy, quick = dial(server), dial(server)
    lazy.sendall(struct.pack("<16sQQ", bytes(16), 0, memory.nbytes))
    quick.sendall(struct.pack("<16sQQ", bytes(16), 0, 4))
    assert len(quick.recv(20, socket.MSG_WAITALL)) == 20
    wait_until(lambda: (len(server._unproved), len(server._proved)) == (0, 1))
    server.close()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_reader_that_took_nothing_for_longer_than_its_owner_waits_reads_on(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memoryview(bytes(range(256)) * (1 << 17))  # 32 MiB: more than sockets hold
    server = SegmentServer(A, Limits(stall_s=0.1))
    server.register(bytes(16), memory)
    with being_at(B):
        remote = RemoteSegment(SegmentHandle(1, 1, memory.nbytes, bytes(16), "a", server.endpoint), 5.0)
    remote._owner.idle.clear()

    def stop() -> None:  # until the owner has ended what this process reads by
        wait_until(lambda: server.sent_bytes == memory.nbytes and not server._proved)

    if ahead:
        remote.expect(0, memory.nbytes, 5.0)
        stop()
    else:
        take, once = remote_segment._Connection.take, iter([stop])

        def take_late(connection: Any, *words: Any) -> None:
            next(once, lambda: None)()
            take(connection, *words)

        monkeypatch.setattr(remote_segment._Connection, "take", take_late)
    into = np.zeros(memory.nbytes, np.uint8)
    remote.read(0, into, 5.0, fresh=not ahead)
    assert into.data == memory
    remote.close()
    server.close()


def test_a_reader_whose_connection_broke_before_it_asked_for_more_reads_on() -> None:
    memory = memoryview(bytes(range(256)) * (1 << 17))
    first, piece = memory.nbytes - (2 << 20), 1 << 20
    server = SegmentServer(A, Limits(stall_s=0.1))
    server.register(bytes(16), memory)
    with being_at(B):
        remote = RemoteSegment(SegmentHandle(1, 1, memory.nbytes, bytes(16), "a", server.endpoint), 5.0)
    remote._owner.idle.clear()
    remote.expect(0, first, 5.0)
    wait_until(lambda: server.sent_bytes == first and not server._proved)
    for offset in (first, first + piece):  # to the first the owner's kernel answers that there is nobody
        remote.expect(offset, piece, 5.0)
    into = np.zeros(memory.nbytes, np.uint8)
    for offset, end in ((0, first), (first, first + piece), (first + piece, memory.nbytes)):
        remote.read(offset, into[offset:end], 5.0, fresh=False)
    assert into.data == memory
    remote.close()
    server.close()


def test_half_a_request_is_not_waited_for_beyond_its_limit() -> None:
    server = SegmentServer(A, Limits(stall_s=0.1))
    connection = dial(server)
    connection.sendall(b"12345")
    assert connection.recv(100) == b""
    server.close()


def test_reader_beyond_the_limit_is_told_why() -> None:
    server = SegmentServer(A, Limits(proved=1))
    server.register(bytes(16), memoryview(b"abc"))
    request = struct.pack("<16sQQ", bytes(16), 0, 3)
    first = dial(server)
    first.sendall(request)
    assert first.recv(19, socket.MSG_WAITALL).endswith(b"abc")  # it is the one, whichever thread would have been first
    second = dial(server)
    second.sendall(request)
    assert b"1 readers already" in second.recv(200)
    first.sendall(request)
    assert first.recv(19, socket.MSG_WAITALL).endswith(b"abc")
    server.close()


@pytest.mark.parametrize("number", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_connections_opened_and_dropped_by_the_thousand_leave_it_serving(number: int) -> None:
    server = SegmentServer(A)
    server.register(bytes(16), memoryview(b"abc"))

    def knock() -> None:
        for _ in range(number // 4):
            connection = socket.create_connection(server.endpoint, timeout=10)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no TIME_WAIT
            connection.close()

    threads = [threading.Thread(target=knock) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    wait_until(lambda: not server._unproved and not server._proved, 30)
    connection = dial(server)
    connection.sendall(struct.pack("<16sQQ", bytes(16), 0, 3))
    assert connection.recv(19, socket.MSG_WAITALL).endswith(b"abc")
    server.close()


def test_server_listens_on_its_own_address_and_in_the_port_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1, ports {port} to {port}"):
            SegmentServer(place("a", ports=(port, port)))
        server = SegmentServer(place("a", ports=(port, port + 50)))
        assert server.endpoint[0] == "127.0.0.1" and port < server.endpoint[1] <= port + 50
        server.close()


def test_port_of_a_server_that_hung_up_on_its_readers_is_free_for_the_next() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first = SegmentServer(place("a", ports=(port, port)))
    with dial(first) as reader:
        first.close()
        assert reader.recv(1) == b"", "the end that hangs up first waits in the kernel, on its port"
    second = SegmentServer(place("a", ports=(port, port)))
    assert second.endpoint[1] == port
    second.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[TlsFiles, TlsFiles]:
    """(Signed by the job's authority, by another one.)"""
    folder = tmp_path_factory.mktemp("tls")
    return signed(folder / "ours"), signed(folder / "theirs")


def test_tls_both_ways_carries_bytes_and_refuses_other_certificates_and_none(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    ours, theirs = certificates
    with being_at(place("a", tls=ours)):
        segment = Segment(3 << 20)
    segment.bytes[:] = 5
    with being_at(place("b", tls=ours)):
        remote = RemoteSegment(segment.handle, 5.0)
        remote.expect(0, 1 << 20, 5.0)
        assert read(remote, 0, 1 << 20) == [5] * (1 << 20)
        assert read(remote, 0, 3 << 20)[-1] == 5
    with being_at(place("c", tls=theirs)), pytest.raises(ChannelError, match="cannot be opened"):
        RemoteSegment(segment.handle, 5.0)
    with being_at(place("c")), pytest.raises(DeadlineExceeded, match="connecting"):  # each waits for the other's words
        RemoteSegment(segment.handle, 0.2)


def test_certificates_that_cannot_be_read_are_a_mistake_with_their_names(tmp_path: Path) -> None:
    nothing = TlsFiles(certificate=tmp_path / "c.pem", private_key=tmp_path / "k.pem", authority=tmp_path / "a.pem")
    with pytest.raises(ConfigError, match="c.pem"):
        SegmentServer(place("a", tls=nothing))
