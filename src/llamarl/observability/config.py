"""What a run shows and leaves behind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llamarl.import_path import is_import_path
from llamarl.strict import NO_BITS, STRICT, ListOf, holding

__all__ = ["ObservabilityConfig"]

_Class = Annotated[str, holding(is_import_path, "must be package.module:Class or path/to/file.py:Class")]


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

    wandb: Annotated[bool, NO_BITS] = False
    """Also send each row to Weights & Biases; needs the extra ``llamarl[wandb]``. Its own
    environment variables apply: the project is WANDB_PROJECT, or llamarl."""

    prometheus_port: Annotated[int, Field(ge=0, le=65535), NO_BITS] = 0
    """Serve the numbers of the last row at http://THIS_MACHINE:PORT/metrics, to whoever reaches it,
    for Prometheus; needs the extra ``llamarl[prometheus]``. 0: no."""

    sinks: Annotated[ListOf[_Class], NO_BITS] = ()
    """Where each row goes besides: classes of your own as package.module:Class or file.py:Class
    (docs/metrics.md). One that fails is left out from then on, and the run says so;
    ``metrics.jsonl`` has every row in any case."""
