"""The environment of ``environment_latency.py``, in a file of its own so that its workers import nothing heavy."""

from __future__ import annotations

import time

from llamarl.data.items import TaskItem
from llamarl.environments.episode import Observation, Step

__all__ = ["SlowTool"]


class SlowTool:
    """Takes ``delay_s`` for each answer, and ends the episode with the last of ``turns``."""

    def __init__(self, turns: int = 4, delay_s: float = 0.2) -> None:
        self.turns, self.delay_s = turns, delay_s

    def reset(self, item: TaskItem, seed: int) -> Observation:
        self.heard = 0
        return Observation(text=f"a{1 + seed % 9} b{1 + seed // 9 % 9} =\n")

    def step(self, reply: str) -> Step:
        time.sleep(self.delay_s)
        self.heard += 1
        return Step(text=f"a{1 + len(reply) % 9} b{self.heard} =", done=self.heard == self.turns)

    def close(self) -> None: ...
