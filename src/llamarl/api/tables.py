"""Rows of a Python program as a file, so that other processes and a resumed run can read them.

    Dataset, list of mappings, data frame   ─▶   llamarl_data/data_3f2a9c01.jsonl

The file's name says its content: the same rows give the same path.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llamarl.environments.items import is_decoded
from llamarl.errors import ConfigError
from llamarl.observability.writing import keep_file

__all__ = ["DATA_FOLDER", "file_of_rows"]

_log = logging.getLogger(__name__)

DATA_FOLDER = "llamarl_data"
"""In the working directory."""
_MISSING = ("float", "NAType", "NaTType")
"""What stands for no answer in a frame: NaN and those of pandas."""
_LOOKED_FOR = ("question", "problem", "prompt", "messages", "completion", "answer")
"""Where such a column is missing in a row, another may take its place."""


def file_of_rows(rows: Any, argument: str) -> str:
    """Write rows into a file of JSON lines; returns its path.

    What JSON does not have (images, dates) is left out, unless it is the answer. Missing values are null, as a reward
    sees them in any other table.

    Args:
        rows: A ``datasets.Dataset``, a ``DatasetDict`` (of which its split ``train`` or its only one is
            read), a data frame of pandas or polars, or a list of mappings.
        argument: What the user called it, for errors.

    Raises:
        ConfigError: It is none of these, has no rows, or its file cannot be written.
    """
    lines = []
    for number, row in enumerate(_rows(rows, argument)):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{argument}: row {number} is {row!r:.60}, expected a mapping of columns to values")
        kept = {
            str(name): plain
            for name, value in row.items()
            if (plain := _plain(value)) is not None or (value is None and name not in _LOOKED_FOR)
        }
        odd = row.get("answer")
        if odd is not None and "answer" not in kept and type(odd).__name__ not in _MISSING:
            raise ConfigError(f"{argument}: row {number}: answer is {odd!r:.60}, expected text or a number")
        lines.append(json.dumps(kept, ensure_ascii=False) + "\n")
    if not lines:
        raise ConfigError(f"{argument} has no rows")
    text = "".join(lines)
    name = f"data_{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]}.jsonl"
    path = Path(DATA_FOLDER).resolve() / name
    try:
        keep_file(path, text.encode())
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{argument}: cannot write {path}, from which other processes read the rows: {error}"
        ) from error
    return str(path)


def _rows(rows: Any, argument: str) -> Iterable[Any]:
    """Its rows, one after the other."""
    if isinstance(rows, Mapping):  # a DatasetDict
        if len(rows) != 1 and "train" not in rows:
            splits = ", ".join(map(str, rows))
            raise ConfigError(f"{argument} is a mapping ({splits:.80}), expected rows: give one of its splits")
        if others := [name for name in rows if len(rows) > 1 and name != "train"]:
            more = f"task={{'eval_data': {argument}[{others[0]!r}]}} evaluates on it"
            _log.warning(
                "%s: of its splits train is read, and not %s (%s)", argument, ", ".join(map(str, others)), more
            )
        return _rows(rows["train"] if "train" in rows else next(iter(rows.values())), argument)
    if hasattr(rows, "to_dicts"):  # polars
        return rows.to_dicts()  # type: ignore[no-any-return]
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # pandas
        return rows.astype(object).where(rows.notna(), None).to_dict("records")  # type: ignore[no-any-return]
    if hasattr(rows, "column_names"):  # of datasets, streamed ones too
        decoded = [column for column, feature in (getattr(rows, "features", None) or {}).items() if is_decoded(feature)]
        if decoded and hasattr(rows, "decode"):  # a streamed one would open them before they are left out
            rows = rows.decode(False)
        return rows.remove_columns(decoded) if decoded else rows
    if isinstance(rows, list | tuple):
        return rows
    raise ConfigError(
        f"{argument} is of type {type(rows).__name__}, expected a path, a name on the Hub, a Dataset, a data frame or a list of mappings"
    )


def _plain(value: Any) -> Any:
    """A value as JSON has it; None for what it has no such value of."""
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float) else None
