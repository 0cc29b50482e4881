"""Reward functions that fork, close, print, detach and hoard: what they can reach, and what outlives them."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from forked_command import SERVER
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_responses import made_group, made_response
from tools.chaos.processes import alive, wait_for_end
from waiting import wait_until

from llamarl.environments.pool import RewardPool
from llamarl.errors import DataError
from llamarl.executors.reward import count_causes
from llamarl.settings.environments import RewardPoolConfig, TaskConfig
from llamarl.types import Failure, Group, Score

JUDGE = '''
import json, multiprocessing, os, re, resource, signal, subprocess, sys, threading, time

def detach(note):
    """A process in a session of its own, forked twice, deaf to every signal that can be ignored."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
            with open(note, "a") as file:
                print(os.getpid(), file=file)
            time.sleep(600)
        os._exit(0)
    while not (os.path.exists(note) and open(note).read().endswith("\\n")):
        time.sleep(0.01)

class OwnStream:
    def write(self, text):
        return len(text)

    def flush(self):
        raise KeyError("nothing to flush")

def deaf():
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)

def frame(job):
    body = json.dumps({"reply": {"job": job, "retire": False, "answer": [{"value": -9.0, "parts": {}}]}})
    return bytes([0]) + len(body).to_bytes(8, "big") + body.encode()

def forked(act, wait):
    child = os.fork()
    if child:
        if wait:
            os.waitpid(child, 0)
        return False
    if act == "fork_raise":
        raise ValueError("in the child")
    if act == "fork_exit":
        sys.exit(0)
    if act == "fork_hang":
        time.sleep(600)
    return True

def act(name):
    """True where this is another process than the one that was asked."""
    if name.startswith("fork"):
        return forked(name.removesuffix("_wait"), name.endswith("_wait"))
    if name == "print":
        print("verdict 0.25", flush=True)
        print("verdict 0.5", file=sys.stderr)
    if name == "print_much":
        print("x" * 300_000)
    if name == "write_frames":
        for job in range(200):
            os.write(1, frame(job))
    if name == "alien":
        os.write(int(sys.argv[1]), frame(10**9))
    if name == "garbage":
        os.write(int(sys.argv[1]), bytes([255]) * 64)
    if name == "subprocess":
        subprocess.run(["sh", "-c", "cat; echo junk; echo junk >&2; for i in 3 4 5 6 7; do echo junk >&$i; done"], stderr=-3)
    if name == "subprocess_all_fds":
        subprocess.run(["sh", "-c", "cat; for i in 3 4 5 6 7 8 9; do echo junk >&$i; done"], stderr=-3, close_fds=False)
    if name == "preexec":
        subprocess.run(["true"], preexec_fn=lambda: print("in the child", flush=True))
    if name == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=print, args=("hello",))
        process.start()
        process.join()
    if name == "close_stdio":
        os.closerange(0, 3)
    if name == "close_stream":
        sys.stdout.close()
        sys.stderr = None
    if name == "own_stream":
        sys.stdout = OwnStream()
    if name == "close_all":
        os.closerange(3, 4096)
    if name == "close_and_reopen":
        os.closerange(3, 4096)
        global kept
        kept = [open("/dev/null", "wb") for _ in range(20)]
    if name == "close_output":
        socket, output = int(sys.argv[1]), os.fstat(1)
        for fd in range(3, 4096):
            if fd != socket and os.path.exists(f"/proc/self/fd/{fd}") and os.path.samestat(os.fstat(fd), output):
                os.close(fd)
    return False

def program(prompt, response, answer):
    asked = json.loads(response)
    for name in asked["acts"]:
        if act(name):
            return -1.0
    return asked["value"]

