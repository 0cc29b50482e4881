"""An engine that plays: sequences whose turn is over are answered by their environment and go on.

    step():  replies that are due join ─▶ the engine's step ─▶ turns that ended are asked about ─▶ episodes that ended
                     ▲                                                  │
                     └──── exactly ``reply_delay`` engine steps ────────┘

Rounding depends on what is computed together, so *when* a reply joins must not depend on when it
arrives. It joins at a stated step: ``reply_delay`` steps after its turn ended. A reply that is
there earlier waits for its step; one that is late holds the step up, and the seconds are counted.
While others write, nobody is held up by a tool that takes less than the delay. Where nobody is left
to write, the count of steps jumps to the earliest reply that is due.

Under ``schedule.weights = "latest"``, where timing decides anyway, it joins when it has arrived,
and ``take_joins`` tells the event log before which step that was (``joining.py``).

A reply enters as the tokens that the chat template puts there (``data/turn_template.py``):
``loss_mask`` False, version -1, no log-probability. The sequence then enters the engine again,
which computes its cache anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from transformers import PreTrainedTokenizerBase

from llamarl.config import RunConfig
from llamarl.data.turn_template import TurnTemplate
from llamarl.engine.base import Engine
from llamarl.engine.joining import AsLogged, Awaited, Join, Key, OnArrival, StatedStep
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.environments.episode import Step
from llamarl.environments.episode_pool import Answer, Environments
from llamarl.environments.episodes import Ask, Episode, Play, answer_turn, messages_of
from llamarl.errors import DataError
from llamarl.types import Failure, FinishReason, Turn

__all__ = ["EpisodeEngine", "ReplyTimes", "make_player"]


@dataclass(slots=True)
class _Waiting:
    """A sequence whose reply is on its way."""

    sequence: TokenSequence
    episode: Episode
    due: int
    """Step of the run before which it joins, where steps are stated."""
    ask: Ask
    asked_s: float

    def awaited(self, pool: Environments) -> Awaited:
        return Awaited(due=self.due, turn=len(self.episode.turns) - 1, arrived=lambda: pool.answered(self.ask))


@dataclass(slots=True)
class ReplyTimes:
    """What late replies cost since somebody asked."""

    waits: list[tuple[float, float]] = field(default_factory=list)
    """When the engine stood still for one: (start, end) on ``time.monotonic``."""
    held_s: float = 0.0
    """Of these seconds, those in which others could have been written: a longer delay would have hidden them."""
    longest_s: float = 0.0
    """That a late reply took, since it was asked for."""
    steps: int = 0
    stepping_s: float = 0.0
    """Seconds that the engine's steps took."""

    @property
    def waited_s(self) -> float:
        return sum(end - start for start, end in self.waits)


