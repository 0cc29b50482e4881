"""Compiles ``csrc/kernels.cpp`` with the user's C++ compiler, once a machine. No torch here.

    source, flags, compiler ─┐
    processor ───────────────┴▶ name ─▶ in the cache folder? ─┬▶ its path
                                                              └▶ compile ─▶ its path

What it computes depends on the compiler, in the last bits. So a run takes a copy along in its folder, to every host and resume
(``controller/run_library.py``); the name tells which kind of processor can execute it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["KernelsUnavailable", "build_library", "find_compiler", "suits"]

_FLAGS = (
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
)
_SOURCE = Path(__file__).parent / "csrc" / "kernels.cpp"
_COMPILE_S = 120


class KernelsUnavailable(Exception):
    """There is no compiled library here; the text says why."""


def find_compiler() -> str | None:
    """Path of the C++ compiler that would be used."""
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


@cache
def build_library() -> Path:
    """The library for this machine, compiled if it has not been: some seconds.

    Raises:
        KernelsUnavailable: No compiler, or it failed.
    """
    compiler = find_compiler()
    if compiler is None:
        raise KernelsUnavailable("no C++ compiler (c++, g++ or clang++) is on the PATH")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(f"{compiler} does not run: {error}") from error
    identity = "\0".join([_SOURCE.read_text(encoding="utf-8"), *_FLAGS, version])
    name = f"kernels-{_digest(identity)}-{_processor_digest()}.so"
    for folder in (_cache_folder(), Path(tempfile.gettempdir()) / f"llamarl-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.getuid():
                continue  # somebody else's: what lies there is not ours to run
            if not (folder / name).exists():
                print(f"llamarl: compiling the engine's loops with {compiler}, once", file=sys.stderr)
                _compile(compiler, folder, name)
        except OSError:
            continue
        return folder / name
    raise KernelsUnavailable("neither the cache folder nor the temporary folder can be written")


def suits(library: Path) -> bool:
    """Whether a library was built for a processor like this one: another might not know its instructions."""
    return library.stem.rpartition("-")[2] == _processor_digest()


def _compile(compiler: str, folder: Path, name: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as work:
        compiled, linked = Path(work) / "kernels.o", Path(work) / name
        # compiled and linked apart: linking with -fopenmp would bring a second OpenMP runtime beside torch's
        steps = (
            [compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(compiled)],
            [compiler, "-shared", "-o", str(linked), str(compiled)],
        )
        for command in steps:
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S)
            except subprocess.TimeoutExpired as error:
                raise KernelsUnavailable(f"{compiler} took more than {_COMPILE_S} s") from error
            if done.returncode:
                raise KernelsUnavailable(f"{compiler} failed: {done.stderr.strip()[-800:]}")
        os.replace(linked, folder / name)  # whole or not at all: other processes may be at the same


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamarl"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _processor_digest() -> str:
    """Of model and instruction sets: ``-march=native`` is for this one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return _digest(platform.platform() + platform.processor())
    return _digest(
        "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))))
    )
