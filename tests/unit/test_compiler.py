"""What a GPU's kernels need is asked for before a run, in a sentence with the cure."""

import os
import tempfile
from pathlib import Path

import pytest

from llamarl import compiler
from llamarl.compiler import check_compiler
from llamarl.errors import ConfigError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where nothing is missing: its folder of headers."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(compiler, "find_spec", lambda name: name)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: name if name == "gcc" else None)
    monkeypatch.setattr(compiler.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("CC", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, "x")  # so that what is set is put back
        monkeypatch.delenv(variable)
    return tmp_path


def test_what_is_compiled_lies_in_a_folder_of_the_users_own(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_somebody"
    )  # torch's own choice
    check_compiler("kernels", "x = 1")
    folder = machine / "cache" / "llamarl"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "torchinductor")
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_refused(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.os, "getuid", lambda: os.stat(machine).st_uid + 1)
    with pytest.raises(ConfigError, match="is another user's: set XDG_CACHE_HOME"):
        check_compiler("kernels", "x = 1")


def test_a_folder_that_cannot_be_made_is_told(machine: Path) -> None:
    (machine / "cache").write_text("as the read-only / of a container whose user has no home")
    with pytest.raises(
        ConfigError, match=r"needs .*/cache/llamarl, which cannot be made \(.*\): set XDG_CACHE_HOME to"
    ):
        check_compiler("kernels", "x = 1")


def test_what_is_missing_is_said_with_its_cure(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "Python.h").unlink()
    with pytest.raises(ConfigError, match="Python.h is missing: install Python's headers .*, or set x = 1"):
        check_compiler("kernels", "x = 1")
    monkeypatch.setenv("CC", "cc-of-mine -O2")
    with pytest.raises(ConfigError, match=r"there is no C compiler \(cc-of-mine\): install gcc, or name one"):
        check_compiler("kernels", "x = 1")
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match="kernels are compiled on a GPU, but Triton is not installed: pip install triton"
    ):
        check_compiler("kernels", "x = 1")
