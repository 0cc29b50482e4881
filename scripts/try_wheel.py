"""Is the built wheel whole? ``python scripts/try_wheel.py``

Builds it, installs it in a new environment, and does in an empty folder what a newcomer does there: lists the recipes, runs
one for a few ticks, writes a task of their own and trains on it. Everything lies in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--borrow",
        metavar="SITE_PACKAGES",
        help="take the libraries that llamarl needs from this folder in place of installing them",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llamarl = install(Path(folder), args.borrow)
        empty = Path(folder) / "empty"
        empty.mkdir()
        for words in (
            ["recipes"],
            ["train", "tiny", "--run.num_ticks", "2", "--evaluation.num_prompts", "8", "--schedule.prompts_per_step", "4"],
            ["new", "my-task"],
            ["train", "my-task/recipe.toml", "--run.num_ticks", "2", "--schedule.prompts_per_step", "4"],
            ["generate", "runs/my-task", "--prompt", "a3 b9 =\n"],
        ):  # fmt: skip
            print(f"$ llamarl {' '.join(words)}", flush=True)
            run([str(llamarl), *words], cwd=empty)
    print("the wheel is whole")


def install(folder: Path, borrow: str | None) -> Path:
    """The command ``llamarl`` of a new environment with the wheel in it."""
    source = folder / "source"  # building leaves files beside the sources
    run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(source)], cwd=folder)
    isolation = ["--no-build-isolation"] if borrow else []
    run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation, "-w", str(folder), str(source)],
        cwd=folder,
    )
    (wheel,) = folder.glob("llamarl-*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    needs = ["--no-deps"] if borrow else ["-c", str(ROOT / "constraints.txt")]
    run([str(python), "-m", "pip", "install", "--quiet", *needs, str(wheel)], cwd=folder)
    if borrow:
        (site,) = (environment / "lib").glob("python*/site-packages")
        (site / "borrowed.pth").write_text(borrow + "\n")
    return environment / "bin" / "llamarl"


def run(command: list[str], cwd: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=environment, timeout=_LIMIT_S)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")


if __name__ == "__main__":
    main()
