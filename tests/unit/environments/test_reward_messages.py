"""What a pool believes of a worker, how a user's function is called, and what workers are given: all without processes."""

import enum
import functools
import math
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from made_responses import made_group, made_response

from llamarl.config import validate
from llamarl.environments.episode import Observation, Step
from llamarl.environments.functions import NotANumber, as_score, how_to_call
from llamarl.environments.jobs import checked_step
from llamarl.environments.messages import Answered, Ready, Refused, parse_reply, reply_text
from llamarl.environments.pool import split_into_batches
from llamarl.environments.worker_process import WorkerProcess, worker_environment
from llamarl.errors import ConfigError, DataError
from llamarl.executors.reward import count_causes, failure_cause
from llamarl.frames import BrokenFrame, Frames, frame
from llamarl.process_tree import OutputTail
from llamarl.types import Failure, Group, Score


def test_frames_come_whole_however_the_bytes_are_cut() -> None:
    sent = [Refused("x" * length) for length in (0, 5, 300)]
    data = b"".join(frame(0, reply_text(reply)) for reply in sent)
    for size in (1, 7, len(data)):
        frames = Frames()
        got = [one for i in range(0, len(data), size) for one in frames.feed(data[i : i + size])]
        assert [parse_reply(text) for _, text in got] == sent
    with pytest.raises(BrokenFrame, match=r"a message of 18446744073709551615 bytes"):
        Frames(most=1 << 26).feed(b"\xff" * 9)


def test_the_long_answer_of_a_worker_that_has_ended_since_is_read_to_its_end() -> None:
    answered = Answered(3, Observation(messages=({"role": "user", "content": "x" * 150_000},)))
    worker = object.__new__(WorkerProcess)
    worker.jobs, theirs = socket.socketpair()
    with worker.jobs, theirs:
        worker.jobs.setblocking(False)
        worker._frames = Frames(1 << 26)
        theirs.sendall(frame(0, reply_text(answered)))  # as much as a socket holds, and more than one read takes
        assert list(worker.read_rest()) == [answered]  # also where somebody holds its end open


@pytest.mark.parametrize(
    "reply",
    [
        Ready(7),
        Refused("no"),
        Answered(3, (Score(value=0.1 + 0.2, parts={"a": 5e-324}), Failure(kind="exception", detail="d")), True),
        Answered(4, ()),
        Answered(5, Failure(kind="environment", detail="")),
        Answered(6, Observation(messages=({"role": "user", "content": ["\u00e9"]},), tools=({"name": "f"},))),
        Answered(7, Step(text="on", reward=-1e308, done=True, truncated=True, parts={"moves": 1.0})),
        Answered(8, Step()),
    ],
)
def test_replies_are_read_with_every_bit_of_their_numbers(reply: Ready | Refused | Answered) -> None:
    assert parse_reply(reply_text(reply)) == reply


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "\x80",
        "[" * 100_000,
        '{"reply": {}}',
        '{"reply": {"pid": "7"}}',
        '{"reply": {"job": "1", "retire": false, "answer": []}}',
        '{"reply": {"job": 1, "retire": false, "answer": [{"value": NaN, "parts": {}}]}}',
        '{"reply": {"job": 1, "retire": false, "answer": [{"value": true, "parts": {}}]}}',
        '{"reply": {"job": 1, "retire": false, "answer": [{"value": 1.0, "parts": {"a": Infinity}}]}}',
        '{"reply": {"job": 1, "retire": false, "answer": [{"kind": "generation", "detail": ""}]}}',
        '{"reply": {"job": 1, "retire": false, "answer": {"text": "", "messages": ["no object"], "tools": []}}}',
        '{"reply": {"job": 1, "retire": false, "answer": {"text": "", "surplus": 1}}}',
    ],
)
def test_what_is_no_reply_is_refused(text: str) -> None:
    with pytest.raises(BrokenFrame):
        parse_reply(text.encode("latin-1"))


