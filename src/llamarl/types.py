"""Records that cross a channel. Plain values and NumPy arrays: no torch, picklable, comparable in tests.

    Prompt ──generator──▶ Group of Responses (no score) ──reward──▶ Group of Responses (scored or failed) ──▶ trainer

Every token carries its own history: ``behavior_logprobs[t]`` and ``policy_versions[t]`` are recorded when token t is
sampled, by the engine, weights and precision that sampled it. Nobody recomputes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "DEMONSTRATIONS",
    "EVAL_INDEX_OFFSET",
    "OWN_PROMPTS",
    "RIGHT",
    "Failure",
    "FailureKind",
    "FinishReason",
    "Group",
    "Opening",
    "Prompt",
    "Response",
    "Score",
    "Turn",
]

OWN_PROMPTS = 1 << 25
"""From here on indices are of prompts of executors of the user's own, as many for each."""
EVAL_INDEX_OFFSET = 1 << 30
"""Held-out prompts are numbered from here, so that no sampling seed of theirs is a training prompt's."""
RIGHT = 1 - 1e-6
"""The least reward of a right answer: 1, less what rounding takes of a sum such as 0.6 + 0.3 + 0.1."""

DEMONSTRATIONS = "demonstrations"
"""``Response.sampled_by`` of a row to imitate: nobody's distribution is known that wrote it."""
FinishReason = Literal["stop", "length", "error"]
FailureKind = Literal["exception", "timeout", "crash", "not_a_number", "generation", "judge", "environment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How an environment opened the episodes of a prompt: all that it needs to begin them again."""

    seed: int
    """64 bits, of all samples of the prompt."""
    max_turns: int
    max_turn_tokens: int
    """0: as many as the episode may have."""
    digest: str = ""
    """Of the first observation: an environment that begins the same episode otherwise is found out."""
    question: str | None = None
    """The item's own words, which the environment may have shown otherwise; None: those of the prompt."""
    failure: str = ""
    """Why there is no episode; the samples of such a prompt are failed without being sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the policy wrote in one go, and how the environment answered."""

    start: int
    """Its first token among those after the prompt."""
    end: int
    """One past its last."""
    finish_reason: FinishReason
    """``stop``, or ``length`` where a limit on tokens cut it."""
    reply: str
    """The policy's words as the environment got them: special tokens left out."""
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    observation: str = ""
    """The environment's words, without what the chat template puts around them; shown to the policy
    where a turn follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the run's prompt stream."""

    index: int
    """Position in the prompt stream, unique in a run; seeds derive from it."""
    tokens: npt.NDArray[np.int32]
    """[P] token ids, chat template applied."""
    text: str
    """What the tokens say, for logs and for reward functions."""
    question: str = ""
    """The task's own words, without template, system prompt or prefix: what a model that judges is
    shown. Empty where the task gave none; ``text`` stands for it then."""
    answer: str | None = None
    """Reference answer, if the task has one."""
    task: str = ""
    """Name of the task that judges the response."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Task data that the judge needs; plain JSON values."""
    opening: Opening | None = None
    """Of its environment's episodes; None where the policy answers once."""
    item: int = -1
    """Place in the task's items that it was made of, also where that was too long and another one took its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward function's verdict."""

    value: float
    """The reward; finite."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of it, for metrics. Names are plain text, also where a member of a string enumeration gave one."""

    def __post_init__(self) -> None:
        names = (str.__str__(name) if isinstance(name, str) else name for name in self.parts)
        object.__setattr__(self, "parts", dict(zip(names, self.parts.values(), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """There is no reward: the sample is kept, counted and excluded from the baseline, never scored zero."""

    kind: FailureKind
    detail: str
    """First lines of the cause, for logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One sampled answer. All arrays have length R, the number of tokens after the prompt."""

    prompt_index: int
    sample_index: int
    """0 .. group_size - 1."""
    tokens: npt.NDArray[np.int32]
    """[R] token ids, the stop token included where one was sampled."""
    behavior_logprobs: npt.NDArray[np.float32]
    """[R] log mu(token), nats, of the distribution sampled from; NaN where ``loss_mask`` is False."""
    policy_versions: npt.NDArray[np.int32]
    """[R] policy version that sampled each token; -1 where the policy did not write the token."""
    loss_mask: npt.NDArray[np.bool_]
    """[R] True on tokens that the policy wrote and the trainer may use."""
    text: str
    finish_reason: FinishReason
    sampled_by: str = ""
    """Executor whose own, frozen model sampled it: its tokens have no age, and their
    ``policy_versions`` are 0. Empty: a version of the policy did."""
    outcome: Score | Failure | None = None
    """None until a reward executor has judged it."""
    verdict: Score | None = None
    """What models that judge have made of it so far, weighted; the reward executor adds it to the
    task's reward and clears it. None where none has."""
    turns: tuple[Turn, ...] = ()
    """Of an episode with an environment, in order; between them lie tokens that the policy did not write."""
    reference_logprobs: npt.NDArray[np.float32] | None = None
    """[R] log-prob of each token under the reference model, nats, at the sampling temperature; NaN
    on tokens that do not train. None where no reference executor has seen it."""
    top_tokens: npt.NDArray[np.int32] | None = None
    """[R, k] the tokens that the reference model finds likeliest in each one's place; 0 on tokens
    that do not train. None where none was asked for (``algorithm.teacher_top_k``)."""
    top_logprobs: npt.NDArray[np.float32] | None = None
    """[R, k] theirs under the reference model, as ``reference_logprobs``."""
    values: npt.NDArray[np.float32] | None = None
    """[R] the critic's estimate, before each token, of the return from there on; NaN on tokens that do not train. None
    where no critic has seen it."""
    routed_experts: npt.NDArray[np.unsignedinteger[Any]] | None = None
    """[R, sparse layers, k] the experts that computed each token when it was first put in: the
    token behind it was sampled so. 0 for what was never put in, as the last token. Of a sparse
    model under ``trainer.router = "replay"``, else None."""

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.behavior_logprobs), len(self.policy_versions), len(self.loss_mask)}
        beside = self.reference_logprobs, self.top_tokens, self.top_logprobs, self.values, self.routed_experts
        lengths |= {len(noted) for noted in beside if noted is not None}
        if len(lengths) != 1:
            raise ValueError(f"response {self.prompt_index}/{self.sample_index}: arrays differ in length: {lengths}")

    @property
    def num_sampled(self) -> int:
        """Tokens that a policy wrote."""
        return int((self.policy_versions >= 0).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All responses to one prompt. Groups travel whole: the baseline needs every member."""

    prompt: Prompt
    responses: tuple[Response, ...]
    prompt_experts: npt.NDArray[np.unsignedinteger[Any]] | None = None
    """[P, sparse layers, k] of the prompt's tokens, where responses have ``routed_experts``: of the
    first member that has any."""

    @property
    def is_held_out(self) -> bool:
        """Whether it is evaluated and never trained on."""
        return self.prompt.index >= EVAL_INDEX_OFFSET

    @property
    def num_tokens(self) -> int:
        """Prompt tokens counted once a response, plus response tokens: the trainer's cost of the group."""
        return sum(len(self.prompt.tokens) + len(r.tokens) for r in self.responses)
