"""Linux's newer calls in a Python that brings none of them, as conda's."""

import fcntl
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import llamarl
from llamarl import linux_calls
from llamarl.linux_calls import pidfd_open, pidfd_send_signal
from llamarl.transports.segments import Segment, open_segment

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture(autouse=True)
def an_old_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (os, fcntl, signal):
        for name in dir(module):
            if name.startswith(("memfd_", "MFD_", "pidfd_", "PIDFD_", "F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_")):
                monkeypatch.delattr(module, name)


def test_a_segment_is_shared_and_keeps_its_size() -> None:
    segment = Segment(1000)
    segment.bytes[999] = 7
    assert open_segment(segment.handle).bytes[999] == 7
    with pytest.raises(PermissionError):
        os.ftruncate(segment.handle.fd, 1)
    assert not os.get_inheritable(segment.handle.fd)


def test_a_process_is_signalled_and_its_end_is_seen() -> None:
    with subprocess.Popen(SLEEPER) as process:
        pidfd = pidfd_open(process.pid)
        try:
            assert select.select([pidfd], [], [], 0) == ([], [], [])
            pidfd_send_signal(pidfd, signal.SIGKILL)
            assert select.select([pidfd], [], [], 30) == ([pidfd], [], [])
            assert process.wait() == -signal.SIGKILL
            with pytest.raises(ProcessLookupError):
                pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def test_nobody_asks_python_for_them() -> None:
    asked = re.compile(r"(os|signal)\.(memfd_create|MFD_|pidfd_(open|send_signal)\()|fcntl\.F_(ADD_SEALS|SEAL_)")
    sources = set(Path(llamarl.__file__).parent.rglob("*.py")) - {Path(linux_calls.__file__)}
    assert [path.name for path in sources if asked.search(path.read_text(encoding="utf-8"))] == []
