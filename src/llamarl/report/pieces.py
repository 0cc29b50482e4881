"""Token ids back to text, token by token, with the tokenizer that the run left or its model has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llamarl.errors import LlamaRLError

__all__ = ["find_tokenizer", "piece_reader"]

_FILE = "tokenizer.json"


def find_tokenizer(run_dir: Path, model_path: str) -> Path | None:
    """``tokenizer.json`` of the exported policy, else of the model that the run started from; None where neither is here."""
    own = run_dir / "model" / _FILE
    if own.is_file():
        return own
    from llamarl.models.folders import resolve_model_path

    try:
        other = resolve_model_path(model_path) / _FILE
    except LlamaRLError:  # the run came from another machine, or its model has been removed
        return None
    return other if other.is_file() else None


def piece_reader(path: Path | None) -> Callable[[Sequence[int]], list[str] | None]:
    """Ids -> the text that each adds, special tokens included; joined they are the whole text. None without a tokenizer.

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
