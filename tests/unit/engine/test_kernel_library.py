"""The file of compiled loops: where it is kept, and what is done with one that cannot be used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.engine import kernel_library
from llamarl.engine.kernel_library import KernelsUnavailable, build_library, executable, whole


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The cache folder and the temporary one, with a compiler that copies a small program."""
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    monkeypatch.setattr(kernel_library, "cache_folder", lambda: cache)
    monkeypatch.setattr(kernel_library, "temporary_folder", lambda: temporary)
    compiler = tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\ncase "$1" in --version) echo 1;; *) echo >> {tmp_path}/calls; while [ "$1" != -o ]; do shift; done; cp /bin/true "$2";; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(kernel_library, "find_compiler", lambda: str(compiler))
    build_library.cache_clear()
    yield cache, temporary
    build_library.cache_clear()


def _build_again() -> Path:
    build_library.cache_clear()
    return build_library()


def _steps_run(folder: Path) -> int:
    return len((folder.parent / "calls").read_text().splitlines())


def test_it_is_compiled_once(folders: tuple[Path, Path]) -> None:
    library = build_library()
    assert library.parent == folders[0] and library.read_bytes() == Path("/bin/true").read_bytes()
    assert _build_again() == library and _steps_run(folders[0]) == 2  # compiled, linked


@pytest.mark.parametrize("left", [0, 63, 4096])
def test_one_that_was_cut_off_is_compiled_again(folders: tuple[Path, Path], left: int) -> None:
    library = build_library()
    os.truncate(library, left)
    assert not whole(library)
    assert _build_again() == library and whole(library) and _steps_run(folders[0]) == 4


def test_where_nothing_may_be_executed_the_other_folder_serves(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_library, "_may_execute", lambda library: library.parent == folders[1])
    assert build_library().parent == folders[1]
    monkeypatch.setattr(kernel_library, "_may_execute", lambda library: False)
    with pytest.raises(KernelsUnavailable, match="written and executed from"):
        _build_again()


def test_a_runs_library_on_such_a_disk_is_computed_with_from_a_copy(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept.so"
    kept.write_bytes(Path("/bin/true").read_bytes())
    assert executable(kept) == kept
    monkeypatch.setattr(kernel_library, "_may_execute", lambda library: library.parent == folders[0])
    copy = executable(kept)
    assert copy.parent == folders[0] and copy.read_bytes() == kept.read_bytes()
    os.truncate(copy, 100)
    assert executable(kept) == copy and copy.read_bytes() == kept.read_bytes()
    monkeypatch.setattr(kernel_library, "_may_execute", lambda library: False)
    with pytest.raises(KernelsUnavailable, match="nothing may be executed"):
        executable(kept)


def test_a_runs_library_that_is_gone_or_cut_off_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailable, match=r"gone\.so cannot be read: No such file"):
        executable(tmp_path / "gone.so")
    (tmp_path / "cut.so").write_bytes(Path("/bin/true").read_bytes()[:-1])
    with pytest.raises(KernelsUnavailable, match=r"cut\.so is damaged"):
        executable(tmp_path / "cut.so")
