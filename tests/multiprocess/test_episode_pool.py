"""The pool of environments, with environments that misbehave in every way."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.data.items import TaskItem
from llamarl.environments.episode import Observation, Step
from llamarl.environments.episode_pool import Answer, EpisodePool
from llamarl.environments.episodes import Ask, Play, digest_of
from llamarl.errors import DataError
from llamarl.settings.environments import RewardPoolConfig, TaskConfig
from llamarl.types import Failure

ENVIRONMENTS = Path(__file__).parents[1] / "small_environments.py"
EPISODES = [0]
"""Number of the first episode of a test; each has its own, for most share a pool."""


@pytest.fixture(autouse=True)
def own_episodes() -> None:
    EPISODES[0] += 10


def config(name: str, num_workers: int = 1, timeout_s: float = 10.0, **options: object) -> TaskConfig:
    return TaskConfig(
        name="episodes",
        environment=f"{ENVIRONMENTS}:{name}",
        environment_options=options,
        pool=RewardPoolConfig(num_workers=num_workers, timeout_s=timeout_s),
    )


def ask(*replies: str, key: int = 0, digests: tuple[str, ...] = (), **plan: str) -> Ask:
    item = TaskItem(
        question="q", metadata={name.removeprefix("turn_").replace("_", " "): do for name, do in plan.items()}
    )
    return Ask(key=(EPISODES[0] + key, 0), play=Play(task="", item=item, seed=7), replies=replies, digests=digests)


def failure(answer: Answer) -> Failure:
    assert isinstance(answer, Failure), answer
    assert answer.kind == "environment"
    return answer


def step(answer: Answer) -> Step:
    assert isinstance(answer, Step), answer
    return answer


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "calls"


@pytest.fixture(scope="module")
def pool(log: Path) -> Iterator[EpisodePool]:
    with EpisodePool(config("Awkward", log=str(log), timeout_s=2.0)) as made:
        yield made


def calls(log: Path) -> list[str]:
    return [line.split(" ", 1)[1] for line in log.read_text().splitlines()]


def test_an_episode_is_opened_answered_and_closed(pool: EpisodePool, log: Path) -> None:
    log.write_text("")
    assert pool.wait(ask()) == Observation(text="begin 7")
    first = step(pool.wait(ask("a")))
    assert first == Step(text="1 a", reward=0.5)
    assert step(pool.wait(ask("a", "stop", digests=(digest_of(first),)))).done
    assert calls(log) == ["0", "close", "0", "1", "2", "close"]  # one instance has answered both turns


def test_a_pool_that_is_closed_closes_its_episodes_first(tmp_path: Path) -> None:
    """What they hold may live elsewhere: a container, a sandbox behind a URL."""
    log = tmp_path / "calls"
    with EpisodePool(config("Awkward", log=str(log))) as own:
        step(own.wait(ask("a")))
        step(own.wait(ask("a", key=1)))
        log.write_text("")
    assert calls(log) == ["close", "close"]


def test_an_episode_that_lost_its_worker_is_played_again(pool: EpisodePool, log: Path) -> None:
    first = step(pool.wait(ask("a")))
    (before,) = pool.worker_pids
    log.write_text("")
    os.kill(before, signal.SIGKILL)
    assert step(pool.wait(ask("a", "b", digests=(digest_of(first),)))) == Step(text="2 b", reward=0.5)
    assert calls(log)[-3:] == ["0", "1", "2"]
    assert pool.worker_pids != [before]


def test_an_episode_that_is_played_again_has_the_time_of_all_its_replies(pool: EpisodePool) -> None:
    """Three tools of 1.5 s each are within 2 s one by one, and not together."""
    replies, digests, limits = ("a", "b", "c"), tuple[str, ...](), []
    for key in (0, 1):  # turn by turn, then as after a resume: no worker holds the episode
        for number in (1, 2, 3) if key == 0 else (3,):
            asked = ask(*replies[:number], key=key, digests=digests[: number - 1])
            pool.ask(asked)
            limits.append(pool._workers[0].deadline - pool._workers[0].started)
            digests = (*digests[: number - 1], digest_of(step(pool.wait(asked))))
    assert limits == pytest.approx([2.0, 2.0, 2.0, 6.0])


def test_a_question_whose_worker_died_is_put_again(pool: EpisodePool, log: Path) -> None:
    log.write_text("")
    replaced = pool.num_replaced
    assert step(pool.wait(ask("a", turn_1="die once"))) == Step(text="1 a", reward=0.5)
    assert [call for call in calls(log) if call != "close"] == ["0", "1", "0", "1"]
    assert pool.num_replaced == replaced + 1


def test_a_replacement_that_is_killed_while_it_starts_is_replaced_too(pool: EpisodePool) -> None:
    replaced = pool.num_replaced
    os.kill(pool.worker_pids[0], signal.SIGKILL)
    pool.ask(ask("a"))
    end = time.monotonic() + 20
    while pool.num_replaced == replaced and time.monotonic() < end:
        pool.poll()
    pool._workers[0].guard.kill()  # the kernel ends the worker with it
    assert step(pool.wait(ask("a"))).text == "1 a"
    assert pool.num_replaced == replaced + 2


def test_a_pool_that_never_heard_of_an_episode_plays_it_from_its_replies() -> None:
    answers = []
    with EpisodePool(config("Ledgers")) as one:
        for n in range(3):
            answers.append(step(one.wait(ask(*["x", "#", "y"][: n + 1], digests=tuple(map(digest_of, answers))))))
    with EpisodePool(config("Ledgers")) as other:
        assert step(other.wait(ask("x", "#", "y", digests=tuple(map(digest_of, answers[:2]))))) == answers[2]


@pytest.mark.parametrize(
    ("do", "words"),
    [("raise", "KeyError: 'no such thing'\n  at "), ("hang", "timeout: .*longer than timeout_s=2.0"), ("die", r"crash: .*signal 9.*3 times"), ("exit", r"crash: .*status 3")],
)  # fmt: skip
def test_what_goes_wrong_fails_its_episode_alone(pool: EpisodePool, do: str, words: str) -> None:
    good = step(pool.wait(ask("a", key=1)))
    assert not isinstance(pool.wait(ask("a", key=2, turn_2=do)), Failure)
    bad = failure(pool.wait(ask("a", "b", key=2, digests=(digest_of(good),), turn_2=do)))
    assert re.search(words, bad.detail, re.DOTALL), bad.detail
    assert step(pool.wait(ask("a", "b", key=1, digests=(digest_of(good),)))).text == "2 b"  # its neighbour goes on


def test_a_reset_that_raises_is_a_failure_too(pool: EpisodePool) -> None:
    assert "no such thing" in failure(pool.wait(ask(turn_0="raise"))).detail


def test_an_environment_that_does_not_repeat_is_found_out_when_it_is_played_again(pool: EpisodePool) -> None:
    first = step(pool.wait(ask("a", turn_1="drift")))
    pool.release(ask().key)
    os.kill(pool.worker_pids[0], signal.SIGKILL)
    again = pool.wait(ask("a", "b", digests=(digest_of(first),), turn_1="drift"))
    assert "turn 1 was answered otherwise when it was played again" in failure(again).detail


@pytest.mark.parametrize("words", [1, 400_000], ids=["sent at once", "more than a socket takes"])
def test_time_in_which_nobody_looks_is_not_the_environments(log: Path, words: int) -> None:
    first, second = ask("a", key=1), ask("b " * words, key=2)
    with EpisodePool(config("Awkward", log=str(log), timeout_s=0.5)) as pool:
        pool.ask(first)
        pool.ask(second)
        assert step(pool.wait(first)).text == "1 a"  # the second is handed out when this is there
        time.sleep(1.0)
        assert step(pool.wait(second)).text == f"1 {'b ' * words}"
        assert pool.num_replaced == 0


def test_slow_tools_run_side_by_side_and_nobody_waits_to_ask() -> None:
    with EpisodePool(config("Ledgers", num_workers=4, delay_s=0.5)) as pool:
        started = time.monotonic()
        asks = [ask("x", key=key) for key in range(4)]
        for one in asks:
            pool.ask(one)
        assert time.monotonic() - started < 0.3
        texts = [step(pool.wait(one)).text for one in asks]
        assert time.monotonic() - started < 1.5  # four of half a second
    assert len(set(texts)) == 1  # the same seed and replies


def test_a_wrong_environment_is_refused_at_the_start() -> None:
    with pytest.raises(DataError, match="has no 'Nobody'"):
        EpisodePool(config("Nobody"))
    with pytest.raises(DataError, match="no_such_option"):
        EpisodePool(config("Ledgers", no_such_option=1))
