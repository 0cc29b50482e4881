"""Names of runtimes, output of workers, deaths of processes, thread environment."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from llamarl.errors import ConfigError
from llamarl.runtime.determinism import environment
from llamarl.runtime.factory import make_runtime
from llamarl.runtime.output import OutputReader
from llamarl.runtime.process_watch import cause_of_death, open_pidfd, process_space


def test_an_unknown_runtime_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="'monach' is unknown, expected one of .*; did you mean 'monarch'"):
        make_runtime("monach")


def test_without_monarch_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install torchmonarch.*or take runtime 'inline'"):
        make_runtime("monarch")


def test_all_thread_pools_of_a_worker_get_the_same_count() -> None:
    counts = {name: value for name, value in environment(3).items() if name.endswith("_NUM_THREADS")}
    assert set(counts.values()) == {"3"} and {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} <= set(counts)


def test_lines_keep_their_source_and_a_killed_writers_last_words_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    reader = OutputReader()
    first, second = reader.open("trainer"), reader.open("generator 1")
    with open(f"{first}.stdout", "wb") as pipe:
        pipe.write(b"one\ntwo")
    code = f"import os; fd = os.open({second + '.stderr'!r}, os.O_WRONLY); os.write(fd, b'last words'); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    reader.close(timeout_s=0.2)
    out, err = capsys.readouterr()
    assert out == "[trainer] one\n[trainer] two\n"
    assert err == "[generator 1] last words\n"
    assert not Path(first).parent.exists()


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import sys; sys.exit(3)", "its process exited with code 3"),
        ("import os; os.kill(os.getpid(), 11)", "its process was killed by signal 11 (SIGSEGV)"),
        ("import os; os.kill(os.getpid(), 9)", "its process was killed by signal 9 (SIGKILL; the kernel does this"),
    ],
)
def test_a_death_is_seen_through_its_pidfd_and_named(code: str, cause: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input();" + code], stdin=subprocess.PIPE)
    pidfd = open_pidfd(process.pid)
    if pidfd is None:
        process.kill()
        process.wait()
        pytest.skip("this kernel or sandbox has no pidfd")
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()
    assert select.select([pidfd], [], [], 30.0)[0] == [pidfd]
    assert cause_of_death(pidfd).startswith(cause)
    process.wait()
    with pytest.raises(ProcessLookupError):
        open_pidfd(process.pid)
    os.close(pidfd)


def test_processes_of_one_kernel_know_that_they_share_their_pids() -> None:
    code = "from llamarl.runtime.process_watch import process_space; print(process_space())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == process_space()


def test_output_closes_in_peace_when_its_thread_has_ended_first(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = OutputReader()
    prefix = reader.open("one")
    writers = [os.open(f"{prefix}.{stream}", os.O_WRONLY) for stream in ("stdout", "stderr")]
    write = os.write

    def late(fd: int, data: bytes) -> int:  # the last process ends between the request to stop and the wake-up
        for writer in writers:
            os.close(writer)
        reader._thread.join(10.0)
        assert not reader._thread.is_alive()
        return write(fd, data)

    monkeypatch.setattr(os, "write", late)
    reader.close(5.0)
