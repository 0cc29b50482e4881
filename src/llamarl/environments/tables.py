"""Items from tables: a data set of the Hugging Face Hub, a folder of one, or a file (parquet, arrow, CSV, JSON, JSONL).

    task.data ──Hub: fetched by commit──▶ files ──datasets──▶ Arrow on disk ──memory-mapped──▶ row ──columns──▶ item

Rows are read one at a time, by index, from a file that all processes map; only the questions are looked through, once, to
divide them. A reward worker, which asks for no item, reads nothing at all. Needs the package ``datasets``.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamarl.data.items import Split, TaskItem, split_questions
from llamarl.environments.config import TaskConfig
from llamarl.errors import DataError, FileError, ModelError
from llamarl.models.hub import fetch_dataset, is_hub_id
from llamarl.reading import user_path

__all__ = ["TableSplits", "local_data"]

_log = logging.getLogger(__name__)

_READERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
}
"""Ending of a file -> who reads it in ``datasets``, and how."""

_QUESTIONS = ("question", "problem", "prompt", "messages")
_BATCH = 1000


def local_data(named: str, revision: str, key: str) -> str:
    """The path itself, or the folder of a data set that is named by its id on the Hub, which is fetched.

    Raises:
        DataError: There is no such file, folder or data set, or it cannot be fetched.
    """
    try:
        path = user_path(named, key)
    except FileError as error:
        raise DataError.at(key, f": {error}") from error
    if os.path.exists(path):
        if revision:
            raise DataError.at(
                f"{key.replace('data', '')}revision",
                f": {revision!r} is of a data set of the Hugging Face Hub, but {key} {named!r} is here, where there are none: "
                "leave it out",
                key,
            )
        return named
    if not is_hub_id(named) or path.suffix in _READERS:
        raise DataError.at(
            key, f": no file or folder {path}; give one, or the id of a data set of the Hugging Face Hub (org/name)"
        )
    try:
        return str(fetch_dataset(named, revision, key=key))
    except ModelError as error:
        raise DataError(str(error), mistakes=error.mistakes) from error


class TableSplits:
    """The train and eval items of one or two tables; an ``ItemSource`` but for its name. Opened when first asked.

    Args:
        to_item: Makes an item of one row; its second argument, which names the row, is for its errors.

    Raises:
        DataError: From ``num_items`` and ``item``: no such table, split or column, an empty split, or a row that is no item.
    """

    def __init__(self, config: TaskConfig, to_item: Callable[[Mapping[str, Any], str], TaskItem], *, seed: int) -> None:
        self._config = config
        self._to_item = to_item
        self._seed = seed

    def num_items(self, split: Split) -> int | None:
        return len(self._splits[split][1])

    def item(self, split: Split, index: int) -> TaskItem:
        table, rows = self._splits[split]
        row = int(rows[index])
        item = self._to_item(self._record(table.rows[row]), f"{table.name} row {row}")
        template = self._config.template
        if template:
            return TaskItem(
                question=template.replace("{question}", item.question),
                answer=item.answer,
                metadata=item.metadata,
                messages=item.messages,
                where=item.where,
            )
        return item

    @cached_property
    def _splits(self) -> dict[Split, tuple[_Table, npt.NDArray[np.int64]]]:
        config = self._config
        train = self._open(config.data, config.split, "data", "split")
        questions = self._questions(train)
        every = np.arange(len(questions), dtype=np.int64)
        if not (config.eval_data or config.eval_split):
            held = np.array(split_questions(questions, seed=self._seed, fraction=config.eval_fraction), dtype=bool)
            return {"train": (train, every[~held]), "eval": (train, every[held])}
        evaluated = self._open(config.eval_data or config.data, config.eval_split, "eval_data", "eval_split")
        asked = self._questions(evaluated)
        known = set(asked)
        kept = np.fromiter((q not in known for q in questions), bool, len(questions))
        if not kept.any():
            raise DataError.at(
                "task.eval_split",
                f": every question of {train.name} is also in {evaluated.name}; the splits must be disjoint",
                "task.data",
            )
        if not kept.all():
            _log.warning("%s: left out %d rows that %s holds too", train.name, int((~kept).sum()), evaluated.name)
        return {"train": (train, every[kept]), "eval": (evaluated, np.arange(len(asked), dtype=np.int64))}

    def _open(self, named: str, split: str, key: str, split_key: str) -> _Table:
        if importlib.util.find_spec("datasets") is None:
            raise DataError.at(
                f"task.{key}",
                f" {named!r} needs the package datasets: pip install 'llamarl[datasets]', or give JSONL by task.train_file",
            )
        config = self._config
        revision = config.eval_revision if named == config.eval_data else config.revision
        path = Path(local_data(named, revision, f"task.{key}")).expanduser()
        splits = _load(path, config.subset, f"task.{key}")
        name = _choose(split or ("train" if key == "data" else ""), splits, named, f"task.{split_key}")
        rows = splits[name]
        if not len(rows):
            raise DataError.at(f"task.{split_key}", f": split {name!r} of {named} has no row")
        for role, column in config.columns.items():
            if column not in rows.column_names:
                raise DataError.at(
                    f"task.columns.{role}", f": {named} has no column {column!r}{_near(column, rows.column_names)}"
                )
        return _Table(f"{named} [{name}]", rows)

    def _record(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row under the names that tasks know."""
        columns = self._config.columns
        named = {role: row[column] for role, column in columns.items()}
        rest = {name: value for name, value in row.items() if name not in columns.values() and name not in named}
        return {name: value for name, value in {**named, **rest}.items() if value is not None and _is_plain(value)}

    def _questions(self, table: _Table) -> list[str]:
        """Of every row, as its item has it but for white space at the ends."""
        columns, have = self._config.columns, table.rows.column_names
        taken = {columns[role]: role for role in _QUESTIONS if role in columns}
        taken = taken or {name: name for name in _QUESTIONS if name in have and name not in columns.values()}
        if not taken:
            raise DataError.at(
                "task.columns",
                f": {table.name} has no column {' or '.join(map(repr, _QUESTIONS))}; it has {', '.join(have)}. Say which holds "
                f"the question: columns = {{ question = {have[0]!r} }}",
                "task.data",
            )
        found: list[str] = []
        for batch in table.rows.select_columns(list(taken)).iter(_BATCH):
            for index in range(len(next(iter(batch.values())))):
                record = {role: batch[column][index] for column, role in taken.items()}
                found.append(_question(record, f"{table.name} row {len(found)}"))
        return found


