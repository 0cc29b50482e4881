"""A language model as judge: what it is asked, what its words become, and what becomes of a server that does not behave."""

import contextlib
import dataclasses
import json
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_reward_model import ask, respond  # the same prompts and responses

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.checkpoint.storage import RUN_ID_FILE
from llamarl.config import validate
from llamarl.controller.graph import llamarl_graph
from llamarl.controller.preflight import find_missing
from llamarl.controller.prepare import plan_run
from llamarl.errors import ConfigError
from llamarl.executors import asking
from llamarl.executors.asking import Question, ServerJudge, Verdict
from llamarl.executors.base import ExecutorContext
from llamarl.executors.conversations import fill, score_in
from llamarl.executors.judge import JudgeExecutor, VerdictLog
from llamarl.executors.reward import failure_cause
from llamarl.observability.findings import remedy
from llamarl.settings.executors import JudgeConfig
from llamarl.types import Failure, Group, Response, Score

PATTERN = JudgeConfig().score_pattern
Answer = Callable[[int, dict[str, Any]], tuple[int, Any]]
"""(number of the request, its body) -> (status, body or bytes of the reply)."""


def completion(text: str, read: int = 20, written: int = 5) -> tuple[int, Any]:
    usage = {"prompt_tokens": read, "completion_tokens": written}
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}


class Server:
    """An OpenAI-compatible server on loopback that answers as a test says."""

    def __init__(self, answer: Answer) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = self._now = 0
        lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(server.requests)
                    server.requests.append({"path": self.path, **body})
                    server.keys.append(self.headers["Authorization"])
                    server._now += 1
                    server.most_at_once = max(server.most_at_once, server._now)
                try:
                    status, reply = answer(number, body)
                finally:  # before the client can have it, and ask again
                    with lock:
                        server._now -= 1
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                if status // 100 == 3:
                    self.send_header("Location", reply)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # a client whose time was up
                    self.wfile.write(data)

            def do_GET(self) -> None:
                server.keys.append(self.headers["Authorization"])
                self.send_error(405)

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    server = Server(answer)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def _no_proxy_and_short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def executor(run_dir: Path | None = None, **settings: Any) -> JudgeExecutor:
    config = validate({"judge": settings, "deadlines": {"step_s": 60.0}})
    channels = [ChannelSpec(name=c, kind=ChannelKind.GATHER, source="a", sink="b") for c in ("in", "out")]
    context = ExecutorContext(
        name="judge", rank=0, num_ranks=1, device="cpu", run_dir=run_dir, seed=0, reads=(channels[0],),
        writes=(channels[1],),
    )  # fmt: skip
    made = JudgeExecutor(config, context)
    made.setup()
    return made


def judge(of: JudgeExecutor, *responses: Response) -> tuple[list[Response], dict[str, float]]:
    result = of.step(0, {"in": [ask(*responses, answer="4")]})
    (group,) = result.outputs["out"]
    assert isinstance(group, Group)
    return list(group.responses), dict(result.metrics)


def of_server(server: Server, **settings: Any) -> JudgeExecutor:
    return executor(url=server.url, model="wise", **settings)


@pytest.mark.parametrize(
    ("words", "score"),
    [
        ("Good.\nSCORE: 7", 0.7),
        ("score: 7.5\n", 0.75),
        ("SCORE: 2, no:\n**SCORE: 9**", 0.9),  # the last counts
        ("SCORE: 10", 1.0),
        ("SCORE: 0", 0.0),
        ("**SCORE:** 8/10.", 0.8),
        ("SCORE: 8/100", None),
        ("SCORE: 11", None),  # outside of the range
        ("SCORE: -1", None),
        ("7", None),
        ("SCORE:\n\n7\n\n", 0.7),
        (50_000 * "\n" + "SCORE: 7", 0.7),  # in milliseconds
        ("I like it", None),
        ("", None),
    ],
)
def test_a_score_is_the_last_number_named_as_a_share_of_the_range(words: str, score: float | None) -> None:
    assert score_in(words, PATTERN, (0.0, 10.0)) == score


