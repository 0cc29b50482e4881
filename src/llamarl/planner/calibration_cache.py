"""The file that keeps a measured machine for later plans, and whether it was measured here.

A home folder may be shared by many machines, so a file names the processor and the cores that it was measured on. What is kept
under the default path for another machine is passed over with a word; a file that was asked for by name is taken as it is.
Reading needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llamarl.errors import FileError, PlanError
from llamarl.planner.hardware import Hardware, hardware_from_dict
from llamarl.reading import read_object
from llamarl.user_folders import cache_folder

__all__ = [
    "calibration_path",
    "load_calibration",
    "machine_here",
    "measured_elsewhere",
    "save_calibration",
    "write_whole",
]

_FORMAT = 1


def calibration_path() -> Path:
    """Where a calibration is kept unless told otherwise."""
    return cache_folder() / "calibration.json"


def machine_here() -> dict[str, Any]:
    """What tells this machine from others as to speed: processor, the cores that a process may use, GPUs by model."""
    processor = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n"):
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux: the platform's own word stands
    gpus = sorted(
        line.partition(":")[2].strip()
        for file in Path("/proc/driver/nvidia/gpus").glob("*/information")
        for line in file.read_text(encoding="utf-8").split("\n")
        if line.startswith("Model")
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"processor": processor, "cores": cores, "gpus": gpus}


def measured_elsewhere(path: Path, what: str) -> str | None:
    """The note that a kept file names another machine and is passed over; None: it names this one, or cannot be read.

    Args:
        what: The words for what it holds, to be named in the note.
    """
    try:
        there = read_object(path).get("machine")
    except FileError:
        return None  # whoever loads it says what is wrong
    here = machine_here()
    if not isinstance(there, Mapping) or all(there.get(key, value) == value for key, value in here.items()):
        return None
    return (
        f"note: {what} in {path} was measured on {_named(there)}, and this is {_named(here)}: not used (--calibrate measures here; "
        f"--calibration {calibration_path()} takes it all the same)"
    )


def _named(machine: Mapping[str, Any]) -> str:
    gpus = machine.get("gpus")
    return ", ".join(
        [
            f"{machine.get('processor')}, {machine.get('cores')} cores",
            *(map(str, gpus) if isinstance(gpus, list) else ()),
        ]
    )


def save_calibration(path: Path, hardware: Hardware, model: str) -> None:
    """Keep a calibration for later plans.

    Raises:
        PlanError: The file cannot be written.
    """
    record = {
        "format": _FORMAT,
        "machine": machine_here(),
        "model": model,
        "device": {k: v for k, v in asdict(hardware.device).items() if k != "name"},
        "efficiency": asdict(hardware.efficiency),
    }
    write_whole(path, json.dumps(record, indent=1))


def write_whole(path: Path, text: str) -> None:
    """A calibration file, whole or not at all.

    Raises:
        PlanError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise PlanError(
            f"calibration file {path} cannot be written: {error}; give another with --calibration"
        ) from error


def load_calibration(path: Path) -> Hardware:
    """Hardware that an earlier ``--calibrate`` measured.

    Raises:
        PlanError: No such file, or it is not a calibration of this version.
    """
    try:
        record = read_object(path)
        if record.get("format") != _FORMAT:
            raise PlanError(
                f"calibration file {path} has format {record.get('format')!r:.60}, expected {_FORMAT}: calibrate again"
            )
        return hardware_from_dict("this-machine", record["device"], record["efficiency"])
    except FileError as error:
        if error.missing:
            raise PlanError(
                f"calibration file {path} does not exist: make it with llamarl plan RECIPE --calibrate"
            ) from None
        raise PlanError(f"calibration file {error}: calibrate again") from error
    except KeyError as error:
        raise PlanError(f"calibration file {path} lacks {error}: calibrate again") from error
    except PlanError as error:
        raise PlanError(f"calibration file {path}: {error}") from error
