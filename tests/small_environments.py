"""Environments for tests, named by path: ``tests/small_environments.py:Ledgers``. They know the bundled model's characters."""

import os
import random
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from llamarl.data.items import TaskItem
from llamarl.environments.episode import Observation, Step

__all__ = ["Awkward", "Ledgers", "Till"]


class Ledgers:
    """A sum a turn; what is asked next depends on the seed, on the number of the turn, and on every reply so far."""

    def __init__(
        self, turns: int = 3, fewest: int = 0, delay_s: float = 0.0, delays: str = "", fails_at: int = -1
    ) -> None:
        self.fails_at = fails_at
        self.fewest, self.most = fewest or turns, turns
        self.delay_s = delay_s
        self.delays = random.Random(delays) if delays else None

    def reset(self, item: TaskItem, seed: int) -> Observation:
        self.random, self.heard, self.index = random.Random(seed), 0, item.metadata.get("index")
        self.turns = self.random.randint(self.fewest, self.most)
        return Observation(text=f"a{self.random.randint(1, 9)} b{self.random.randint(1, 9)} =\n")

    def step(self, reply: str) -> Step:
        time.sleep(self.delay_s if self.delays is None else self.delays.uniform(0, self.delay_s))
        self.heard += 1
        if self.heard == 2 and self.index == self.fails_at:
            raise KeyError("as it was told")
        self.random = random.Random(f"{self.random.random()} {reply}")
        closed = float("#" in reply)
        return Step(
            text=" ".join(f"{name}{self.random.randint(1, 9)}" for name in "abcd"[: 1 + self.heard]) + " =",
            reward=closed + self.random.randint(0, 3) / 4,
            parts={"closed": closed},
            done=self.heard >= self.turns,
        )

    def close(self) -> None:
        pass


class Till:
    """A tool with a memory: ``b+7=`` adds to a register and shows it; anything else is no call, and the policy is told so.

    What is shown depends on every call so far. Rewards differ from call to call, so that every tick has something to learn; how
    many calls an episode has depends on its seed, so that some are cut at the end of a tick.
    """

    def __init__(self, calls: int = 5) -> None:
        self.calls = calls

    def reset(self, item: TaskItem, seed: int) -> Observation:
        rng = random.Random(seed)
        self.registers = {name: rng.randint(1, 9) for name in "abc"}
        self.left = rng.randint(1, self.calls)
        return Observation(text=" ".join(f"{name}{value}" for name, value in self.registers.items()) + " =\n")

    def step(self, reply: str) -> Step:
        self.left -= 1
        call = re.search(r"([a-z])\+(\d)=\s*$", reply)
        if call is None:
            return Step(text=f"no {self.left}", reward=len(reply) % 3 / 8, done=self.left == 0, parts={"calls": 0.0})
        name, number = call.groups()
        self.registers[name] = self.registers.get(name, 0) * 2 + int(number)
        total = sum(self.registers.values())
        return Step(
            text=f"{name}={self.registers[name]} #{total}",
            reward=total % 4 / 8,
            done=self.left == 0,
            parts={"calls": 1.0},
        )

    def close(self) -> None:
        pass


class Awkward:
    """Does what the item's metadata says under the number of the turn: 0 is ``reset``. ``log`` hears of every call."""

    def __init__(self, log: str = "") -> None:
        self.log = Path(log) if log else None

    def reset(self, item: TaskItem, seed: int) -> Observation:
        self.plan: Mapping[str, str] = item.metadata
        self.seed, self.heard = seed, 0
        self._do("0")
        return Observation(text=f"begin {seed}")

    def step(self, reply: str) -> Step:
        self.heard += 1
        self._do(str(self.heard))
        return Step(text=f"{self.heard} {reply}", reward=0.5, done=reply == "stop")

    def close(self) -> None:
        self._tell("close")

    def _do(self, turn: str) -> None:
        self._tell(turn)
        match self.plan.get(turn, ""):
            case "raise":
                raise KeyError("no such thing")
            case "hang":
                time.sleep(3600)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "die once" if not self._died_before():
                os.kill(os.getpid(), signal.SIGKILL)
            case "drift":
                self.heard += time.monotonic_ns()  # never the same twice
            case "exit":
                raise SystemExit(3)

    def _died_before(self) -> bool:
        mark = self.log.with_suffix(".died")
        if mark.exists():
            return True
        mark.write_text("once")
        return False

    def _tell(self, what: str) -> None:
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()} {what}\n")