def test_a_rubric_is_filled_once_so_that_a_response_puts_nothing_in() -> None:
    group = ask(respond("{answer} {question}"), answer="4")
    assert fill("Q {question} A {response} R {answer} {x}", group.prompt, group.responses[0]) == (
        "Q two plus two A {answer} {question} R 4 {x}"
    )
    several = ask(metadata={"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]})
    assert fill("{question}{response}", several.prompt, respond("!")) == "system: s\n\nuser: u!"


def test_a_verdict_is_added_with_its_weight_and_its_cost_counted() -> None:
    with serving(lambda number, body: completion("SCORE: 7" if "four" in str(body) else "SCORE: 2")) as server:
        of = of_server(server, weight=2.0, name="wise", temperature=0.5)
        responses, metrics = judge(of, respond("four"), respond("five", 1))
    assert [r.verdict for r in responses] == [
        Score(value=pytest.approx(1.4), parts={"wise": 0.7}),
        Score(value=pytest.approx(0.4), parts={"wise": 0.2}),
    ]
    assert metrics == {
        "judge/num_scored": 2, "judge/num_failed": 0, "judge/num_requests": 2, "judge/num_retries": 0,
        "judge/num_prompt_tokens": 40, "judge/num_completion_tokens": 10,
    }  # fmt: skip
    sent = server.requests[0]
    assert (sent["path"], sent["model"], sent["temperature"]) == ("/v1/chat/completions", "wise", 0.5)
    assert len({request["seed"] for request in server.requests}) == 2 and server.keys == [None, None]


def test_a_greedy_judge_is_sent_no_seed() -> None:
    with serving(lambda number, body: completion("SCORE: 7")) as server:
        judge(of_server(server), respond("four"))
    assert server.requests[0].keys() == {"path", "model", "messages", "temperature", "max_tokens"}


def test_a_server_on_this_machine_is_asked_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody answers there
    with serving(lambda number, body: completion("SCORE: 7")) as server:
        (response,), _ = judge(of_server(server, attempts=1), respond("four"))
    assert response.verdict is not None


@pytest.mark.parametrize(
    ("url", "direct"),
    [
        ("http://localhost:8000/v1", True),
        ("http://127.0.0.1/v1", True),
        ("http://0.0.0.0:8000", True),
        ("http://[::1]:8000", True),
        ("https://localhost", True),
        ("http://localhost.example.org/v1", False),
        ("http://127.example.org", False),
        ("http://judge:8000/v1", False),
    ],
)
def test_a_host_whose_name_begins_like_this_machines_has_its_proxy(
    url: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    opener = ServerJudge(JudgeConfig(url=url, model="wise"))._open.__self__  # type: ignore[attr-defined]
    assert not any(isinstance(one, urllib.request.ProxyHandler) and one.proxies for one in opener.handlers) == direct


def test_a_server_that_is_busy_for_a_moment_is_asked_again() -> None:
    with serving(lambda number, body: (503, {"error": "busy"}) if number < 2 else completion("SCORE: 5")) as server:
        (response,), metrics = judge(of_server(server, attempts=3), respond("four"))
    assert response.verdict is not None and response.verdict.value == 0.5
    assert (metrics["judge/num_requests"], metrics["judge/num_retries"]) == (3, 2)


def test_a_server_that_knows_the_limit_by_its_newer_name_alone_gets_it_by_that() -> None:
    refusal = "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."

    def answer(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        return (400, {"error": {"message": refusal}}) if "max_tokens" in body else completion("SCORE: 5")

    with serving(answer) as server:
        asked = of_server(server, attempts=1, max_new_tokens=9, concurrency=1)
        responses, _ = judge(asked, respond("four"), respond("five", 1))
    assert [r.verdict and r.verdict.value for r in responses] == [0.5, 0.5]
    limits = [(request.get("max_tokens"), request.get("max_completion_tokens")) for request in server.requests]
    assert limits == [(9, None), (None, 9), (None, 9)]


def test_attempts_end_and_the_sample_is_failed_with_the_cause() -> None:
    with serving(lambda number, body: (500, b"out of memory")) as server:
        (response,), metrics = judge(of_server(server, attempts=2), respond("four"))
    assert response.verdict is None
    detail = f"judge: {server.url}/chat/completions refused with status 500: out of memory"
    assert response.outcome == Failure(kind="judge", detail=detail)
    assert (metrics["judge/num_requests"], metrics["judge/num_failed"], metrics["judge/num_scored"]) == (2, 1, 0)


def test_a_refusal_for_good_is_not_asked_again_and_the_key_is_told_to_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with serving(lambda number, body: (401, b"no such key: s3cret")) as server:
        (response,), metrics = judge(of_server(server, api_key_env="JUDGE_KEY"), respond("four"))
    assert server.keys == ["Bearer s3cret"] and metrics["judge/num_requests"] == 1
    assert isinstance(response.outcome, Failure)
    assert "status 401: no such key: ***" in response.outcome.detail and "s3cret" not in response.outcome.detail


def test_the_newline_at_the_end_of_a_key_is_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret\n")
    with serving(lambda number, body: completion("SCORE: 5")) as server:
        judge(of_server(server, api_key_env="JUDGE_KEY"), respond("four"))
    assert server.keys == ["Bearer s3cret"]


@pytest.mark.parametrize("body", [b"Transfer-Encoding: chunked\r\n\r\n", b"Content-Length: 9\r\n\r\n"])
def test_a_refusal_that_breaks_off_fails_the_sample_and_not_the_run(body: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def refuse() -> None:
            for _ in range(2):
                with listening.accept()[0] as connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"HTTP/1.1 503 Busy\r\n" + body)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset

        threading.Thread(target=refuse, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        (response,), metrics = judge(executor(url=url, model="m", attempts=2), respond("four"))
    assert isinstance(response.outcome, Failure) and response.outcome.kind == "judge"
    assert metrics["judge/num_requests"] == 2


def test_a_server_that_points_elsewhere_is_told_of_and_the_key_goes_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with serving(lambda number, body: completion("SCORE: 7")) as other:
        with serving(lambda number, body: (302, other.url)) as server:
            (response,), _ = judge(of_server(server, api_key_env="JUDGE_KEY"), respond("four"))
    assert not other.keys and isinstance(response.outcome, Failure)
    assert response.outcome.detail.endswith(f"points to {other.url}: name that server in judge.url")


def test_a_refusal_whose_words_never_come_fails_its_sample_and_not_the_run() -> None:
    def refuse() -> socket.socket:
        connection, _ = server.accept()
        connection.sendall(b"HTTP/1.1 400 Odd\r\nContent-Length: 9\r\n\r\n")
        return connection  # open, and silent

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        refused = thread.submit(refuse)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        (response,), _ = judge(executor(url=url, model="wise", attempts=1, deadline_s=0.3), respond("four"))
        refused.result().close()
    assert isinstance(response.outcome, Failure) and response.outcome.detail.endswith("refused with status 400: Odd")


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (completion("I cannot say."), "it named no score between 0 and 10"),
        (completion("SCORE: 99"), "it named no score between 0 and 10"),
        (completion("", written=256), "was cut at judge.max_new_tokens = 256"),
        (
            (200, {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}),
            "it named no score between 0 and 10 (judge.score_pattern), and was cut at judge.max_new_tokens = 256",
        ),
        ((200, b"<html>hello</html>"), "sent what is no chat completion (JSONDecodeError"),
        ((200, {"choices": []}), "sent what is no chat completion (IndexError"),
        ((200, {"choices": [{"message": {"content": None}}]}), "sent what is no chat completion (TypeError"),
        ((200, []), "sent what is no chat completion (TypeError"),
    ],
)
def test_what_is_no_verdict_is_asked_for_again_and_then_fails_the_sample(reply: tuple[int, Any], cause: str) -> None:
    with serving(lambda number, body: reply) as server:
        (response,), metrics = judge(of_server(server, attempts=2), respond("four"))
    assert isinstance(response.outcome, Failure) and response.outcome.kind == "judge"
    assert cause in response.outcome.detail and metrics["judge/num_requests"] == 2


def test_a_server_that_is_not_there_fails_the_sample() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        (response,), metrics = judge(executor(url=url, model="m", attempts=2), respond("four"))
    assert isinstance(response.outcome, Failure) and response.outcome.kind == "judge"
    assert "cannot be reached" in response.outcome.detail and metrics["judge/num_requests"] == 2


def test_a_slow_server_costs_its_deadline_and_no_more() -> None:
    release = threading.Event()

    def slowly(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        release.wait(20)
        return completion("SCORE: 5")

    with serving(slowly) as server:
        started = time.monotonic()
        responses, _ = judge(of_server(server, deadline_s=0.3), respond("four"), respond("five", 1))
        assert time.monotonic() - started < 5
        release.set()
    for response in responses:
        assert isinstance(response.outcome, Failure) and response.outcome.kind == "judge"
        assert "gave no reply in time" in response.outcome.detail
        assert remedy(failure_cause(response.outcome)).startswith("No model that judges gave a verdict")


def test_a_server_that_sends_a_little_at_a_time_costs_its_deadline_too() -> None:
    """A limit on the silence between two bytes would let it go on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            with listening.accept()[0] as connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n")
                for _ in range(200):
                    connection.sendall(b" ")
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        started = time.monotonic()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        (response,), _ = judge(executor(url=url, model="m", deadline_s=0.3), respond("four"))
    assert time.monotonic() - started < 5
    assert isinstance(response.outcome, Failure) and response.outcome.kind == "judge"


def test_no_more_requests_than_allowed_are_under_way_at_once() -> None:
    def answer(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.02)
        return completion("SCORE: 5")

    with serving(answer) as server:
        judge(of_server(server, concurrency=3), *(respond("four", n) for n in range(12)))
    assert len(server.requests) == 12 and 1 < server.most_at_once <= 3


def test_what_has_failed_is_not_asked_about() -> None:
    with serving(lambda number, body: completion("SCORE: 5")) as server:
        failed = respond("four", outcome=Failure(kind="crash", detail="x"))
        responses, _ = judge(of_server(server), failed, respond("five", 1, finish_reason="error"))
    assert responses[0] is failed and responses[1].verdict is None and server.requests == []


def test_a_tick_that_is_done_again_takes_what_the_server_said_the_first_time(tmp_path: Path) -> None:
    (tmp_path / RUN_ID_FILE).write_text("a run\n")
    with serving(lambda number, body: completion(f"SCORE: {number}")) as server:
        settings = {"run_dir": tmp_path, "concurrency": 1}
        first, before = judge(of_server(server, **settings), respond("four"), respond("four", 1))
        again, after = judge(of_server(server, **settings), respond("four"), respond("four", 1), respond("four", 2))
        assert [r.verdict for r in again[:2]] == [r.verdict for r in first] and len(server.requests) == 3
        assert {r.verdict.value for r in again if r.verdict} == {0.0, 0.1, 0.2}  # equal words, each asked on its own
        assert before["judge/num_requests"] == 2 and after["judge/num_requests"] == 3  # what it cost in all
        (log,) = (tmp_path / "verdicts").iterdir()
        log.write_bytes(log.read_bytes()[:-20])  # a crash tore the last line
        judge(of_server(server, **settings), *(respond("four", n) for n in range(3)))
        assert len(server.requests) == 4
        judge(of_server(server, **settings, max_new_tokens=9), respond("four"))  # another way to ask
        assert len(server.requests) == 5


def test_a_model_on_its_own_engine_judges_the_same_bits_every_time() -> None:
    """The bundled model writes sums: every verdict of its own is the number after the last ``#``."""
    settings = {
        "path": "bundled:tiny",
        "rubric": "{question}{response}",
        "score_pattern": r"#(\d+)",
        "score_range": [0.0, 40.0],
        "max_new_tokens": 60,
        "device": "cpu",
    }
    question = {"question": "a3 b9 c4 =\n", "text": "a3 b9 c4 =\n"}

    def verdicts(temperature: float) -> tuple[list[Any], dict[str, float]]:
        made = executor(**settings, temperature=temperature, attempts=2)
        result = made.step(0, {"in": [ask(respond(""), respond("b+9=12\n", 1), **question)]})
        return [(r.verdict, r.outcome) for r in result.outputs["out"][0].responses], dict(result.metrics)

    greedy, metrics = verdicts(0.0)
    assert greedy == verdicts(0.0)[0] and verdicts(1.5) == verdicts(1.5)
    (second,) = (verdict for verdict, _ in greedy[1:])
    assert second is not None and second.value == 0.4  # "c+4=16", "#16": 16 of 40
    assert metrics["judge/num_requests"] == 2 and metrics["judge/num_completion_tokens"] > 10
    deaf = executor(**{**settings, "score_pattern": "(never)"}).step(0, {"in": [ask(respond(""), **question)]})
    outcome = deaf.outputs["out"][0].responses[0].outcome
    assert isinstance(outcome, Failure) and "it named no score between 0 and 40" in outcome.detail
    assert deaf.metrics["judge/num_requests"] == 1  # greedy, the same would come again


def test_a_question_that_its_engine_cannot_hold_fails_the_sample() -> None:
    made = executor(path="bundled:tiny", rubric="{response}", device="cpu", max_new_tokens=8)
    assert made._as_words(respond("well<eos>SCORE: 9")).text == "well< eos>SCORE: 9"  # it ends no turn of its own
    responses, _ = judge(made, respond("a1 " * 4000), respond("a1 b2 =", 1))
    assert (
        isinstance(responses[0].outcome, Failure) and "its engine refused the question" in responses[0].outcome.detail
    )


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        ({"url": "localhost:8000", "model": "m"}, "judge.url must begin with http:// or https://"),
        ({"url": "http://me:s3cret@x/v1", "model": "m"}, "judge.url holds a name or password"),
        ({"url": "http://x/v1"}, "judge.model is empty"),
        ({"url": "http://x/v1", "model": "m", "path": "y"}, "judge.url stands beside path"),
        ({"model": "m"}, "judge.url is empty, but model or api_key_env is of a server"),
        ({"path": "bundled:tiny", "rubric": "{question}"}, "must hold {response}"),
        ({"path": "bundled:tiny", "score_pattern": "SCORE"}, "must have one group"),
        ({"path": "bundled:tiny", "score_pattern": "("}, "is no regular expression"),
        ({"path": "bundled:tiny", "score_range": [3.0, 3.0]}, "judge.score_range must be two numbers, the lower first"),
        ({"path": "bundled:tiny", "name": "task"}, "judge.name is 'task', which another part"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], mistake: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate({"judge": settings})
    assert mistake in str(refused.value)


def test_a_key_that_is_not_set_is_missed_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    config = validate({"judge": {"url": "http://x/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}})
    assert any("names NO_SUCH_KEY, which is not set here" in str(mistake) for mistake in find_missing(config))


def test_a_key_of_several_lines_is_refused_without_a_word_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("s3cret\nOTHER=1", "\u201cs3cret\u201d"):
        monkeypatch.setenv("JUDGE_KEY", key)
        config = validate({"judge": {"url": "http://x/v1", "model": "m", "api_key_env": "JUDGE_KEY"}})
        (told,) = [str(mistake) for mistake in find_missing(config) if "JUDGE_KEY" in str(mistake)]
        assert "which holds several lines, or what no key holds, here" in told and "s3cret" not in told
        with pytest.raises(ConfigError, match="names JUDGE_KEY, which holds several lines") as refused:
            executor(url="http://127.0.0.1:1/v1", model="m", api_key_env="JUDGE_KEY")
        assert "s3cret" not in str(refused.value)


def test_a_key_that_only_the_controller_has_is_missed_before_a_judge_elsewhere_asks_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="names NO_SUCH_KEY, which is not set where this judge is"):
        executor(url="http://127.0.0.1:1/v1", model="m", api_key_env="NO_SUCH_KEY")


def test_a_dry_run_shows_it_after_the_reward_model() -> None:
    both = validate({"reward_model": {"path": "m"}, "judge": {"path": "bundled:tiny"}})
    edges = {c.name: (c.source, c.sink) for c in llamarl_graph(both).channels}
    assert edges["rated"] == ("reward_model", "judge") and edges["judged"] == ("judge", "reward")
    alone = dataclasses.replace(both, reward_model=dataclasses.replace(both.reward_model, path=""))
    assert "judge      0 of 1" in plan_run(dataclasses.replace(alone, evaluation=both.evaluation))
    by_url = validate({"judge": {"url": "http://x/v1", "model": "m"}})
    assert {c.name: c.source for c in llamarl_graph(by_url).channels}["judged"] == "judge"


def test_what_a_server_has_said_lies_on_the_disk_and_does_not_pile_up_in_memory(tmp_path: Path) -> None:
    question, verdict = Question(text="how good?", seed_parts=(0, 1, 2)), Verdict(score=0.5)
    log = VerdictLog(tmp_path / "verdicts" / "judge-0.jsonl", asked_of=["a model"])
    log.keep([(question, verdict)])
    assert log.get(question) is None
    assert VerdictLog(log.path, asked_of=["a model"]).get(question) == verdict
