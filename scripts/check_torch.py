"""Type-check ``src`` against the sources of the oldest torch that pyproject.toml allows, and of the newest.

A name that one of them does not have ends a run on somebody else's machine at the first step. Wheels of another
platform will do, since only their Python files are read: no driver, no CUDA, 80 MB each.

    python scripts/check_torch.py [VERSION ...]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORM = ("--platform", "macosx_11_0_arm64", "--platform", "macosx_14_0_arm64", "--python-version", "3.12")


def main() -> int:
    found = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found is not None, "pyproject.toml names the oldest torch"
    failed = [version for version in sys.argv[1:] or (f"=={found[1]}.*", "") if not check(version)]
    return len(failed)


def check(version: str) -> bool:
    """Whether ``src`` fits a torch; ``version`` as pip takes it after the name, empty: the newest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *PLATFORM]
        subprocess.run([*pip, "--dest", name, f"torch{version}"], check=True, timeout=900)
        (wheel,) = folder.glob("torch-*.whl")
        print(f"{wheel.name}:", flush=True)
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder, [one for one in packed.namelist() if one.endswith((".py", ".pyi", "py.typed"))])
        mypy = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(folder / "cache")]
        return subprocess.run([*mypy, "src/llamarl"], cwd=ROOT, env=os.environ | {"MYPYPATH": name}).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
