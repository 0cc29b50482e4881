"""Items from tables: every kind of file gives the same items, columns and splits go by name, and mistakes name what there is."""

import csv
import datetime
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

datasets = pytest.importorskip("datasets", reason="tables need the package datasets: pip install 'llamarl[datasets]'")
import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402
from hub_server import Hub, serving_here  # noqa: E402
from huggingface_hub import constants  # noqa: E402

from llamarl.config import RunConfig  # noqa: E402
from llamarl.controller.settle import local, pinned  # noqa: E402
from llamarl.data.items import Split  # noqa: E402
from llamarl.environments.factory import make_task, task_mistakes  # noqa: E402
from llamarl.environments.items import TableItems, tell  # noqa: E402
from llamarl.errors import DataError, FileError  # noqa: E402
from llamarl.reading import read_lines  # noqa: E402
from llamarl.settings.environments import TaskConfig, TaskSection  # noqa: E402

ROWS = [{"problem": f"What is {n} + 1?", "solution": f"It is \\boxed{{{n + 1}}}.", "level": n} for n in range(12)]
SPLITS: tuple[Split, Split] = ("train", "eval")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "tables"))


def write_parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_arrow(path: Path) -> Path:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def write_csv(path: Path) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def write_lines(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def write_json(path: Path) -> Path:
    path.write_text(json.dumps(ROWS))
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "a.parquet": write_parquet, "a.arrow": write_arrow, "a.csv": write_csv, "a.tsv": write_csv,
    "a.json": write_json,
}  # fmt: skip


def mistakes(**task: Any) -> str:
    return "\n".join(map(str, task_mistakes(TaskConfig(**task), seed=0)))


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_items_that_lines_of_json_give(name: str, tmp_path: Path) -> None:
    lines = make_task(
        TaskConfig(name="math", data=str(write_lines(tmp_path / "lines.jsonl")), eval_fraction=0.4), seed=3
    )
    table = make_task(TaskConfig(name="math", data=str(WRITERS[name](tmp_path / name)), eval_fraction=0.4), seed=3)
    for split in ("train", "eval"):
        count = lines.num_items(split)
        assert table.num_items(split) == count and count
        for index in range(count):
            ours, theirs = table.item(split, index), lines.item(split, index)
            assert (ours.question, ours.answer, ours.metadata) == (theirs.question, theirs.answer, theirs.metadata)
    assert table.item("train", 0).where == f"{tmp_path / name} [train] row {table.item('train', 0).metadata['level']}"


