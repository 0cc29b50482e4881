"""Other libraries' environments among the examples: gymnasium as text, gyms over strings, an OpenEnv server."""

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gymnasium_text import without_colors
from openenv_client import text_field, websocket_url
from string_gyms import GemShape, TextArenaShape

from llamarl.data.items import TaskItem
from llamarl.environments.episode import EpisodeOver
from llamarl.environments.games.game import OwnRandomness
from llamarl.environments.registry import make_environment
from llamarl.errors import DataError

NO_WORDS = TaskItem(question="")
GAMES = Path(__file__).parents[3] / "examples/games"
GYMNASIUM = f"{GAMES}/gymnasium_text.py:GymnasiumEnvironment"
OPENENV = f"{GAMES}/openenv_client.py:OpenEnv"


def test_a_colored_picture_becomes_plain_text() -> None:
    assert without_colors("  (Down)\nS\x1b[41mF\x1b[0mFF\nFHFH\n") == "S*FF\nFHFH"
    assert without_colors("|\x1b[35m\x1b[43mY\x1b[0m\x1b[0m| : |\x1b[34;1mB\x1b[0m: |\n  (North)\n") == "|*| : |B: |"


def test_frozen_lake_of_gymnasium_is_walked_by_names() -> None:
    pytest.importorskip("gymnasium")
    lake = make_environment(GYMNASIUM, {"name": "FrozenLake-v1", "make": {"is_slippery": False}, "max_moves": 8})
    opened = lake.reset(NO_WORDS, 2**63)
    assert opened.text.endswith("Each turn, write one action: left, down, right, up.\n\n*FFF\nFHFH\nFFFH\nHFFG")
    hint = lake.step("What?")
    assert hint.text == "Write one action: left, down, right, up." and hint.parts["invalid"] == 1.0
    steps = [lake.step(move) for move in ("down", "I go <answer>Down</answer>", "right", "down", "right", "right")]
    assert steps[0].text == "SFFF\n*HFH\nFFFH\nHFFG"
    assert (steps[-1].reward, steps[-1].done, steps[-1].truncated) == (1.0, True, False)
    with pytest.raises(EpisodeOver):
        lake.step("up")
    lake.reset(NO_WORDS, 0)
    cut = [lake.step("up") for _ in range(8)][-1]
    assert cut.done and cut.truncated
    lake.close()


def test_taxi_and_blackjack_are_told_in_words() -> None:
    pytest.importorskip("gymnasium")
    taxi = make_environment(GYMNASIUM, {"name": "Taxi-v4"})
    opened = taxi.reset(NO_WORDS, 5)
    assert "|*| : |B: |" in opened.text and opened.text.endswith("Passenger: R. Destination: Y.")
    assert taxi.step("go north").reward == -1.0
    cards = make_environment(GYMNASIUM, {"name": "Blackjack-v1"})
    assert cards.reset(NO_WORDS, 5).text.endswith("Your cards: 21, with an ace that counts 11. The dealer shows 9.")
    assert cards.step("stick").done


def test_an_episode_of_gymnasium_repeats() -> None:
    pytest.importorskip("gymnasium")
    for name in ("FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1"):
        seen = []
        for _ in range(2):
            env = make_environment(GYMNASIUM, {"name": name, "max_moves": 12})
            rng = random.Random(3)
            seen.append([env.reset(NO_WORDS, 77)])
            while not (step := env.step(env.random_reply(rng))).done:  # type: ignore[attr-defined]
                seen[-1].append(step)  # type: ignore[arg-type]
            seen[-1].append(step)  # type: ignore[arg-type]
        assert seen[0] == seen[1], name


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("FrozenLak-v1", {}, "gymnasium: Environment `FrozenLak` doesn't exist. Did you mean"),
        ("CartPole-v1", {"action_names": ["left"]}, "CartPole-v1 has 2 actions, got the names ['left']"),
        ("Pendulum-v1", {}, "only Discrete ones"),
        ("my_module:Env-v0", {}, "names a module"),
    ],
)
def test_what_gymnasium_does_not_have_is_refused(name: str, options: dict[str, Any], told: str) -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(DataError) as caught:
        make_environment(GYMNASIUM, {"name": name, **options})
    assert told in str(caught.value)


