"""What can be told of a process from outside."""

from __future__ import annotations

import subprocess
import time

import pytest

from llamarl.runtime.child_process import is_stopped


@pytest.mark.parametrize(("stopped", "word"), [(True, "STOP"), (False, "CONT")])
def test_a_guard_whose_rank_was_stopped_before_it_said_who_it_is_counts_as_stopped(stopped: bool, word: str) -> None:
    program = f"sleep 60 & kill -{word} $!; echo done; wait"
    with subprocess.Popen(["bash", "-c", program], stdout=subprocess.PIPE, process_group=0) as guard:
        assert guard.stdout is not None and guard.stdout.readline() == b"done\n"
        until = time.monotonic() + 5.0
        while stopped and not is_stopped(guard.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert is_stopped(guard.pid) is stopped
        subprocess.run(["kill", "-KILL", "--", f"-{guard.pid}"], check=True)
    assert not is_stopped(guard.pid)  # nobody is not stopped