def test_a_folder_that_a_data_set_was_saved_to_is_read_split_by_split(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    datasets.load_from_disk(tmp_path / "one").filter(lambda row: row["level"] == 3)  # leaves cache-*.arrow there
    datasets.DatasetDict({"easy": rows.select(range(9)), "hard": rows.select([9, 10, 11])}).save_to_disk(
        tmp_path / "two"
    )
    one = make_task(TaskConfig(name="math", data=str(tmp_path / "one"), eval_fraction=0.0), seed=0)
    assert one.num_items("train") == 12 and one.item("train", 11).answer == "12"
    config = TaskConfig(name="math", data=str(tmp_path / "two"), split="easy", eval_split="hard")
    two = make_task(config, seed=0)
    assert (two.num_items("train"), two.num_items("eval"), two.item("eval", 0).answer) == (9, 3, "10")


def test_a_question_of_a_table_stays_as_it_was_written(tmp_path: Path) -> None:
    rows = [{"problem": "a3 b9 =\n", "solution": "\\boxed{12}", "level": 1}]
    file = write_parquet(tmp_path / "a.parquet", rows)
    task = make_task(TaskConfig(name="math", data=str(file), eval_fraction=0.0), seed=0)
    assert task.item("train", 0).question == "a3 b9 =\n"


def test_an_empty_cell_is_none_to_a_reward_as_in_a_line(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": None, "solution": "7" if n else None} for n in range(2)]
    data = str(write_parquet(tmp_path / "a.parquet", rows))
    task = make_task(TaskConfig(name="function", reward="builtins:len", data=data, eval_fraction=0.0), seed=0)
    assert [task.item("train", n).metadata for n in range(2)] == [{"solution": None}, {"solution": "7"}]


def test_questions_and_answers_of_csv_are_what_its_cells_say(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    rows = "question,Result,limit\na,007,1\nb,1.50,2\nc,None,3\nd,,4\n12,3,5\n"
    file.write_text(rows)
    folder, carded = tmp_path / "folder", tmp_path / "carded"  # as a data set of the Hub is downloaded
    for where in (folder, carded):
        where.mkdir()
    (folder / "train.tsv").write_text(rows.replace(",", "\t"))
    (carded / "rows.csv").write_text(rows.replace(",", ";"))
    (carded / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: rows.csv\n  sep: ';'\n---\n"
    )
    for data in (file, folder, carded):
        task = make_task(
            TaskConfig(
                name="function", reward="json:dumps", data=str(data), columns={"answer": "Result"}, eval_fraction=0.0
            ),
            seed=0,
        )
        items = [task.item("train", index) for index in range(5)]
        assert [item.answer for item in items] == ["007", "1.50", "None", None, "3"], data
        assert (items[4].question, [item.metadata["limit"] for item in items]) == ("12", [1, 2, 3, 4, 5])
    file.write_text("question,answer\nIf a1, what is b2?,3\n")  # the words before the comma would be lost
    assert "more cells in a row than in its header" in mistakes(name="function", reward="json:dumps", data=str(file))


def test_an_answer_that_json_does_not_have_is_refused_where_another_column_is_left_out(tmp_path: Path) -> None:
    day = datetime.date(2026, 1, 2)
    file = write_parquet(tmp_path / "a.parquet", [{"question": "When?", "answer": day, "asked": day}])
    task = {"name": "function", "reward": "json:dumps", "data": str(file), "eval_fraction": 0.0}
    with pytest.raises(DataError, match="row 0: field 'answer' is date datetime.date.2026, 1, 2., expected text"):
        make_task(TaskConfig(**task), seed=0).item("train", 0)
    renamed = make_task(TaskConfig(**task, columns={"question": "question", "when": "answer"}), seed=0)
    assert (renamed.item("train", 0).answer, dict(renamed.item("train", 0).metadata)) == (None, {})


def test_columns_splits_and_a_template_go_by_name(tmp_path: Path) -> None:
    write_parquet(tmp_path / "set" / "train.parquet")
    write_parquet(tmp_path / "set" / "test.parquet", ROWS[:2])
    task = make_task(
        TaskConfig(
            name="function", reward="json:dumps", data=str(tmp_path / "set"), eval_split="test",
            columns={"question": "problem", "answer": "level", "how": "solution"}, template="Q: {question}\nA:",
        ),
        seed=0,
    )  # fmt: skip
    assert (task.num_items("train"), task.num_items("eval")) == (10, 2)  # two of the twelve are asked in the test
    item = task.item("train", 0)
    assert item.question == "Q: What is 2 + 1?\nA:"
    assert (item.answer, dict(item.metadata)) == ("2", {"how": "It is \\boxed{3}."})


def test_the_column_that_is_named_is_the_question_whatever_else_rows_hold(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "in the talk"}, {"role": "assistant", "content": "\\boxed{1}"}]
    rows = [{"problem": f"p{n}", "question": f"q{n}", "mine": f"m{n}", "messages": talk} for n in range(4)]
    rows = [{**row, "solution": f"\\boxed{{{n}}}", "own": f"o{n}"} for n, row in enumerate(rows)]
    (lines := tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for data in (str(lines), str(write_parquet(tmp_path / "a.parquet", rows))):
        for column in ("problem", "mine"):
            task = make_task(TaskConfig(name="math", data=data, columns={"question": column}, eval_fraction=0), seed=0)
            assert [task.item("train", n).question for n in range(4)] == [f"{column[0]}{n}" for n in range(4)]
            assert task.item("train", 0).messages is None and task.item("train", 3).answer == "3"
        columns = {"question": "problem", "completion": "own"}
        shown = make_task(TaskConfig(name="demonstrations", data=data, columns=columns, eval_fraction=0), seed=0)
        item = shown.item("train", 2)
        assert item.question == "p2" and item.metadata == {"continuation": [{"role": "assistant", "content": "o2"}]}
        columns = {"completion": "own"}
        shown = make_task(TaskConfig(name="demonstrations", data=data, columns=columns, eval_fraction=0), seed=0)
        assert shown.item("train", 2).metadata == {"continuation": [{"role": "assistant", "content": "o2"}]}


def test_a_conversation_that_holds_its_answer_is_no_question(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "\\boxed{2}"}]
    file = write_parquet(tmp_path / "a.parquet", [{"problem": "1 + 1?", "solution": "\\boxed{2}", "messages": talk}])
    with pytest.raises(DataError, match="row 0: the conversation in 'messages' ends with words of the assistant"):
        make_task(TaskConfig(name="math", data=str(file)), 0).item("train", 0)
    lines = write_lines(tmp_path / "a.jsonl")
    lines.write_text(json.dumps({"answer": "2", "messages": talk}) + "\n")
    assert "a.jsonl:1: the conversation in 'messages' ends" in mistakes(name="math", data=str(lines))


@pytest.mark.parametrize(
    "prompt", ["Say it. 1?", [{"role": "user", "content": "Say it. 1?"}]], ids=["text", "messages"]
)
def test_of_several_questions_one_is_asked_with_a_word_and_a_reward_gets_the_others(
    prompt: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tell.cache_clear()  # it says each line once
    rows = [{"prompt": prompt, "question": "1?", "problem": "one", "answer": "1"}]
    file = write_parquet(tmp_path / "a.parquet", rows)
    item = make_task(TaskConfig(name="function", reward="json:dumps", data=str(file), eval_fraction=0), 0).item(
        "train", 0
    )
    assert (item.question, dict(item.metadata)) == ("Say it. 1?", {"question": "1?", "problem": "one"})
    assert "prompt is asked (task.columns.question names another: question, problem)" in caplog.text


def test_conversations_to_learn_from_that_begin_alike_fall_on_one_side(tmp_path: Path) -> None:
    said = [[{"role": "user", "content": f"{n // 4}?"}, {"role": "assistant", "content": f"{n}!"}] for n in range(40)]
    rows = [{"messages": talk} for talk in said]
    (lines := tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    halves = []
    for file in (lines, write_parquet(tmp_path / "a.parquet", rows)):
        config = TaskConfig(name="demonstrations", data=str(file), eval_fraction=0.3)
        task = make_task(config, seed=0)
        halves.append([[task.item(split, n).question for n in range(task.num_items(split))] for split in SPLITS])
    assert halves[0] == halves[1] and not {*halves[0][0]} & {*halves[0][1]}


@pytest.mark.parametrize("task", ["function", "demonstrations"])
def test_conversations_in_the_form_of_sharegpt_are_told_as_that(task: str, tmp_path: Path) -> None:
    rows = [{"id": "1", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}]
    (lines := tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    for file in (lines, write_parquet(tmp_path / "a.parquet", rows)):
        words = mistakes(name=task, data=str(file), reward="json:dumps" if task == "function" else "")
        assert "column 'conversations' holds turns of {from, value} (ShareGPT's form)" in words


def test_a_template_beside_conversations_is_refused(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", [{"prompt": [{"role": "user", "content": "1?"}], "answer": "1"}])
    task = make_task(TaskConfig(name="math", data=str(file), template="Q: {question}", eval_fraction=0), 0)
    with pytest.raises(DataError, match="task.template wraps questions, but .* row 0 holds a conversation"):
        task.item("train", 0)


def test_wrong_names_are_told_with_the_nearest_and_all_that_there_are(tmp_path: Path) -> None:
    file, folder = str(write_parquet(tmp_path / "a.parquet")), tmp_path / "set"
    wrong = mistakes(name="math", data=file, columns={"question": "problm"})
    assert wrong.startswith(
        f"task.columns.question: {file} [train] has no column 'problm'; did you mean 'problem'? it has "
    )
    assert "problem, solution, level" in wrong
    write_parquet(folder / "train.parquet")
    write_parquet(folder / "test.parquet")
    wrong = mistakes(name="math", data=str(folder), eval_split="tset")
    assert f"task.eval_split: {folder} has no split 'tset'; did you mean 'test'? it has train, test" in wrong
    both = mistakes(name="math", data=str(folder), eval_split="test")
    assert "task.eval_split: every question of" in both
    wrong = mistakes(name="function", reward="json:dumps", data=file, columns={"answer": "problem"})
    assert "task.columns:" in wrong and "it has problem, solution, level. Say which holds the question" in wrong
    assert "no file or folder" in mistakes(name="math", data=str(tmp_path / "none.parquet"))
    assert "ends in '.xlsx', expected one of .jsonl, .parquet" in mistakes(
        name="math", data=str(write_lines(tmp_path / "a.xlsx"))
    )
    (tmp_path / "bad.json").write_text("{")
    assert "cannot be read as a table" in mistakes(name="math", data=str(tmp_path / "bad.json"))
    (tmp_path / "empty.csv").write_text("problem,solution\n")
    assert f"task.data: {tmp_path / 'empty.csv'} has no row" in mistakes(name="math", data=str(tmp_path / "empty.csv"))


@pytest.mark.parametrize(
    "path", ["ftp://127.0.0.1/a.jsonl", "[a.jsonl, http://x/b]", "reference://*::file:///x.json", "hf://datasets/a/b/c"]
)
def test_a_folder_whose_card_names_addresses_is_refused_before_they_are_asked(path: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet")
    head = f"configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {json.dumps(path)}\n"
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\nsource: https://x\n{head}---\n# Words: see https://y\n")
    assert "README.md names files by addresses: fetch them into" in mistakes(name="math", data=str(tmp_path))
    (tmp_path / "README.md").write_text(
        f"---\nsource: https://x\n{head.replace(json.dumps(path), 'train.parquet')}---\n"
    )
    assert "addresses" not in mistakes(name="math", data=str(tmp_path))


@pytest.mark.parametrize(("name", "head"), [("README.md", "---\na: 1\n---x: 2\n{}---\n"), (".huggingface.yaml", "{}")])
def test_cards_are_read_as_the_library_reads_them(name: str, head: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet")
    (tmp_path / name).write_text(
        head.format("configs:\n- config_name: default\n  data_files: 'ftp://127.0.0.1/a.jsonl'\n")
    )
    assert f"{name} names files by addresses" in mistakes(name="math", data=str(tmp_path))


def test_pictures_of_a_table_are_neither_opened_nor_fetched(tmp_path: Path) -> None:
    of_pictures = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    picture = {"bytes": None, "path": "ftp://127.0.0.1:1/a.png"}
    table = pyarrow.Table.from_pylist(ROWS)
    features = datasets.Features.from_arrow_schema(table.schema)
    for name, kind, value, feature in (
        ("picture", of_pictures, picture, datasets.Image()),
        ("pages", pyarrow.list_(of_pictures), [picture], [datasets.Image()]),
    ):
        table = table.append_column(name, pyarrow.array([value] * len(ROWS), kind))
        features[name] = feature
    told = {"huggingface": json.dumps({"info": {"features": features.to_dict()}})}
    pyarrow.parquet.write_table(table.replace_schema_metadata(told), tmp_path / "a.parquet")
    task = make_task(TaskConfig(name="math", data=str(tmp_path / "a.parquet")), 0)
    assert not {"picture", "pages"} & task.item("train", 0).metadata.keys()


def test_without_the_package_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = mistakes(name="math", data=str(write_parquet(tmp_path / "a.parquet")))
    assert "needs the package datasets: pip install 'llamarl[datasets]', or give JSON lines (.jsonl)" in words


def test_a_table_is_opened_only_where_items_are_asked_for(tmp_path: Path) -> None:
    task = make_task(TaskConfig(name="math", data="no/such/table"), seed=0)  # as a reward worker makes it
    assert isinstance(task, TableItems)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving_here(monkeypatch, tmp_path) as hub:
        yield hub


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: main/train-*}
---
"""


def test_gsm8k_is_the_hubs_data_and_the_math_judge_and_its_commit_is_kept(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": f"{n} + {n}?", "answer": f"It doubles.\n#### {2 * n}"} for n in range(1, 9)]
    files = {
        "README.md": CARD.encode(),
        "main/train-00000-of-00001.parquet": write_parquet(tmp_path / "t", rows[:6]).read_bytes(),
        "main/test-00000-of-00001.parquet": write_parquet(tmp_path / "e", rows[6:]).read_bytes(),
        "gsm8k.py": b"raise SystemExit",
    }
    commit = hub.commit("datasets/openai/gsm8k", files)
    recorded = pinned(RunConfig(task=TaskSection(name="gsm8k")))
    assert recorded.task.data == f"openai/gsm8k@{commit}"
    hub.commit("datasets/openai/gsm8k", {"README.md": b""})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    executed = local(recorded)
    assert Path(executed.task.data).is_dir() and "gsm8k.py" not in hub.fetched()
    for config in (recorded, executed):
        task = make_task(config.task, seed=0)
        assert (task.num_items("train"), task.num_items("eval")) == (6, 2)
        item = task.item("eval", 0)
        assert item.question.startswith("7 + 7?\n\nReason step by step") and item.answer == "14"
    assert "task.subset:" in (words := mistakes(name="math", data=executed.task.data)) and "main" in words
    assert "socratic" in mistakes(name="math", data=executed.task.data, subset="mian")


def test_a_data_set_that_is_not_there_is_told_as_one(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has no data set of that name" in mistakes(name="math", data="lab/none")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "hf download lab/none --repo-type dataset" in mistakes(name="math", data="lab/none")
    hub.commit("datasets/lab/one", {"README.md": b""})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert "task.data: lab/one has no revision 'v9'" in mistakes(name="math", data="lab/one@v9")


def test_lines_are_read_one_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf"a"\r\n\n"\xe2\x80\xa8"\r"b"\n' + b" " * (1 << 20) + b"\n\xff\n")
    lines = read_lines(file)
    assert [next(lines) for _ in range(3)] == [(f"{file}:1", '"a"'), (f"{file}:3", '"\u2028"'), (f"{file}:4", '"b"')]
    with pytest.raises(FileError, match=r"is not UTF-8 text \(byte"):
        next(lines)
