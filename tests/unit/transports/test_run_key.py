"""Connections that must prove the run's key: every wrong peer is refused, and nothing of it is parsed."""

import hmac
import os
import socket
import threading
import time
from collections.abc import Callable

import pytest

from llamarl.transports.run_key import KEY_BYTES, KeyRefused, prove_as_client, prove_as_server

KEY = bytes(range(32))

Act = Callable[[socket.socket], object]


def both(server: Act, client: Act) -> list[Exception | None]:
    """What each end raised: [server, client]."""
    ends = socket.socketpair()
    raised: list[Exception | None] = [None, None]

    def run(which: int, act: Act) -> None:
        try:
            act(ends[which])
        except Exception as error:
            raised[which] = error
            ends[which].close()

    threads = [threading.Thread(target=run, args=(which, act)) for which, act in enumerate((server, client))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for end in ends:
        end.close()
    return raised


def serve(key: bytes = KEY, purpose: str = "orders", deadline_s: float = 5.0) -> Act:
    return lambda connection: prove_as_server(connection, key, purpose, deadline_s)


def dial(key: bytes = KEY, purpose: str = "orders", deadline_s: float = 5.0) -> Act:
    return lambda connection: prove_as_client(connection, key, purpose, deadline_s)


def test_equal_keys_and_purposes_are_accepted_and_the_key_never_travels() -> None:
    seen = bytearray()

    def client(connection: socket.socket) -> None:
        head = connection.recv(4096)
        mine = b"\x07" * 32
        # worked by hand, from the module's docstring
        proof = hmac.digest(KEY, b"client\x00orders\x00" + head[-32:] + mine, "sha256")
        connection.sendall(mine + proof)
        answer = connection.recv(4096)
        seen.extend(head + mine + proof + answer)
        assert answer == hmac.digest(KEY, b"server\x00orders\x00" + head[-32:] + mine, "sha256")

    assert both(serve(), client) == [None, None]
    assert KEY not in seen
    assert both(serve(), dial()) == [None, None]


@pytest.mark.parametrize("client", [dial(os.urandom(KEY_BYTES)), dial(purpose="segments"), dial(b"")])
def test_another_key_or_purpose_is_refused_at_both_ends(client: Act) -> None:
    server, dialled = both(serve(), client)
    assert isinstance(server, KeyRefused) and isinstance(dialled, KeyRefused)


def test_a_proof_that_was_heard_before_is_refused() -> None:
    heard = bytearray()

    def first(connection: socket.socket) -> None:
        nonce = connection.recv(4096)[-32:]
        heard.extend(b"\x01" * 32 + hmac.digest(KEY, b"client\x00orders\x00" + nonce + b"\x01" * 32, "sha256"))
        connection.sendall(heard)
        connection.recv(4096)

    assert both(serve(), first)[0] is None

    def again(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(heard)
        connection.recv(4096)

    assert isinstance(both(serve(), again)[0], KeyRefused)


def test_a_peer_that_drips_is_cut_off_at_the_deadline_of_the_whole() -> None:
    def drip(connection: socket.socket) -> None:
        for _ in range(64):
            time.sleep(0.05)
            connection.sendall(b"x")

    began = time.monotonic()
    server, _ = both(serve(deadline_s=0.3), drip)
    assert isinstance(server, KeyRefused)
    assert time.monotonic() - began < 3.0, "64 drips take 3.2 s"


def test_a_server_that_is_not_ours_is_told_from_one_of_another_version() -> None:
    answers = {b"SSH-2.0-OpenSSH_9.2".ljust(48): "no llamarl process", b"llamarl-key-9\n".ljust(48): "another version"}
    for head, words in answers.items():
        _, dialled = both(lambda connection, head=head: connection.sendall(head), dial())  # type: ignore[misc]
        assert isinstance(dialled, KeyRefused) and words in str(dialled)


def test_a_server_without_the_key_is_refused_by_the_client() -> None:
    def impostor(connection: socket.socket) -> None:
        connection.sendall(b"llamarl-key-1\n\x00\x00" + b"\x00" * 32)
        connection.recv(4096)
        connection.sendall(b"\x00" * 32)

    assert isinstance(both(impostor, dial())[1], KeyRefused)
