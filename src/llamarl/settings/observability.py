"""What a run shows and leaves behind."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llamarl.strict import NO_BITS, STRICT, ListOf, holding, is_import_path

__all__ = ["ObservabilityConfig", "TRACKERS", "why_no_tracker"]

TRACKERS = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "opentelemetry": "opentelemetry.exporter.otlp.proto.http",
}
"""Name in ``observability.sinks``, which is also that of llamarl's extra -> the module that it needs."""


def why_no_tracker(name: str) -> str:
    """What is to be installed for a sink; nothing for one of the user's own, or where all is there."""
    if name not in TRACKERS:
        return ""
    module = TRACKERS[name]
    try:
        if importlib.util.find_spec(module) is not None:
            return ""
    except ImportError:  # of a package around it
        pass
    return f"{name!r} needs the package {module.partition('.')[0]}: pip install 'llamarl[{name}]', or leave it out"


_Sink = Annotated[
    str,
    holding(
        lambda name: name in TRACKERS or is_import_path(name),
        f"must be {', '.join(TRACKERS)}, package.module:Class or path/to/file.py:Class",
    ),
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ObservabilityConfig:
    """Console, curves, rollouts and trace of a run. None of it changes a bit of what is learned."""

    console: Annotated[Literal["auto", "rich", "plain", "none"], NO_BITS] = "auto"
    """Live display (rich), one line every few ticks, about 30 a run (plain), or nothing. auto takes
    rich on a terminal, else plain."""

    tensorboard: Annotated[bool, NO_BITS] = True
    """Write TensorBoard files into ``RUN/tensorboard``."""

    rollouts: Annotated[bool, NO_BITS] = True
    """Write prompts, responses, rewards, log-probabilities and versions into ``RUN/rollouts``."""

    trace: Annotated[bool, NO_BITS] = True
    """Write ``RUN/trace.json``, one lane an executor, for https://ui.perfetto.dev or chrome://tracing."""

    prometheus_port: Annotated[int, Field(ge=0, le=65535), NO_BITS] = 0
    """Serve the numbers of the last row at http://THIS_MACHINE:PORT/metrics, to whoever reaches it,
    for Prometheus; needs the extra ``llamarl[prometheus]``. 0: no."""

    sinks: Annotated[ListOf[_Sink], NO_BITS] = ()
    """Where each row goes besides: wandb, mlflow, trackio, opentelemetry, each with the extra of its
    name and its own environment variables; classes of your own as package.module:Class or
    file.py:Class (docs/metrics.md). One that fails is left out from then on, and the run says so;
    ``metrics.jsonl`` has every row in any case."""
