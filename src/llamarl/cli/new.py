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

_RECIPE = """\
# A task of your own: questions in {folder}/questions.jsonl, judged by {folder}/reward.py.
# Paths are as seen from this file; on the command line, from where you are: llamarl train {folder}/recipe.toml
# Every key: llamarl --help keys

[run]
dir = {run_dir}
num_ticks = 40  # policy versions to make

[model]
path = "bundled:tiny"  # your own: the folder of a Hugging Face model, or an id of the Hub: org/name

[task]
name = "function"
data = "questions.jsonl"  # a share of its questions is held out for evaluation
reward = "reward.py:score"

[schedule]
prompts_per_step = 16  # prompts a tick
max_staleness = 1  # versions by which the generator may be behind; 0 is synchronous

[generator]
group_size = 8  # responses a prompt, compared with each other
sampling = {{ max_new_tokens = 48 }}

[optimizer]
lr = 2e-4

[evaluation]
every = 10
num_prompts = 40

[checkpoint]
every = 20
"""

_REWARD = '''\
"""The reward of this task: how good is a response?"""


def score(prompt: str, response: str, answer: str) -> float:
    """1 for the right sum behind the last "#", a tenth for any number there, else 0.

    Args:
        prompt: What the policy was asked.
        response: What it wrote.
        answer: The reference answer of the question; None where it has none.

    Whatever is raised here makes the sample failed: it is counted and shown, and no token of it trains.
    """
    _, mark, given = response.rpartition("#")
    given = given.strip()
    if not mark or not given.isdecimal():
        return 0.0
    return 1.0 if given == answer else 0.1
'''

_TEST = '''\
"""Run with: pytest {folder}"""

from reward import score


def test_the_right_answer_scores_one() -> None:
    assert score("a3 b9 =\\n", "b+9=12\\n#12", "12") == 1.0


def test_a_wrong_number_scores_a_tenth() -> None:
    assert score("a3 b9 =\\n", "b+9=13\\n#13", "12") == 0.1


def test_no_answer_scores_nothing() -> None:
    assert score("a3 b9 =\\n", "b+9=12", "12") == 0.0
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("folder", help="to be made")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    folder = user_path(args.folder, "folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and holds something: give the name of a new folder")
    files = {
        "recipe.toml": _RECIPE.format(
            folder=folder,
            run_dir=json.dumps(f"runs/{folder.resolve().name}", ensure_ascii=False),
        ),
        "questions.jsonl": "".join(json.dumps(question) + "\n" for question in _questions()),
        "reward.py": _REWARD,
        "test_reward.py": _TEST.format(folder=folder),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from error
    _tell(folder)
    return 0


def _questions() -> list[dict[str, str]]:
    """Ledgers that the bundled model can read; the same ones each time."""
    from llamarl.environments.sum_task import write_ledger

    rng = random.Random(0)
    ledgers: dict[str, int] = {}
    while len(ledgers) < _NUM_QUESTIONS:
        digits = [rng.randrange(10) for _ in range(rng.randint(2, 5))]
        ledgers[write_ledger(digits)] = sum(digits)
    return [{"question": question, "answer": str(total)} for question, total in ledgers.items()]


def _tell(folder: Path) -> None:
    print(f"""\
{folder}/questions.jsonl   {_NUM_QUESTIONS} questions with their answers, one JSON object a line
{folder}/reward.py         what a response is worth
{folder}/test_reward.py    pytest {folder}
{folder}/recipe.toml       llamarl train {folder}/recipe.toml""")
