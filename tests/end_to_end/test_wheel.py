"""The built wheel, with nothing of this checkout beside it, in an empty folder."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_an_installed_wheel_trains_in_an_empty_folder() -> None:
    pytest.importorskip("setuptools")
    site = sysconfig.get_paths()["purelib"]
    if not (Path(site) / "torch").is_dir():
        pytest.skip("the libraries are not in this environment's own folder, from which the new one would borrow them")
    command = [sys.executable, str(ROOT / "scripts" / "try_wheel.py"), "--borrow", site]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "done · 2 ticks" in done.stdout and "the wheel is whole" in done.stdout
