"""The compiled loops of a run: when it computes with them, and which library its ranks are given."""

from __future__ import annotations

import dataclasses
import os
import shlex
import struct
from pathlib import Path

import pytest

from llamarl.checkpoint.platform import platform_facts
from llamarl.config import RunConfig, apply_overrides, to_plain, validate
from llamarl.controller import run_library
from llamarl.controller.run_library import settled_engines, take_library, with_library
from llamarl.engine.kernel_library import KernelsUnavailable, suits
from llamarl.errors import ConfigError
from llamarl.files.content import paths_in

LOOPS = b"\x7fELF".ljust(0x28, b"\0") + struct.pack("=Q", 64) + bytes(10) + struct.pack("=HHH", 64, 1, 0) + bytes(64)
"""An ELF header that says: one section of 64 bytes after me; and those."""


def _config(*changes: str) -> RunConfig:
    base = ["--generator.device", "cpu", "--generator.engine.dtype", "float32", "--model.path", "bundled:tiny"]
    return validate(apply_overrides(to_plain(RunConfig()), [*base, *changes]))


def _file_name(identity: str = "a") -> str:
    from llamarl.engine.kernel_library import _processor_digest

    return f"kernels-{identity * 16}-{_processor_digest()}.so"


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a compiler has made."""
    library = tmp_path / "cache" / _file_name()
    library.parent.mkdir()
    library.write_bytes(LOOPS)
    monkeypatch.setattr(run_library, "build_library", lambda: library)
    return library


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Path:
        raise KernelsUnavailable("no C++ compiler is on the PATH")

    monkeypatch.setattr(run_library, "build_library", build)


def _settled(config: RunConfig, processor: str = "", run_dir: Path = Path("/no run here")) -> str | None:
    changed = settled_engines(config, run_dir, processor)
    return changed["generator"]["engine"].kernels if changed else None


def test_auto_is_compiled_where_a_compiler_is_and_torch_with_a_word_where_none_is(
    built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _settled(_config()) == "compiled"
    assert capsys.readouterr().err == ""

    def build() -> Path:
        raise KernelsUnavailable("no C++ compiler is on the PATH")

    monkeypatch.setattr(run_library, "build_library", build)
    assert _settled(_config()) == "torch"
    assert "torch alone, no C++ compiler is on the PATH" in capsys.readouterr().err


def test_asked_for_by_name_and_not_to_be_had_is_refused(without_compiler: None) -> None:
    with pytest.raises(ConfigError, match="generator.engine.kernels is 'compiled', but no C\\+\\+ compiler"):
        settled_engines(_config("--generator.engine.kernels", "compiled"), Path("/no run here"))


@pytest.mark.parametrize(
    "change", [("--generator.engine.dtype", "float16"), ("--generator.device", "cuda")], ids=["float16", "cuda"]
)
def test_where_the_loops_know_nothing_auto_is_torch_and_nothing_is_compiled(
    without_compiler: None, change: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _settled(_config(*change)) == "torch"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("--generator.engine.dtype", "float16"), "not float16 on cpu"),
        (("--generator.device", "cuda"), "float32 on cuda"),
    ],
    ids=["float16", "cuda"],
)
def test_asked_for_by_name_where_the_loops_know_nothing_is_refused_and_told_of_a_run_that_began_so(
    built: Path, change: tuple[str, str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config("--generator.engine.kernels", "compiled", *change)
    with pytest.raises(ConfigError, match=f"generator.engine.kernels is 'compiled', but .*{why}: set it to 'torch' or"):
        settled_engines(config, Path("/no run here"))
    assert settled_engines(config, Path("/a/run"), begun=True) == {}
    told = capsys.readouterr().err
    assert told.startswith("generator.engine.kernels 'compiled' has no effect in this run: ") and why in told


def test_a_run_that_lost_its_library_where_no_compiler_is_names_the_fork_that_does_without(
    without_compiler: None, tmp_path: Path
) -> None:
    run = tmp_path / "my run"
    with pytest.raises(ConfigError) as raised:
        settled_engines(_config("--generator.engine.kernels", "compiled"), run, begun=True)
    told, _, command = str(raised.value).partition(" as a new run: ")
    assert f"{run / 'kernels'} holds none for this processor, and no C++ compiler" in told and "'auto'" not in told
    *fork, key, value = shlex.split(command)
    assert fork == ["llamarl", "train", "--resume", str(run), "--fork", f"{run}-fork"]
    assert settled_engines(_config(key, value), run, begun=True) == {}


def test_what_was_chosen_is_left_as_it_is(built: Path) -> None:
    assert _settled(_config("--generator.engine.kernels", "torch")) is None
    assert _settled(_config("--generator.engine.kernels", "compiled")) is None


def test_hosts_with_other_processors_than_the_controller_compute_with_torch(built: Path) -> None:
    assert _settled(_config(), platform_facts()["processor"]) == "compiled"
    assert _settled(_config(), "x86_64 another one") == "torch"


def test_a_run_keeps_the_library_that_it_began_with(built: Path, tmp_path: Path) -> None:
    config = _config("--generator.engine.kernels", "compiled")
    run = tmp_path / "run"
    run.mkdir()
    first = with_library(config, run).generator.engine.library
    assert Path(first).parent == run / "kernels" and Path(first).read_bytes() == LOOPS
    built.write_bytes(LOOPS + b"of a newer compiler")
    assert with_library(config, run).generator.engine.library == first
    assert Path(first).read_bytes() == LOOPS
    repeated = tmp_path / "repeated"
    repeated.mkdir()
    take_library(run, repeated)
    assert Path(with_library(config, repeated).generator.engine.library).read_bytes() == LOOPS


def test_a_run_that_has_a_library_needs_no_compiler(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config("--generator.engine.kernels", "compiled")
    with_library(config, tmp_path)

    def build() -> Path:
        raise KernelsUnavailable("no C++ compiler is on the PATH")

    monkeypatch.setattr(run_library, "build_library", build)
    assert settled_engines(config, tmp_path) == {}
    assert _settled(_config(), run_dir=tmp_path) == "compiled"


def test_a_library_for_another_processor_is_left_where_it_lies(built: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    other = run / "kernels" / f"kernels-{'a' * 16}-{'0' * 16}.so"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"\0")
    assert not suits(other)
    library = with_library(_config("--generator.engine.kernels", "compiled"), run).generator.engine.library
    assert library == os.fspath(run / "kernels" / built.name)


def test_a_run_with_torch_has_no_library(without_compiler: None, tmp_path: Path) -> None:
    config = _config("--generator.engine.kernels", "torch")
    assert with_library(config, tmp_path) is config
    assert not list(tmp_path.iterdir())


def test_the_library_travels_to_hosts_like_a_model(built: Path, tmp_path: Path) -> None:
    config = with_library(_config("--generator.engine.kernels", "compiled"), tmp_path)
    assert os.fspath(tmp_path / "kernels" / built.name) in paths_in(to_plain(config))
    assert (
        dataclasses.replace(config.generator.engine, library="")
        == _config("--generator.engine.kernels", "compiled").generator.engine
    )


def test_a_run_whose_library_is_gone_is_told_so_and_a_new_one_is_not(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config("--generator.engine.kernels", "compiled")
    with_library(config, tmp_path)
    assert capsys.readouterr().err == ""
    (tmp_path / "checkpoints" / "tick_000001").mkdir(parents=True)
    with_library(config, tmp_path)
    assert capsys.readouterr().err == ""
    (tmp_path / "kernels" / built.name).unlink()
    with_library(config, tmp_path)
    assert f"{tmp_path / 'kernels'} is gone; it is compiled again" in capsys.readouterr().err


@pytest.mark.parametrize("identity, told", [("a", "by the same compiler"), ("b", "bits may differ")])
def test_a_damaged_library_of_a_run_is_compiled_again_and_said(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], identity: str, told: str
) -> None:
    run = tmp_path / "run"
    damaged = run / "kernels" / _file_name(identity)
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(LOOPS[:64])
    library = with_library(_config("--generator.engine.kernels", "compiled"), run).generator.engine.library
    assert Path(library).read_bytes() == LOOPS
    assert f"{damaged} is damaged" in (said := capsys.readouterr().err) and told in said
