"""From a row of the data to tokens to imitate: prompt, completion, and which tokens are the assistant's.

    prompt (as a policy would see it) | reply, end of turn | what the template puts between | reply, end of turn | ...
    ─────────── no loss ──────────────┼────── loss ────────┼───────── no loss ──────────────┼────── loss ────────

Prompt and turns are tokenised apart, as in generation: so the trained model is asked, in reinforcement learning or when
it is served, exactly what it has learned to answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamarl.data.items import ItemSource, TaskItem
from llamarl.data.prompts import PromptStream, Tokenizer
from llamarl.data.turn_template import END_OF_THOUGHT, THOUGHT, TurnTemplate
from llamarl.errors import DataError
from llamarl.settings.data import DataConfig
from llamarl.types import DEMONSTRATIONS, Group, Prompt, Response, Score

__all__ = ["CONTINUATION", "DemonstrationStream"]

_log = logging.getLogger(__name__)

CONTINUATION = "continuation"
"""Of an item's metadata: messages from the first assistant's turn to the last."""


class DemonstrationStream(PromptStream):
    """The data's rows as groups of one response each, in the order of a prompt stream.

    Args:
        task: Its items' metadata hold a ``CONTINUATION``.
        room: Tokens that the model's context has for prompt and completions together; None is no limit.
    """

    ROOM = "the model's context"
    MORE_ROOM = "take a model of a longer context"

    def __init__(
        self, task: ItemSource, tokenizer: Tokenizer, config: DataConfig, seed: int, *, room: int | None = None
    ) -> None:
        super().__init__(task, tokenizer, config, seed, room=room)
        self._turns = TurnTemplate(tokenizer, config)
        self._thinks = self._turns.opens_thought
        self._unended = ""

    def demonstration(self, index: int) -> Group:
        """Row ``index`` of the training stream, from 0 on without end; errors as ``get``."""
        return self._group(self.get(index))

    def held_out(self, num_rows: int) -> list[Group]:
        """The first ``num_rows`` held-out rows; fewer if there are fewer."""
        return [self._group(prompt) for prompt in self.eval_prompts(num_rows)]

    def check_training_prompts(self, num_prompts: int | None = None) -> None:
        """As of any prompts; a warning names the first row that leaves the thought open which its prompt has begun."""
        super().check_training_prompts(num_prompts)
        if self._unended:
            _log.warning(
                "%s: a completion has no %s, though the chat template ends the prompt with %s: the model would learn to answer "
                "as a thought. Write %s before the answer, or where the template knows it set data.chat_template_kwargs = "
                "{ enable_thinking = false }",
                self._unended, END_OF_THOUGHT, THOUGHT, END_OF_THOUGHT,
            )  # fmt: skip

    def read(self, item: TaskItem, prompt: npt.NDArray[np.int32]) -> Sequence[int]:
        """Those of prompt and completions together.

        Raises:
            DataError: A completion would begin to think a second time.
        """
        for message in item.metadata[CONTINUATION] if self._thinks else ():
            if message["role"] != "assistant":
                continue
            if END_OF_THOUGHT not in message["content"]:
                self._unended = self._unended or item.where
            if message["content"].lstrip().startswith(THOUGHT):
                raise DataError(
                    f"{item.where}: a completion begins with {THOUGHT}, with which the chat template ends the prompt: leave it "
                    "out of the rows (what the model writes begins behind it)"
                )
        return [*prompt, *self._continue(item.metadata[CONTINUATION])[0]]

    def _group(self, prompt: Prompt) -> Group:
        metadata = dict(prompt.metadata)
        tokens, is_own = self._continue(metadata.pop(CONTINUATION))
        response = Response(
            prompt_index=prompt.index,
            sample_index=0,
            tokens=np.asarray(tokens, np.int32),
            behavior_logprobs=np.where(is_own, 0.0, np.nan).astype(np.float32),
            policy_versions=np.where(is_own, 0, -1).astype(np.int32),
            loss_mask=np.asarray(is_own, np.bool_),
            text="",
            finish_reason="stop",
            sampled_by=DEMONSTRATIONS,
            outcome=Score(value=1.0),
        )
        return Group(prompt=prompt, responses=(response,))

    def _continue(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """Tokens of a continuation, and which of them the assistant wrote."""
        tokens: list[int] = []
        is_own: list[bool] = []
        between: list[Mapping[str, Any]] = []
        end = self._turns.end_token
        for message in messages:
            if message["role"] != "assistant":
                between.append(message)
                continue
            if between:
                shown = self._turns.between(tokens[-1], between)
                tokens += shown
                is_own += [False] * len(shown)
                between = []
            said = self._tokenizer(message["content"], add_special_tokens=False)["input_ids"]
            written = [*said, *([] if end is None or said[-1:] == [end] else [end])]  # some rows bring their end along
            tokens += written
            is_own += [True] * len(written)
        return tokens, is_own
