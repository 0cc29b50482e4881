"""The two ways to ask a judge: on an engine of the executor's own, or behind a URL. Both give a
verdict for each question.

EngineJudge   all questions into one engine, in order; seeds from (run, prompt, sample): the same bits in every run
ServerJudge   a thread a question, at most ``concurrency`` at a time; attempts with pauses between them; a deadline each

A server speaks the protocol of OpenAI's ``/chat/completions``. The client is the standard
library's, behind the proxies of the environment: ``huggingface_hub.InferenceClient`` limits the
silence between two bytes, not a request, bounds no reply, and sends the user's hub token to
whatever server it is pointed at.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from llamarl.data.prompts import apply_template
from llamarl.determinism import derive_seed
from llamarl.engine.factory import load_engine
from llamarl.engine.sequence import SamplingParams
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.executors.conversations import score_in, special_tokens
from llamarl.models.loading import load_tokenizer
from llamarl.running_time import running_s
from llamarl.settings.engine import EngineConfig
from llamarl.settings.executors import JudgeConfig

__all__ = ["EngineJudge", "Question", "ServerJudge", "Verdict"]

_JUDGE_SEED = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_MAX_REPLY_BYTES = 4 << 20
_MAX_DETAIL = 300
_HERE = re.compile(r"https?://(localhost|127\.[\d.]+|0\.0\.0\.0|\[::1\])(?![\w.-])")
_PASSING_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Of a server that may answer a moment later."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a judge is asked about one response."""

    text: str
    seed_parts: tuple[int, int, int]
    """Run seed, prompt index, sample index."""

    def seed(self, attempt: int) -> int:
        """64-bit; a function of the response's place in the run alone."""
        run, prompt, sample = self.seed_parts
        return derive_seed(run, _JUDGE_SEED, prompt, sample, attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one question."""

    score: float | None
    """Between 0 and 1; None where there is none."""
    cause: str = ""
    """Why there is none; the same words for the same trouble, so that it is counted together."""
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class EngineJudge:
    """A frozen language model on one rank."""

    def __init__(self, config: JudgeConfig, engine: EngineConfig, *, device: str) -> None:
        self._config = config
        self._tokenizer = load_tokenizer(config.path)
        self.special = special_tokens(self._tokenizer)
        self._engine = load_engine(config.path, engine, self._tokenizer, device=device)
        eos = self._tokenizer.eos_token_id
        self._params = SamplingParams(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            stop_token_ids=() if eos is None else (int(eos),),
        )

    def ask(self, questions: Sequence[Question], *, until_s: float) -> list[Verdict]:
        """Verdicts in order. At a temperature above 0, words without a score are asked for again with another seed.

        Args:
            until_s: Not looked at: a time limit of its own would make bits depend on the clock. The
                tick's deadline holds.
        """
        verdicts = self._round(questions, attempt=0)
        for attempt in range(1, self._config.attempts if self._config.temperature else 1):
            redo = [i for i, verdict in enumerate(verdicts) if verdict.score is None]
            for i, new in zip(redo, self._round([questions[i] for i in redo], attempt=attempt), strict=True):
                verdicts[i] = _together(verdicts[i], new)
        return verdicts

    def _round(self, questions: Sequence[Question], *, attempt: int) -> list[Verdict]:
        sequences = [
            TokenSequence(
                prompt_index=index,
                sample_index=0,
                prompt_tokens=self._tokens(question.text),
                params=self._params,
                seed=question.seed(attempt),
            )
            for index, question in enumerate(questions)
        ]
        refused: dict[int, str] = {}
        for index, sequence in enumerate(sequences):
            try:
                self._engine.add([sequence])
            except ValueError as error:  # too long for its context or its cache
                refused[index] = str(error)
        while self._engine.has_work:
            self._engine.step()
        return [self._verdict(sequence, refused.get(index, "")) for index, sequence in enumerate(sequences)]

    def _tokens(self, text: str) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            return list(self._tokenizer(text)["input_ids"])
        messages = [{"role": "user", "content": text}]
        rendered = apply_template(self._tokenizer, messages)
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def _verdict(self, sequence: TokenSequence, refused: str) -> Verdict:
        read, written = len(sequence.prompt_tokens), len(sequence.tokens)
        if refused or sequence.error:
            return Verdict(
                score=None, cause=f"its engine refused the question: {refused or sequence.error}", requests=1
            )
        text = str(self._tokenizer.decode(sequence.tokens, skip_special_tokens=True))
        cut = sequence.finish_reason == "length"
        return _of_words(text, self._config, cut=cut, read=read, written=written)


class _NoReply(Exception):
    """A request came to nothing.

    Attributes:
        may_pass: Whether another attempt may do better.
        wait_s: Seconds after which the server asks to be tried again; 0 where it does not say.
    """

    def __init__(self, detail: str, *, may_pass: bool, wait_s: float = 0.0) -> None:
        super().__init__(detail)
        self.may_pass, self.wait_s = may_pass, wait_s


class _StaysThere(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key would go along, and a question becomes a GET."""

    def redirect_request(self, *args: Any) -> None:
        return None


class ServerJudge:
    """A model behind a URL."""

    def __init__(self, config: JudgeConfig, *, api_key: str = "") -> None:
        """
        Args:
            api_key: Sent as a bearer token; never part of an error.
        """
        self._config = config
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        self._key = api_key
        direct = [urllib.request.ProxyHandler({})] if _HERE.match(config.url) else []  # no proxy knows this machine
        self._open = urllib.request.build_opener(_StaysThere, *direct).open
        self._limit = "max_tokens"

    def ask(self, questions: Sequence[Question], *, until_s: float) -> list[Verdict]:
        """Verdicts in order.

        Args:
            until_s: On ``running_s``: what has no verdict then is failed, so that the tick keeps its deadline.
        """
        if not questions:
            return []
        with ThreadPoolExecutor(self._config.concurrency, thread_name_prefix="judge") as threads:
            return list(threads.map(lambda question: self._one(question, until_s), questions))

    def _one(self, question: Question, tick_until_s: float) -> Verdict:
        until_s = min(running_s() + self._config.deadline_s, tick_until_s)
        verdict = Verdict(score=None, cause="no time was left in this tick (deadlines.step_s)")
        for attempt in range(self._config.attempts):
            if running_s() >= until_s:
                break
            wait_s = 0.0
            try:
                new = self._verdict(self._post(question, attempt, until_s))
                may_pass = True
            except _NoReply as error:
                new = Verdict(score=None, cause=str(error), requests=1)
                may_pass, wait_s = error.may_pass, error.wait_s
            verdict = _together(verdict, new)
            if verdict.score is not None or not may_pass:
                break
            pause_s = max(min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S), wait_s)
            if attempt + 1 == self._config.attempts or running_s() + pause_s >= until_s:
                break
            time.sleep(pause_s)
        return verdict

    def _post(self, question: Question, attempt: int, until_s: float) -> bytes:
        """The body of the reply to one request, which waits for nothing beyond ``until_s``."""
        limit = self._limit
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": question.text}],
            "temperature": self._config.temperature,
            limit: self._config.max_new_tokens,
        }
        if self._config.temperature:  # greedy has none: Gemini's and Mistral's servers refuse one
            body["seed"] = question.seed(attempt) >> 33  # many servers take 31 bits
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, data=json.dumps(body).encode(), headers=headers, method="POST")
        try:
            with self._open(request, timeout=max(until_s - running_s(), 0.001)) as response:
                return _read(response, until_s)
        except urllib.error.HTTPError as error:
            said = b""
            with contextlib.suppress(OSError, http.client.HTTPException):  # a connection may break off here too
                said = error.read1(_MAX_DETAIL)
            if limit == "max_tokens" and b"max_completion_tokens" in said:  # all that OpenAI's models that think know
                self._limit = "max_completion_tokens"
                return self._post(question, attempt, until_s)
            shown = self._clean(said.decode(errors="replace")) or error.reason
            detail = f"{self._url} refused with status {error.code}: {shown}"
            if place := error.headers.get("Location"):
                detail = f"{self._url} points to {self._clean(place)}: name that server in judge.url"
            wait_s = _seconds(error.headers.get("Retry-After"))
            raise _NoReply(detail, may_pass=error.code in _PASSING_STATUSES, wait_s=wait_s) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise _NoReply(f"{self._url} gave no reply in time", may_pass=False) from None
            detail = f"{self._url} cannot be reached: {self._clean(str(reason) or type(reason).__name__)}"
            raise _NoReply(detail, may_pass=True) from None

    def _verdict(self, data: bytes) -> Verdict:
        try:
            said: Any = json.loads(data)
            choice = said["choices"][0]
            text = choice["message"]["content"]
            usage = said.get("usage") or {}
            read, written = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
            cut = choice.get("finish_reason") == "length" or written >= self._config.max_new_tokens
            if text is None and cut:  # in the middle of a thought, which the server keeps apart
                text = ""
            if not isinstance(text, str):
                raise TypeError("its content is no text")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            shown = self._clean(data[:_MAX_DETAIL].decode(errors="replace"))
            detail = f"{self._url} sent what is no chat completion ({type(error).__name__}: {error}): {shown}"
            raise _NoReply(detail, may_pass=True) from None
        return _of_words(text, self._config, cut=cut, read=read, written=written)

    def _clean(self, text: str) -> str:
        """One short line, without the key."""
        shown = " ".join(text.split())[:_MAX_DETAIL]
        return shown.replace(self._key, "***") if self._key else shown


