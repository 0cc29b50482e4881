"""A task by import path, and code of this package that was patched in one process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import llamarl.environments.math as math_module
import llamarl.environments.steps as steps_module
from llamarl.environments import factory
from llamarl.environments.config import TaskConfig
from llamarl.environments.factory import make_task, task_mistakes
from llamarl.environments.patches import find_patches, refuse_patches
from llamarl.environments.pool import RewardPool
from llamarl.errors import DataError

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
    config = TaskConfig(name="math", train_file=str(tmp_path / "math.jsonl"), eval_fraction=0.0)
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


@pytest.mark.parametrize("name", ["stepz", "steps:x", ":Task", "my_task.py:"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        TaskConfig(name=name)


def _mine(*arguments: Any, **named: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("owner", "name", "shown"),
    [
        (math_module.MathTask, "respond", "llamarl.environments.math.MathTask.respond"),
        (math_module, "MathTask", "llamarl.environments.math.MathTask"),
        (factory, "make_task", "llamarl.environments.factory.make_task"),
        (steps_module, "draw_item", "llamarl.environments.steps.draw_item"),
    ],
)
def test_code_patched_in_this_process_is_refused_where_other_processes_would_ignore_it(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, shown: str
) -> None:
    refuse_patches()
    monkeypatch.setattr(owner, name, _mine)
    with pytest.raises(DataError, match=f"replaced in this process alone: {shown}. .*task.reward"):
        refuse_patches()
    assert any(shown in str(mistake) for mistake in task_mistakes(TaskConfig(), seed=0))
    with pytest.raises(DataError, match=shown):
        RewardPool(TaskConfig())


SOURCE = """
import functools
from dataclasses import dataclass

@functools.lru_cache
def cached(): ...

@dataclass(frozen=True)
class Record:
    value: int = 0
    @property
    def twice(self): return 2 * self.value
    @staticmethod
    def zero(): return 0
    @classmethod
    def one(cls): return cls(1)

class Lazy:
    @functools.cached_property
    def value(self): return 1
"""


def test_decorated_code_is_not_taken_for_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "decorated.py").write_text(SOURCE)
    module = ModuleType("decorated")
    monkeypatch.setitem(sys.modules, "decorated", module)
    module.__file__ = str(tmp_path / "decorated.py")
    exec(compile(SOURCE, module.__file__, "exec"), vars(module))
    assert list(find_patches(module)) == []
    module.Record.twice = property(_mine)  # type: ignore[attr-defined]
    assert list(find_patches(module)) == ["decorated.Record.twice"]
