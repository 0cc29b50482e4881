"""The reward pool against reward functions that misbehave in every way."""

import dataclasses
import os
import signal
import threading
from pathlib import Path

import pytest
from made_responses import made_group, made_response
from tools.chaos.processes import alive, wait_for_end
from waiting import wait_until

from llamarl.environments.pool import RewardPool
from llamarl.errors import DataError, DeadlineExceeded, ExecutorFailed
from llamarl.settings.environments import RewardPoolConfig, TaskConfig
from llamarl.types import Failure, Group, Score

REWARDS = """
import os, re, signal, sys, time

def reward(prompt, response, answer):
    print("a reward function may print")
    if response == "raise":
        raise KeyError("no such thing")
    if response == "hang":
        time.sleep(3600)
    if response == "regex":
        re.match(r"(a+)+$", "a" * 50 + "b")  # never gives the interpreter lock back
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "interrupted" and not os.path.exists(first := __file__ + ".once"):
        open(first, "w").close()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever began the tests may ignore it
        os.kill(os.getpid(), signal.SIGINT)
    if response == "exit":
        print("leaving now", file=sys.stderr)
        sys.exit(3)
    if response == "orphan":
        os.fork()
        time.sleep(3600)
    if response == "slow":
        time.sleep(0.5)
    if response == "torch":
        return float("torch" in sys.modules)
    if response == "pid":
        return float(os.getpid())
    return {"nan": float("nan"), "inf": float("-inf"), "text": "1.0", "none": None, "true": True}.get(
        response, float(len(prompt + response + answer))
    )
"""


@pytest.fixture
def config(tmp_path: Path) -> TaskConfig:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    return TaskConfig(
        name="function",
        data=str(tmp_path / "train.jsonl"),
        eval_fraction=0.0,
        reward=f"{tmp_path}/rewards.py:reward",
        pool=RewardPoolConfig(num_workers=2, timeout_s=10.0),
    )


def one_worker(config: TaskConfig, **settings: float) -> TaskConfig:
    return dataclasses.replace(config, pool=dataclasses.replace(config.pool, num_workers=1, **settings))


def _group(index: int, *texts: str) -> Group:
    responses = (made_response(i, index=index, text=text) for i, text in enumerate(texts))
    return made_group(responses, index=index, text="pp", answer="aaa", task="function")


def _outcomes(group: Group) -> list[Score | Failure | None]:
    return [response.outcome for response in group.responses]


def test_ctrl_c_that_is_sent_to_a_whole_job_costs_no_verdict(config: TaskConfig) -> None:
    with RewardPool(one_worker(config)) as pool:
        (group,) = pool.score([_group(0, "interrupted")])
        assert _outcomes(group) == [Score(value=16.0)] and pool.num_replaced == 1


