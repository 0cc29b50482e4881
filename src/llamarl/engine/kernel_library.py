"""Compiles ``csrc/kernels.cpp`` with the user's C++ compiler, once a machine. No torch here.

    source, flags, compiler ─┐
    processor ───────────────┴▶ name ─▶ whole in the cache folder? ─┬▶ its path
                                                                    └▶ compile ─▶ its path

What it computes depends on the compiler, in the last bits. So a run takes a copy along in its folder, to every host and resume
(``controller/run_library.py``); the name tells which kind of processor can execute it. A folder may be on a disk from which
nothing may be executed (``noexec``): there it is kept, and computed with from a copy elsewhere.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from llamarl.observability.writing import replace_file
from llamarl.user_folders import cache_folder, temporary_folder

__all__ = ["KernelsUnavailable", "build_library", "executable", "find_compiler", "suits", "whole"]

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
    for folder in _own_folders():
        library = folder / name
        try:
            if not whole(library):
                print(f"llamarl: compiling the engine's loops with {compiler}, once", file=sys.stderr)
                _compile(compiler, library)
        except OSError:
            continue  # full, or read-only
        if _may_execute(library):
            return library
    raise KernelsUnavailable(
        "neither the cache folder nor the temporary folder can be written and executed from (XDG_CACHE_HOME names another)"
    )


def executable(library: Path) -> Path:
    """``library``, or a copy of it where this machine lets it be executed.

    Raises:
        KernelsUnavailable: It is not whole, or may be executed nowhere.
    """
    try:
        content = library.read_bytes()
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be read: {error.strerror}") from error
    if not whole(library):
        raise KernelsUnavailable(f"{library} is damaged (no whole library)")
    if _may_execute(library):
        return library
    for folder in _own_folders():
        copy = folder / f"{hashlib.sha256(content).hexdigest()[:16]}-{library.name}"
        try:
            if not copy.exists() or copy.read_bytes() != content:
                replace_file(copy, content, writer=str(os.getpid()))
        except OSError:
            continue
        if _may_execute(copy):
            return copy
    raise KernelsUnavailable(
        f"{library} is on a disk from which nothing may be executed, as are the cache and temporary folders: let XDG_CACHE_HOME or TMPDIR name "
        "one that allows it"
    )


def whole(library: Path) -> bool:
    """Whether a file is there and is as long as it says itself: the table at the end of an ELF file is within it. To load one
    that was cut off ends the process."""
    try:
        size = library.stat().st_size
        with library.open("rb") as file:
            header = file.read(64)
    except OSError:
        return False
    if not header.startswith(b"\x7fELF"):
        return size > 0 and sys.platform != "linux"
    if len(header) < 64:
        return False
    (table,), (entry_bytes, entries) = struct.unpack_from("=Q", header, 0x28), struct.unpack_from("=HH", header, 0x3A)
    return bool(0 < table + entry_bytes * entries <= size)


def _own_folders() -> Iterator[Path]:
    """Folders that are there and this user's alone."""
    for folder in dict.fromkeys((cache_folder(), temporary_folder())):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid == os.getuid():  # else what lies there is not ours to run
                yield folder
        except OSError:
            continue


def _may_execute(library: Path) -> bool:
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC):
            return True
    except (OSError, ValueError):
        return False


def suits(library: Path) -> bool:
    """Whether a library was built for a processor like this one: another might not know its instructions."""
    return library.stem.rpartition("-")[2] == _processor_digest()


def _compile(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        compiled, linked = Path(work) / "kernels.o", Path(work) / library.name
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
        replace_file(library, linked.read_bytes(), writer=str(os.getpid()))  # others may be at the same


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
