"""Text that a model cannot read: what its tokenizer has no token for and replaces by one that stands for anything unknown.

Most tokenizers spell any text out in bytes and have no such token. Those of words or letters do, and then two different questions
may reach the policy as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["holds_unknown", "unknown_text_warning", "unknown_token_id"]


def unknown_token_id(tokenizer: Any) -> int | None:
    """The token that replaces what the vocabulary lacks; None where there is none, or where it is also written on purpose."""
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
