"""An OpenEnv server with a small game of its own: find a number below ten; played by ``test_real_environments.py``."""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    words: str = Field(max_length=20)


class Told(Observation):
    text: str
    guesses: int


class Guessing(Environment):  # type: ignore[type-arg]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Told:
        self._secret, self._guesses = random.Random(seed).randrange(10), 0
        return Told(text="Guess a number below 10.", guesses=0)

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Told:  # type: ignore[override]
        self._guesses += 1
        if not action.words.strip().isdigit():
            return Told(text="Write a number.", guesses=self._guesses, reward=0.0)
        guess = int(action.words)
        if guess == self._secret:
            return Told(text="Right.", guesses=self._guesses, done=True, reward=1.0)
        return Told(text="higher" if guess < self._secret else "lower", guesses=self._guesses, done=self._guesses >= 6)

    @property
    def state(self) -> State:
        return State(step_count=self._guesses)


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Told, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