class EpisodeEngine:
    """Implements :class:`llamarl.engine.base.Engine` around another one: only sequences whose
    episode is over leave ``step``.

    Sequences without an episode pass through.

    Args:
        reply_delay: Engine steps from a turn's end until its reply joins, >= 0.
        on_arrival: It joins when it has arrived instead; then ``begin_tick`` is called before a tick's first ``step``.
    """

    def __init__(
        self,
        engine: Engine,
        pool: Environments,
        template: TurnTemplate,
        tokenizer: PreTrainedTokenizerBase,
        *,
        reply_delay: int,
        on_arrival: bool = False,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._template = template
        self._tokenizer = tokenizer
        self._reply_delay = reply_delay
        self._clock = StatedStep()
        self._rule: StatedStep | OnArrival | AsLogged = OnArrival(pool.agree) if on_arrival else self._clock
        self._step = 0  # of this tick
        self._joins: list[Join] = []  # of this tick
        self._order: dict[Key, int] = {}  # what is inside, in order of admission, and its place in that
        self._places = count()
        self._waiting: dict[Key, _Waiting] = {}
        self._ended: list[TokenSequence] = []
        self._times = ReplyTimes()

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def has_work(self) -> bool:
        return self._engine.has_work or bool(self._waiting) or bool(self._ended)

    def add(self, sequences: Sequence[TokenSequence]) -> None:
        """As ``Engine.add``. A carried sequence that waits for a reply goes on waiting, for the
        steps that were left."""
        inside = []
        for sequence in sequences:
            episode = sequence.episode
            self._order.setdefault(_key(sequence), next(self._places))
            if episode is None:
                inside.append(sequence)
            elif episode.failure:
                self._end(sequence, "error", episode.failure)
            elif episode.due_in is not None:
                self._wait_for_reply(sequence, episode, self._clock.now + episode.due_in)
            else:
                _limit_turn(sequence, episode)
                inside.append(sequence)
        self._engine.add(inside)

    def step(self) -> list[TokenSequence]:
        self._pool.poll()
        self._join()
        self._step += 1
        if self._engine.has_work:
            started = time.monotonic()
            ended = self._engine.step()
            self._times.stepping_s += time.monotonic() - started
            self._times.steps += 1
            self._clock.stepped()
            for sequence in ended:
                if sequence.episode is None or sequence.finish_reason not in ("stop", "length"):
                    self._release(sequence)
                    self._ended.append(sequence)
                else:
                    self._end_turn(sequence, sequence.episode)
        ended, self._ended = sorted(self._ended, key=lambda sequence: self._order[_key(sequence)]), []
        for sequence in ended:
            del self._order[_key(sequence)]
        return ended

    def suspend(self) -> list[TokenSequence]:
        """As ``Engine.suspend``. Those that wait note the steps that are left; what they asked is
        still being answered."""
        held = {_key(sequence): sequence for sequence in self._engine.suspend()}
        for key, waiting in self._waiting.items():
            waiting.episode.due_in = max(0, waiting.due - self._clock.now)
            held[key] = waiting.sequence
        taken = [held[key] for key in self._order if key in held]
        self._waiting.clear()
        for sequence in self._ended:  # nobody has heard of it: it ends again when it is added again
            sequence.finish_reason = sequence.error = None
            taken.append(sequence)
        self._ended = []
        self._order.clear()
        return taken

    def parameters_for_sync(self) -> Mapping[str, torch.Tensor]:
        return self._engine.parameters_for_sync()

    def weights_updated(self, version: int) -> None:
        self._engine.weights_updated(version)

    def stats(self) -> Mapping[str, float]:
        return self._engine.stats()

    def begin_tick(self, logged: Sequence[Join] | None) -> None:
        """Where replies join on arrival: count steps anew, and follow what another run did in this
        tick; None: decide."""
        self._step, self._joins = 0, []
        self._rule = OnArrival(self._pool.agree) if logged is None else AsLogged(logged)

    @property
    def joins(self) -> tuple[Join, ...]:
        """What joined on arrival in this tick, in order."""
        return tuple(self._joins)

    def take_times(self) -> ReplyTimes:
        """Since the last call."""
        times, self._times = self._times, ReplyTimes()
        return times

    # -- inside ---------------------------------------------------------------------------------------------------

    def _end_turn(self, sequence: TokenSequence, episode: Episode) -> None:
        """Note the turn that the policy has written, and ask what its environment says."""
        assert sequence.finish_reason is not None
        start, end = episode.turn_start, len(sequence.tokens)
        reply = str(self._tokenizer.decode(sequence.tokens[start:end], skip_special_tokens=True))
        episode.turns.append(Turn(start=start, end=end, finish_reason=sequence.finish_reason, reply=reply))
        sequence.finish_reason = None
        episode.due_in = self._reply_delay
        self._wait_for_reply(sequence, episode, self._clock.now + self._reply_delay)

    def _wait_for_reply(self, sequence: TokenSequence, episode: Episode, due: int) -> None:
        ask = Ask(
            key=_key(sequence),
            play=Play(task=episode.task, item=episode.item, seed=episode.opening.seed, digest=episode.opening.digest),
            replies=tuple(turn.reply for turn in episode.turns),
            digests=tuple(episode.digests),
        )
        self._pool.ask(ask)
        self._waiting[_key(sequence)] = _Waiting(sequence, episode, due, ask, time.monotonic())

    def _join(self) -> None:
        """The replies whose step this is, in the rule's order."""
        idle = not self._engine.has_work and not self._ended
        if idle and self._waiting and isinstance(self._rule, OnArrival):
            self._wait_for_any()
        awaited = {key: waiting.awaited(self._pool) for key, waiting in self._waiting.items()}
        going_on: list[TokenSequence] = []
        for key in self._rule.choose(self._step, awaited, idle=idle):
            waiting = self._waiting.pop(key)
            waiting.episode.due_in = None
            if self._rule is not self._clock:
                self._joins.append(Join(self._step, *key, awaited[key].turn))
            answer = self._answer(waiting, held=bool(going_on) or self._engine.has_work)
            if self._apply(waiting.sequence, waiting.episode, answer):
                going_on.append(waiting.sequence)
        if going_on:
            self._engine.add(going_on)

    def _wait_for_any(self) -> None:
        """Return when a reply has arrived: without one there is nothing to compute."""
        asks = [waiting.ask for waiting in self._waiting.values()]
        if not any(map(self._pool.answered, asks)):
            started = time.monotonic()
            self._pool.wait_any(asks)
            self._times.waits.append((started, time.monotonic()))

    def _answer(self, waiting: _Waiting, *, held: bool) -> Answer:
        """Waits where it is late; ``held`` says whether others could be written meanwhile."""
        started = time.monotonic()
        late = not self._pool.answered(waiting.ask)
        answer = self._pool.wait(waiting.ask)
        if late:
            ended = time.monotonic()
            self._times.waits.append((started, ended))
            self._times.held_s += held * (ended - started)
            self._times.longest_s = max(self._times.longest_s, ended - waiting.asked_s)
        return answer

    def _apply(self, sequence: TokenSequence, episode: Episode, answer: Answer) -> bool:
        """Write an answer into a sequence; returns whether the policy goes on."""
        if isinstance(answer, Failure):
            episode.failure = answer.detail
            self._end(sequence, "error", answer.detail)
            return False
        assert isinstance(answer, Step), "an episode that goes on is answered with a step"
        answer_turn(episode, answer)
        if answer.done:
            out_of_tokens = episode.turns[-1].finish_reason == "length" and len(sequence.tokens) >= episode.max_tokens
            self._end(sequence, "length" if answer.truncated or out_of_tokens else "stop")
            return False
        if len(episode.turns) < episode.opening.max_turns:
            try:
                tokens = self._template.between(sequence.tokens[-1], messages_of(answer))
            except DataError as error:
                self._release(sequence)
                episode.failure = str(error)
                self._end(sequence, "error", episode.failure)
                return False
            if len(sequence.tokens) + len(tokens) < episode.max_tokens:
                _append(sequence, tokens)
                episode.turn_start = len(sequence.tokens)
                _limit_turn(sequence, episode)
                return True
        self._release(sequence)
        self._end(sequence, "length")
        return False

    def _end(self, sequence: TokenSequence, reason: FinishReason, error: str | None = None) -> None:
        sequence.finish_reason, sequence.error = reason, error
        self._ended.append(sequence)

    def _release(self, sequence: TokenSequence) -> None:
        if sequence.episode is not None:
            self._pool.release(_key(sequence))


def make_player(
    config: RunConfig,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    environments: Environments | None,
    *,
    on_arrival: bool = False,
) -> Engine:
    """``engine`` itself, or around it one that plays with ``environments``.

    Args:
        on_arrival: As of ``EpisodeEngine``.

    Raises:
        DataError: What the chat template puts between two turns cannot be known.
    """
    if environments is None:
        return engine
    template = TurnTemplate(tokenizer, config.data)
    return EpisodeEngine(
        engine, environments, template, tokenizer, reply_delay=config.generator.reply_delay, on_arrival=on_arrival
    )


def _key(sequence: TokenSequence) -> Key:
    return sequence.prompt_index, sequence.sample_index


def _limit_turn(sequence: TokenSequence, episode: Episode) -> None:
    """Have the engine end the sequence where its turn ends."""
    if sequence.params.max_new_tokens != episode.turn_end:
        sequence.params = replace(sequence.params, max_new_tokens=episode.turn_end)


def _append(sequence: TokenSequence, tokens: Sequence[int]) -> None:
    """Tokens that the policy did not write."""
    sequence.tokens += tokens
    sequence.logprobs += [math.nan] * len(tokens)
    sequence.policy_versions += [-1] * len(tokens)
    sequence.loss_mask += [False] * len(tokens)
