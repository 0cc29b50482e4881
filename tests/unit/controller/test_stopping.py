"""Ctrl-C in two steps."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from llamarl.controller.controller import StopRequest


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """What a shell that started these tests in the background has switched off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_ctrl_c_asks_and_the_second_interrupts(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest() as request:
        assert not request.take()
        press()
        assert request.take() and not request.take()
        assert "Ctrl-C once more stops at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            press()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_live_display_says_it_in_place_of_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with StopRequest(lambda words: not said.append(words)) as request:  # type: ignore[func-returns-value]
        press()
        assert request.take()
    assert "stopping after the next tick" in said[0] and not capfd.readouterr().err


def test_a_ctrl_c_that_has_ended_the_reader_of_standard_error_asks_all_the_same() -> None:
    terminal = os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 2)
    try:
        os.close(read)  # `tee` ends by the same Ctrl-C
        os.close(write)
        with StopRequest() as request:
            press()
            assert request.take()
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def test_a_handler_of_somebody_else_stays() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with StopRequest() as request:
            press()
            assert heard == [signal.SIGINT] and not request.take()
    finally:
        signal.signal(signal.SIGINT, before)


def test_elsewhere_than_in_the_main_thread_nothing_is_handled() -> None:
    found: list[object] = []

    def run() -> None:
        with StopRequest():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert found == [signal.default_int_handler]
