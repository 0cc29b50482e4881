"""``data`` may be rows of the program: a list, a Dataset or a frame; they become a file with the same items."""

import datetime
import json
import math
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from llamarl.api.llm import LLM
from llamarl.api.settings import run_config
from llamarl.api.tables import file_of_rows
from llamarl.data.items import read_messages
from llamarl.environments.factory import make_task
from llamarl.errors import ConfigError

ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": f"{n} + 1?"}], "answer": str(n + 1), "level": n} for n in range(4)
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def as_dataset(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows)


def as_frame(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("pandas").DataFrame(rows)


def test_an_answer_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="data: row 1: answer is Decimal.*, expected text or a number"):
        file_of_rows([{"question": "a", "answer": math.nan}, {"question": "b", "answer": Decimal("1.5")}], "data")


@pytest.mark.parametrize("made", [list, tuple, as_dataset, as_frame])
def test_rows_of_a_program_are_the_items_of_the_task(made: Any) -> None:
    config = run_config(None, {"model": "bundled:tiny", "data": made(ROWS), "reward": "json:dumps"})
    task = make_task(config.task, seed=0)
    items = [task.item(split, place) for split in ("train", "eval") for place in range(task.num_items(split) or 0)]
    found = sorted((item.question, item.answer, item.metadata["level"]) for item in items)
    assert found == [("0 + 1?", "1", 0), ("1 + 1?", "2", 1), ("2 + 1?", "3", 2), ("3 + 1?", "4", 3)]
    assert all(item.messages == ({"role": "user", "content": item.question},) for item in items)


@pytest.mark.parametrize("made", [list, as_dataset, as_frame])
def test_what_is_missing_in_a_row_is_none_to_a_reward_and_no_question_or_answer(made: Any) -> None:
    rows = [{"messages": None, "prompt": f"{n}?", "answer": None, "solution": "7" if n else None} for n in range(2)]
    task = {"data": made(rows), "eval_fraction": 0.0}
    items = make_task(run_config(None, {"model": "bundled:tiny", "task": task, "reward": "json:dumps"}).task, seed=0)
    found = [items.item("train", place) for place in range(2)]
    assert [(item.question, item.answer, item.metadata) for item in found] == [
        ("0?", None, {"solution": None}),
        ("1?", None, {"solution": "7"}),
    ]


