"""Real libraries on the other side of the adapters: an openenv-core server on the loopback, TextArena's offline games."""

import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamarl.data.items import TaskItem
from llamarl.environments.episode import Environment
from llamarl.environments.registry import make_environment
from llamarl.errors import DataError

EXAMPLES = Path(__file__).parents[2] / "examples/games"
OPENENV = f"{EXAMPLES}/openenv_client.py:OpenEnv"
TEXTARENA = f"{EXAMPLES}/string_gyms.py:textarena"
NO_WORDS = TaskItem(question="")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    pytest.importorskip("openenv.core", reason="openenv-core is not installed: make test-environments")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(__file__).with_name("guessing_server.py")
    running = subprocess.Popen([sys.executable, str(program), str(port)])
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert running.poll() is None and time.monotonic() < deadline, "the server does not start"
                time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait(20)


def play(env: Environment, answer: Callable[[str], str], seed: int) -> list[Any]:
    seen: list[Any] = [env.reset(NO_WORDS, seed)]
    text = seen[0].text
    for _ in range(100):
        seen.append(env.step(answer(text)))
        if seen[-1].done:
            break
        text = seen[-1].text
    return seen


def bisect() -> Callable[[str], str]:
    span = [0, 9]

    def answer(text: str) -> str:
        if "higher" in text:
            span[0] = (span[0] + span[1]) // 2 + 1
        elif "lower" in text:
            span[1] = (span[0] + span[1]) // 2 - 1
        return str((span[0] + span[1]) // 2)

    return answer


def test_a_real_openenv_server_is_played_to_the_end_and_repeats(server: str) -> None:
    env = make_environment(OPENENV, {"address": f"ws://{server}/ws", "observation_field": "text", "timeout_s": 20})
    first = play(env, bisect(), 2**50 + 11)
    assert first[0].text == "Guess a number below 10." and first[-1].reward == 1.0 and first[-1].done
    assert play(env, bisect(), 2**50 + 11) == first
    other = make_environment(OPENENV, {"address": f"http://{server}", "observation_field": "text", "timeout_s": 20})
    assert play(other, bisect(), 2**50 + 11) == first  # another session
    env.reset(NO_WORDS, 3)
    other.reset(NO_WORDS, 4)  # beside each other
    assert env.step("?").text == "Write a number."
    refused = env.step("x" * 30)  # longer than the action's field may be
    assert refused.parts["invalid"] == 1.0 and "at most 20 characters" in refused.text
    env.close()
    other.close()


def test_the_whole_observation_is_shown_where_no_field_is_named(server: str) -> None:
    env = make_environment(OPENENV, {"address": f"ws://{server}/ws", "timeout_s": 20})
    assert env.reset(NO_WORDS, 1).text == "Guess a number below 10."
    env.close()


def random_words(rng: random.Random) -> Callable[[str], str]:
    def answer(text: str) -> str:
        offered = re.findall(r"\[[^\[\]\n]{1,12}\]", text)
        return rng.choice(offered) if offered and rng.random() < 0.8 else f"[{rng.randint(1, 20)}]"

    return answer


GAMES = [
    "FrozenLake-v0",
    "GuessTheNumber-v0",
    "Mastermind-v0",
    "TowerOfHanoi-v0",
    "LightsOut-v0",
    "Secretary-v0",
    "Bandit-v0",
]


@pytest.mark.parametrize("game", GAMES)
def test_games_of_textarena_are_played_and_repeat(game: str) -> None:
    pytest.importorskip("textarena", reason="textarena is not installed: make test-environments")
    plays = []
    for _ in range(2):
        env = make_environment(TEXTARENA, {"name": game})
        other = make_environment(TEXTARENA, {"name": "FrozenLake-v0"})  # draws from the same global generator
        answer, noise = random_words(random.Random(5)), random_words(random.Random(len(plays)))
        seen: list[Any] = [env.reset(NO_WORDS, 9)]
        other.reset(NO_WORDS, len(plays))
        for _ in range(60):
            seen.append(env.step(answer(seen[-1].text)))
            if not other.step(noise("[up] [down]")).done:
                random.random()
            else:
                other.reset(NO_WORDS, 1)
            if seen[-1].done:
                break
        plays.append(seen)
        assert seen[0].text and all(step.text or step.done for step in seen[1:])
        assert -1.0 <= sum(step.reward for step in seen[1:]) <= 1.0
    assert plays[0] == plays[1]


def test_guessing_in_textarena_is_won_by_halving() -> None:
    pytest.importorskip("textarena", reason="textarena is not installed: make test-environments")
    env = make_environment(TEXTARENA, {"name": "GuessTheNumber-v0"})
    low, high = 1, 20
    text = env.reset(NO_WORDS, 4).text
    for _ in range(6):
        middle = (low + high) // 2
        step = env.step(f"I guess [{middle}]")
        if step.done:
            break
        low, high = (middle + 1, high) if "higher" in step.text else (low, middle - 1)
    assert step.done and step.reward == 1.0 and "[5]" in text


def test_a_game_that_textarena_does_not_have_is_told() -> None:
    pytest.importorskip("textarena", reason="textarena is not installed: make test-environments")
    with pytest.raises(DataError, match="no game 'FrozenLak-v0'; nearest: FrozenLake-v0"):
        make_environment(TEXTARENA, {"name": "FrozenLak-v0"})
