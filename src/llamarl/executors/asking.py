"""The two ways to ask a judge: on an engine of the executor's own, or behind a URL. Both give a verdict for each question.

EngineJudge   all questions into one engine, in order; seeds from (run, prompt, sample): the same bits in every run
ServerJudge   a thread a question, at most ``concurrency`` at a time; attempts with pauses between them; a deadline each
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from llamarl.engine.base import Engine
from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.executors.chat_client import ChatClient, ChatFailed
from llamarl.executors.config import JudgeConfig
from llamarl.executors.rubric import score_in
from llamarl.models.loading import load_tokenizer
from llamarl.running_time import running_s
from llamarl.seeding import derive_seed

__all__ = ["EngineJudge", "Question", "ServerJudge", "Verdict"]

_JUDGE_SEED = 5
_LONGEST_PAUSE_S = 30.0


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
    timed_out: bool = False
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class EngineJudge:
    """A frozen language model on one rank."""

    def __init__(self, config: JudgeConfig, *, device: str) -> None:
        self._config = config
        self._tokenizer = load_tokenizer(config.path)
        self._engine: Engine
        if config.engine.name == "vllm":
            from llamarl.engine.vllm import VllmEngine

            self._engine = VllmEngine(config.path, config.engine, quantization="none")
        else:
            self._engine = NativeEngine(config.path, config.engine, tokenizer=self._tokenizer, device=device)
        eos = self._tokenizer.eos_token_id
        self._params = SamplingParams(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            stop_token_ids=() if eos is None else (int(eos),),
        )

    def ask(self, questions: Sequence[Question], *, until_s: float) -> list[Verdict]:
        """Verdicts in order. At a temperature above 0, words without a score are asked for again with another seed.

        Args:
            until_s: Not looked at: a time limit of its own would make bits depend on the clock. The tick's deadline holds.
        """
        verdicts = self._round(questions, attempt=0)
        for attempt in range(1, self._config.attempts if self._config.temperature else 1):
            again = [i for i, verdict in enumerate(verdicts) if verdict.score is None]
            for i, new in zip(again, self._round([questions[i] for i in again], attempt=attempt), strict=True):
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
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(str(rendered), add_special_tokens=False)["input_ids"])

    def _verdict(self, sequence: TokenSequence, refused: str) -> Verdict:
        read, written = len(sequence.prompt_tokens), len(sequence.tokens)
        if refused or sequence.error:
            return Verdict(
                score=None, cause=f"its engine refused the question: {refused or sequence.error}", requests=1
            )
        text = str(self._tokenizer.decode(sequence.tokens, skip_special_tokens=True))
        score = score_in(text, self._config.score_pattern, self._config.score_range)
        cause = "" if score is not None else _no_score(sequence.finish_reason == "length", self._config)
        return Verdict(score=score, cause=cause, requests=1, prompt_tokens=read, completion_tokens=written)


class ServerJudge:
    """A model behind a URL."""

    def __init__(self, config: JudgeConfig, client: ChatClient) -> None:
        self._config = config
        self._client = client

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
        verdict = Verdict(score=None, cause="no time was left in this tick (deadlines.step_s)", timed_out=True)
        for attempt in range(self._config.attempts):
            if running_s() >= until_s:
                break
            new, may_pass, wait_s = self._attempt(question, attempt, until_s)
            verdict = new if attempt == 0 else _together(verdict, new)
            if verdict.score is not None or not may_pass:
                break
            pause_s = max(min(self._config.backoff_s * 2**attempt, _LONGEST_PAUSE_S), wait_s)
            if attempt + 1 == self._config.attempts or running_s() + pause_s >= until_s:
                break
            time.sleep(pause_s)
        return verdict

    def _attempt(self, question: Question, attempt: int, until_s: float) -> tuple[Verdict, bool, float]:
        """What came of one request, whether another may do better, and how long the server asks to wait."""
        messages = [{"role": "user", "content": question.text}]
        try:
            reply = self._client.ask(
                messages,
                until_s=until_s,
                temperature=self._config.temperature,
                max_tokens=self._config.max_new_tokens,
                seed=question.seed(attempt) >> 33,  # many servers take 31 bits
            )
        except ChatFailed as error:
            return (
                Verdict(score=None, cause=str(error), timed_out=error.timed_out, requests=1),
                error.may_pass,
                error.wait_s,
            )
        score = score_in(reply.text, self._config.score_pattern, self._config.score_range)
        cut = reply.completion_tokens >= self._config.max_new_tokens
        verdict = Verdict(
            score=score,
            cause="" if score is not None else _no_score(cut, self._config),
            requests=1,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
        )
        return verdict, True, 0.0


def _together(before: Verdict, new: Verdict) -> Verdict:
    """The newer verdict, with what both cost."""
    return Verdict(
        score=new.score,
        cause=new.cause,
        timed_out=new.timed_out,
        requests=before.requests + new.requests,
        prompt_tokens=before.prompt_tokens + new.prompt_tokens,
        completion_tokens=before.completion_tokens + new.completion_tokens,
    )


def _no_score(cut: bool, config: JudgeConfig) -> str:
    low, high = config.score_range
    why = f", and was cut at judge.max_new_tokens = {config.max_new_tokens}" if cut else ""
    return f"it named no score between {low:g} and {high:g} (judge.score_pattern){why}"
