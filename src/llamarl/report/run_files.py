"""Everything in a run's folder but its rollouts, as plain values. Reads only; what is missing or
torn is said, not raised.

A run may be going on, may have been killed in the middle of a line, may lack any file but one: then
the others still tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llamarl.controller.run_folder import CONFIG_FILE, who_holds
from llamarl.errors import ConfigError, FileError, LlamaRLError
from llamarl.observability.job_description import JOB_FILE
from llamarl.observability.metrics import METRICS_FILE, read_metrics, read_warnings
from llamarl.observability.rollouts import ROLLOUTS_FOLDER
from llamarl.observability.trace import TRACE_FILE, Trace, read_trace
from llamarl.reading import read_object, read_toml, refuse_pipes, user_path

__all__ = ["MAX_RUNS", "RunFiles", "open_run", "read_run", "runs_of", "title_of"]

MAX_RUNS = 16
"""On one page."""

Status = Literal["running", "done", "stopped", "unknown"]

_MARKS = (CONFIG_FILE, METRICS_FILE, ROLLOUTS_FOLDER, TRACE_FILE)
"""A folder that holds none of these is no run."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run's folder holds, rollouts apart."""

    path: Path
    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    job: dict[str, Any]
    trace: Trace
    missing: tuple[str, ...]
    """In words: files that are not there, and what the page lacks for it."""
    status: Status = "unknown"

    @property
    def num_ticks(self) -> int | None:
        """Ticks of the whole run as configured; None where nobody recorded them."""
        found = self.config.get("run", {}).get("num_ticks")
        return found if isinstance(found, int) else None

    def setting(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key of the configuration."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value


def open_run(named: str) -> Path:
    """The folder that a user named: of a run, or of runs.

    Raises:
        ConfigError: It is not there, or holds neither.
        FileError: A pipe or a device in it.
    """
    path = user_path(named, "RUN")
    if not path.exists():
        raise ConfigError(f"no folder {path}: give the folder of a run (its run.dir), or of runs")
    if not path.is_dir():
        raise ConfigError(f"{path} is a file, expected the folder of a run (its run.dir), or of runs")
    found = runs_of([path])
    if not found:
        raise ConfigError(f"{path} holds no run (none of {', '.join(_MARKS)}), and no folder in it does")
    for run in found:
        refuse_pipes(run)
    return path


def runs_of(opened: Sequence[Path]) -> list[Path]:
    """The runs on a page: those opened, and of each folder of runs the newest ``MAX_RUNS``, the oldest first."""
    return [run for path in opened for run in ([path] if _is_run(path) else _runs_inside(path)[-MAX_RUNS:])]


def title_of(opened: Sequence[Path]) -> str:
    """Names of what was opened, for people; says where runs of a folder are left out."""
    names = []
    for path in opened:
        inside = 0 if _is_run(path) else len(_runs_inside(path))
        left_out = f" (the newest {MAX_RUNS} of {inside} runs)" if inside > MAX_RUNS else ""
        names.append(path.resolve().name + left_out)
    return ", ".join(names)


def _is_run(path: Path) -> bool:
    return any((path / mark).exists() for mark in _MARKS)


def _runs_inside(path: Path) -> list[Path]:
    """By when they began.

    Raises:
        FileError: The folder cannot be read.
    """

    def began(run: Path) -> tuple[float, str]:
        config = run / CONFIG_FILE
        return config.stat().st_mtime if config.exists() else 0.0, run.name

    try:
        return sorted((child for child in path.iterdir() if child.is_dir() and _is_run(child)), key=began)
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror})") from error


def read_run(path: Path) -> RunFiles:
    """Read what is there.

    Raises:
        LlamaRLError: A file is there and cannot be opened.
    """
    refuse_pipes(path)  # each time: it may have begun since, and be a stranger's
    missing: list[str] = []
    config = _object_or_empty(path / CONFIG_FILE, missing, "configuration and its differences are not shown")
    rows: list[dict[str, Any]] = []
    if (path / METRICS_FILE).exists():
        rows = [dict(row) for row in read_metrics(path)]
    else:
        missing.append(f"{METRICS_FILE} (not there yet): no curve, no token ledger")
    job = _object_or_empty(path / JOB_FILE, missing, "channels, machine and the size of a version are not known")
    if (path / TRACE_FILE).exists():
        trace = read_trace(path / TRACE_FILE)
    else:
        trace = Trace()
        missing.append(f"{TRACE_FILE} (observability.trace was off, or the run has not begun): no timeline")
    imitates = isinstance(algorithm := config.get("algorithm"), dict) and algorithm.get("name") == "sft"
    if not (path / ROLLOUTS_FOLDER).is_dir() and not imitates:
        missing.append(f"{ROLLOUTS_FOLDER}/ (nothing was sampled yet, or observability.rollouts was off): no responses")
    files = RunFiles(
        path=path,
        name=path.resolve().name,
        config=config,
        rows=rows,
        warnings=read_warnings(path),
        job=job,
        trace=trace,
        missing=tuple(missing),
    )
    num_done = int(rows[-1].get("step") or 0) + 1 if rows else 0
    return dataclasses.replace(files, status=_status(path, num_done, files.num_ticks))


def _object_or_empty(path: Path, missing: list[str], without: str) -> dict[str, Any]:
    if not path.exists():
        missing.append(f"{path.name} (not there): {without}")
        return {}
    try:
        return read_toml(path) if path.suffix == ".toml" else read_object(path)
    except LlamaRLError as error:
        missing.append(f"{error}: {without}")
        return {}


def _status(path: Path, num_done: int, num_ticks: int | None) -> Status:
    if who_holds(path):
        return "running"
    if num_ticks is None:
        return "unknown"
    return "done" if num_done >= num_ticks else "stopped"
