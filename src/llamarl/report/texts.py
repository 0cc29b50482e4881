"""Looks into a response's text: what each of its tokens adds to it, and signs that it is garbage.

The signs come from the text alone, with limits far outside of what good answers show.
"""

from __future__ import annotations

import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from llamarl.errors import LlamaRLError

__all__ = ["find_tokenizer", "flags_of", "is_repetitive", "other_script", "piece_reader"]

_FILE = "tokenizer.json"

_MAX_PERIOD = 60
_MIN_LOOP = 80
"""Characters that a loop covers at least: numbers and rulers have short ones."""
_MIN_ROUNDS = 4
_MIN_COMPRESSED = 400
_RATIO = 0.12
"""Compressed bytes by bytes; prose has 0.3 to 0.6."""
_MIN_LETTERS = 8
_OTHER_SHARE = 0.3
_NEUTRAL = frozenset({"LATIN", "GREEK", "MATHEMATICAL", ""})
"""Scripts that formulas and names bring along anywhere."""


def find_tokenizer(run_dir: Path, model_path: str) -> Path | None:
    """``tokenizer.json`` of the exported policy, else of the model that the run started from; None
    where neither is here. Nothing is fetched."""
    own = run_dir / "model" / _FILE
    if own.is_file():
        return own
    from llamarl.models.folders import is_hub_id, resolve_model_path, split_revision

    if is_hub_id(model_path) and not Path(model_path).is_dir():
        from huggingface_hub import try_to_load_from_cache

        repo, revision = split_revision(model_path)
        cached = try_to_load_from_cache(repo, _FILE, revision=revision or None)
        return Path(cached) if isinstance(cached, str) else None
    try:
        other = resolve_model_path(model_path) / _FILE
    except LlamaRLError:  # the run came from another machine, or its model has been removed
        return None
    return other if other.is_file() else None


def piece_reader(path: Path | None) -> Callable[[Sequence[int]], list[str] | None]:
    """Ids -> the text that each adds, special tokens included; joined they are the whole text. None
    without a tokenizer.

    A token that holds part of a character adds nothing; the one that completes it adds it all.
    """
    if path is None:
        return lambda ids: None
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception:  # the library raises plain Exception for a file that is none of its own
        return lambda ids: None

    def read(ids: Sequence[int]) -> list[str] | None:
        stream = DecodeStream(skip_special_tokens=False)
        try:
            return [stream.step(tokenizer, int(one)) or "" for one in ids]
        except Exception:  # an id that this tokenizer does not have
            return None

    return read


def is_repetitive(text: str) -> bool:
    """Whether it runs in circles: a loop of up to 60 characters at its end, or text that says little more than once."""
    if any(_ends_in_loop(text, period) for period in range(1, _MAX_PERIOD + 1)):
        return True
    data = text.encode("utf-8", "replace")
    return len(data) >= _MIN_COMPRESSED and len(zlib.compress(data, 1)) < _RATIO * len(data)


def _ends_in_loop(text: str, period: int) -> bool:
    size = max(_MIN_LOOP, _MIN_ROUNDS * period)
    return len(text) >= size and text[-1] == text[-1 - period] and text[-size:-period] == text[period - size :]


@cache
def _script(character: str) -> str:
    """First word of the character's name, which names its script (``CYRILLIC``, ``CJK``,
    ``HANGUL``, ..); "" for no letter."""
    return unicodedata.name(character, "").split(" ")[0] if character.isalpha() else ""


def other_script(text: str, context: str) -> bool:
    """Whether much of ``text`` is written in scripts that ``context`` (prompt and reference answer) does not use."""
    if text.isascii():
        return False
    counts: Counter[str] = Counter()
    for character, number in Counter(text).items():
        counts[_script(character)] += number
    letters = sum(number for script, number in counts.items() if script)
    known = {_script(character) for character in set(context)} | _NEUTRAL
    foreign = sum(number for script, number in counts.items() if script not in known)
    return letters >= _MIN_LETTERS and foreign > _OTHER_SHARE * letters


def flags_of(text: str, context: str, finish_reason: str) -> int:
    """Bits of ``observability.findings.FLAGS``."""
    found = (is_repetitive(text), finish_reason == "length", other_script(text, context), not text.strip())
    return sum(1 << position for position, flag in enumerate(found) if flag)