@pytest.mark.parametrize(
    ("groups", "size", "batches"),
    [
        ([[0, 1], [2, 3]], 1, [(0,), (1,), (2,), (3,)]),
        ([[0, 1, 2], [3, 4], [5, 6]], 4, [(0, 1, 2), (3, 4, 5, 6)]),
        ([[0, 1, 2, 3, 4], [5]], 2, [(0, 1), (2, 3), (4, 5)]),
        ([[], [0], []], 3, [(0,)]),
        ([[]], 3, []),
    ],
)
def test_batches_hold_whole_groups_where_they_fit(
    groups: list[list[int]], size: int, batches: list[tuple[int, ...]]
) -> None:
    assert split_into_batches(groups, size) == batches


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def _wrapped_by_position(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda prompt, response, answer: (prompt, response, answer), ("p", "r", "a")),
        (lambda a, b, c: (a, b, c), ("p", "r", "a")),
        (lambda prompt, completion, truth: (prompt, completion, truth), ("p", "r", "a")),
        (lambda answer, response: (answer, response), ("a", "r")),
        (lambda response, metadata: (response, metadata), ("r", {"k": 1})),
        (lambda a, b, c, metadata: (a, b, c, metadata), ("p", "r", "a", {"k": 1})),
        (lambda a, b, c, metadata=None: (a, b, c, metadata), ("p", "r", "a", {"k": 1})),
        (lambda a, b, c, **more: (a, b, c, more), ("p", "r", "a", {})),
        (lambda *all_of_them: all_of_them, ("p", "r", "a")),
        (lambda response, scale=2.0: (response, scale), ("r", 2.0)),
        (functools.partial(lambda a, b, c, scale: (a, b, c, scale), scale=3), ("p", "r", "a", 3)),
        (_wrapped(lambda response, metadata: (response, metadata)), ("r", {"k": 1})),
        (_wrapped(lambda a, b, c: (a, b, c)), ("p", "r", "a")),
        (_wrapped_by_position(lambda prompt, response, answer: (prompt, response, answer)), ("p", "r", "a")),
        (max, "r"),
    ],
)
def test_a_function_gets_what_its_parameters_ask_for(function: Callable[..., Any], got: object) -> None:
    assert how_to_call(function, "r.py:f", batch_size=0)("p", "r", "a", {"k": 1}) == got


