"""The judge: a language model reads each response under a rubric, and the number that it names
becomes part of the reward.

In: ``rated``, or ``completions``; out: ``judged``. Two kinds:

    path   a frozen model on this executor's own engine: greedy unless told otherwise, the same bits in every run
    url    a server that speaks OpenAI's protocol: threads, attempts, deadlines; what it says need
    not repeat, so what it said is
           kept (``VerdictLog``) and a tick that is done again asks nobody twice

No verdict is ever a zero: a judge that cannot be reached, runs out of time or names no score fails
the sample with that cause.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llamarl.checkpoint.snapshot import canonical_json, checksum_bytes
from llamarl.checkpoint.storage import RunIdentity
from llamarl.errors import ConfigError
from llamarl.executors.asking import EngineJudge, Question, ServerJudge, Verdict
from llamarl.executors.base import BaseExecutor, Stateless, StepResult
from llamarl.executors.conversations import fill, without
from llamarl.executors.judging import to_judge, with_score
from llamarl.executors.reward import JUDGING_SHARE
from llamarl.observability.writing import LineLog, Patience
from llamarl.running_time import running_s
from llamarl.types import Failure, Group, Response

__all__ = ["JudgeExecutor", "VerdictLog"]


class JudgeExecutor(Stateless, BaseExecutor):
    """Section ``judge``. A further one, ``[executors.NAME]``, has that section in its ``settings``."""

    def setup(self) -> None:
        self.settings = self.config.judge
        self._log: VerdictLog | None = None
        self.judge: EngineJudge | ServerJudge
        if self.settings.path:
            self.judge = EngineJudge(self.settings, self.config.judge_engine, device=self.context.device)
            return
        variable = self.settings.api_key_env
        if why := self.settings.why_no_key():  # on another host: here the checks before the run have seen it
            raise ConfigError(
                f"judge.api_key_env names {variable}, which {why} where this judge is: on a cluster it has the environment "
                "of its node (of Ray: export it before ray start)"
            )
        self.judge = ServerJudge(self.settings, api_key=os.environ.get(variable, "").strip())
        if self.context.run_dir is not None:
            self._folder = RunIdentity.of(self.context.run_dir)
            file = self.context.run_dir / "verdicts" / f"{self.name}-{self.context.rank}.jsonl"
            of = self.settings
            asked_of = [of.url, of.model, of.temperature, of.max_new_tokens, of.score_pattern, list(of.score_range)]
            self._log = VerdictLog(file, asked_of=asked_of, patience=Patience(self.config.deadlines.disk_s))

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        started = time.monotonic()
        until_s = running_s() + JUDGING_SHARE * self.config.deadlines.step_s
        groups: list[Group] = self.items_of(inputs)
        questions = [
            Question(
                text=fill(self.settings.rubric, group.prompt, self._as_words(response)),
                seed_parts=(self.config.run.seed, group.prompt.index, response.sample_index),
            )
            for group in groups
            for response in group.responses
            if to_judge(response)
        ]
        verdicts = self._ask(questions, until_s=until_s)
        found = iter(verdicts)
        judged = [
            dataclasses.replace(
                group, responses=tuple(self._judged(r, next(found)) if to_judge(r) else r for r in group.responses)
            )
            for group in groups
        ]
        return StepResult(
            outputs=self.outputs_of(judged),
            metrics=self.own_keys(_metrics(verdicts)),
            spans=(("judge", started, time.monotonic()),),
        )

    def _as_words(self, response: Response) -> Response:
        """What a model of the job's own reads; which tokens of a server's are special is not known here."""
        return without(self.judge.special, response) if isinstance(self.judge, EngineJudge) else response

    def _ask(self, questions: Sequence[Question], *, until_s: float) -> list[Verdict]:
        """Verdicts in order; those that an interrupted run has got already are taken from its log."""
        if self._log is None:
            return self.judge.ask(questions, until_s=until_s)
        kept = [self._log.get(question) for question in questions]
        new = [question for question, verdict in zip(questions, kept, strict=True) if verdict is None]
        asked = iter(self.judge.ask(new, until_s=until_s))
        verdicts = [next(asked) if verdict is None else verdict for verdict in kept]
        self._folder.check()
        self._log.keep(
            (question, verdict)
            for question, verdict, before in zip(questions, verdicts, kept, strict=True)
            if before is None
        )
        return verdicts

    def _judged(self, response: Response, verdict: Verdict) -> Response:
        if verdict.score is None:
            failure = Failure(kind="judge", detail=f"{self.settings.name}: {verdict.cause}")
            return dataclasses.replace(response, outcome=failure)
        return with_score(response, verdict.score, name=self.settings.name, weight=self.settings.weight)

    def close(self) -> None:
        self.__dict__.pop("judge", None)


def _metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    failed = sum(verdict.score is None for verdict in verdicts)
    counts = {
        "num_scored": len(verdicts) - failed,
        "num_failed": failed,
        "num_requests": sum(verdict.requests for verdict in verdicts),
        "num_retries": sum(max(0, verdict.requests - 1) for verdict in verdicts),
        "num_prompt_tokens": sum(verdict.prompt_tokens for verdict in verdicts),
        "num_completion_tokens": sum(verdict.completion_tokens for verdict in verdicts),
    }
    return {f"judge/{name}": float(count) for name, count in counts.items()}


class VerdictLog(LineLog):
    """What a judge behind a URL said to one rank, kept so that a tick that is done again gives the same rewards.

    ``RUN/verdicts/NAME-RANK.jsonl``: {"question": checksum, "verdict": {...}, "checksum": of these}
    a line. A resumed run does the ticks since its last checkpoint again; their responses are the
    same, bit for bit, so their questions are too. A line that was torn by a crash is not used. Only
    scores are kept: what failed may be asked again.
    """

    def __init__(self, path: Path, *, asked_of: Sequence[Any], patience: Patience | None = None) -> None:
        """
        Args:
            patience: With a disk that refuses verdicts; None: none.
            asked_of: Plain values: which judge it is, and how it is asked. What another one said is not taken.
        """
        super().__init__(path, patience)
        self._asked_of = list(asked_of)
        self._found: dict[str, Verdict] = {}
        if path.is_file():
            with open(path, "rb") as file:
                for line in file:
                    self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record: Any = json.loads(line)
            checksum = record.pop("checksum")
            if checksum_bytes(canonical_json(record)) == checksum:
                self._found[record["question"]] = Verdict(**record["verdict"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # torn, or not of this release: it is asked again

    def get(self, question: Question) -> Verdict | None:
        """What was said to it; None where nothing was."""
        return self._found.get(self._key(question))

    def keep(self, verdicts: Iterable[tuple[Question, Verdict]]) -> None:
        """Add scores, and return when they are on the disk; whoever does the tick again is another process, which reads
        them there.

        Raises:
            LlamaRLError: The disk is full or not writable.
        """
        lines = []
        for question, verdict in verdicts:
            if verdict.score is not None:
                record = {"question": self._key(question), "verdict": dataclasses.asdict(verdict)}
                lines.append(json.dumps({**record, "checksum": checksum_bytes(canonical_json(record))}))
        if not lines:
            return
        self._patience.write(self.path, lambda: self.path.parent.mkdir(exist_ok=True))
        self.append_lines(("\n" + "\n".join(lines) + "\n").encode())  # the line before may be torn
        self.sync()

    def _key(self, question: Question) -> str:
        """Of its words and its place in the run: two responses that read the same are asked about on their own."""
        return checksum_bytes(canonical_json([self._asked_of, question.text, list(question.seed_parts)]))