def judge(prompt, response, answer):
    word, _, rest = response.partition(" ")
    if word == "env":
        return float(rest in os.environ)
    if word == "hoard":
        return float(len(bytearray(int(rest) << 20)))
    if word == "threads":  # that live at once
        end, threads = threading.Event(), [threading.Thread(target=lambda: end.wait()) for _ in range(int(rest))]
        for thread in threads:
            thread.start()
        end.set()
        return float(len(threads))
    if word == "detach":
        detach(rest)
        return 1.0
    if word == "detach_hang":
        detach(rest)
        deaf()
        time.sleep(600)
    if word == "detach_regex":
        detach(rest)
        re.match(r"(a+)+$", "a" * 50 + "b")  # never gives the interpreter lock back
    if word == "detach_exit":
        detach(rest)
        os._exit(4)
    if word == "noise_exit":
        for i in range(200_000):
            print("line", i)
        print("last words")
        os._exit(5)
    if word == "quiet_exit":
        os._exit(5)
    if word == "stdin":
        return float(len(sys.stdin.read()))
    if word == "child_status":
        child = os.fork()
        if child == 0:
            if rest == "raises":
                raise ValueError("in the child")
            if rest == "exits":
                sys.exit(7)
            return -1.0
        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if word == "child_has_socket":
        child = os.fork()
        if child == 0:
            os._exit(os.path.exists(f"/proc/self/fd/{sys.argv[1]}"))
        forked = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return float(forked + (subprocess.run(["test", "-e", f"/proc/self/fd/{sys.argv[1]}"], close_fds=False).returncode == 0))
    if word == "alarm":
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    if word == "nap":
        time.sleep(0.5)
    if word == "surrogate":
        raise ValueError("\\ud800")
    if word == "unprintable":
        class Unprintable(Exception):
            def __str__(self):
                raise KeyError("no text")
        raise Unprintable
    return float(len(response))

def batch(prompts, responses, answers, metadata):
    if "raise" in responses:
        raise KeyError("one of them")
    if "short" in responses:
        return [1.0]
    if "scalar" in responses:
        return 1.0
    return [float("nan") if r == "nan" else len(responses) + m["weight"] / 8 for r, m in zip(responses, metadata)]