def test_a_second_run_with_equal_rows_leaves_the_file_that_the_first_reads() -> None:
    file = Path(file_of_rows(ROWS, "data"))
    before = file.stat()
    assert file_of_rows(ROWS, "data") == str(file)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    text = file.read_text()
    with file.open() as reader:  # of a run that goes on
        file.write_text(text + "x")  # by somebody
        assert Path(file_of_rows(ROWS, "data")).read_text() == text and reader.read() == text + "x"
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_equal_rows_are_one_file_and_what_json_lacks_is_left_out() -> None:
    rows = [{"question": "a", "answer": "b", "when": datetime.date(2020, 1, 1), "score": float("nan")}, ROWS[0]]
    first, again = (run_config(None, {"data": rows, "reward": "json:dumps"}).task.data for _ in range(2))
    assert first == again
    assert [json.loads(line) for line in Path(first).read_text().splitlines()] == [
        {"question": "a", "answer": "b"},
        ROWS[0],
    ]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"data": [1]}, "data: row 0 is 1, expected a mapping of columns to values"),
        ({"data": []}, "data has no rows"),
        ({"data": 7}, "data is of type int, expected a path, a name on the Hub, a Dataset, a data frame or a list of mappings"),
        ({"task": {"eval_data": [2]}, "data": ROWS}, "task.eval_data: row 0 is 2, expected a mapping of columns to values"),
        ({"num_ticks": -3}, "num_ticks must be in [1, 1000000], got -3"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_that_names_the_argument(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run_config(None, {"model": "bundled:tiny", "reward": "json:dumps", "data": ROWS, **settings})
    assert str(raised.value).startswith(sentence) and "\n" not in str(raised.value)


def test_rows_with_an_environment_need_no_reward_and_alone_ask_who_judges_them(tmp_path: Path) -> None:
    Path("shop.py").write_text("class Shop:\n    def reset(self): ...\n    def get_reward(self): ...\n")
    words = {"model": "bundled:tiny", "data": ROWS}
    assert run_config(None, {**words, "task": {"environment": "trl:shop.py:Shop"}}).task.name == "function"
    with pytest.raises(
        ConfigError, match=r"data is of a table of questions.*name what judges them, such as math, or function"
    ):
        run_config(None, words)


def test_all_words_that_are_no_settings_are_told_at_once_with_what_they_are_here() -> None:
    with pytest.raises(ConfigError) as raised:
        run_config(None, {"learning_rate": 1e-4, "data": ROWS, "max_steps": 3, "generator": 7})
    first, second, third = str(raised.value).splitlines()
    assert "no setting 'learning_rate'; TRL's learning_rate is optimizer.lr" in first
    assert "no setting 'max_steps'; TRL's max_steps is run.num_ticks" in second
    assert "generator is a section, so give a mapping" in third and "There are model, task, reward" in third


@pytest.mark.parametrize("splits", [{"test": 1, "train": 4}, {"all": 4}])
def test_of_a_dataset_dict_the_split_train_or_the_only_one_is_read(
    splits: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    made = pytest.importorskip("datasets").DatasetDict({name: as_dataset(ROWS[:n]) for name, n in splits.items()})
    data = run_config(None, {"data": made, "reward": "json:dumps"}).task.data
    assert [json.loads(line)["level"] for line in Path(data).read_text().splitlines()] == [0, 1, 2, 3]
    told = "data: of its splits train is read, and not test (task={'eval_data': data['test']} evaluates on it)"
    assert (told in caplog.text) == ("test" in splits)


def test_a_dataset_dict_of_several_other_splits_is_asked_for_one_of_them() -> None:
    made = pytest.importorskip("datasets").DatasetDict(first=as_dataset(ROWS), second=as_dataset(ROWS))
    with pytest.raises(
        ConfigError, match=r"data is a mapping \(first, second\), expected rows: give one of its splits"
    ):
        run_config(None, {"data": made, "reward": "json:dumps"})


def test_a_column_that_was_found_by_its_content_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"words": f"{n} + 1?", "answer": str(n + 1)} for n in range(3)]
    config = run_config(None, {"model": "bundled:tiny", "data": rows, "reward": "json:dumps"})
    for _ in range(2):
        make_task(config.task, seed=0).num_items("train")
    assert [line for line in caplog.messages if "'words' is taken for the question" in line] == caplog.messages
    assert len(caplog.messages) == 1


def test_sounds_of_a_dataset_are_not_opened() -> None:
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    sound = {"bytes": None, "path": "/no/where.wav"}
    features = {"question": datasets.Value("string"), "sound": datasets.Audio(), "all": [datasets.Audio()]}
    told = {"huggingface": json.dumps({"info": {"features": datasets.Features(features).to_dict()}})}
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    columns = [pyarrow.array(["q"]), pyarrow.array([sound], kind), pyarrow.array([[sound]], pyarrow.list_(kind))]
    table = pyarrow.table(columns, names=list(features))
    made = datasets.Dataset(table.replace_schema_metadata(told))
    for rows in (made, made.to_iterable_dataset()):
        data = run_config(None, {"data": rows, "reward": "json:dumps"}).task.data
        assert Path(data).read_text() == '{"question": "q"}\n'


def test_one_conversation_is_a_list_of_one_as_one_text_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(LLM, "sequences", lambda self, prompts, **rest: asked.append(prompts) or [])
    monkeypatch.setattr(LLM, "decode", lambda self, sequences: iter(()))
    talk, llm = [{"role": "user", "content": "hi"}], LLM.__new__(LLM)
    llm._one_call = threading.Lock()
    for prompts in ("hi", ["hi"], talk, [talk], [talk, "hi"], []):
        llm.generate(prompts)
    assert asked == [["hi"], ["hi"], [talk], [talk], [talk, "hi"], []]


def test_what_is_null_in_a_message_of_a_table_is_not_shown_to_templates() -> None:
    record = {"messages": [{"role": "user", "content": "hi", "tool_calls": None, "name": "x"}]}
    assert read_messages(record, "f:1") == ({"role": "user", "content": "hi", "name": "x"},)
