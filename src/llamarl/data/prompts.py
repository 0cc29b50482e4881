"""Prompts. An item becomes text and tokens by chat template, system prompt and the words put into the policy's mouth;
in the run's stream of them prompt ``i`` is a pure function of the configuration, the seed and ``i``.

    index ──(epoch, shuffled place)──▶ task item ──chat template──▶ Prompt

Nothing is consumed, so the position in the data is one integer, and resuming is asking for the next one. An epoch's
order comes from sorting 64-bit keys derived from (seed, epoch, place): the same on every machine and library version.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llamarl.data.items import ItemSource, Split, TaskItem
from llamarl.data.template_process import TemplateLimitError, render_template
from llamarl.determinism import derive_seed
from llamarl.errors import DataError
from llamarl.progress import watch
from llamarl.settings.data import DataConfig
from llamarl.types import EVAL_INDEX_OFFSET, Opening, Prompt

__all__ = [
    "Opened",
    "Opener",
    "PromptStream",
    "Tokenizer",
    "apply_template",
    "holds_unknown",
    "plain_tokens",
    "render_prompt",
    "shuffled",
    "splitmix",
    "unknown_text_warning",
    "unknown_token_id",
    "uses_chat_template",
    "with_answer",
]

_log = logging.getLogger(__name__)

_MAX_REPLACEMENTS = 100
_MAX_NAMED = 5
_EVAL_EPOCH = (1 << 63) - 1
_EPISODES = 0x657069
"""Of the seeds of episodes, which differ from those of samples."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any

    @property
    def special_tokens_map(self) -> Any: ...

    # The library's signatures change with its versions: only the names are relied on here.
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def get_chat_template(self, *args: Any, **kwargs: Any) -> Any: ...
    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any: ...


_WHAT_TEMPLATES_SEE = (
    "{{ {'messages': messages, 'tools': tools, 'documents': documents, 'add_generation_prompt': add_generation_prompt}"
    " | tojson }}"
)
"""A template in place of the model's, so that transformers prepares conversations and nothing of the model's is run."""

_NO_TOOLS = (
    "shows the policy no tools ({names}): set task.environment_options = {{ in_text = true }}, which a ToolEnvironment and TRL's "
    "classes know; have another environment describe them in its first observation's text and leave Observation.tools empty; or "
    "choose a model whose template shows them"
)


def _names(tools: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(tool.get("function", tool).get("name", "?")) for tool in tools)


def uses_chat_template(tokenizer: Tokenizer, config: DataConfig) -> bool:
    """True where prompts go through the tokenizer's chat template."""
    return config.chat_template == "auto" and bool(getattr(tokenizer, "chat_template", None))


