"""A share of a tick's prompts that is decoded alone, whichever rank decodes it.

    tick k ─┬─ shard 0: prompts 0, V, 2V, ..   ─┐               rank i of r decodes shards i*V/r .. (i+1)*V/r - 1, one
            ├─ shard 1: prompts 1, V + 1, ..    ├─▶ groups      after the other, each in an engine that holds no other
            └─ shard V-1                        ┘   in order    sequence: so what is computed together does not depend on r

What a shard carries from tick to tick (groups in flight, how far it is with its prompts) is its
own, and is saved by its number. So r may be another one at any tick. V is ``generator.num_shards``:
as many as there are replicas, unless a recipe says more. Shards of unlike replicas may get unlike
numbers of prompts (``tick_shares.py``); each of these replicas decodes its one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import TypeAdapter

from llamarl.channels.samples import ANY, Limits
from llamarl.engine.expert_record import ExpertRecord
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.environments.episodes import load_episode, save_episode
from llamarl.tick_schedule import NEVER, deadlines, select_due
from llamarl.tick_shares import Dealing
from llamarl.types import FinishReason, Prompt

__all__ = ["ActiveGroup", "GeneratorShard", "num_sampled", "shards_of_rank"]


def shards_of_rank(rank: int, num_ranks: int, num_shards: int) -> range:
    """The shards that a rank decodes: consecutive ones, in the order of ranks, at most one more than another rank has.

    Args:
        rank: Of ``num_ranks`` replicas.
    """
    return range(rank * num_shards // num_ranks, (rank + 1) * num_shards // num_ranks)


@dataclass
class ActiveGroup:
    """A prompt whose responses are not all delivered."""

    prompt: Prompt
    admitted_tick: int
    sequences: list[TokenSequence] = field(default_factory=list)
    _oldest_version: int | None = None

    @property
    def oldest_version(self) -> int | None:
        """Of all its tokens; None while it has none. Versions only grow, so the first one found stays."""
        if self._oldest_version is None:
            versions = (v for s in self.sequences for v in s.policy_versions if v >= 0)
            self._oldest_version = min(versions, default=None)
        return self._oldest_version

    @property
    def complete(self) -> bool:
        """Whether every response has ended."""
        return all(s.finished for s in self.sequences)


class GeneratorShard:
    """The state of one shard, and the rule by which its groups enter and leave. No engine in sight.

    Args:
        index: Among the shards.
        dealing: Which prompts of a tick each shard gets.
        oversubscription: Groups that it keeps active, as a multiple of those that it delivers.
        max_segments: Policy versions, or under the latest weights ticks, that a response may span.
        new_group: (prompt index, tick, item) -> a group without tokens, of this item of the task, or of the one whose
            turn it is where that is None.
    """

    def __init__(
        self,
        index: int,
        dealing: Dealing,
        *,
        first_prompt: int,
        oversubscription: float,
        max_segments: int,
        new_group: Callable[[int, int, int | None], ActiveGroup],
    ) -> None:
        self.index = index
        self._dealing = dealing
        self._first_prompt = first_prompt
        self._oversubscription = oversubscription
        self._max_segments = max_segments
        self._new_group = new_group
        self.cursor = 0
        """Prompts that it has admitted so far."""
        self.active: list[ActiveGroup] = []
        """In order of admission."""
        self.completed: list[int] = []
        """Prompt indices, in order of completion."""
        self.inside: set[int] = set()
        """Prompt indices of groups that the engine has been given."""

    def prompt_index(self, number: int) -> int:
        """Of the shard's ``number``-th prompt."""
        return self._first_prompt + self._dealing.prompt_index(self.index, number)

    def delivers(self, tick: int) -> int:
        """Groups that leave at ``tick``."""
        return self._dealing.counts(tick)[self.index]

    def delivers_after(self, tick: int, num_ticks: int) -> list[int]:
        """Groups that leave at each of the ticks after ``tick``."""
        return self._dealing.ahead(self.index, tick + 1, num_ticks)

    def num_active(self, tick: int) -> int:
        """Groups that it keeps active at ``tick``."""
        return self._dealing.num_active(
            self.index, tick, oversubscription=self._oversubscription, max_segments=self._max_segments
        )

    def admit(self, tick: int) -> None:
        """Take in new prompts until enough groups are active."""
        wanted = self.num_active(tick)
        while len(self.active) < wanted:
            index = self.prompt_index(self.cursor)
            self.cursor += 1
            self.active.append(self._new_group(index, tick, None))

    def next_prompts(self, tick: int) -> list[int]:
        """Those that the tick after ``tick`` admits, if it admits as many as this one delivers."""
        return [self.prompt_index(self.cursor + ahead) for ahead in range(self.delivers(tick))]

    def heard_of(self, ended: Sequence[TokenSequence]) -> None:
        """Sequences have ended."""
        by_index = {group.prompt.index: group for group in self.active} if ended else {}
        for sequence in ended:
            index = sequence.prompt_index
            if by_index[index].complete and index not in self.completed:
                self.completed.append(index)

    def deadlines(self, *, latest_staleness: int | None = None) -> list[int]:
        """The last tick at which each active group may leave.

        Args:
            latest_staleness: ``schedule.max_staleness`` under the latest weights, where tokens' versions count too.
        """
        if latest_staleness is None:
            return [group.admitted_tick + self._max_segments - 1 for group in self.active]
        oldest = [NEVER if group.oldest_version is None else group.oldest_version for group in self.active]
        admitted = [group.admitted_tick for group in self.active]
        found: list[int] = deadlines(
            admitted, oldest, max_segments=self._max_segments, max_staleness=latest_staleness
        ).tolist()
        return found

    def deliverable(self, tick: int, *, latest_staleness: int | None = None) -> list[int] | None:
        """Places of the groups that leave in this tick; None while too few are complete.

        Args:
            latest_staleness: As of ``deadlines``.
        """
        leaving = self.delivers(tick)
        if len(self.completed) < leaving:  # asked in each step, of thousands of groups
            return None
        due, later = self.deadlines(latest_staleness=latest_staleness), self.delivers_after(tick, self._max_segments)
        return select_due(due, self._completed_places(), tick=tick, prompts_per_step=leaving, later=later)

    def _completed_places(self) -> list[int]:
        """In ``active``, in order of completion."""
        position = {group.prompt.index: place for place, group in enumerate(self.active)}
        return [position[index] for index in self.completed]

    def take(self, places: Sequence[int]) -> list[ActiveGroup]:
        """The groups at these places leave."""
        delivered = [self.active[place] for place in places]
        gone = {group.prompt.index for group in delivered}
        self.active = [group for group in self.active if group.prompt.index not in gone]
        self.completed = [index for index in self.completed if index not in gone]
        self.inside -= gone
        return delivered

    def state(self) -> dict[str, Any]:
        """What it carries, as plain values."""
        return {
            "cursor": self.cursor,
            "completed": self.completed,
            "active": [
                {
                    "prompt_index": group.prompt.index,
                    "item": group.prompt.item,
                    "admitted_tick": group.admitted_tick,
                    "sequences": [_sequence_state(sequence) for sequence in group.sequences],
                }
                for group in self.active
            ],
        }

    def take_state(self, state: Mapping[str, Any], tick: int, limits: Limits = ANY) -> None:
        """Take what ``state`` gave after ``tick``.

        Raises:
            ValueError: It is none that a shard gives: a state that was read may be anybody's.
        """
        saved = _SHARD.validate_python(state)
        self.cursor, self.completed, self.active = saved.cursor, saved.completed, []
        if self.cursor != len(saved.active) + sum(map(self.delivers, range(tick + 1))):
            raise ValueError(
                f"{self.cursor} prompts were admitted, which are not those delivered and {len(saved.active)}"
            )
        for of_group in saved.active:
            group = self._new_group(of_group.prompt_index, of_group.admitted_tick, of_group.item)
            for sequence, values in zip(group.sequences, of_group.sequences, strict=True):
                if sequence.episode is not None:
                    load_episode(sequence.episode, values.episode, len(values.tokens))
                for name in _STATE:
                    setattr(sequence, name, getattr(values, name))
                if sequence.finished and sequence.episode is not None and sequence.episode.failure:
                    sequence.finish_reason, sequence.error = "error", sequence.episode.failure
                if values.experts is not None:
                    sequence.experts = ExpertRecord.from_plain(values.experts)
                _check_sequence(sequence, tick, limits)
            self.active.append(group)
        active, complete = [g.prompt.index for g in self.active], [g.prompt.index for g in self.active if g.complete]
        if len({*active}) < len(active) or sorted(self.completed) != sorted(complete):
            raise ValueError(f"groups {self.completed} are told to be complete, and of {active} {complete} are")
        if self.active and not tick < min(self.deadlines()) < tick + self._max_segments:
            raise ValueError(f"a group was not admitted in the {self._max_segments} ticks up to {tick}")