@pytest.mark.parametrize(
    ("function", "batch_size", "words"),
    [
        (lambda response, ground_truth: 0.0, 0, r"\(response, ground_truth\) cannot be called: it gets \(prompt, resp"),
        (lambda response, answer, scale: 0.0, 0, r"\(response, answer, scale\) cannot be called"),
        (lambda queries, prompts, labels: [], 8, r"\(queries, prompts, labels\) cannot be called"),
        (lambda a, b, c, d: 0.0, 0, "give its other parameters defaults"),
        (lambda: 0.0, 0, r"\(\) cannot be called"),
        (lambda prompts, responses, answers: [], 0, "takes lists, as task.reward_batch_size = 0 passes one sample"),
        (lambda prompt, response, answer: 0.0, 8, "one sample a call, as task.reward_batch_size = 8 passes lists"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_with_what_it_gets(
    function: Callable[..., Any], batch_size: int, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        how_to_call(function, "r.py:f", batch_size=batch_size)


def test_workers_get_an_allow_list_of_variables_and_the_recipes_names() -> None:
    here = {"PATH": "/bin", "LC_ALL": "C", "AWS_SECRET_ACCESS_KEY": "s", "HF_TOKEN": "t", "OMP_NUM_THREADS": "8"}
    fixed = {
        **{"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        **{"PYTHONPATH": "/a:/b", "PYTHONHASHSEED": "0"},
    }
    assert worker_environment(here, (), ["/a", "/b"]) == {"PATH": "/bin", "LC_ALL": "C", **fixed}
    passed = worker_environment(here | {"PYTHONHASHSEED": "7"}, ("HF_*", "OMP_NUM_THREADS", "PYTHON*"), ["/a", "/b"])
    assert passed == {"PATH": "/bin", "LC_ALL": "C", **fixed, "HF_TOKEN": "t", "OMP_NUM_THREADS": "8"}


def test_an_agents_endpoint_is_asked_past_the_proxy_that_a_recipe_passes_on() -> None:
    here = {"HTTP_PROXY": "http://proxy:3128", "HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": ".lab"}
    alone = worker_environment(here, ("HTTP*_PROXY",), [])
    assert (alone["no_proxy"], alone["NO_PROXY"]) == ("127.0.0.1", "127.0.0.1")
    both = worker_environment(here, ("*_PROXY",), [])
    assert (both["no_proxy"], both["NO_PROXY"]) == (".lab,127.0.0.1", ".lab,127.0.0.1")
    every = worker_environment({**here, "NO_PROXY": "*"}, ("*_PROXY",), [])
    assert every["no_proxy"] == "*"  # in a list it says nothing
    assert "no_proxy" not in worker_environment(here, ("HTTPS_PROXY",), [])


def test_of_endless_output_the_last_lines_since_the_mark_are_kept_in_bounded_memory() -> None:
    tail = OutputTail(b"<mark>")
    for _ in range(1000):
        tail.feed(b"y" * 999 + b"\n")
    assert len(tail._bytes) <= 8192
    tail.feed(b"the end of an old line<ma")
    tail.feed(b"rk>" + b"".join(b"line %d\n" % i for i in range(20)) + b"\xff\n\n")
    assert tail.lines() == [*(f"line {i}" for i in range(13, 20)), "\ufffd"]


def _group(*outcomes: Score | Failure | None) -> Group:
    return made_group(made_response(i, tokens=(), outcome=outcome) for i, outcome in enumerate(outcomes))


def test_causes_are_counted_the_commonest_first_and_exceptions_by_their_place() -> None:
    def raised(text: str, line: int = 7) -> Failure:
        return Failure(kind="exception", detail=f"KeyError: {text}\n  at /r.py:{line}: raise KeyError(x)")

    slow = Failure(kind="timeout", detail="judging took longer than timeout_s=1 s; its worker was replaced")
    groups = [_group(slow, raised("'a'"), Score(value=1.0)), _group(raised("'b'"), None, raised("'a'", line=9))]
    assert list(count_causes(groups).items()) == [
        ("exception: KeyError: 'a' at /r.py:7", 2),
        (f"timeout: {slow.detail}", 1),
        ("exception: KeyError: 'a' at /r.py:9", 1),
    ]
    assert failure_cause(Failure(kind="crash", detail="")) == "crash: "
    assert failure_cause(raised("1 error\nscore\n  should be a number")) == "exception: KeyError: 1 error at /r.py:7"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (10**400, "too large for a float"),
        (Score(value=1.0, parts={"style": math.inf}), "reward part 'style' is inf"),
        (Score(value=1.0, parts={"style": "x"}), "reward part 'style' is str 'x'"),  # type: ignore[dict-item]
        (Score(value=1.0, parts={3: 1.0}), "reward part 3 must be named by text"),  # type: ignore[dict-item]
        (Score(value=math.nan), "reward is nan"),
    ],
)
def test_what_is_wrong_with_a_score_is_told_by_its_part(value: object, words: str) -> None:
    with pytest.raises(NotANumber, match=words):
        as_score(value)


def test_a_tensor_of_no_dimensions_is_a_number() -> None:
    torch = pytest.importorskip("torch")
    for value in (torch.tensor(0.5), np.array(0.5), np.float32(0.5)):
        assert as_score(value) == as_score(Score(value=value)) == Score(value=0.5)
    for other in (torch.tensor([0.5]), np.array("0.5"), torch.tensor(float("nan"))):
        with pytest.raises(NotANumber, match="reward is"):
            as_score(other)


class _Part(enum.StrEnum):
    STYLE = "style"


class _OldPart(str, enum.Enum):  # noqa: UP042  # how it was written before Python 3.11
    STYLE = "style"


@pytest.mark.parametrize("name", [_Part.STYLE, _OldPart.STYLE])
def test_a_part_that_an_enumeration_names_is_plain_text_for_every_other_process(name: str) -> None:
    for parts in (
        Score(value=1.0, parts={name: 0.5}).parts,
        as_score(Score(value=1.0, parts={name: 0.5})).parts,
        checked_step(Step(text="", parts={name: 0.5})).parts,
    ):
        assert parts == {"style": 0.5} and [type(key) for key in parts] == [str]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"pool": {"memory_limit_mb": 100}}, r"task.pool.memory_limit_mb must be 0 .* or >= 256 MiB, got 100"),
        ({"pool": {"pass_env": ["A=b"]}}, "task.pool.pass_env holds names of environment variables without"),
        ({"reward_batch_size": 4}, "task.reward_batch_size 4 is for a reward of your own"),
        ({"reward": "r:f", "reward_batch_size": -1}, "task.reward_batch_size must be >= 0"),
    ],
)
def test_wrong_pool_settings_are_named(task: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate({"task": task})