def apply_template(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    reply_follows: bool = True,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """A conversation as the tokenizer's chat template writes it.

    Args:
        reply_follows: It ends with what the template puts before a reply of the policy.
        settings: Variables of the template's own, such as ``enable_thinking``.

    Raises:
        DataError: The template refuses it, or breaks the limits of time, memory or size.
    """
    shown = list(tools) or None
    try:
        template = tokenizer.get_chat_template(None, shown)
        prepared = tokenizer.apply_chat_template(
            list(messages),
            tools=shown,
            chat_template=_WHAT_TEMPLATES_SEE,
            tokenize=False,
            add_generation_prompt=reply_follows,
        )
        variables = {**settings, **tokenizer.special_tokens_map, **json.loads(prepared)}
        return render_template(template, variables)
    except TemplateLimitError as error:
        folder = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise DataError(
            f"the chat template of {folder} (chat_template.jinja, or chat_template in tokenizer_config.json) is refused: "
            f"{error}; mend it, or try data.chat_template = 'none'"
        ) from error
    except (ValueError, TypeError) as error:
        system = any(message.get("role") == "system" for message in messages)
        hint = "some templates know no system message (data.system_prompt): leave it out, or " if system else ""
        raise DataError(
            f"the chat template refused {list(messages)!r:.1000}: {error}; {hint}try data.chat_template = 'none'"
        ) from error


def render_prompt(
    item: TaskItem, tokenizer: Tokenizer, config: DataConfig, *, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, npt.NDArray[np.int32]]:
    """Text and tokens of one prompt, of any length.

    A chat template writes its own special tokens, so the tokenizer adds none to its text; plain text gets those the
    tokenizer usually adds (a beginning-of-sequence token, where it has that habit).

    Returns:
        The text, and its token ids, [P].

    Raises:
        DataError: The chat template refuses the conversation or does not show the tools, or the prompt has no tokens.
    """
    question = config.question_template.replace("{question}", item.question)
    if uses_chat_template(tokenizer, config):
        messages = list(item.messages) if item.messages else [{"role": "user", "content": question}]
        if config.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        settings = config.chat_template_kwargs
        text = apply_template(tokenizer, messages, tools=tools, settings=settings)
        if tools and text == apply_template(tokenizer, messages, settings=settings):
            raise DataError("the chat template " + _NO_TOOLS.format(names=_names(tools)))
        text += config.response_prefix
        tokens = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    else:
        if item.messages:
            question = "\n\n".join(message["content"] for message in item.messages)
        if tools:
            raise DataError(
                "plain text (data.chat_template = 'none', or no template) " + _NO_TOOLS.format(names=_names(tools))
            )
        text = f"{config.system_prompt}\n\n{question}" if config.system_prompt else question
        text += config.response_prefix
        tokens = plain_tokens(tokenizer, text)
    if tokens.size == 0:
        raise DataError(
            f"question {item.question!r} gives a prompt without a token; an empty prompt cannot be continued"
        )
    return text, tokens


def plain_tokens(tokenizer: Tokenizer, text: str) -> npt.NDArray[np.int32]:
    """With what the tokenizer adds before a text, once where it stands there already; what some add behind would end the
    prompt that the policy is to go on with, [P]."""
    begin: Any = getattr(tokenizer, "bos_token", None)
    end: Any = getattr(tokenizer, "eos_token", None)
    tokens = np.asarray(
        tokenizer(text, add_special_tokens=not (begin and text.startswith(begin)))["input_ids"], np.int32
    )
    ended = end and tokens.size > 1 and tokens[-1] == getattr(tokenizer, "eos_token_id", None)
    return tokens[:-1] if ended and not text.endswith(end) else tokens


def _marks(tokenizer: Tokenizer, config: DataConfig) -> tuple[str, ...]:
    """Special tokens that the chat template writes around a question."""
    if not uses_chat_template(tokenizer, config):
        return ()
    try:
        text = apply_template(tokenizer, [{"role": "user", "content": "?"}], settings=config.chat_template_kwargs)
    except DataError:  # one that wants more is told by the prompts themselves
        return ()
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return tuple(str(token) for token in added.values() if token.special and str(token) in text)


def with_answer(prompt: Prompt, template: str, tokenizer: Tokenizer, config: DataConfig) -> Prompt:
    """The prompt as one is shown it who knows the answer: ``template`` in place of its question, or of its last message.

    Raises:
        DataError: Its task gives no answer, or nobody knows which of its words are the question.
    """
    if prompt.answer is None:
        raise DataError(
            f"reference.template shows the teacher answers, and prompt {prompt.index}, {(prompt.question or prompt.text)[:80]!r}, "
            "has none: give the task's items an answer, or name a teacher that needs none"
        )
    messages = [dict(message) for message in prompt.metadata.get("messages", ())]
    if not messages and not prompt.question:
        raise DataError.at(
            "reference.template",
            f"stands in place of a question, and of prompt {prompt.index}, {prompt.text[:80]!r}, only the whole is known, as of "
            "every recorded one: leave it out, or sample anew",
            "task.rollouts",
        )
    words = {"question": messages[-1]["content"] if messages else prompt.question, "answer": prompt.answer}
    shown = re.sub(r"\{(question|answer)\}", lambda found: words[found[1]], template)
    if messages:
        messages[-1]["content"] = shown
    item = TaskItem(question=shown, messages=tuple(messages) or None)
    text, tokens = render_prompt(item, tokenizer, config)
    return replace(prompt, text=text, tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An episode that has begun."""

    question: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    opening: Opening


class Opener(Protocol):
    """An environment, as far as prompts are concerned: its first observation is what the policy is
    shown in place of the item."""

    def ask(self, item: TaskItem, seed: int) -> None:
        """Begin to open an episode; returns at once."""
        ...

    def open(self, item: TaskItem, seed: int) -> Opened:
        """The episode's beginning; waits for it."""
        ...


class PromptStream:
    """Random access to a task's prompts, tokenized.

    Args:
        task: Where items come from.
        tokenizer: The policy's own.
        seed: The run's seed; decides the order, never the content of an item.
        room: Tokens that the model's context leaves to a prompt beside the longest response; None is no such limit.
        opener: Environment that answers the policy; None where it answers once.
    """

    ROOM = "all that the model's context leaves beside generator.sampling.max_new_tokens"
    MORE_ROOM = "lower generator.sampling.max_new_tokens"

    def __init__(
        self,
        task: ItemSource,
        tokenizer: Tokenizer,
        config: DataConfig,
        seed: int,
        *,
        room: int | None = None,
        opener: Opener | None = None,
    ) -> None:
        self._opener = opener
        self._task = task
        self._tokenizer = tokenizer
        self._config = config
        self._seed = seed
        self._limit = config.max_prompt_tokens if room is None else min(room, config.max_prompt_tokens)
        of_context = self._limit < config.max_prompt_tokens
        self._limit_words = (
            f"{self._limit} tokens ({self.ROOM})" if of_context else f"data.max_prompt_tokens={self._limit}"
        )
        self._remedy = self.MORE_ROOM if of_context else "raise data.max_prompt_tokens"
        self.num_skipped = 0
        """Training items that were too long and left out, since this stream was made."""
        self._order = lru_cache(maxsize=4)(lambda num_items, epoch: shuffled(num_items, seed, epoch))

    def get(self, index: int, item: int | None = None) -> Prompt:
        """Prompt ``index`` of the training stream, ``index`` from 0 on without end.

        Args:
            item: Place of the training item that was chosen for it; None: the one whose turn it is.

        Raises:
            DataError: The prompt is longer than the limit, or too many replacements in a row were.
            ValueError: There is no such item.
        """
        place = self._place(index) if item is None else item
        if not 0 <= place < (self._task.num_items("train") or EVAL_INDEX_OFFSET):
            raise ValueError(f"task {self._task.name!r} has no training item {place}")
        for attempt in range(_MAX_REPLACEMENTS):
            prompt = self._make("train", self._place(index, attempt) if attempt else place, index)
            if prompt is not None:
                self.num_skipped += attempt
                return replace(prompt, item=place) if attempt else prompt
        raise DataError(
            f"task {self._task.name!r}: {_MAX_REPLACEMENTS} items in a row are longer than {self._limit_words} (looking for "
            f"prompt {index}): {self._remedy}"
        )

    def candidates(self, index: int) -> tuple[str, list[int]]:
        """The task's name, and the places of the items among which prompt ``index`` is chosen."""
        count = self._config.candidates
        return self._task.name, [self._place(index * count + number) for number in range(count)]

    def read(self, item: TaskItem, prompt: npt.NDArray[np.int32]) -> Sequence[int] | npt.NDArray[np.int32]:
        """Tokens of an item that the model is to read, and that count against the limit: the prompt's, [P]."""
        return prompt

    def ask_ahead(self, index: int) -> None:
        """Have the environment, if there is one, begin prompt ``index``, so that ``get`` need not wait for it."""
        if self._opener is not None:
            self._opener.ask(self._task.item("train", self._place(index)), self._episode_seed(index))

    def _place(self, index: int, attempt: int = 0) -> int:
        """Which training item is tried for a prompt; each attempt another."""
        num_items = self._task.num_items("train")
        if attempt:
            return derive_seed(self._seed, index, attempt) % (num_items or EVAL_INDEX_OFFSET)
        if num_items is None:
            return index
        epoch, position = divmod(index, num_items)
        return int(self._order(num_items, epoch)[position]) if self._config.shuffle else position

    def _episode_seed(self, index: int) -> int:
        return derive_seed(self._seed, _EPISODES, index)

    def check_training_prompts(self, num_prompts: int | None = None) -> None:
        """Make the training prompts of a finite task once, so that none that is too long is met in
        the middle of a run.

        Where such prompts are skipped, a warning says how many are; so it does of prompts that hold
        unknown text, and of those that seem to have been through a chat template before. What an environment
        shows is not known before it is played.

        Args:
            num_prompts: As many as the run may ask for, from the first on; None: all. Where others take the place of long
                ones all are made.

        Raises:
            DataError: Prompts are too long and ``too_long`` is ``error``, or no prompt is short
                enough (names the first); or they are to be chosen by their pass rates, and have no end.
        """
        num_items = self._task.num_items("train")
        if num_items is None and self._config.candidates > 1:
            raise DataError.at(
                "data.candidates",
                f"is {self._config.candidates}, but task {self._task.name!r} makes its items without end and asks none twice: "
                "what is known of one chooses nothing; leave it out",
            )
        if num_items is None or self._opener is not None:
            return
        places: Sequence[int] = range(num_items)
        if num_prompts is not None and num_prompts < num_items and self._config.too_long == "error":
            places = sorted(map(self._place, range(num_prompts)))
        long, unread, unknown = [], [], unknown_token_id(self._tokenizer)
        rendered, marks, number = [], _marks(self._tokenizer, self._config), 0
        watch("checking", "training prompt", len(places), lambda: number)
        for place in places:
            item = self._task.item("train", place)
            tokens = self.read(item, render_prompt(item, self._tokenizer, self._config)[1])
            if len(tokens) > self._limit:
                long.append(f"{item.where or f'item {place}'} ({len(tokens)} tokens)")
            if holds_unknown(tokens, unknown):
                unread.append(f"{item.where or f'item {place}'}, {item.question[:80]!r},")
            if any(mark in item.question for mark in marks):
                rendered.append(f"{item.where or f'item {place}'}, {item.question[:80]!r},")
            number += 1
        if unread:
            words = unknown_text_warning(len(unread), len(places), "training prompts", unread[0])
            _log.warning("task %r: %s", self._task.name, words)
        if rendered:
            _log.warning(
                "task %r: %d of %d training prompts hold tokens that the chat template writes around them: %s is one. If they "
                "have been through a template already, set data.chat_template = 'none'",
                self._task.name, len(rendered), len(places), rendered[0],
            )  # fmt: skip
        if not long:
            return
        named = ", ".join(long[:_MAX_NAMED]) + (", ..." if len(long) > _MAX_NAMED else "")
        found = f"task {self._task.name!r}: {len(long)} of {len(places)} training prompts are longer than {self._limit_words}: {named}"
        if self._config.too_long == "error":
            raise DataError(f"{found}: {self._remedy}, remove them, or set data.too_long = 'skip'")
        if len(long) == len(places):
            raise DataError(f"{found}: none is left; {self._remedy}")
        _log.warning("%s: others take their place (data.too_long = 'skip')", found)

    def num_items(self, split: Split) -> int | None:
        """Items of one split; None for a task that makes them, without end."""
        return self._task.num_items(split)

    @property
    def holds_out(self) -> bool:
        """Whether the task has anything to evaluate on."""
        return self.num_items("eval") != 0

    def eval_prompts(self, num_prompts: int) -> list[Prompt]:
        """The first ``num_prompts`` held-out prompts in an order that the seed alone decides; fewer if there are fewer.

        Raises:
            DataError: A prompt is longer than the limit and ``too_long`` is ``error``, or none is left.
        """
        num_items = self._task.num_items("eval")
        places = range(num_prompts + _MAX_REPLACEMENTS) if num_items is None else range(num_items)
        if num_items is not None and self._config.shuffle:
            places = [int(place) for place in self._order(num_items, _EVAL_EPOCH)]  # type: ignore[assignment]
        prompts: list[Prompt] = []
        if self._opener is not None:
            for number, place in enumerate(places[:num_prompts]):
                self._opener.ask(self._task.item("eval", place), self._episode_seed(EVAL_INDEX_OFFSET + number))
        for place in places:
            if len(prompts) == num_prompts:
                break
            prompt = self._make("eval", place, EVAL_INDEX_OFFSET + len(prompts))
            if prompt is not None:
                prompts.append(prompt)
        if num_items == 0 and num_prompts > 0:
            trained = self._task.num_items("train") or "of its"
            raise DataError(
                f"task {self._task.name!r} holds out nothing to evaluate on: all {trained} items are trained on. Set "
                "task.eval_fraction above 0, or give items of their own (task.eval_data)"
            )
        if not prompts and num_prompts > 0:
            raise DataError(
                f"task {self._task.name!r} has no eval prompt within {self._limit_words}: give eval data, or {self._remedy}"
            )
        return prompts

    def _make(self, split: Split, place: int, index: int) -> Prompt | None:
        """The prompt of one item; None where it is too long and such prompts are skipped."""
        item = shown = self._task.item(split, place)
        opening: Opening | None = None
        tools: tuple[Mapping[str, Any], ...] = ()
        if self._opener is not None:
            opened = self._opener.open(item, self._episode_seed(index))
            opening, tools = opened.opening, opened.tools
            shown = replace(item, question=opened.question, messages=opened.messages or None)
        text, tokens = render_prompt(shown, self._tokenizer, self._config, tools=tools)
        length = len(self.read(item, tokens))
        if opening is not None and not opening.failure and length > self._limit and self._config.too_long == "error":
            # which nothing could tell before it was played: it costs its own samples, not the run
            why = f"its first observation makes a prompt of {length} tokens, limit {self._limit_words}: {self._remedy}"
            opening = replace(opening, failure=f"{why}, or set data.too_long = 'skip'")
            shown = replace(item, question=item.question or "(no episode)", messages=None)
            text, tokens = render_prompt(shown, self._tokenizer, self._config)
            length = len(self.read(item, tokens))
        if length > self._limit:
            if self._config.too_long == "skip":
                return None
            raise DataError(
                f"task {self._task.name!r}, {split} item {place} (prompt {index}{item.where and f', {item.where}'}): the prompt "
                f"has {length} tokens, limit {self._limit_words}: {self._remedy} or set data.too_long = 'skip'; it begins "
                f"{shown.question[:80]!r}"
            )
        metadata = dict(item.metadata)
        if item.messages:  # a judge may want to see the conversation
            metadata["messages"] = [dict(message) for message in item.messages]
        return Prompt(
            index=index,
            tokens=tokens,
            text=text,
            question=shown.question,
            answer=item.answer,
            task=self._task.name,
            metadata=metadata,
            opening=opening,
            item=place,
        )


def shuffled(num_items: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """A permutation of 0 .. num_items - 1: places sorted by splitmix64 keys."""
    return np.argsort(splitmix(np.arange(num_items, dtype=np.uint64), derive_seed(seed, epoch)), kind="stable")


def splitmix(numbers: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """A 64-bit key of each number (splitmix64)."""
    keys = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return keys ^ (keys >> np.uint64(31))


def unknown_token_id(tokenizer: Any) -> int | None:
    """The token that replaces what the vocabulary lacks; None where there is none, or where it is
    also written on purpose."""
    token = getattr(tokenizer, "unk_token_id", None)
    if token is None:  # a tokenizer may know of one that its settings do not name
        model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        word = getattr(model, "unk_token", None)
        token = tokenizer.convert_tokens_to_ids(word) if isinstance(word, str) else None
    on_purpose = (getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "eos_token_id", None))
    return None if token is None or token in on_purpose else int(token)


def holds_unknown(tokens: Sequence[int] | npt.NDArray[np.int32], unknown: int | None) -> bool:
    """Whether a prompt's tokens, [P], hold the one that ``unknown_token_id`` gave."""
    return unknown is not None and unknown in tokens


def unknown_text_warning(count: int, total: int, what: str, first: str) -> str:
    """In words; ``what`` is what there are ``total`` of, ``first`` says which one to look at."""
    return (
        f"{count} of {total} {what} hold text that the model's vocabulary has no token for, so the model cannot read it: {first} "
        f"is one. Write them in what the vocabulary has, or choose a model that takes any text (model.path)"
    )
