"""Samples that an earlier run has recorded, as groups to train on again: nothing is sampled and nothing judged.

    RUN/rollouts/tick_*.jsonl ─▶ groups of a prompt, as they were judged ─┬─ for the loss of an algorithm: whole, with their log-probs
                                                                       └─ to imitate: one row a sample that earned enough

Group i of the training stream is a pure function of the files, the seed and i, in an order of its
own each epoch, like that of prompts. Prompts to hold out are chosen by a hash of their words, as
rows of a table are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from llamarl.data.items import Split, split_questions
from llamarl.data.prompts import Tokenizer, plain_tokens, shuffled
from llamarl.errors import DataError
from llamarl.observability.rollouts import Rollout, read_rollouts
from llamarl.types import DEMONSTRATIONS, EVAL_INDEX_OFFSET, Group, Prompt, Response, Score

__all__ = ["RecordedStream", "numbered"]

_SOURCE = "rollouts"
_SHOWN = 60


class RecordedStream:
    """Groups that a run has recorded."""

    def __init__(
        self,
        run: str,
        tokenizer: Tokenizer,
        *,
        seed: int,
        imitate: bool,
        least_reward: float,
        eval_fraction: float,
        shuffle: bool = True,
        room: int | None = None,
    ) -> None:
        """
        Args:
            run: Folder of the run, or its ``rollouts``.
            tokenizer: The policy's.
            imitate: One group a sample of at least ``least_reward``, equal ones once; else as they were recorded.
            eval_fraction: Of distinct prompts, held out where the samples are imitated.
            room: Tokens that the model's context has; None is no limit.

        Raises:
            DataError: No rollouts, none that can be trained on, or they were written with another tokenizer.
        """
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(lambda num_groups, epoch: shuffled(num_groups, seed, epoch))
        found: dict[tuple[int, int, bytes], list[Rollout]] = {}  # another program may write them in any order
        for one in read_rollouts(run):
            found.setdefault((one.tick, one.response.prompt_index, one.prompt_tokens.tobytes()), []).append(one)
        recorded = list(found.values())
        if not recorded:
            raise DataError.at("task.rollouts", f": the rollouts of {run} are empty files: no sample was recorded")
        _check_tokenizer(run, [group[0] for group in recorded], tokenizer)
        if imitate:
            groups = _to_imitate(run, [sample for group in recorded for sample in group], least_reward)
            held = split_questions([group.prompt.text for group in groups], seed=seed, fraction=eval_fraction)
        else:
            groups = [_as_recorded(run, group) for group in recorded]
            held = [False] * len(groups)
        longest = max(len(g.prompt.tokens) + len(r.tokens) for g in groups for r in g.responses)
        if room is not None and longest > room:
            raise DataError.at(
                "task.rollouts",
                f": a sample of {run} has {longest} tokens, the model's context {room}: take a longer one",
            )
        self._groups: dict[Split, list[Group]] = {
            "train": [group for group, out in zip(groups, held, strict=True) if not out],
            "eval": [group for group, out in zip(groups, held, strict=True) if out],
        }

    def demonstration(self, index: int) -> Group:
        """Group ``index`` of the training stream, from 0 on without end."""
        groups = self._groups["train"]
        epoch, place = divmod(index, len(groups))
        if self._shuffle:
            place = int(self._order(len(groups), epoch)[place])
        return numbered(groups[place], index)

    def held_out(self, num_rows: int) -> list[Group]:
        """The first ``num_rows`` held-out groups; fewer if there are fewer."""
        return [numbered(group, EVAL_INDEX_OFFSET + i) for i, group in enumerate(self._groups["eval"][:num_rows])]

    def num_items(self, split: Split) -> int:
        """Groups of one split."""
        return len(self._groups[split])


def numbered(group: Group, index: int) -> Group:
    """The group under its number in this run."""
    responses = tuple(dataclasses.replace(response, prompt_index=index) for response in group.responses)
    return dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, index=index), responses=responses)


def _prompt(sample: Rollout) -> Prompt:
    return Prompt(
        index=0,
        tokens=sample.prompt_tokens,
        text=sample.prompt,
        answer=sample.answer,
        task=sample.task,
        metadata=dict(sample.metadata),
    )


def _as_recorded(run: str, samples: Sequence[Rollout]) -> Group:
    """All samples of a prompt, each token with the log-prob with which it was sampled.

    Raises:
        DataError: They are not there: no loss can correct for what sampled the tokens.
    """
    for sample in samples:
        response = sample.response
        if (
            response.sampled_by == DEMONSTRATIONS
            or not np.isfinite(response.behavior_logprobs[response.loss_mask]).all()
        ):
            raise DataError.at(
                "task.rollouts",
                f": sample {response.prompt_index}/{response.sample_index} of tick {sample.tick} of {run} has no log-probs of what "
                "sampled it (behavior_logprobs), which every loss but that of algorithm.name 'sft' weighs by: imitate the "
                "best samples by that one, or record them anew",
                "algorithm.name",
            )
        if response.outcome is None:
            raise DataError.at(
                "task.rollouts",
                f": sample {response.prompt_index}/{response.sample_index} of tick {sample.tick} of {run} was never judged",
            )
    responses = tuple(dataclasses.replace(sample.response, sampled_by=_SOURCE) for sample in samples)
    return Group(prompt=_prompt(samples[0]), responses=responses)


def _to_imitate(run: str, samples: Sequence[Rollout], least_reward: float) -> list[Group]:
    """A group for each of the samples that earned ``least_reward`` or more, equal ones once.

    Raises:
        DataError: There is none.
    """
    found: dict[tuple[bytes, bytes], Group] = {}
    rewards = [s.response.outcome.value for s in samples if isinstance(s.response.outcome, Score)]
    for sample in samples:
        outcome, response = sample.response.outcome, sample.response
        if not isinstance(outcome, Score) or outcome.value < least_reward or not response.loss_mask.any():
            continue
        key = sample.prompt_tokens.tobytes(), response.tokens.tobytes()
        found.setdefault(key, Group(prompt=_prompt(sample), responses=(_demonstrated(response),)))
    if not found:
        best = f"the highest is {max(rewards):g}" if rewards else "none of them has a reward"
        raise DataError.at(
            "task.least_reward",
            f": none of {len(samples)} samples of {run} has a reward of {least_reward:g} or more ({best}): lower it",
            "task.rollouts",
        )
    return list(found.values())


def _demonstrated(response: Response) -> Response:
    """As a row of data would hold it: written by nobody whose distribution is known."""
    own = response.loss_mask
    return dataclasses.replace(
        response,
        sample_index=0,
        behavior_logprobs=np.where(own, 0.0, np.nan).astype(np.float32),
        policy_versions=np.where(own, 0, -1).astype(np.int32),
        sampled_by=DEMONSTRATIONS,
        outcome=Score(value=1.0),
    )


def _check_tokenizer(run: str, samples: Sequence[Rollout], tokenizer: Tokenizer) -> None:
    """Raises DataError unless the prompts' words become the tokens that were recorded."""
    for sample in samples:
        wanted = sample.prompt_tokens.tolist()
        by_template = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        if list(by_template) != wanted and plain_tokens(tokenizer, sample.prompt).tolist() != wanted:
            shown = sample.prompt[:_SHOWN]
            raise DataError.at(
                "task.rollouts",
                f": {Path(run)} was recorded with another tokenizer than the policy's: {shown!r} has other tokens there",
                "model.path",
            )
