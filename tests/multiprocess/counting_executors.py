"""Executors that count, and say what they carry. Where their processes are forks, what these need is imported once, here."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import llamarl.channels.ends  # noqa: F401
from llamarl.executors.base import ExecutorContext, StepResult

STEP_S = 0.02


class _Counter:
    def __init__(self, config: object, context: ExecutorContext) -> None:
        self.context, self.total = context, 0

    def setup(self) -> None:
        pass

    def initial_token(self, channel: str, source_tick: int) -> Any:
        return np.zeros(1, np.int64)

    def journal(self, tick: int) -> bytes | None:
        return str(self.total).encode()

    def restore(self, state: bytes, tick: int) -> None:
        self.total = int(state)

    def save(self, folder: Path, tick: int) -> None:
        raise AssertionError("this job has no checkpoints")

    def load(self, folder: Path, tick: int) -> None:
        raise AssertionError("this job has no checkpoints")

    def close(self) -> None:
        pass


class Source(_Counter):
    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        time.sleep(STEP_S)
        numbers = [np.array([tick + int(inputs["back"][0])]), np.array([self.total])]
        self.total += 3
        return StepResult(outputs={"numbers": numbers})


class Doubler(_Counter):
    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        time.sleep(STEP_S)
        return StepResult(outputs={"doubled": [2 * number for number in inputs["numbers"]]})


class Sink(_Counter):
    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        time.sleep(STEP_S)
        self.total += sum(int(number[0]) for number in inputs["doubled"])
        return StepResult(outputs={"back": np.array([self.total % 1009])}, metrics={"sink/total": float(self.total)})
