"""A task by import path."""

import re
from pathlib import Path

import pytest

from llamarl.environments.factory import make_task, task_mistakes
from llamarl.errors import DataError
from llamarl.settings.environments import TaskConfig

TASK = """
from llamarl.data.items import TaskItem
from llamarl.types import Score

class Doubling:
    name = "doubling"

    def __init__(self, options, *, seed, eval_fraction):
        self.most = options["most"]
        self.seed = seed

    def num_items(self, split):
        return None

    def item(self, split, index):
        number = (index + self.seed) % self.most
        return TaskItem(question=f"twice {number}", answer=str(2 * number), metadata={"number": number})

    def respond(self, prompt, turns):
        return Score(value=float(turns[-1] == prompt.answer))

class NoJudge:
    name = "no judge"
    def __init__(self, options, *, seed, eval_fraction): pass
    def num_items(self, split): return 1
    def item(self, split, index): return TaskItem(question="q")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "my_task.py").write_text(TASK)
    return tmp_path / "my_task.py"


def test_a_task_of_the_users_own_is_named_by_import_path(file: Path) -> None:
    config = TaskConfig(name=f"{file}:Doubling", options={"most": 10})
    assert list(task_mistakes(config, seed=3)) == []
    item = make_task(config, seed=3).item("train", 4)
    assert (item.question, item.answer, item.metadata) == ("twice 7", "14", {"number": 7})


def test_metadata_are_the_other_fields_of_a_line_of_math_too(tmp_path: Path) -> None:
    (tmp_path / "math.jsonl").write_text('{"problem": "1 + 1", "solution": "It is \\\\boxed{2}.", "level": 1}\n')
    config = TaskConfig(name="math", data=str(tmp_path / "math.jsonl"), eval_fraction=0.0)
    item = make_task(config, seed=0).item("train", 0)
    assert (item.answer, item.metadata) == ("2", {"solution": "It is \\boxed{2}.", "level": 1})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Doubling", r"called as Task\(options, seed=..., eval_fraction=...\): KeyError: 'most'"),
        ("NoJudge", "a task has name, num_items, item and respond .*; NoJudge lacks respond"),
        ("Missing", "task.name .*my_task.py has no 'Missing'; it has .*'Doubling', 'NoJudge'"),
    ],
)
def test_what_is_no_task_is_refused_by_its_key(file: Path, name: str, words: str) -> None:
    config = TaskConfig(name=f"{file}:{name}")
    with pytest.raises(DataError, match=words):
        make_task(config, seed=0)
    assert len(list(task_mistakes(config, seed=0))) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "TaskItem(question='q', metadata={'number': numpy.int64(3)})",
            "Object of type int64 is not JSON serializable",
        ),
        ("TaskItem(question='q', answer=0)", "answer is 0, expected text"),
        ("{'question': 'q'}", "'dict' object has no attribute 'question'"),
        ("TaskItem(question=self.missing)", "no attribute 'missing' at .*my_task.py:27: def item"),
    ],
)
def test_a_task_whose_items_no_run_could_keep_is_refused_before_it(file: Path, given: str, words: str) -> None:
    judging = "    respond = None\n"
    file.write_text(f"import numpy\n{TASK}{judging}".replace('TaskItem(question="q")', given))
    (mistake,) = task_mistakes(TaskConfig(name=f"{file}:NoJudge"), seed=0)
    assert mistake.key == "task.name" and re.search(words, mistake.text), mistake


@pytest.mark.parametrize("name", ["stepz", "steps:x", ":Task", "my_task.py:"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        TaskConfig(name=name)
