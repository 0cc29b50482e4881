"""``llamarl new``: a task of your own to start from."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from llamarl.errors import ConfigError
from llamarl.reading import user_path

__all__ = ["add_arguments", "run"]

_DESCRIPTION = """\
Writes a folder with questions, a reward function, a test of it, and a recipe that trains on them. It runs as it is, on a
model that is bundled, in about a minute; change what you want to be different.

  llamarl new my-task
  llamarl train my-task/recipe.toml"""

_NUM_QUESTIONS = 400

_TEMPLATES = Path(__file__).resolve().parent.parent / "assets" / "new_task"
"""Texts with ``{places}`` in them, but for the reward's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.set_defaults(run=run)
    parser.add_argument("folder", help="to be made")


def run(args: argparse.Namespace) -> int:
    folder = user_path(args.folder, "folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and holds something: give the name of a new folder")
    files = {
        "recipe.toml": _template("recipe.toml").format(
            folder=folder, run_dir=json.dumps(f"runs/{folder.resolve().name}", ensure_ascii=False)
        ),
        "questions.jsonl": "".join(json.dumps(question) + "\n" for question in _questions()),
        "reward.py": _template("reward.py"),
        "test_reward.py": _template("test_reward.py").format(folder=folder),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from error
    print(f"""\
{folder}/questions.jsonl   {_NUM_QUESTIONS} questions with their answers, one JSON object a line
{folder}/reward.py         what a response is worth
{folder}/test_reward.py    pytest {folder}
{folder}/recipe.toml       llamarl train {folder}/recipe.toml""")
    return 0


def _template(name: str) -> str:
    return (_TEMPLATES / f"{name}.txt").read_text(encoding="utf-8")


def _questions() -> list[dict[str, str]]:
    """Ledgers that the bundled model can read; the same ones each time."""
    from llamarl.environments.sum_task import write_ledger

    rng = random.Random(0)
    ledgers: dict[str, int] = {}
    while len(ledgers) < _NUM_QUESTIONS:
        digits = [rng.randrange(10) for _ in range(rng.randint(2, 5))]
        ledgers[write_ledger(digits)] = sum(digits)
    return [{"question": question, "answer": str(total)} for question, total in ledgers.items()]