def _group_members(group: int) -> list[int]:
    """Living processes of a process group."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            members.append(int(folder.name))
    return members


def test_results_come_back_in_order_with_the_functions_values(config: TaskConfig) -> None:
    """Also of a large sample, and of one that is True; no worker has imported torch."""
    groups = [
        _group(0, "x", "true", "xxx"),
        _group(1, "torch"),
        _group(2, *("y" * n for n in range(1, 30)), "z" * 3_000_000),
    ]
    with RewardPool(config) as pool:
        scored = pool.score(groups)
    values = [[o.value for o in _outcomes(g) if isinstance(o, Score)] for g in scored]
    assert values == [[6.0, 1.0, 8.0], [0.0], [*(float(5 + n) for n in range(1, 30)), 3_000_005.0]]
    assert [g.prompt.index for g in scored] == [0, 1, 2]


BAD = {
    "raise": ("exception", "KeyError: 'no such thing'"),
    "kill": ("crash", "(3 times in a row)"),
    "exit": ("crash", "exited with status 3"),
    "nan": ("not_a_number", "nan"),
    "inf": ("not_a_number", "-inf"),
    "text": ("not_a_number", "str '1.0'"),
    "none": ("not_a_number", "NoneType"),
}


def test_a_bad_reward_fails_its_sample_only_and_says_why(config: TaskConfig) -> None:
    with RewardPool(one_worker(config)) as pool:
        outcomes = _outcomes(pool.score([_group(0, *(word for text in BAD for word in ("x", text, "xx")))])[0])
    for before, bad, after, (kind, words) in zip(
        outcomes[::3], outcomes[1::3], outcomes[2::3], BAD.values(), strict=True
    ):
        assert (before, after) == (Score(value=6.0), Score(value=7.0))
        assert isinstance(bad, Failure)
        assert bad.kind == kind
        assert words in bad.detail


@pytest.mark.parametrize("text", ["hang", "regex", "orphan"])
def test_a_sample_over_its_time_is_failed_and_its_worker_and_children_are_gone(config: TaskConfig, text: str) -> None:
    with RewardPool(one_worker(config, timeout_s=0.5)) as pool:
        (old,) = pool.worker_pids
        bad, after = _outcomes(pool.score([_group(0, text, "xx")])[0])
        assert after == Score(value=7.0)
        assert isinstance(bad, Failure)
        assert bad.kind == "timeout"
        assert "timeout_s=0.5" in bad.detail
        assert pool.num_replaced == 1
        assert not alive(old)
        wait_until(lambda: not _group_members(old))


def test_a_batch_over_its_limit_fails_what_is_left_and_the_pool_goes_on(config: TaskConfig) -> None:
    with RewardPool(one_worker(config)) as pool:
        scored = pool.score([_group(0, "x", "hang"), _group(1, "xx", "hang")], limit_s=1.0)
        first, *left = [outcome for group in scored for outcome in _outcomes(group)]
        assert first == Score(value=6.0)
        for outcome in left:
            assert isinstance(outcome, Failure)
            assert outcome.kind == "timeout"
            assert "3 of 4 samples had no verdict after 1.0 s" in outcome.detail
            assert "task.pool.num_workers (1)" in outcome.detail
        pool._workers[0].deadline = 0.0  # as if the next tick came after its limit to start
        assert _outcomes(pool.score([_group(0, "xx")], limit_s=60.0)[0]) == [Score(value=7.0)]


def test_a_generation_error_is_failed_without_being_judged_and_an_outcome_is_kept(config: TaskConfig) -> None:
    group = _group(0, "x", "x")
    first = made_response(text="x", finish_reason="error")
    kept = dataclasses.replace(group.responses[1], outcome=Score(value=0.25))
    with RewardPool(one_worker(config)) as pool:
        scored = pool.score([Group(prompt=group.prompt, responses=(first, kept))])
    failed, same = _outcomes(scored[0])
    assert isinstance(failed, Failure)
    assert failed.kind == "generation"
    assert same == Score(value=0.25)


def test_an_idle_worker_that_dies_costs_no_sample(config: TaskConfig) -> None:
    with RewardPool(one_worker(config)) as pool:
        (pid,) = pool.worker_pids
        os.kill(pid, signal.SIGKILL)
        assert not wait_for_end({pid}, 10.0)
        outcomes = _outcomes(pool.score([_group(0, "x")])[0])
    assert outcomes == [Score(value=6.0)]


def test_a_worker_that_is_killed_from_outside_at_its_work_costs_no_verdict(config: TaskConfig) -> None:
    with RewardPool(one_worker(config)) as pool:

        def kill() -> None:
            wait_until(lambda: pool._workers[0].job is not None)
            os.kill(pool._workers[0].pid or 0, signal.SIGKILL)

        killing = threading.Thread(target=kill)
        killing.start()
        outcomes = _outcomes(pool.score([_group(0, "slow", "x")])[0])
        killing.join()
        assert pool.num_replaced == 1
    assert outcomes == [Score(value=9.0), Score(value=6.0)]


def test_close_ends_every_worker(config: TaskConfig) -> None:
    pool = RewardPool(config)
    pids = pool.worker_pids
    pool.close()
    pool.close()
    assert [alive(pid) for pid in pids] == [False, False]
    with pytest.raises(ValueError, match="closed"):
        pool.score([])


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ("import a_module_that_is_not_there\n", DataError, "a_module_that_is_not_there"),
        ("import sys\nsys.exit(0)\n", DataError, r"rewards.py ends its process when it is imported.*__main__"),
        ("import time\ntime.sleep(3600)\n", DeadlineExceeded, r"imports task.reward .*limit 1 s"),
        ("import os\nos._exit(0)\n", ExecutorFailed, r"imports task.reward .*rewards.py:reward.*status 0"),
    ],
)
def test_a_module_that_fails_exits_or_hangs_at_import_is_refused_at_the_start_by_name(
    config: TaskConfig, body: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(config.reward.partition(":")[0]).write_text(body + REWARDS)
    if error is DeadlineExceeded:
        monkeypatch.setattr("llamarl.environments.worker_process.START_TIMEOUT_S", 1.0)
        monkeypatch.setattr("llamarl.environments.worker_pool.START_TIMEOUT_S", 1.0)
    with pytest.raises(error, match=words):
        RewardPool(dataclasses.replace(config, pool=RewardPoolConfig(num_workers=1)))


KILLED = """
import os, signal
from pathlib import Path
starts = Path(__file__).with_name("starts")
starts.write_text((starts.read_text() if starts.exists() else "") + "x")
if len(starts.read_text()) <= {deaths}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_is_killed_while_the_pool_starts_is_started_again_but_not_for_ever(config: TaskConfig) -> None:
    module, pool = Path(config.reward.partition(":")[0]), RewardPoolConfig(num_workers=1)
    module.write_text(KILLED.format(deaths=2) + REWARDS)
    with RewardPool(dataclasses.replace(config, pool=pool)) as made:
        assert made.num_replaced == 2
    module.write_text(KILLED.format(deaths=99) + REWARDS)
    module.with_name("starts").unlink()
    with pytest.raises(ExecutorFailed, match=r"imports task.reward .*rewards.py:reward.*signal 9"):
        RewardPool(dataclasses.replace(config, pool=pool))
    assert module.with_name("starts").read_text() == "xxx"
