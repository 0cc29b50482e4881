"""Where rows go besides ``metrics.jsonl``: TensorBoard and, if asked, Weights & Biases."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from llamarl.errors import ConfigError
from llamarl.observability.metrics import append_all, cannot_write, replace_file

__all__ = ["RowSink", "TensorBoardSink", "WandbSink"]


class RowSink(Protocol):
    """Takes each row once, in order."""

    def write(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files in ``RUN/tensorboard``, written in the caller's thread: no queue that a kill could lose, and no torch.

    A resumed run opens a new file that tells TensorBoard to forget the steps that are repeated.
    """

    def __init__(self, folder: str | Path, *, resume_after_tick: int | None = None) -> None:
        """
        Raises:
            LlamaRLError: The folder cannot be written.
        """
        folder = Path(folder)
        start_s = time.time()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            number = len(list(folder.glob("events.out.tfevents.*")))
            self._path = folder / f"events.out.tfevents.{int(start_s):010d}.llamarl.{number}"
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except OSError as error:
            raise cannot_write(folder, error) from error
        self._records = RecordWriter(_Unbuffered(self._file))
        self._put(Event(wall_time=start_s, file_version="brain.Event:2"))
        if resume_after_tick is not None:
            restart = SessionLog(status=SessionLog.START)
            self._put(Event(wall_time=start_s, step=resume_after_tick + 1, session_log=restart))

    def write(self, row: Mapping[str, Any]) -> None:
        """One point of every curve.

        Raises:
            LlamaRLError: The disk is full or not writable.
        """
        values = [
            Summary.Value(tag=key, simple_value=float(value))
            for key, value in row.items()
            if key != "step" and value is not None
        ]
        self._put(Event(wall_time=time.time(), step=int(row["step"]), summary=Summary(value=values)))

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _put(self, event: Event) -> None:
        try:
            self._records.write(event.SerializeToString())
        except OSError as error:
            raise cannot_write(self._path, error) from error


class _Unbuffered:
    """What the record writer writes to: nothing is held back, so a failed disk cannot fail a second time on close."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        append_all(self._descriptor, data)


class WandbSink:
    """Weights & Biases. Its run is remembered in ``RUN/wandb_id``, so that a resumed run goes on in the same curves."""

    def __init__(self, run_dir: str | Path, project: str, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            ConfigError: The extra is not installed.
        """
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                "observability.wandb is true, but wandb is not installed: pip install 'llamarl[wandb]', or set it to false"
            ) from error
        memory = Path(run_dir) / "wandb_id"
        name = memory.read_text().strip() if memory.is_file() else None
        self._run = wandb.init(
            project=project,
            id=name,
            resume="allow",
            dir=str(run_dir),
            config=dict(config or {}),
            name=Path(run_dir).name,
        )
        try:
            replace_file(memory, f"{self._run.id}\n".encode())
        except OSError as error:
            raise cannot_write(memory, error) from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Send one row."""
        values = {key: value for key, value in row.items() if key != "step" and value is not None}
        self._run.log(values, step=int(row["step"]))

    def close(self) -> None:
        """Flush; idempotent."""
        self._run.finish()
