"""Who does not hold the key gets nothing from a worker, and keeps nobody out who does."""

from __future__ import annotations

import contextlib
import hmac
import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import signed
from loopback_hosts import KEY, LoopbackHost, loopback_hosts, worker_key, workers

from llamarl.errors import ConfigError
from llamarl.runtime.hosts.connection import WorkerKey, ask
from llamarl.runtime.hosts.wire import PURPOSE, Word, message
from llamarl.transports.run_key import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    answer_challenge,
    new_key,
    prove_as_client,
    receive_exactly,
)
from llamarl.transports.segment_wire import client_tls


@pytest.fixture
def host() -> Iterator[LoopbackHost]:
    with loopback_hosts("a") as (one,):
        yield one


def dial(host: LoopbackHost) -> socket.socket:
    return socket.create_connection((host.worker.address, host.worker.port), timeout=20.0)


def challenge_of(connection: socket.socket) -> bytes:
    return receive_exactly(connection, CHALLENGE_BYTES, time.monotonic() + 20.0)


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the other end hangs up, in whatever way."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            found += part
    return found


def still_serves(host: LoopbackHost) -> None:
    began = time.monotonic()
    assert ask(workers([host]), worker_key())[0][0].space == "a"
    assert time.monotonic() - began < 10.0


def test_a_wrong_key_is_refused_and_told_so(host: LoopbackHost) -> None:
    with pytest.raises(ConfigError, match="host a: the worker at 127.0.0.1:[0-9]+ does not take this key"):
        ask(workers([host]), WorkerKey(new_key()))
    still_serves(host)


def test_orders_before_the_proof_start_nothing(host: LoopbackHost) -> None:
    with dial(host) as connection:
        challenge_of(connection)
        order = {"label": "x", "folders": [], "environment": {}, "apart": False}
        connection.sendall((message(Word.HELLO, content={"silence_s": 5}) + message(Word.START, 1, order)) * 3)
        assert rest_of(connection) == b""
    still_serves(host)


def test_a_proof_that_was_right_once_is_worth_nothing_again(host: LoopbackHost) -> None:
    with dial(host) as first:
        answer, _ = answer_challenge(KEY, PURPOSE, challenge_of(first))
        first.sendall(answer)
        assert receive_exactly(first, 32, time.monotonic() + 20.0)
    with dial(host) as second:
        challenge_of(second)
        second.sendall(answer)
        assert rest_of(second) == b""


def test_a_proof_for_segments_opens_no_worker(host: LoopbackHost) -> None:
    with dial(host) as connection:
        answer, _ = answer_challenge(KEY, "segments", challenge_of(connection))
        connection.sendall(answer)
        assert rest_of(connection) == b""


def test_a_worker_that_holds_another_key_is_not_believed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"llamarl-key-1\n\x00\x00" + os.urandom(32))
        theirs.sendall(hmac.digest(new_key(), b"guess", "sha256"))
        with pytest.raises(Exception, match="does not hold this run's key"):
            prove_as_client(ours, KEY, PURPOSE, 5.0)


def test_who_says_nothing_or_a_byte_a_second_is_hung_up_on(host: LoopbackHost) -> None:
    began = time.monotonic()
    with dial(host) as silent, dial(host) as slow:
        slow.settimeout(1.0)
        challenge_of(slow)
        slow.settimeout(1.0)
        got = None
        for _ in range(min(15, ANSWER_BYTES)):
            try:
                slow.sendall(b"x")
                got = slow.recv(1)
            except TimeoutError:
                continue
            except OSError:
                got = b""
            if got == b"":
                break
        assert got == b"" and time.monotonic() - began < 12.0
        challenge_of(silent)
        assert rest_of(silent) == b""
    still_serves(host)


def test_ten_thousand_connections_that_say_nothing_keep_nobody_out(host: LoopbackHost) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[socket.socket] = []
    at_once = min(500, soft - 100)
    try:
        for number in range(10_000):
            held.append(dial(host))
            if len(held) > at_once:
                held.pop(0).close()
            if number in (1_000, 9_000):
                still_serves(host)
        still_serves(host)
        descriptors = len(os.listdir(f"/proc/{host.process.pid}/fd"))
        assert descriptors < 200, descriptors
    finally:
        for connection in held:
            connection.close()


def test_it_listens_on_the_one_address_alone(host: LoopbackHost) -> None:
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", host.worker.port), timeout=2.0)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_with_tls_a_peer_needs_a_certificate_of_the_authority_and_the_key(tmp_path: Path) -> None:
    ours, theirs = signed(tmp_path / "ours"), signed(tmp_path / "theirs")
    files = [str(ours.certificate), str(ours.private_key), str(ours.authority)]
    flags = [word for pair in zip(("--tls-cert", "--tls-key", "--tls-ca"), files, strict=True) for word in pair]
    with loopback_hosts("a", *flags) as (host,):
        inventory = ask(workers([host]), WorkerKey(KEY, client_tls(ours)))[0][0]
        assert inventory.tls == ours, "its ranks take the same files"
        with pytest.raises(ConfigError, match="host a: .*(TLS|no worker|does not take)"):
            ask(workers([host]), WorkerKey(KEY, client_tls(theirs)))
        with pytest.raises(ConfigError, match="does not take this key"):
            ask(workers([host]), WorkerKey(new_key(), client_tls(ours)))
        with pytest.raises(ConfigError, match="host a: "):
            ask(workers([host]), WorkerKey(KEY))
        ask(workers([host]), WorkerKey(KEY, client_tls(ours)))