@dataclass(frozen=True, kw_only=True)
class _SavedSequence:
    """What a new sequence of the same prompt lacks. Floats survive JSON: Python writes the shortest exact form."""

    tokens: list[int]
    logprobs: list[float]
    policy_versions: list[int]
    loss_mask: list[bool]
    finish_reason: FinishReason | None
    error: str | None
    episode: dict[str, Any] = field(default_factory=dict)
    experts: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _SavedGroup:
    prompt_index: int
    item: int
    admitted_tick: int
    sequences: list[_SavedSequence]


@dataclass(frozen=True, kw_only=True)
class _SavedShard:
    cursor: int
    completed: list[int]
    active: list[_SavedGroup]


_SHARD = TypeAdapter(_SavedShard)
_STATE = tuple(f.name for f in fields(_SavedSequence) if f.name not in ("episode", "experts"))


def _sequence_state(sequence: TokenSequence) -> dict[str, Any]:
    episode = {} if sequence.episode is None else {"episode": save_episode(sequence.episode)}
    experts = {} if sequence.experts is None else {"experts": sequence.experts.to_plain()}
    return {name: getattr(sequence, name) for name in _STATE} | episode | experts


def _check_sequence(sequence: TokenSequence, tick: int, limits: Limits) -> None:
    """Raises ValueError for numbers that no engine writes."""
    noted = (sequence.logprobs, sequence.policy_versions, sequence.loss_mask)
    where, length = f"sample {sequence.sample_index} of prompt {sequence.prompt_index}", len(sequence.tokens)
    if any(len(values) != length for values in noted):
        raise ValueError(f"{where}: {length} tokens, and other numbers of what is noted of them")
    most = sequence.params.max_new_tokens - (sequence.episode is None and not sequence.finished)
    if length > most:
        raise ValueError(f"{where} has {length} tokens, and may have {most}")
    for place, token in enumerate(sequence.tokens):
        logprob, version, trained = (values[place] for values in noted)
        if not 0 <= token < limits.num_token_ids:
            raise ValueError(f"{where} has the token {token}, and the vocabulary {limits.num_token_ids}")
        if not (0 if trained else -1) <= version <= tick or (
            trained and sequence.error is None and not math.isfinite(logprob)
        ):
            raise ValueError(f"{where} has a token of policy version {version} and log-prob {logprob}")


def num_sampled(groups: Sequence[ActiveGroup]) -> int:
    """Tokens that a policy wrote."""
    return sum(len(s.tokens) - s.policy_versions.count(-1) for g in groups for s in g.sequences)
