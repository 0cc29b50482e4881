"""The real executors of a job, watched: what a calibration runs instead of them.

They do what the real ones do, on the same data, channels and threads; beside that, the generator's engine notes for every
step how much it computed and how long it took, and the trainer gets half of its batch at every second tick, which tells
what a tick costs whatever its size from what a token costs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamarl.engine.base import Engine
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.executors.base import StepResult
from llamarl.executors.generator import GeneratorExecutor
from llamarl.executors.trainer import TrainerExecutor

__all__ = ["ProbedEngine", "ProbedGenerator", "ProbedTrainer", "read_steps"]

StepRow = tuple[float, float, float, float]
"""Of an engine step: tokens sampled, cached tokens that they attend to, prompt tokens computed, seconds."""


class ProbedEngine:
    """An engine with a stop watch. Everything but ``add``, ``step`` and ``suspend`` goes straight through."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: list[TokenSequence] = []
        self.rows: list[StepRow] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, sequences: Sequence[TokenSequence]) -> None:
        self._open += sequences
        self._engine.add(sequences)

    def suspend(self) -> list[TokenSequence]:
        self._open = []
        return self._engine.suspend()

    def step(self) -> list[TokenSequence]:
        self._open = [s for s in self._open if not s.finished]
        cached = sum(len(s.prompt_tokens) + len(s.tokens) for s in self._open)
        waiting = len(self._open)
        began = time.perf_counter()
        ended = self._engine.step()
        seconds = time.perf_counter() - began
        stats = self._engine.stats()
        sampled = stats["tokens_sampled"]
        attended = cached * sampled / waiting if waiting else 0.0  # the others wait for a slot
        self.rows.append((sampled, attended, stats["prompt_tokens_computed"], seconds))
        return ended


class ProbedGenerator(GeneratorExecutor):
    """Writes ``RUN/probe/generator_TICK.json``: the rows of its engine's steps."""

    def setup(self) -> None:
        super().setup()
        self._probe = ProbedEngine(self.engine)
        self.engine = self._probe  # type: ignore[assignment]  # it forwards what it does not watch

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        self._probe.rows = []
        result = super().step(tick, inputs)
        assert self.context.run_dir is not None, "a calibration has a folder"
        if self.context.rank == 0:
            path = _steps_path(self.context.run_dir, tick)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(self._probe.rows), encoding="utf-8")
        return result


class ProbedTrainer(TrainerExecutor):
    """Trains on the first half of the groups at odd ticks."""

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        groups = inputs["scored"]
        if tick % 2:
            groups = groups[: max(1, len(groups) // 2)]
        return super().step(tick, {**inputs, "scored": groups})


def _steps_path(run_dir: Path, tick: int) -> Path:
    return run_dir / "probe" / f"generator_{tick:06d}.json"


def read_steps(run_dir: Path, tick: int) -> list[StepRow]:
    """What ``ProbedGenerator`` noted of a tick."""
    return [tuple(row) for row in json.loads(_steps_path(run_dir, tick).read_text(encoding="utf-8"))]
