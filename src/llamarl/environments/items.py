"""Items from tables: a file of JSON lines, another file (parquet, arrow, CSV, JSON), a folder of
them, or a data set of the Hub.

    task.data ──.jsonl──────────────────────────────▶ lines, read at once ──────────────────▶ row ─┐
        │                                                                                          ├─columns─▶ item
        └──Hub: fetched by commit──▶ files ──datasets──▶ Arrow on disk, memory-mapped ──▶ row ─────┘

JSON lines need no other package, and every mistake in them is named by file and line before a run.
Anything else needs ``datasets``: rows are read one at a time, by index, from a file that all
processes map; only the questions are looked through, once, to divide them. A reward worker, which
asks for no item, reads nothing at all.

Where an evaluation table or split is named, a training question that also stands in it is left out.
Else a share of the distinct questions is held out by a hash of their words. White space at the ends
of a question is kept, but makes it no other question.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamarl.data.items import Split, TaskItem, read_messages, split_questions
from llamarl.errors import DataError, FileError, Mistake, ModelError
from llamarl.models.folders import fetch_dataset, is_hub_id, split_revision
from llamarl.reading import parse_json, read_lines, read_text, user_path
from llamarl.settings.environments import TaskConfig

__all__ = [
    "TableItems",
    "is_decoded",
    "local_data",
    "question_item",
    "question_of",
    "tell",
    "text_field",
    "with_verl_answer",
]

_log = logging.getLogger(__name__)

_LINES = ".jsonl"
_AS_WRITTEN = {"keep_default_na": False, "na_values": [""]}
"""An answer ``None`` or ``NA`` is text to pandas too; an empty cell is none."""
_READERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".csv": ("csv", _AS_WRITTEN),
    ".tsv": ("csv", {**_AS_WRITTEN, "sep": "\t"}),
    ".json": ("json", {}),
}
"""Ending of a file -> who reads it in ``datasets``, and how."""

_TEXTS = ("prompt", "question", "problem")
_QUESTIONS = (*_TEXTS, "messages")
_LIKE_QUESTIONS = (*_QUESTIONS, "instruction", "query", "input", "context", "conversation", "conversations")
"""Names by which one of several columns of text is known as the question, in lower or upper case."""
_ANSWERS = frozenset(
    {"answer", "solution", "completion", "response", "output", "chosen", "rejected", "label", "target", "ground_truth"}
)
"""What is no question, though it is text."""
_AS_TEXT = (*_TEXTS, "answer", "solution", "completion")
"""What no reader of CSV may take for a number."""
_BATCH = 1000

ToItem = Callable[[Mapping[str, Any], str], TaskItem]
"""Makes an item of one record; the second argument, which names its place, is for errors."""
Shown = Callable[[Sequence[Mapping[str, str]]], Sequence[Mapping[str, str]]]


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


def _asked(record: Mapping[str, Any]) -> str:
    """Name of the field that holds a record's question, a conversation before text; empty where none does."""
    talk = next((name for name in ("messages", *_TEXTS) if isinstance(record.get(name), list)), "messages")
    texts = sorted((name for name in _TEXTS if name in record), key=lambda name: record[name] is None)
    return talk if talk in record else next(iter(texts), "")


def question_of(record: Mapping[str, Any], where: str) -> tuple[str, tuple[Mapping[str, str], ...] | None]:
    """A record's question, and the conversation where it is one (``messages``, or a ``prompt`` that is a list).

    Raises:
        DataError: No question, or a conversation that is malformed or holds its own answer; names ``where``.
    """
    asked = _asked(record)
    if len(found := [name for name in _QUESTIONS if name in record]) > 1:
        others = ", ".join(name for name in found if name != asked)
        tell(f"rows have {', '.join(found)}: {asked} is asked (task.columns.question names another: {others})")
    question, messages = _words(record, where)
    if messages and messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the conversation in {asked!r} ends with words of the assistant, which the policy would be shown before "
            "it answers: leave them out, or name a column of questions (task.columns.question)"
        )
    return question, messages


