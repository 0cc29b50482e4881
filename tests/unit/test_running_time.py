"""Deadlines of a process that was stopped do not count the stop."""

import os
import signal
import subprocess
import sys
import time

import pytest

from llamarl import running_time
from llamarl.running_time import RunningTime, running_s, wait_for


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_only_silences_of_more_than_two_seconds_are_left_out() -> None:
    clock = Clock()
    running = RunningTime(clock)
    found = []
    for step_s in (0.0, 0.5, 2.0, 58.0, 0.5, 2.1, 0.25):
        clock.now_s += step_s
        found.append(running() - 1000.0)
    assert found == pytest.approx([0.0, 0.5, 2.5, 2.5, 3.0, 3.0, 3.25])


_WAITING = """
import sys, time
from llamarl.transports.deadline import Clock
clock = Clock(2.4, "sink rank 0")
print("waiting", flush=True)
for _ in range(10):
    time.sleep(0.1)
    clock("waiting for block 1")
"""


def test_a_stop_of_the_process_does_not_use_up_its_deadline_and_a_sleeping_one_is_not_taken_for_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", _WAITING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "waiting\n"
        os.kill(process.pid, signal.SIGSTOP)
        began, really = running_s(), time.monotonic()
        time.sleep(2.8)  # longer than any silence that counts: the thread of this process must have looked meanwhile
        assert running_s() - began == pytest.approx(time.monotonic() - really, abs=0.2)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(timeout=30.0) == 0


def test_a_wait_goes_on_after_one_that_ended_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = Clock(), []
    monkeypatch.setattr(running_time, "running_s", clock)

    def done(within_s: float) -> bool:
        waits.append(within_s)
        clock.now_s += 1.5  # the stop made its own clock run out
        return len(waits) == 3

    assert wait_for(done, 5.0) and waits == [5.0, 3.5, 2.0]
    assert not wait_for(lambda _: False, 0.0)
    waits[:] = []
    assert not wait_for(lambda within_s: done(within_s) and False, 4.0)
    assert waits == [4.0, 2.5, 1.0, 0.0]