'''


def _config(folder: Path, function: str, **pool: object) -> TaskConfig:
    (folder / "judges.py").write_text(JUDGE)
    (folder / "train.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    return TaskConfig(
        name="function",
        data=str(folder / "train.jsonl"),
        eval_fraction=0.0,
        reward=f"{folder}/judges.py:{function}",
        pool=RewardPoolConfig(**{"num_workers": 1, "timeout_s": 30.0} | pool),  # type: ignore[arg-type]
    )


def _group(*texts: str, metadata: dict[str, object] | None = None) -> Group:
    responses = (made_response(sample, text=text) for sample, text in enumerate(texts))
    return made_group(responses, text="pp", answer="aaa", metadata=metadata or {})


def _judge(pool: RewardPool, *texts: str) -> list[Score | Failure | None]:
    return [response.outcome for response in pool.score([_group(*texts)])[0].responses]


def _failure(outcome: object) -> Failure:
    assert isinstance(outcome, Failure)
    return outcome


KEEPS_ITS_VERDICT = (
    *("fork_return", "fork_return_wait", "fork_raise", "fork_raise_wait", "fork_exit_wait", "fork_hang"),
    *("print", "print_much", "write_frames", "subprocess", "subprocess_all_fds", "preexec", "multiprocessing"),
    "alien",
)
LEAVES_STREAMS_ODD = ("close_stdio", "close_stream", "own_stream")
LOSES_THE_POOL = ("close_all", "close_and_reopen", "close_output")
VALUES = itertools.count(1)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    with RewardPool(_config(tmp_path_factory.mktemp("judges"), "program", num_workers=2)) as pool:
        yield pool


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    with RewardPool(_config(tmp_path_factory.mktemp("judges"), "judge")) as pool:
        yield pool


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(KEEPS_ITS_VERDICT), max_size=2),
            st.lists(st.sampled_from((*LEAVES_STREAMS_ODD * 3, *LOSES_THE_POOL)), max_size=1),
        ).map(lambda acts: acts[0] + acts[1]),
        min_size=1,
        max_size=5,
    )
)
def test_whatever_judges_do_to_their_process_a_verdict_belongs_to_its_own_sample(
    programs: RewardPool, samples: list[list[str]]
) -> None:
    values = [float(next(VALUES)) for _ in samples]
    texts = [json.dumps({"value": value, "acts": acts}) for value, acts in zip(values, samples, strict=True)]
    for value, acts, outcome in zip(values, samples, _judge(programs, *texts), strict=True):
        if set(acts) & set(LOSES_THE_POOL):
            assert _failure(outcome).kind == "crash"
        else:
            assert outcome == Score(value=value), (acts, outcome)


@pytest.mark.parametrize("act", (*KEEPS_ITS_VERDICT, *LEAVES_STREAMS_ODD))
def test_each_of_these_acts_alone_costs_no_verdict_and_no_worker(programs: RewardPool, act: str) -> None:
    replaced = programs.num_replaced
    values = [float(next(VALUES)) for _ in range(6)]
    texts = [json.dumps({"value": value, "acts": [act]}) for value in values]
    assert _judge(programs, *texts) == [Score(value=value) for value in values]
    assert programs.num_replaced == replaced


def test_a_judge_that_closes_the_workers_socket_is_told_so(programs: RewardPool) -> None:
    for act in LOSES_THE_POOL:
        (outcome,) = _judge(programs, json.dumps({"value": 1.0, "acts": [act]}))
        assert "the judge closed the reward worker's connection" in _failure(outcome).detail


def test_a_forked_child_that_leaves_the_judge_ends_at_once_with_a_status_its_parent_can_read(
    judges: RewardPool,
) -> None:
    statuses = _judge(judges, "child_status returns", "child_status raises", "child_status exits")
    assert statuses == [Score(value=0.0), Score(value=1.0), Score(value=7.0)]


def test_neither_forked_nor_started_processes_inherit_the_workers_socket(judges: RewardPool) -> None:
    assert _judge(judges, "child_has_socket") == [Score(value=0.0)]


def test_an_alarm_left_over_does_not_ring_in_the_next_sample(judges: RewardPool) -> None:
    assert _judge(judges, "alarm", "nap") == [Score(value=5.0), Score(value=3.0)]


def test_what_is_no_reply_on_the_workers_socket_fails_the_sample_it_came_in(programs: RewardPool) -> None:
    texts = [json.dumps({"value": 1.0, "acts": acts}) for acts in (["garbage"], [])]
    bad, good = _judge(programs, *texts)
    assert _failure(bad).kind == "crash" and "sent what is no reply" in _failure(bad).detail
    assert good == Score(value=1.0)


def test_standard_input_is_empty(judges: RewardPool) -> None:
    assert _judge(judges, "stdin") == [Score(value=0.0)]


def test_workers_get_no_secrets_but_what_the_recipe_passes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MY_TOKEN", "MY_KEY", "MY_LAB_A", "HF_TOKEN", "LC_TIME"):
        monkeypatch.setenv(name, "x")
    words = ("env MY_TOKEN", "env MY_KEY", "env MY_LAB_A", "env HF_TOKEN", "env LC_TIME", "env PATH")
    with RewardPool(_config(tmp_path, "judge", pass_env=("MY_KEY", "MY_LAB_*"))) as pool:
        values = [outcome.value for outcome in _judge(pool, *words) if isinstance(outcome, Score)]
    assert values == [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("word", ["detach", "detach_hang", "detach_exit"])
def test_detached_processes_that_ignore_signals_do_not_outlive_their_worker(tmp_path: Path, word: str) -> None:
    note = tmp_path / "pids"
    with RewardPool(_config(tmp_path, "judge", timeout_s=3.0)) as pool:
        (outcome,) = _judge(pool, f"{word} {note}")
        (pid,) = map(int, note.read_text().split())
        if word == "detach":
            assert outcome == Score(value=1.0)
            assert alive(pid)  # the judge may want it for its next sample
        else:
            assert _failure(outcome).kind == ("timeout" if word == "detach_hang" else "crash")
            assert not alive(pid)
    assert not alive(pid)


def _hold_a_pool(config: TaskConfig, text: str, how: str, said: Connection) -> None:
    os.setsid()
    pool = RewardPool(config)
    if how == "fork" and os.fork() == 0:  # holds a copy of every socket of the pool
        time.sleep(60)
    said.send([*pool.worker_pids, *(worker.guard.pid for worker in pool._workers)])
    pool.score([_group(text)])
    time.sleep(60)


@pytest.mark.parametrize(("word", "how"), [("detach_regex", "alone"), ("detach", "fork")])
def test_nobody_is_left_when_the_process_of_the_pool_is_killed(tmp_path: Path, word: str, how: str) -> None:
    note = tmp_path / "pids"
    config = _config(tmp_path, "judge", timeout_s=60.0)
    heard, said = SERVER.Pipe(duplex=False)
    parent = SERVER.Process(target=_hold_a_pool, args=(config, f"{word} {note}", how, said))
    parent.start()
    try:
        assert heard.poll(60) and len(pids := set(heard.recv())) == 2
        wait_until(lambda: note.exists() and note.read_text().endswith("\n"))
        pids |= set(map(int, note.read_text().split()))
        assert all(map(alive, pids))
        parent.kill()
        parent.join(10)
        assert not wait_for_end(pids, 15.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)  # the forked copy, which is not the pool's to end


def test_a_worker_whose_guard_is_killed_dies_too_and_is_replaced(tmp_path: Path) -> None:
    with RewardPool(_config(tmp_path, "judge")) as pool:
        (old,) = pool.worker_pids
        pool._workers[0].guard.kill()
        assert not wait_for_end({old}, 15.0)
        assert _judge(pool, "xx") == [Score(value=2.0)]


def test_output_costs_no_disk_and_only_the_last_lines_of_its_own_sample_are_told(judges: RewardPool) -> None:
    noisy, quiet = (_failure(outcome) for outcome in _judge(judges, "noise_exit", "quiet_exit"))
    assert noisy.detail.splitlines() == [
        "the reward worker exited with status 5",
        *(f"line {i}" for i in range(199_993, 200_000)),
        "last words",
    ]
    assert quiet.detail == "the reward worker exited with status 5"


def test_a_sample_beyond_the_memory_limit_is_failed_with_its_cause_and_the_next_is_judged_afresh(
    tmp_path: Path,
) -> None:
    with RewardPool(_config(tmp_path, "judge", memory_limit_mb=600)) as pool:
        small, large, after = _judge(pool, "hoard 100", "hoard 900", "xx")
        assert pool.num_replaced == 1
    assert (small, after) == (Score(value=float(100 << 20)), Score(value=2.0))
    assert _failure(large).kind == "exception"
    assert "MemoryError: (task.pool.memory_limit_mb = 600)" in _failure(large).detail


def test_the_stacks_of_threads_leave_room_under_the_memory_limit(tmp_path: Path) -> None:
    with RewardPool(_config(tmp_path, "judge", memory_limit_mb=600)) as pool:
        assert _judge(pool, "threads 150") == [Score(value=150.0)]  # of 8 MiB each, 75 would be too many


@pytest.mark.parametrize(("word", "told"), [("surrogate", r"ValueError: \ud800"), ("unprintable", "Unprintable: (its")])
def test_an_exception_whose_text_cannot_be_written_is_still_a_cause(judges: RewardPool, word: str, told: str) -> None:
    (outcome,) = _judge(judges, word)
    assert told in _failure(outcome).detail
    _failure(outcome).detail.encode()


def test_a_batch_function_gets_whole_groups_and_metadata_and_fails_all_its_samples_at_once(tmp_path: Path) -> None:
    config = dataclasses.replace(_config(tmp_path, "batch", num_workers=2), reward_batch_size=4)
    groups = [_group("a", "b", "c", metadata={"weight": 1}), _group("d", "nan", metadata={"weight": 2})]
    with RewardPool(config) as pool:
        first, second = pool.score(groups)
        assert [response.outcome for response in first.responses] == [Score(value=3.125)] * 3  # a batch of three
        assert second.responses[0].outcome == Score(value=2.25)
        assert _failure(second.responses[1].outcome).kind == "not_a_number"
        scored = pool.score([_group("raise", "a"), _group("b"), _group("short", "c", "d"), _group("scalar", "x", "y")])
    line = JUDGE.splitlines().index('        raise KeyError("one of them")') + 1
    assert count_causes(scored) == {
        f"exception: KeyError: 'one of them' at {tmp_path}/judges.py:{line}": 3,
        "not_a_number: the reward of a batch has 1 values for 3 samples, expected one each": 3,
        "not_a_number: the reward of a batch is float, expected a list of 3 numbers": 3,
    }


def test_a_function_with_the_wrong_parameters_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"judges.py:forked.*forked\(act, wait\) cannot be called"):
        RewardPool(_config(tmp_path, "forked"))