class _Table:
    """Rows that ``datasets`` maps, and what they are called."""

    def __init__(self, name: str, rows: Any) -> None:
        self.name = name
        self.rows = rows


def _question(record: Mapping[str, Any], where: str) -> str:
    from llamarl.environments.functions import function_item

    return function_item({name: value for name, value in record.items() if value is not None}, where).question.strip()


def _load(path: Path, subset: str, key: str) -> Mapping[str, Any]:
    """The splits of a folder or file."""
    import datasets

    datasets.disable_progress_bars()
    if path.is_dir():
        source: tuple[Any, ...] = (str(path), subset or None)
        options: dict[str, Any] = {}
    else:
        if subset:
            raise DataError.at(
                "task.subset", f": {subset!r} is of a data set of several, but {path} is one file: leave it out"
            )
        if path.suffix not in _READERS:
            raise DataError.at(key, f": {path} ends in {path.suffix!r}, expected one of {', '.join(_READERS)}")
        reader, options = _READERS[path.suffix]
        source, options = (reader,), {**options, "data_files": str(path)}
    try:
        return datasets.load_dataset(*source, **options)  # type: ignore[no-any-return]
    except Exception as error:  # of a dozen readers, each with errors of its own
        innermost: BaseException = error
        while innermost.__cause__ is not None:
            innermost = innermost.__cause__
        text = str(error if "onfig" in str(error) else innermost).partition("\nExample")[0].replace("\n", " ")
        if "corresponds to no data" in text:  # in the words of datasets
            raise DataError.at(key, f": {path} has no row") from error
        at = "task.subset" if "onfig name" in text or "BuilderConfig" in text else key
        raise DataError.at(
            at, f": {path} cannot be read as a table: {type(innermost).__name__}: {text:.500}"
        ) from error


def _choose(wanted: str, splits: Mapping[str, Any], named: str, key: str) -> str:
    if wanted in splits:
        return wanted
    if len(splits) == 1 and wanted in ("", "train"):  # a folder of test data alone, say
        return next(iter(splits))
    if not wanted:
        raise DataError.at(key, f" must name a split of {named}: it has {', '.join(splits)}")
    raise DataError.at(key, f": {named} has no split {wanted!r}{_near(wanted, list(splits))}")


def _near(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; {f'did you mean {near[0]!r}? ' if near else ''}it has {', '.join(known)}"


def _is_plain(value: Any) -> bool:
    """Whether JSON has such a value: images, sounds, bytes and dates are left out of an item."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value))