def _words(record: Mapping[str, Any], where: str) -> tuple[str, tuple[Mapping[str, str], ...] | None]:
    """Those of a question, or of a conversation however it ends; errors as ``question_of``."""
    asked = _asked(record)
    if asked != "messages" and not isinstance(record.get(asked), list):
        return text_field(record, (asked,) if asked else _TEXTS, where), None
    messages = read_messages(record, where, asked)
    return _joined(messages), messages


def _joined(messages: Sequence[Mapping[str, str]]) -> str:
    return "\n\n".join(message["content"] for message in messages)


def question_item(record: Mapping[str, Any], where: str) -> TaskItem:
    """A record's question or conversation, and its answer if there is one; the other fields become the item's metadata.

    Raises:
        DataError: No question, or a conversation that is malformed or holds its own answer; names ``where``.
    """
    question, messages = question_of(record, where)
    record = with_verl_answer(record)
    taken = (_asked(record), "messages", "answer")
    return TaskItem(
        question=question,
        answer=None if record.get("answer") is None else text_field(record, ("answer",), where, trim=True),
        metadata={key: value for key, value in record.items() if key not in taken},
        messages=messages,
        where=where,
    )


def with_verl_answer(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record without an ``answer``, with that which verl's tables have as ``ground_truth`` in ``reward_model``; what is
    neither text nor a number is left there, for a reward of verl's kind."""
    of_verl = record.get("reward_model")
    found = of_verl.get("ground_truth") if isinstance(of_verl, Mapping) else None
    if "answer" in record or found is None:
        return record
    if isinstance(found, bool) or not isinstance(found, str | int | float):
        tell("a ground_truth is no text and no number: a reward that is called as by verl gets it, others no answer")
        return record
    return {**record, "answer": found}


def local_data(named: str, key: str) -> str:
    """The path itself, or the folder of a data set that is named by its id on the Hub, which is fetched.

    Raises:
        DataError: There is no such file, folder or data set, or it cannot be fetched.
    """
    try:
        path = user_path(named, key)
    except FileError as error:
        raise DataError.at(key, f": {error}") from error
    if os.path.exists(path):
        return named
    if not is_hub_id(named) or Path(split_revision(named)[0]).suffix in (_LINES, *_READERS):
        raise DataError.at(
            key, f": no file or folder {path}; give one, or the id of a data set of the Hugging Face Hub (org/name)"
        )
    try:
        return str(fetch_dataset(named, key=key))
    except ModelError as error:
        raise DataError(str(error), mistakes=error.mistakes) from error


class TableItems:
    """The train and eval items of one or two tables; an ``ItemSource`` but for its name. Opened when first asked.

    Args:
        shown: What is asked of a conversation: all of it, but where the rest is learned.

    Raises:
        DataError: From ``num_items`` and ``item``: no such table, split or column, an empty table,
            or a record that is no item.
    """

    def __init__(self, config: TaskConfig, to_item: ToItem, *, seed: int, shown: Shown = tuple) -> None:
        self._config = config
        self._to_item = to_item
        self._seed = seed
        self._shown = shown

    def num_items(self, split: Split) -> int | None:
        return len(self._splits[split][1])

    def item(self, split: Split, index: int) -> TaskItem:
        table, rows = self._splits[split]
        item = table.item(int(rows[index]))
        template = self._config.template
        if template and item.messages:
            raise DataError.at(
                "task.template", f"wraps questions, but {item.where} holds a conversation: leave one of the two out"
            )
        return dataclasses.replace(item, question=template.replace("{question}", item.question)) if template else item

    @cached_property
    def _splits(self) -> dict[Split, tuple[_Lines | _Mapped, npt.NDArray[np.int64]]]:
        config = self._config
        wanted = [(config.data, config.split, "task.data", "task.split")]
        if config.eval_data or config.eval_split:
            wanted.append((config.eval_data or config.data, config.eval_split, "task.eval_data", "task.eval_split"))
        tables: list[_Lines | _Mapped] = []
        problems: list[Mistake] = []
        for arguments in wanted:
            try:
                tables.append(self._open(*arguments))
            except DataError as error:
                problems += error.mistakes
        if problems:
            raise DataError("\n".join(map(str, problems)), mistakes=problems)
        train = tables[0]
        questions = train.questions()
        every = np.arange(len(questions), dtype=np.int64)
        if len(tables) == 1:
            held = np.array(split_questions(questions, seed=self._seed, fraction=config.eval_fraction), dtype=bool)
            return {"train": (train, every[~held]), "eval": (train, every[held])}
        evaluated = tables[1]
        asked = evaluated.questions()
        known = set(asked)
        kept = np.fromiter((q not in known for q in questions), bool, len(every))
        if not kept.any():
            raise DataError.at(
                "task.eval_data" if config.eval_data else "task.eval_split",
                f": every question of {train.name} is also in {evaluated.name}; the splits must be disjoint",
                "task.data",
            )
        if not kept.all():
            _log.warning("%s: left out %d items that %s holds too", train.name, int((~kept).sum()), evaluated.name)
        return {"train": (train, every[kept]), "eval": (evaluated, np.arange(len(asked), dtype=np.int64))}

    def _open(self, named: str, split: str, key: str, split_key: str) -> _Lines | _Mapped:
        config = self._config
        lines = named.endswith(_LINES)
        if not lines and importlib.util.find_spec("datasets") is None:
            raise DataError.at(
                key,
                f" {named!r} needs the package datasets: pip install 'llamarl[datasets]', or give JSON lines (.jsonl)",
            )
        path = Path(local_data(named, key)).expanduser()
        if path.is_file() and config.subset:
            raise DataError.at(
                "task.subset", f": {config.subset!r} is of a data set of several, but {path} is one file: leave it out"
            )
        if lines:
            _choose(split, ("train",), named, split_key)
            return _Lines(path, named, config.columns, self._to_item, key)
        splits = _load(path, config, key)
        name = _choose(split, tuple(splits), named, split_key)
        if not len(splits[name]):
            raise DataError.at(split_key, f": split {name!r} of {named} has no row")
        return _Mapped(f"{named} [{name}]", splits[name], config.columns, self._to_item, self._shown)


class _Lines:
    """A file with one JSON object a line; blank lines are passed over.

    Raises:
        DataError: The file is missing, unreadable or has no items, or a line is no JSON object of the right form.
    """

    def __init__(self, file: Path, name: str, columns: Mapping[str, str], to_item: ToItem, key: str) -> None:
        self.name = name
        self._items: list[TaskItem] = []
        try:
            for where, line in read_lines(file):
                record = parse_json(line, where, big_integers=True)
                if not isinstance(record, dict):
                    shown = f"{type(record).__name__} {line.strip()[:80]!r}"
                    raise DataError(f"{where}: got {shown}, expected a JSON object")
                if not self._items:
                    _check_columns(columns, list(record), where)
                    columns = with_question(columns, record, name)
                self._items.append(to_item(_record(record, columns, where), where))
        except FileError as error:
            raise DataError.at(key, f": {error}; give one JSON object a line, UTF-8") from error
        except DataError as error:
            raise error if error.mistakes[0].key else DataError.at(key, f": {error}") from error
        if not self._items:
            raise DataError.at(key, f": {file}: got an empty file, expected one JSON object a line")

    def questions(self) -> Sequence[str]:
        return [item.question.strip() for item in self._items]

    def item(self, row: int) -> TaskItem:
        return self._items[row]


class _Mapped:
    """Rows that ``datasets`` maps into memory."""

    def __init__(self, name: str, rows: Any, columns: Mapping[str, str], to_item: ToItem, shown: Shown) -> None:
        self.name, self._shown = name, shown
        _check_columns(columns, rows.column_names, name)
        self._rows, self._columns, self._to_item = rows, with_question(columns, rows[0], name), to_item

    def item(self, row: int) -> TaskItem:
        where = f"{self.name} row {row}"
        record = _record(self._rows[row], self._columns, where)
        told = record.get("answer")  # no NaN, which is none: refused, where another column would be left out
        kept = {k: v for k, v in record.items() if _is_plain(v) or (v is told and not isinstance(v, float))}
        item = self._to_item({k: v for k, v in kept.items() if v is not None}, where)
        empty = {k: None for k, v in kept.items() if v is None and k not in (*_QUESTIONS, "answer")}
        return dataclasses.replace(item, metadata={**empty, **item.metadata})

    def questions(self) -> Sequence[str]:
        """Made anew by each call: of ten million rows they are gigabytes, in every process that reads the table."""
        columns, have = self._columns, self._rows.column_names
        taken = {columns[role]: role for role in _QUESTIONS if role in columns}
        free = _TEXTS if "completion" in columns else _QUESTIONS
        taken = taken or {name: name for name in free if name in have and name not in columns.values()}
        if not taken:
            raise DataError.at(
                "task.columns",
                f": {self.name} has no column {' or '.join(map(repr, _QUESTIONS))}; it has {', '.join(have)}. Say which holds "
                f"the question: columns = {{ question = {have[0]!r} }}",
                "task.data",
            )
        found: list[str] = []
        for batch in self._rows.select_columns(list(taken)).iter(_BATCH):
            for index in range(len(next(iter(batch.values())))):
                record = {role: batch[column][index] for column, role in taken.items()}
                record = {k: v for k, v in record.items() if v is not None}
                question, messages = _words(record, f"{self.name} row {len(found)}")
                if messages and _asked(record) == "messages":
                    question = _joined(self._shown(messages))
                found.append(question.strip())
        return found


def _check_columns(columns: Mapping[str, str], have: Sequence[str], name: str) -> None:
    for role, column in columns.items():
        if column not in have:
            raise DataError.at(f"task.columns.{role}", f": {name} has no column {column!r}{_near(column, have)}")


def with_question(columns: Mapping[str, str], row: Mapping[str, Any], name: str) -> Mapping[str, str]:
    """``columns``, with the one that holds the question where no name says so: found by what the first row holds.

    Raises:
        DataError: It holds conversations in another form.
    """
    if any(role in columns or (role in row and role not in columns.values()) for role in _QUESTIONS):
        return columns
    if foreign := next((column for column, value in row.items() if _is_conversation(value, {"from", "value"})), ""):
        raise DataError(
            f"{name}: column {foreign!r} holds turns of {{from, value}} (ShareGPT's form): write them as {{role, content}}, "
            "with the roles system, user and assistant"
        )
    free = [column for column in row if column not in columns.values() and column.lower() not in _ANSWERS]
    role, found = "messages", [column for column in free if _is_conversation(row[column])]
    if not found:
        like = [column for column in free if isinstance(row[column], str) and column.lower() in _LIKE_QUESTIONS]
        texts = [column for column in free if isinstance(row[column], str) and row[column].strip()]
        # of instruction and input (Alpaca) or context (Dolly), one may be blank in this row alone
        role, found = "question", like if len(like) > 1 else [column for column in texts if column in like] or texts
    if len(found) != 1:
        return columns
    answered = {"answer", "completion"} & {*row, *columns} or (
        role == "messages" and row[found[0]][-1]["role"] == "assistant"
    )
    none = "" if answered else ", none for the answer (task.columns.answer)"
    tell(f"{name}: column {found[0]!r} is taken for the {role} (task.columns.{role} says otherwise){none}")
    return {**columns, role: found[0]}


@cache
def tell(line: str) -> None:
    """Warn once: a task is made several times before a run."""
    _log.warning(line)


def _is_conversation(value: Any, keys: Set[str] = frozenset({"role", "content"})) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, Mapping) and keys <= one.keys() for one in value)
    )


