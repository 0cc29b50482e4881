"""Names of runtimes, output of workers, deaths of processes, thread environment."""

import io
import os
import resource
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl.determinism import environment
from llamarl.runtime import processes
from llamarl.runtime.base import JobStart
from llamarl.runtime.children import cause_of_death
from llamarl.runtime.output import OutputReader
from llamarl.runtime.ranks import END_S


def test_all_waits_between_a_failure_and_the_end_of_the_last_process_come_to_less_than_the_stated_ten_seconds() -> None:
    """docs/runtime.md: for what came with it, for executors to close, for processes to end, be killed and have their output read."""
    assert processes._FOLLOW_UP_S + processes._CLOSE_BUSY_S + END_S < 10.0


def test_a_job_takes_as_many_open_files_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_workers(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(processes, "plan_workers", plan_workers)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))  # what a shell gives
        with pytest.raises(InterruptedError):
            processes.ProcessRuntime().start(JobStart(executors=[], channels=[], deadline_s=1.0))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], 1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_tick_that_takes_too_long_names_its_key_and_ranks_at_one_place_together() -> None:
    runtime = processes.ProcessRuntime()
    ranks: Any = SimpleNamespace(
        of={"trainer": [SimpleNamespace(rank=rank, pid=100 + rank) for rank in range(6)]},
        where=lambda some: ["all_reduce" if one.rank else "log" for one in some],
        stopped=lambda some: [],
    )
    runtime._ranks = ranks
    first, second = runtime._late("trainer", "tick 3", runtime.now(), [5]).splitlines()
    assert first.endswith("no report from rank 0 (pid 100), which is at: log")
    assert second.endswith("from rank 1 (pid 101), 2 (pid 102), 3 (pid 103), 4 (pid 104), which is at: all_reduce")
    cause = runtime._overdue("trainer", "tick 3", 1800.0, [5]).cause
    assert cause == "it gave no answer within 1800 s (deadlines.step_s)"


def test_all_thread_pools_of_a_worker_get_the_same_count() -> None:
    counts = {name: value for name, value in environment(3).items() if name.endswith("_NUM_THREADS")}
    assert set(counts.values()) == {"3"} and {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} <= set(counts)


def test_threads_that_wait_for_each_other_sleep_unless_the_user_says_otherwise() -> None:
    assert environment(2)["OMP_WAIT_POLICY"] == "PASSIVE" and environment(2)["GOMP_SPINCOUNT"] == "0"
    assert "OMP_WAIT_POLICY" not in environment(1)  # nobody to wait for
    program = "from llamarl.determinism import environment; print('OMP_WAIT_POLICY' in environment(2))"
    said = {**os.environ, "GOMP_SPINCOUNT": "300000"}
    done = subprocess.run([sys.executable, "-c", program], env=said, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"


def test_lines_keep_their_source_and_a_killed_writers_last_words_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    reader = OutputReader()
    first, second = reader.pipe("trainer", "stdout"), reader.pipe("generator 1", "stderr")
    os.write(first, b"one\ntwo")
    code = "import os; os.write(2, b'last words'); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], stderr=second).returncode == -9
    os.close(first)
    os.close(second)
    reader.close(timeout_s=0.2)
    out, err = capsys.readouterr()
    assert out == "[trainer] one\n[trainer] two\n"
    assert err == "[generator 1] last words\n"


def test_a_console_that_lacks_a_letter_shows_the_line_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", newline="\n")
    monkeypatch.setattr(sys, "stdout", shown)
    reader = OutputReader()
    pipe = reader.pipe("reward", "stdout")
    os.write(pipe, "first\né → 1\n".encode())
    os.close(pipe)
    reader.close(timeout_s=2.0)
    shown.seek(0)
    assert shown.read() == "[reward] first\n[reward] é ? 1\n"


def test_ranks_of_a_program_without_an_output_are_read_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # `>&-`
    reader = OutputReader()
    pipe = reader.pipe("reward", "stdout")
    os.write(pipe, b"a line\n")
    os.close(pipe)
    reader.close(timeout_s=2.0)
    assert not reader._buffers


def test_a_line_that_never_ends_is_shown_in_pieces_and_not_gathered(capsys: pytest.CaptureFixture[str]) -> None:
    reader = OutputReader()
    pipe = reader.pipe("reward", "stdout")
    for _ in range(40):
        os.write(pipe, b"\r" + b"#" * 9999)
    assert sum(map(len, reader._buffers.values())) <= 1 << 17  # the pipe itself holds 64 KiB
    os.close(pipe)
    reader.close(timeout_s=2.0)
    out = capsys.readouterr().out
    assert out.count("#") == 40 * 9999 and out.count("[reward] ") > 1


@pytest.mark.parametrize(
    ("returncode", "cause"),
    [
        (3, "its process exited with code 3"),
        (-11, "its process was killed by signal 11 (SIGSEGV)"),
        (-9, "its process was killed by signal 9 (SIGKILL; the kernel does this when memory runs out)"),
        (-34, "its process was killed by signal 34 (SIGRTMIN)"),
        (-35, "its process was killed by signal 35 (unknown)"),
    ],
)
def test_a_death_is_told_in_words(returncode: int, cause: str) -> None:
    assert cause_of_death(returncode) == cause


def test_output_closes_in_peace_when_its_thread_has_ended_first(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = OutputReader()
    writers = [reader.pipe("one", stream) for stream in ("stdout", "stderr")]
    write = os.write

    def late(fd: int, data: bytes) -> int:  # the last process ends between the request to stop and the wake-up
        for writer in writers:
            os.close(writer)
        reader._thread.join(10.0)
        assert not reader._thread.is_alive()
        return write(fd, data)

    monkeypatch.setattr(os, "write", late)
    reader.close(5.0)
