"""Environments that hang cost samples, which are told of, and not the tick's deadline."""

import math
import socket
from typing import Any

import pytest

from llamarl.data.items import TaskItem
from llamarl.environments import worker_pool
from llamarl.environments.episode_pool import EpisodePool
from llamarl.environments.episodes import Ask, Play
from llamarl.settings.environments import RewardPoolConfig, TaskConfig
from llamarl.types import Failure


class HangingWorker:
    """Takes a job and never answers."""

    ready, was_killed, had_more_time, started = True, False, False, 0.0

    def __init__(self, number: int, hello: bytes, config: RewardPoolConfig) -> None:
        self.number, self.job, self.deadline = number, None, math.inf
        self.control, self.jobs = socket.socketpair()

    def died_idle(self) -> bool:
        return False

    def assign(self, job: Any, request: bytes, timeout_s: float) -> None:
        self.job = job

    def begin_stop(self) -> None: ...

    def stop(self) -> str:
        self.control.close()
        self.jobs.close()
        return "killed"


def ask(number: int) -> Ask:
    return Ask(key=(number, 0), play=Play(task="", item=TaskItem(question="q"), seed=7), replies=("a",))


def test_what_has_no_answer_when_the_ticks_time_is_over_fails_and_nobody_is_asked_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_pool, "WorkerProcess", HangingWorker)
    with EpisodePool(TaskConfig(name="episodes", environment="games.py:Game")) as pool:
        pool.begin(0.01)
        pool.ask(ask(0))
        pool.ask(ask(1))  # behind it
        for number in range(3):
            answer = pool.wait(ask(number))
            assert isinstance(answer, Failure) and answer.kind == "environment"
            assert answer.detail.startswith(
                "timeout: no answer in the time of a tick (nine tenths of deadlines.step_s)"
            )
        assert pool.num_replaced == 1  # that of the first; the third was asked of nobody
        pool.begin(10.0)
        pool.ask(ask(3))
        assert not pool.answered(ask(3))
