"""Where rows go besides ``metrics.jsonl``: TensorBoard, Prometheus, and what ``observability.sinks`` lists, libraries and own."""

from __future__ import annotations

import importlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from llamarl.bounded_server import BoundedServer, QuietHandler
from llamarl.errors import ConfigError, DataError, LlamaRLError
from llamarl.import_path import import_user, own_line
from llamarl.observability.writing import append_all, replace_file, writes
from llamarl.reading import read_text

__all__ = ["BUILT_IN", "GuardedSink", "PrometheusSink", "RowSink", "TensorBoardSink"]


class RowSink(Protocol):
    """Takes each row once, in order.

    One of the user's own (``observability.sinks``) is called as ``Sink(run_dir, config,
    resume_after_tick)``: the run's folder, the resolved recipe as nested plain values, and the tick
    after which a run goes on, whose later rows come again; None for a new run. It lives in the
    controller's process, so a slow one holds up the job.
    """

    def write(self, row: Mapping[str, Any]) -> None:
        """A row of ``metrics.jsonl``: key -> number, None where it is not finite; ``step`` is the tick."""
        ...

    def close(self) -> None:
        """The run is over, well or ill."""
        ...


class GuardedSink:
    """One of ``observability.sinks``: it may fail, and the run goes on without it, and says so."""

    def __init__(
        self,
        name: str,
        run_dir: Path,
        config: Mapping[str, Any],
        resume_after_tick: int | None,
        warn: Callable[..., None],
    ) -> None:
        """
        Args:
            name: Of a library, or the import path of a class of the user's own.
            warn: Shows and keeps a line for the user: called with ``tick`` and ``text``.

        Raises:
            ConfigError: It cannot be imported or made, or lacks a method: nothing has been lost yet.
            LlamaRLError: It cannot be made where the run goes on: its server may be back at the next attempt.
        """
        self._where = f"observability.sinks {name!r}"
        self._warn = warn
        self._failed = False
        self._tick = 0 if resume_after_tick is None else resume_after_tick + 1
        try:
            make: Any = BUILT_IN.get(name) or import_user(name, "observability.sinks")
            sink = make(run_dir, config, resume_after_tick)
        except DataError as error:
            raise ConfigError(str(error)) from error
        except (Exception, SystemExit) as error:  # code that is not llamarl's may raise anything
            kind: type[LlamaRLError] = ConfigError
            way_out = ""
            if resume_after_tick is not None:
                kind, way_out = LlamaRLError, "; try again, or go on without it (--observability.sinks)"
            raise kind(
                f"{self._where}, called as Sink(run_dir, config, resume_after_tick): "
                f"{type(error).__name__}: {error}{own_line(error)}{way_out}"
            ) from error
        if missing := [name for name in ("write", "close") if not callable(getattr(sink, name, None))]:
            raise ConfigError(f"{self._where}: a sink has write(row) and close(); this one lacks {', '.join(missing)}")
        self._sink: RowSink = sink
        self._close: Callable[[str], None] = sink.close if name in BUILT_IN else lambda stopped: sink.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """One row; after a failure nothing."""
        self._tick = int(row["step"])
        if not self._failed:
            self._try(lambda: self._sink.write(dict(row)), "write(row)")

    def close(self, stopped: str = "") -> None:
        """The sink is closed whether or not it has failed; a library's is told by what the run was stopped, if it was."""
        self._try(lambda: self._close(stopped), "close()")

    def _try(self, call: Callable[[], None], doing: str) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:  # and a run must not end by it
            text = f"{self._where} failed in {doing}: {type(error).__name__}: {error}{own_line(error)}"
            if not self._failed:
                text += ". It gets no more rows; metrics.jsonl has them all"
            self._failed = True
            self._warn(tick=self._tick, text=text)


class TensorBoardSink:
    """Event files in ``RUN/tensorboard``, written in the caller's thread: no queue that a kill
    could lose, and no torch.

    A resumed run opens a new file that tells TensorBoard to forget the steps that are repeated.
    """

    def __init__(self, folder: str | Path, *, resume_after_tick: int | None = None) -> None:
        """
        Raises:
            LlamaRLError: The folder cannot be written.
        """
        folder = Path(folder)
        start_s = time.time()
        with writes(folder):
            folder.mkdir(parents=True, exist_ok=True)
            number = len(list(folder.glob("events.out.tfevents.*")))
            self._path = folder / f"events.out.tfevents.{int(start_s):010d}.llamarl.{number}"
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
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
        with writes(self._path):
            self._records.write(event.SerializeToString())