class Gem:
    """Draws from the global generator, as such libraries do."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        return f"number {random.randrange(1000)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"{action} {random.randrange(1000)}", 0.25, action == "end", action == "cut", {}


def test_a_gym_over_strings_is_played_and_repeats_beside_another() -> None:
    alone, other = GemShape(Gem), GemShape(Gem)
    first = [alone.reset(NO_WORDS, 5).text] + [alone.step(word).text for word in "abc"]
    again = [alone.reset(NO_WORDS, 5).text]
    other.reset(NO_WORDS, 6)
    for word in "abc":
        other.step(word)
        again.append(alone.step(word).text)
    assert again == first and len(set(first)) == 4
    end = alone.step("end")
    assert (end.reward, end.done, end.truncated) == (0.25, True, False)
    with pytest.raises(EpisodeOver):
        alone.step("more")
    assert alone.reset(TaskItem(question="Play."), 5).text == f"Play.\n\n{first[0]}"
    assert alone.step("cut").truncated


def test_the_global_generators_are_left_as_they_were() -> None:
    import numpy as np

    own = OwnRandomness(3)
    random.seed(1), np.random.seed(1)
    expected = (random.Random(1).random(), np.random.RandomState(1).rand())
    with own:
        one = (random.random(), np.random.rand())
    assert (random.random(), np.random.rand()) == expected
    with own:
        two = (random.random(), np.random.rand())
    again = random.Random(3)
    assert [one[0], two[0]] == [again.random(), again.random()] and one[1] != two[1]


class Kind:
    name = "PLAYER_ACTION"


class Arena:
    def reset(self, num_players: int, seed: int) -> None:
        self.seen: list[Any] = [(-1, "Say yes.", None)]

    def get_observation(self) -> tuple[int, list[Any]]:
        seen, self.seen = self.seen, []
        return 0, seen

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.seen = [(0, action, Kind()), (-1, "No.", None)]
        self.done = action == "yes"
        return self.done, {}

    def close(self) -> tuple[dict[int, float], dict[str, Any]]:
        return {0: 1.0}, {}


def test_textarenas_shape_shows_what_is_new_and_pays_at_the_end() -> None:
    env = TextArenaShape(Arena)
    assert env.reset(NO_WORDS, 0).text == "Say yes."
    assert env.step("maybe").text == "No."
    end = env.step("yes")
    assert (end.reward, end.done) == (1.0, True)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("ws://127.0.0.1:8000/ws", "ws://127.0.0.1:8000/ws"),
        ("http://host:80", "ws://host:80/ws"),
        ("https://host/env/", "wss://host/env/ws"),
        ("127.0.0.1:8000", "ws://127.0.0.1:8000/ws"),
    ],
)
def test_addresses_of_servers(address: str, url: str) -> None:
    assert websocket_url(address) == url


def test_the_field_for_text_is_told_from_the_schema() -> None:
    text, number = {"type": "string"}, {"type": "integer"}
    assert (
        text_field({"properties": {"message": text, "metadata": {}, "n": number}, "required": ["message"]}) == "message"
    )
    assert text_field({"properties": {"a": text, "b": text}, "required": ["b"]}) == "b"
    for fields in ({"n": number}, {"a": text, "b": text}):
        with pytest.raises(ValueError, match="name one as action_field"):
            text_field({"properties": fields})


@pytest.fixture
def server() -> Iterator[str]:
    """OpenEnv's protocol in a thread: counts to three, refuses "bad", breaks at "break"."""
    pytest.importorskip("websockets")
    from websockets.datastructures import Headers
    from websockets.http11 import Response
    from websockets.sync.server import serve

    schema = {"action": {"properties": {"message": {"type": "string"}}, "required": ["message"]}}

    def over_http(connection: Any, request: Any) -> Any:
        if request.path == "/schema":
            return Response(200, "OK", Headers([("Content-Type", "application/json")]), json.dumps(schema).encode())
        return None

    def session(socket: Any) -> None:
        count = 0
        for raw in socket:
            message = json.loads(raw)
            if message["type"] == "close":
                return
            if message["type"] == "reset":
                count = 0
                told: dict[str, Any] = {
                    "observation": {"said": f"seed {message['data']['seed']}"},
                    "reward": None,
                    "done": False,
                }
            elif message["data"]["message"] == "bad":
                socket.send(json.dumps({"type": "error", "data": {"message": "say good", "code": "VALIDATION_ERROR"}}))
                continue
            elif message["data"]["message"] == "break":
                socket.send(json.dumps({"type": "error", "data": {"message": "oh", "code": "EXECUTION_ERROR"}}))
                continue
            elif message["data"]["message"] == "hang up":
                return
            else:
                count += 1
                told = {
                    "observation": {"said": message["data"]["message"], "n": count},
                    "reward": 0.5,
                    "done": count == 3,
                }
            socket.send(json.dumps({"type": "observation", "data": told}))

    with serve(session, "127.0.0.1", 0, process_request=over_http) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"127.0.0.1:{running.socket.getsockname()[1]}"
        running.shutdown()
        thread.join(10)


def test_an_openenv_server_is_played_over_its_websocket(server: str) -> None:
    env = make_environment(OPENENV, {"address": f"ws://{server}/ws", "timeout_s": 10})
    assert env.reset(TaskItem(question="Go."), 2**40 + 7).text == "Go.\n\nseed 7"
    one = env.step("a")
    assert (one.text, one.reward, one.done) == ("a", 0.5, False)
    refused = env.step("bad")
    assert refused.text == "That action is not valid: say good" and refused.parts["invalid"] == 1.0
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR: oh"):
        env.step("break")
    env.step("b")
    assert env.step("c").done
    with pytest.raises(EpisodeOver):
        env.step("d")
    env.reset(NO_WORDS, 1)
    with pytest.raises(ConnectionError, match="ended the session"):
        env.step("hang up")
    assert env.reset(NO_WORDS, 1).text == "seed 1"  # a new session
    env.close()


def test_replies_may_be_whole_actions(server: str) -> None:
    env = make_environment(OPENENV, {"address": f"http://{server}", "action_field": "json", "timeout_s": 10})
    env.reset(NO_WORDS, 1)
    assert env.step("no json").parts["invalid"] == 1.0
    assert env.step('{"message": "a"}').text == "a"
    env.close()


def test_a_server_that_is_not_there_is_told() -> None:
    pytest.importorskip("websockets")
    with pytest.raises(DataError, match="no OpenEnv server answers at http://127.0.0.1:9/schema"):
        make_environment(OPENENV, {"address": "127.0.0.1:9", "timeout_s": 2})
