"""``tools.chaos --hosts``: workers are started, one of them goes, the bits are those of the run that nobody disturbed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = (
    *("--run.num_ticks", "3", "--checkpoint.every", "0", "--evaluation.every", "0", "--schedule.prompts_per_step", "2"),
    *(
        "--generator.group_size",
        "2",
        "--generator.sampling.max_new_tokens",
        "8",
        "--observability.tensorboard",
        "false",
    ),
    *("--generator.max_segments", "1", "--generator.oversubscription", "1.0"),
)


# with this seed the host goes as soon as ranks are there: whatever the machine is at, it goes
@pytest.mark.long  # in short: test_survival_on_hosts.py
def test_a_host_that_is_cut_off_changes_no_bit_and_no_worker_is_left() -> None:
    words = ["tiny", "--hosts", "2", "--cuts", "1", "--seed", "2", *SMALL]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "tools.chaos", *words], env=path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (cut,) = re.findall(r"cut off host 127\.0\.0\.1:(\d+) after \d rows", done.stdout)
    assert "0 processes struck and 1 host cut off, 0 times resumed" in done.stdout
    assert "brought up again: " in done.stdout and "the bits agree" in done.stdout
    assert cut in done.stdout.split("--hosts ")[1].split()[0], "it was one of the two"