class _Unbuffered:
    """What the record writer writes to: nothing is held back, so a failed disk cannot fail a second time on close."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        append_all(self._descriptor, data)


class PrometheusSink:
    """Serves the last value of each key to Prometheus: a gauge a key, ``reward/mean`` as ``llamarl_reward_mean{run="NAME"}``."""

    def __init__(self, port: int, run: str) -> None:
        """
        Raises:
            ConfigError: The extra is not installed, or the port is taken.
        """
        try:
            library: Any = importlib.import_module("prometheus_client")
        except ImportError as error:
            raise ConfigError(
                "observability.prometheus_port needs the package prometheus_client: pip install 'llamarl[prometheus]'"
            ) from error
        self._gauge, self._run = library.Gauge, run
        self._registry = library.CollectorRegistry()
        self._gauges: dict[str, Any] = {}

        class Handler(QuietHandler):
            def do_GET(handler) -> None:
                page = library.generate_latest(self._registry)
                handler.answer(HTTPStatus.OK, library.CONTENT_TYPE_LATEST, page)

        try:
            self._server = BoundedServer(("0.0.0.0", port), Handler)
        except OSError as error:
            raise ConfigError(f"observability.prometheus_port: {port}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """Set the gauges of the row; what is not finite is NaN. What it does not say, as an accuracy between two
        evaluations, stays: Prometheus may ask more seldom than rows come."""
        for key, value in row.items():
            name = "llamarl_" + re.sub(r"\W", "_", key, flags=re.ASCII)
            if name not in self._gauges:
                self._gauges[name] = self._gauge(name, "as last told", ["run"], registry=self._registry)
            self._gauges[name].labels(self._run).set(math.nan if value is None else float(value))

    def close(self, stopped: str = "") -> None:
        """End the server; idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Wandb:
    """Weights & Biases. Its run is remembered in ``RUN/wandb_id``, so that a resumed run goes on in the same curves."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_after_tick: int | None) -> None:
        project, memory = os.environ.get("WANDB_PROJECT", "llamarl"), run_dir / "wandb_id"
        known = _remembered(memory)  # it may have been renamed since
        name = None if known else os.environ.get("WANDB_NAME", run_dir.name)
        self._run = importlib.import_module("wandb").init(
            project=project, id=known, resume="allow", dir=str(run_dir), config=config, name=name
        )
        _remember(memory, self._run.id)

    def write(self, row: Mapping[str, Any]) -> None:
        """Send one row; without ``commit`` it would be held back until the next."""
        if row["step"] >= self._run.starting_step:  # those that its run has it would refuse, each with a warning
            self._run.log(_finite(row), step=int(row["step"]), commit=True)

    def close(self, stopped: str = "") -> None:
        """Flush; idempotent."""
        self._run.finish(exit_code=int(bool(stopped)))


class Trackio:
    """trackio, which finds the run of a resume by its name, that of the folder."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_after_tick: int | None) -> None:
        project, resume = (
            os.environ.get("TRACKIO_PROJECT", "llamarl"),
            "never" if resume_after_tick is None else "allow",
        )
        library = importlib.import_module("trackio")
        self._run = library.init(project=project, name=run_dir.name, resume=resume, config=config, embed=False)

    def write(self, row: Mapping[str, Any]) -> None:
        """Send one row."""
        self._run.log(_finite(row), step=int(row["step"]))

    def close(self, stopped: str = "") -> None:
        """Flush; idempotent."""
        self._run.finish()


class MLflow:
    """MLflow, at MLFLOW_TRACKING_URI. Its run is remembered in ``RUN/mlflow_id``."""

    _MOST_PARAMS = 100
    """That a call may log; a value has at most 6000 characters."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_after_tick: int | None) -> None:
        mlflow, memory = importlib.import_module("mlflow"), run_dir / "mlflow_id"
        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric
        self._have = -1
        """The last tick that the run has: those that are done again after a resume are left out."""
        if known := _remembered(memory):
            self._id = known
            self._client.update_run(self._id, status="RUNNING")
            self._have = max((one.step for one in self._client.get_metric_history(known, "time/step_s")), default=-1)
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "llamarl")
        self._id = self._client.create_run(self._experiment(name), run_name=run_dir.name).info.run_id
        params = [mlflow.entities.Param(key, str(value)[:6000]) for key, value in _flat(config) if str(value)]
        for first in range(0, len(params), self._MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + self._MOST_PARAMS])
        _remember(memory, self._id)

    def _experiment(self, name: str) -> str:
        """Its id; made where it is new, unless another run that begins now was faster."""
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def write(self, row: Mapping[str, Any]) -> None:
        """Send one row."""
        now_ms, step = int(time.time() * 1000), int(row["step"])
        if step <= self._have:
            return
        named = {re.sub(r"[^\w./ -]", "_", key): value for key, value in _finite(row).items()}  # others it refuses
        self._client.log_batch(
            self._id, metrics=[self._metric(key, value, now_ms, step) for key, value in named.items()]
        )

    def close(self, stopped: str = "") -> None:
        """The run is over; idempotent."""
        self._client.set_terminated(self._id, status="FAILED" if stopped else "FINISHED")


class OpenTelemetry:
    """A gauge a key over OTLP/HTTP, to OTEL_EXPORTER_OTLP_ENDPOINT: ``reward/mean`` as ``llamarl.reward.mean``.

    The library's thread sends the last row every OTEL_METRIC_EXPORT_INTERVAL milliseconds, a minute by default.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_after_tick: int | None) -> None:
        exporter = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        sdk = importlib.import_module("opentelemetry.sdk.metrics")
        reading = importlib.import_module("opentelemetry.sdk.metrics.export")
        reader = reading.PeriodicExportingMetricReader(exporter.OTLPMetricExporter())
        self._provider = sdk.MeterProvider([reader])
        self._meter, self._labels = self._provider.get_meter("llamarl"), {"run": run_dir.name}

    def write(self, row: Mapping[str, Any]) -> None:
        """Set every gauge; what is not finite is NaN."""
        for key, value in row.items():
            name = re.sub(r"[^\w.-]", "_", key.replace("/", "."), flags=re.ASCII)  # other characters it refuses
            gauge = self._meter.create_gauge(f"llamarl.{name}")
            gauge.set(math.nan if value is None else value, self._labels)

    def close(self, stopped: str = "") -> None:
        """Send the last row."""
        self._provider.shutdown()


BUILT_IN = {"wandb": Wandb, "trackio": Trackio, "mlflow": MLflow, "opentelemetry": OpenTelemetry}
"""Those of ``settings.observability.TRACKERS``."""


def _finite(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key != "step" and value is not None}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Key with dots -> value, as on the command line."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _remembered(memory: Path) -> str | None:
    return read_text(memory).strip() if memory.exists() else None


def _remember(memory: Path, name: str) -> None:
    with writes(memory):
        replace_file(memory, f"{name}\n".encode())