def _record(row: Mapping[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    """A row under the names that tasks know."""
    if columns and (missing := [column for column in columns.values() if column not in row]):
        raise DataError(f"{where}: got fields {sorted(row)}, expected {missing[0]!r}, which task.columns names")
    named = {role: row[column] for role, column in columns.items()}
    others = {name: value for name, value in row.items() if name not in columns.values() and name not in named}
    if named.keys() & {*_QUESTIONS, "completion"}:  # who names one wants no other
        others.pop("messages", None)
    if named.keys() & {*_QUESTIONS}:
        others = {name: value for name, value in others.items() if name not in _QUESTIONS}
    return named | others


def _refuse_addresses(folder: Path, key: str) -> None:
    """Refuse a folder whose card sends ``datasets`` elsewhere for its files: it may be a stranger's."""
    import yaml
    from huggingface_hub import DatasetCard

    for name in ("README.md", ".huggingface.yaml"):
        if not (card := folder / name).is_file():
            continue
        text = read_text(card)
        try:
            facts = (
                DatasetCard(text, ignore_metadata_errors=True).data.to_dict()
                if name == "README.md"
                else yaml.safe_load(text)
            )
        except (yaml.YAMLError, ValueError, TypeError) as error:
            raise DataError.at(key, f": the facts in {card} cannot be read: {' '.join(str(error).split())}") from error
        places = json.dumps(facts.get("configs"), default=str) if isinstance(facts, dict) else ""
        if "://" in places or "::" in places:
            raise DataError.at(key, f": {card} names files by addresses: fetch them into {folder}, and name them there")


def is_decoded(feature: Any) -> bool:
    """Whether ``datasets`` makes a picture, a sound or a film of it, with programs and addresses that the row names."""
    parts = feature.values() if isinstance(feature, Mapping) else feature if isinstance(feature, list) else ()
    inner = getattr(feature, "feature", None)
    return hasattr(feature, "decode") or any(map(is_decoded, parts)) or inner is not None and is_decoded(inner)


def _saved(path: Path) -> dict[str, list[str]]:
    """The files of each split where ``save_to_disk`` of ``datasets`` wrote the folder, which its ``load_dataset`` refuses;
    beside them lies what was computed of them later (``cache-*.arrow``)."""
    folders = {"train": path} | {folder.name: folder for folder in sorted(path.iterdir()) if folder.is_dir()}
    return {
        name: [str(file) for file in sorted(folder.glob("*.arrow")) if not file.name.startswith("cache-")]
        for name, folder in folders.items()
        if (folder / "state.json").is_file()
    }


def _load(path: Path, config: TaskConfig, key: str) -> Mapping[str, Any]:
    """The splits of a folder or file. Questions and answers of CSV are text as written: 007 is no 7, 1.50 no 1.5."""
    import datasets

    datasets.disable_progress_bars()
    if path.is_dir():
        _refuse_addresses(path, key)
        source: tuple[Any, ...] = (str(path), config.subset or None)
        options: dict[str, Any] = {}
        if not config.subset and (saved := _saved(path)):
            source, options = ("arrow",), {"data_files": saved}
    else:
        if path.suffix not in _READERS:
            raise DataError.at(
                key, f": {path} ends in {path.suffix!r}, expected one of {', '.join((_LINES, *_READERS))}"
            )
        reader, options = _READERS[path.suffix]
        source, options = (reader,), {**options, "data_files": str(path)}
    try:
        if path.is_dir() and not options and hasattr(datasets.load_dataset_builder(*source).config, "keep_default_na"):
            options = dict(_AS_WRITTEN)  # its files are CSV, its separator is of their ending or its card
        if "keep_default_na" in options:
            options["converters"] = {config.columns.get(role, role): str for role in _AS_TEXT}
        splits = datasets.load_dataset(*source, **options)
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
    if "converters" in options and any("__index_level_0__" in rows.column_names for rows in splits.values()):
        raise DataError.at(key, f": {path} has more cells in a row than in its header: quote text with a comma")
    return {
        name: rows.remove_columns([column for column, feature in rows.features.items() if is_decoded(feature)])
        for name, rows in splits.items()
    }


def _choose(wanted: str, splits: Sequence[str], named: str, key: str) -> str:
    if wanted in splits:
        return wanted
    if len(splits) == 1 and wanted in ("", "train"):  # a folder of test data alone, say
        return splits[0]
    if not wanted:
        raise DataError.at(key, f" must name a split of {named}: it has {', '.join(splits)}")
    raise DataError.at(key, f": {named} has no split {wanted!r}{_near(wanted, splits)}")


def _near(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; {f'did you mean {near[0]!r}? ' if near else ''}it has {', '.join(known)}"


def _is_plain(value: Any) -> bool:
    """Whether JSON has such a value: images, sounds, bytes and dates are left out of an item."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value))
