"""A host is gone when its kernel is silent, not when its process takes nothing."""

from __future__ import annotations

import socket
import sys
import time

import pytest

from llamarl.runtime.hosts.silence import Signs, Silence, signs_of, watch_over


def test_a_host_is_gone_when_it_owes_an_answer_for_three_looks_beyond_the_limit() -> None:
    silence = Silence(8.0)
    looks = [(7.5, True), (8.1, True), (8.8, True), (9.4, True)]
    assert [silence.gone(Signs(silent_s=silent, owed=owed)) for silent, owed in looks] == [False, False, True, True]


def test_an_idle_host_that_owes_nothing_is_not_gone() -> None:
    silence = Silence(8.0)
    assert not any(silence.gone(Signs(silent_s=100.0, owed=False)) for _ in range(10))


def test_an_answer_between_two_looks_begins_the_count_again() -> None:
    silence = Silence(8.0)
    looks = [(20.0, True), (20.5, True), (0.1, False), (20.0, True), (20.5, True)]
    assert not any(silence.gone(Signs(silent_s=silent, owed=owed)) for silent, owed in looks)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells on Linux")
def test_a_process_that_takes_nothing_is_not_silent_though_all_buffers_are_full() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as full:
        stopped, _ = listener.accept()
        with stopped:
            for end in (full, stopped):
                watch_over(end, 2.0)
            full.setblocking(False)
            silence, until, sent = Silence(2.0), time.monotonic() + 5.0, 0
            while time.monotonic() < until:
                try:
                    sent += full.send(b"x" * 65_536)  # raises what a broken connection raises
                except BlockingIOError:
                    time.sleep(0.25)
                    signs = signs_of(full)
                    assert signs is not None and not silence.gone(signs)
            stopped.setblocking(True)
            received = 0
            while received < sent:
                received += len(stopped.recv(1 << 20))
            assert received == sent > 65_536
