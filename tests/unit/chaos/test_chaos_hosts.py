"""A forwarder passes bytes on both ways until it is cut; of the hosts of a trial one is always left."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from tools.chaos.forwarder import Forwarder
from tools.chaos.hosts import GivenHosts
from tools.chaos.plan import Blow, Target

from llamarl.runtime.config import Worker

WAIT_S = 10.0


@pytest.fixture
def echo() -> Iterator[Worker]:
    """Somebody who says back what he hears, on every connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    yield Worker("echo", *listener.getsockname())
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def dial(forwarder: Forwarder) -> socket.socket:
    return socket.create_connection((forwarder.address, forwarder.port), WAIT_S)


def say(connection: socket.socket, data: bytes) -> bytes:
    threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
    heard = b""
    while len(heard) < len(data) and (more := connection.recv(1 << 16)):
        heard += more
    return heard


def test_what_is_said_is_heard_on_several_connections_and_an_end_is_passed_on(echo: Worker) -> None:
    forwarder = Forwarder(echo)
    large = os.urandom(3 << 20)
    with dial(forwarder) as one, dial(forwarder) as other:
        assert say(one, large) == large
        assert say(other, b"small") == b"small"
        one.shutdown(socket.SHUT_WR)
        assert one.recv(1) == b"", "the echo has heard that nothing more comes, and has ended"
        assert say(other, b"again") == b"again"
    forwarder.cut()


def test_a_cut_ends_connections_that_are_open_and_takes_no_more(echo: Worker) -> None:
    forwarder = Forwarder(echo)
    with dial(forwarder) as connection:
        assert say(connection, b"there") == b"there"
        forwarder.cut()
        assert connection.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        dial(forwarder)
    with socket.create_connection((echo.address, echo.port), WAIT_S) as still_there:
        assert say(still_there, b"lives") == b"lives"


class FakeHost:
    def __init__(self, name: str) -> None:
        self.name, self.is_cut = name, False

    def cut(self) -> None:
        self.is_cut = True


def test_hosts_that_were_cut_off_are_left_out_of_a_resume_and_the_last_one_is_no_target() -> None:
    hosts = [FakeHost(name) for name in ("a", "b", "c")]
    reach = GivenHosts(hosts, more=["--hosts.key", "file"])
    assert reach.words(resumed=False) == ["--hosts", "a,b,c", "--hosts.key", "file"]
    for name, left in (("host b", "a,c"), ("host a", "c")):
        (target,) = [one for one in reach.there(os.getpid()) if one.name == name]
        assert reach.strike(Blow(kind="cut", rows=0, delay_s=0.0, draws=(0.5,)), [target]) == "cut off"
        assert reach.words(resumed=True)[1] == left
    assert [host.is_cut for host in hosts] == [True, True, False]
    assert reach.there(os.getpid()) == [Target(name="controller", pid=os.getpid())]
