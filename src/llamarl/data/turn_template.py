"""The tokens between two turns of the policy, without ever tokenising again what it wrote.

    render [user U, assistant S, new messages, reply follows]  =  ... S | end of turn | separator | messages | head of reply
                                                                      └────────────── what is appended ──────────────────┘

S is a word that no template knows. What follows it in the text is what the template puts after any
reply; only that is tokenised, and appended. Where the policy wrote the end of its turn itself, that
token is not repeated; where a limit cut it, it is added.

A template is looked at once, when a run starts: that it keeps a reply's words, and ends every reply alike, but that
some end the text behind the last one. What the policy wrote stays as it was, so thinking that a template leaves out of
earlier turns is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamarl.data.prompts import Tokenizer, apply_template, uses_chat_template
from llamarl.errors import DataError
from llamarl.settings.data import DataConfig

__all__ = ["END_OF_THOUGHT", "THOUGHT", "TurnTemplate"]

THOUGHT, END_OF_THOUGHT = "<think>", "</think>"

_REPLY = "qzReplyOfThePolicyzq"
_PROBE = "qzWordsOfMessage{}zq"
_USER: Mapping[str, Any] = {"role": "user", "content": "qzUserzq"}
_SAID: Mapping[str, Any] = {"role": "assistant", "content": _REPLY}
_CALLED: Mapping[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "callid000", "function": {"name": _REPLY, "arguments": {}}}],
}
"""Some templates take a tool's result after a call only."""


class TurnTemplate:
    """What a tokenizer puts between turns.

    Raises:
        DataError: What its chat template puts there cannot be known.
    """

    def __init__(self, tokenizer: Tokenizer, config: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._chat = uses_chat_template(tokenizer, config)
        self._forms: dict[tuple[str, ...], Mapping[str, Any]] = {}
        self.closing = ""
        """What the template writes after any reply: the end of the turn, and a separator where it is always there."""
        self.opens_thought = False
        """Whether a reply begins inside of a thought, which its prompt has opened."""
        self._end_text = ""
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        self._added = {str(token): int(number) for number, token in added.items() if str(token)}
        if self._chat:
            settings = config.chat_template_kwargs
            last = apply_template(tokenizer, [_USER, _SAID], reply_follows=False, settings=settings)
            self.closing = _what_follows(last, _REPLY)
            earlier = _what_follows(apply_template(tokenizer, [_USER, _SAID, _USER], settings=settings), _REPLY)
            if not earlier.startswith(self.closing):  # Phi 3 and OLMo 3 end the text there too, or in its place
                self.closing = self._first_special(earlier) or self.closing
            self._end_text = self._first_special(self.closing)
            self.opens_thought = (self._after([_USER]) + config.response_prefix).rstrip().endswith(THOUGHT)
            self.between(None, [_USER])  # what it does with the plainest case, before a run depends on it

    @property
    def end_token(self) -> int | None:
        """The token that ends a turn: the template's, or the end of the text; None where the tokenizer has neither."""
        return self._added.get(self._end_text, getattr(self._tokenizer, "eos_token_id", None))

    def between(self, last_token: int | None, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens from the end of the policy's turn to the beginning of its next one.

        Args:
            last_token: That the policy wrote, or None.
            messages: What the environment says; ``role`` user, tool or system.

        Raises:
            DataError: The chat template refuses the messages, or leaves their words out.
        """
        if self._chat:
            text = self._after(messages)
        else:
            words = "\n".join(str(message.get("content", "")) for message in messages)
            text = self._config.turn_template.replace("{text}", words)
        tokens = self._tokenizer(text + self._config.response_prefix, add_special_tokens=False)["input_ids"]
        written = self._chat and last_token in self._added.values() and tokens[:1] == [last_token]
        return [int(token) for token in tokens[1 if written else 0 :]]

    def _first_special(self, text: str) -> str:
        """The tokenizer's added token with which ``text`` begins, behind white space; empty where it begins with none."""
        return max((token for token in self._added if text.lstrip().startswith(token)), key=len, default="")

    def _after(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that follows the policy's words."""
        roles = tuple(str(message.get("role")) for message in messages)
        if roles not in self._forms:
            self._forms[roles] = self._form_for(messages)
        return self._rendered(self._forms[roles], messages)

    def _form_for(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The form of reply after which the template shows all of such messages: plain words, or a call."""
        probes = [{**message, "content": _PROBE.format(number)} for number, message in enumerate(messages)]
        causes = []
        for form in (_SAID, _CALLED):
            try:
                after = self._rendered(form, probes)
            except DataError as error:
                causes.append(str(error))
                continue
            if all(probe["content"] in after for probe in probes):
                return form
            causes.append("the chat template leaves out what one of them says")
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise DataError(
            f"messages of the roles {roles} cannot be put after a turn of the policy: {causes[0]}. Have the environment "
            f"answer with text (a user message), or set data.chat_template = 'none'"
        )

    def _rendered(self, form: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
        if form is _CALLED:
            messages = [{"tool_call_id": "callid000", **m} if m.get("role") == "tool" else m for m in messages]
        text = apply_template(self._tokenizer, [_USER, form, *messages], settings=self._config.chat_template_kwargs)
        after = _what_follows(text, _REPLY)
        if form is _SAID and after.startswith(self.closing):
            bare = after.lstrip()  # Llama 2 writes a space before the end of a turn, which no policy writes
            return bare if self._end_text and bare.startswith(self._end_text) else after
        if (
            form is _CALLED and self._end_text and self._end_text in after
        ):  # behind the name stands the rest of the call
            return after[after.index(self._end_text) :]
        raise DataError(
            f"the chat template ends a reply with {self.closing!r}, but before a message with {after[:80]!r}"
        )


def _what_follows(text: str, word: str) -> str:
    _, found, after = text.rpartition(word)
    if not found:
        raise DataError("the chat template does not show what the policy wrote in an earlier turn")
    return after
