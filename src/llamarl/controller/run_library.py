"""The engine's compiled loops in a run: whether it computes with them, and the one library that all its ranks use.

    kernels = "auto" ─▶ settled_engines, once ─▶ "compiled" or "torch" in RUN/config.toml
    RUN/kernels/*.so ─▶ with_library ─▶ what executors get; sent to hosts like a model, taken along by resume, fork and replay

Bits depend on who compiled it, so a run keeps what it began with.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from llamarl.checkpoint.platform import platform_facts
from llamarl.config import RunConfig
from llamarl.engine.config import EngineConfig
from llamarl.engine.kernel_library import KernelsUnavailable, build_library, find_compiler, suits, whole
from llamarl.errors import ConfigError
from llamarl.models.folders import read_model_config
from llamarl.models.support import why_unsupported
from llamarl.observability.writing import replace_file
from llamarl.roles import Role, present_roles, with_settings

__all__ = ["settled_engines", "take_library", "with_library"]

_FOLDER = "kernels"


def settled_engines(
    config: RunConfig, run_dir: Path, processor: str = "", *, begun: bool = False
) -> dict[str, dict[str, Any]]:
    """Role -> its ``engine``, where "auto" has become what it stands for here. Builds the library where it is needed and not yet there.

    Args:
        config: With models as folders, devices and precisions settled.
        run_dir: Of the run whose library it is to be; none need be there.
        processor: Of the hosts that hold ranks; empty: they are on this machine.
        begun: That run has begun: its settings stay what they are.

    Raises:
        ConfigError: The compiled loops are asked for by name, or are what the run began with, and cannot be had.
    """
    settled = {}
    for role, engine in _engines(config):
        key, kernels, why_not = f"{role.section}.engine.kernels", engine.kernels, _why_torch(config, role, engine)
        if kernels == "compiled" and why_not:
            if not begun:
                raise ConfigError(f"{key} is 'compiled', but {why_not}: set it to 'torch' or 'auto'")
            print(f"{key} 'compiled' has no effect in this run: {why_not}", file=sys.stderr)
        if kernels == "auto" and not why_not and processor not in ("", platform_facts()["processor"]):
            why_not = "the hosts have other processors than this machine"
        if kernels != "torch" and not why_not and not engine.library and _kept(run_dir) is None:
            try:
                build_library()
            except KernelsUnavailable as error:
                why_not = str(error)
                if kernels == "compiled" and begun:
                    fork = shlex.join(["llamarl", "train", "--resume", str(run_dir), "--fork", f"{run_dir}-fork"])
                    raise ConfigError(
                        f"{key}: {run_dir} computes with compiled loops, but {run_dir / _FOLDER} holds none for this processor, and "
                        f"{error}. Put its {_FOLDER} folder back, or install a compiler; or go on without them as a new run: {fork} "
                        f"--{key} torch"
                    ) from error
                if kernels == "compiled":
                    raise ConfigError(
                        f"{key} is 'compiled', but {error}. With 'torch' or 'auto' it does without"
                    ) from error
                _advise(why_not)
        if kernels == "auto":
            settled[role.name] = {"engine": dataclasses.replace(engine, kernels="torch" if why_not else "compiled")}
    return settled


def with_library(config: RunConfig, run_dir: Path) -> RunConfig:
    """``config`` with the run's library, which is put into its folder if it is not there. Nothing changes where none is used.

    Raises:
        ConfigError: It cannot be built, or the folder cannot be written.
    """
    engines = {
        role.name: engine
        for role, engine in _engines(config)
        if engine.kernels == "compiled" and not engine.library and not _why_torch(config, role, engine)
    }
    if not engines:
        return config
    library = _kept(run_dir)
    if library is None:
        try:
            built = build_library()
            if told := _told_of_loss(run_dir, built):
                print(f"llamarl: {told}", file=sys.stderr)
            (run_dir / _FOLDER).mkdir(exist_ok=True)
            library = run_dir / _FOLDER / built.name
            replace_file(library, built.read_bytes())
        except (KernelsUnavailable, OSError) as error:
            raise ConfigError(f"the engine's compiled loops cannot be put into {run_dir / _FOLDER}: {error}") from error
    changes = {name: {"engine": dataclasses.replace(engine, library=str(library))} for name, engine in engines.items()}
    return with_settings(config, changes)


def take_library(source: Path, run_dir: Path) -> None:
    """Give a new run the library of another one, which it repeats or goes on from; nothing if that has none for this processor.

    Raises:
        ConfigError: It cannot be copied.
    """
    if (library := _kept(source)) is not None:
        try:
            (run_dir / _FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(library, run_dir / _FOLDER / library.name)
        except OSError as error:
            raise ConfigError(f"{library} cannot be copied into {run_dir / _FOLDER}: {error.strerror}") from error


def _kept(run_dir: Path) -> Path | None:
    """The library in a run's folder for this kind of processor. One that somebody else put there is not ours to run, and one
    that was cut off is none."""
    found = sorted(
        path
        for path in (run_dir / _FOLDER).glob("*.so")
        if suits(path) and whole(path) and path.stat().st_uid == os.getuid()
    )
    return found[0] if found else None


def _told_of_loss(run_dir: Path, built: Path) -> str:
    """What to say where a run that has computed with a library has it no more; empty: it has not."""
    found = sorted((run_dir / _FOLDER).glob("*.so"))
    if not found and any((run_dir / "checkpoints").glob("tick_*")):
        return f"{run_dir / _FOLDER} is gone; it is compiled again, and by another compiler than before bits may differ"
    if lost := [path for path in found if suits(path)]:
        same = (
            "the same compiler, so the bits stay"
            if built.name in {p.name for p in lost}
            else "another compiler: bits may differ"
        )
        return f"{lost[0]} is damaged; it is compiled again, by {same}"
    return ""


def _engines(config: RunConfig) -> list[tuple[Role, EngineConfig]]:
    """Those of the job that may compute with compiled loops."""
    found = [(role, getattr(role.settings(config), "engine", None)) for role in present_roles(config)]
    return [
        (role, engine)
        for role, engine in found
        if isinstance(engine, EngineConfig) and engine.name == "native" and role.model is not None
    ]


def _why_torch(config: RunConfig, role: Role, engine: EngineConfig) -> str:
    """Why an engine computes with torch whatever compiler there is; empty: nothing speaks for it."""
    device = role.settings(config).device
    if device != "cpu" or engine.dtype not in ("float32", "bfloat16"):
        return f"the loops are for float32 and bfloat16 on the CPU, not {engine.dtype} on {device}"
    assert role.model is not None
    if not role.model.uses(config):
        return "it holds no model"  # a judge that is asked by URL
    return why_unsupported(read_model_config(role.model.path(config)), "compiled_kernels") or ""


def _advise(why_not: str) -> None:
    advice = "" if find_compiler() else ": with g++ (apt install g++) a small model generates 1.3 to 1.5 times as fast"
    print(f"llamarl: the engine computes with torch alone, {why_not}{advice}", file=sys.stderr)