def _read(response: Any, until_s: float) -> bytes:
    data = bytearray()
    while chunk := response.read1(1 << 16):
        data += chunk
        if len(data) > _MAX_REPLY_BYTES:
            raise _NoReply(f"its reply is longer than {_MAX_REPLY_BYTES >> 20} MiB", may_pass=False)
        if running_s() > until_s:
            raise TimeoutError
    return bytes(data)


def _seconds(header: str | None) -> float:
    """Of ``Retry-After``, where it is a number of seconds."""
    try:
        return max(0.0, min(float(header or 0), 3600.0))
    except ValueError:
        return 0.0


def _of_words(text: str, config: JudgeConfig, *, cut: bool, read: int, written: int) -> Verdict:
    """The verdict in what a model said."""
    low, high = config.score_range
    score = score_in(text, config.score_pattern, config.score_range)
    cause = f"it named no score between {low:g} and {high:g} (judge.score_pattern)" if score is None else ""
    if cause and cut:
        cause += f", and was cut at judge.max_new_tokens = {config.max_new_tokens}"
    return Verdict(score=score, cause=cause, requests=1, prompt_tokens=read, completion_tokens=written)


def _together(before: Verdict, new: Verdict) -> Verdict:
    """The newer verdict, with what both cost."""
    return replace(
        new,
        requests=before.requests + new.requests,
        prompt_tokens=before.prompt_tokens + new.prompt_tokens,
        completion_tokens=before.completion_tokens + new.completion_tokens,
    )
