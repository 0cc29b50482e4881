"""Items from JSONL files: one JSON object a line, every mistake named by file and line.

With an eval file the two splits are the two files, and a training question that also stands in the eval file is left
out. Without one, a share of the distinct questions is held out by a hash of their words. White space at the ends of a\nquestion is kept, but makes it no other question.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llamarl.data.items import Split, TaskItem, split_questions
from llamarl.errors import DataError, FileError, Mistake
from llamarl.reading import parse_json, read_lines

__all__ = ["JsonlSplits", "load_jsonl", "text_field"]

_log = logging.getLogger(__name__)


def load_jsonl(path: str | Path, to_item: Callable[[Mapping[str, Any], str], TaskItem]) -> list[TaskItem]:
    """All items of a file, in order; blank lines are passed over.

    Args:
        to_item: Makes an item of one object; its second argument, ``file:line``, is for its errors.

    Raises:
        DataError: The file is missing, unreadable or has no items, or a line is not a JSON object of the right form.
    """
    file = os.path.expanduser(path)
    try:
        lines = read_lines(file)
    except FileError as error:
        raise DataError(f"{error}; give a JSONL file: one JSON object a line, UTF-8") from error
    items = []
    for where, line in lines:
        try:
            record = parse_json(line, where, big_integers=True)
        except FileError as error:
            raise DataError(f"{error}, expected one JSON object: fix or remove the line") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: got {type(record).__name__} {line.strip()[:80]!r}, expected a JSON object")
        items.append(to_item(record, where))
    if not items:
        raise DataError(f"{file}: got an empty file, expected one JSON object a line")
    return items


def text_field(record: Mapping[str, Any], names: tuple[str, ...], where: str, *, trim: bool = False) -> str:
    """The first of ``names`` that the record has, as text; numbers are written out.

    Args:
        trim: Without white space at its ends, for what is compared. A question stays as it was written.

    Raises:
        DataError: It has none of them, or the value is neither text nor a number, or blank.
    """
    for name in names:
        if name in record:
            value = record[name]
            finite = not isinstance(value, float) or math.isfinite(value)
            if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not finite:
                raise DataError(f"{where}: field {name!r} is {type(value).__name__} {value!r:.60}, expected text")
            text = str(value)
            if not text.strip():
                raise DataError(f"{where}: field {name!r} is blank, expected text")
            return text.strip() if trim else text
    raise DataError(f"{where}: got fields {sorted(record)}, expected one of {list(names)}")


class JsonlSplits:
    """The train and eval items of one or two JSONL files; an ``ItemSource`` but for its name.

    Raises:
        DataError: A file cannot be read as ``load_jsonl`` says, one line of the message each; or a split is empty.
    """

    def __init__(
        self,
        train_file: str,
        eval_file: str,
        to_item: Callable[[Mapping[str, Any], str], TaskItem],
        *,
        seed: int,
        eval_fraction: float,
    ) -> None:
        files = {"task.train_file": train_file} | ({"task.eval_file": eval_file} if eval_file else {})
        loaded: dict[str, list[TaskItem]] = {}
        problems: list[Mistake] = []
        for key, file in files.items():
            try:
                loaded[key] = load_jsonl(file, to_item)
            except DataError as error:
                problems.append(Mistake(key, f": {error}"))
        if problems:
            raise DataError("\n".join(map(str, problems)), mistakes=problems)
        train = loaded["task.train_file"]
        if eval_file:
            held = loaded["task.eval_file"]
            asked = {item.question.strip() for item in held}
            kept = [item for item in train if item.question.strip() not in asked]
            if not kept:
                raise DataError.at(
                    "task.train_file",
                    f": every question of {train_file} is also in {eval_file}; the splits must be disjoint",
                )
            if len(kept) < len(train):
                _log.warning("%s: left out %d items that %s holds too", train_file, len(train) - len(kept), eval_file)
        else:
            questions = [item.question.strip() for item in train]
            split = split_questions(questions, seed=seed, fraction=eval_fraction)
            held = [item for item, out in zip(train, split, strict=True) if out]
            kept = [item for item, out in zip(train, split, strict=True) if not out]
        self._items: dict[Split, list[TaskItem]] = {"train": kept, "eval": held}

    def num_items(self, split: Split) -> int | None:
        return len(self._items[split])

    def item(self, split: Split, index: int) -> TaskItem:
        return self._items[split][index]
