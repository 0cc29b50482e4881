"""Tasks: items by random access, disjoint splits, and verdicts."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.data.items import TaskItem
from llamarl.environments.answers import extract_answer, last_number
from llamarl.environments.base import Task
from llamarl.environments.factory import make_task, task_mistakes, with_preset
from llamarl.environments.functions import NotANumber, as_score
from llamarl.environments.games.second_try import SecondTry
from llamarl.environments.reasoning_gym import EVALUATING, REFUSED
from llamarl.environments.sum_task import read_ledger, write_ledger, written_steps
from llamarl.errors import DataError
from llamarl.import_path import check, import_user
from llamarl.settings.environments import RewardPart, TaskConfig
from llamarl.types import Prompt, Score


def _prompt(item: TaskItem) -> Prompt:
    return Prompt(
        index=0, tokens=np.array([1], np.int32), text=item.question, answer=item.answer, metadata=dict(item.metadata)
    )


def _value(task: Task, item: TaskItem, response: str) -> float:
    verdict = task.respond(_prompt(item), [response])
    assert isinstance(verdict, Score)
    return verdict.value


@pytest.mark.parametrize(
    ("text", "numeric", "expected"),
    [
        ("so <answer> 4 </answer> no <answer>5</answer> 6", True, "5"),
        ("we get \\boxed{\\frac{1}{2}} or 7", True, "\\frac{1}{2}"),
        ("steps\n#### 1,234", True, "1,234"),
        ("<think>\\boxed{3}?</think>\nIt is 4.", True, "4"),
        ("Rome? No.</think>\n\nParis", False, "Paris"),
        ("The answer is 12.", True, "12"),
        (" Paris \n", False, "Paris"),
        ("no digits", True, None),
        ("", False, None),
    ],
)
def test_extract_answer(text: str, numeric: bool, expected: str | None) -> None:
    assert extract_answer(text, numeric=numeric) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it costs $1,250.50 today", "1250.50"),
        ("5 - 9 = -4", "-4"),
        ("= −7.", "-7"),
        ("it is 3.50 dollars", "3.50"),
        ("5-3", None),
        ("from 1,2,3", None),
        ("so 1/2.", None),
        ("we get 10^3", None),
        ("about 1.5e3", None),
        ("2 hours and 30 minutes", None),
        ("v2 is x3", None),
    ],
)
def test_last_number(text: str, expected: str | None) -> None:
    assert last_number(text) == expected


@pytest.mark.parametrize(
    "config",
    [
        TaskConfig(),
        TaskConfig(name="reasoning_gym:chain_sum", options={"max_terms": 2, "max_digits": 1}, eval_fraction=0.2),
    ],
)
def test_procedural_items_depend_on_seed_split_and_index_alone_and_splits_share_no_question(config: TaskConfig) -> None:
    task, again, other = make_task(config, 1), make_task(config, 1), make_task(config, 2)
    train = [task.item("train", i) for i in range(300)]
    held = [task.item("eval", i) for i in range(100)]
    assert [again.item("train", i) for i in reversed(range(300))] == train[::-1]
    assert [other.item("train", i) for i in range(300)] != train
    assert not {item.question for item in train} & {item.question for item in held}


def test_the_written_steps_of_the_bundled_task_score_one_and_a_wrong_or_missing_sum_zero() -> None:
    assert write_ledger([3, 9, 4]) == "a3 b9 c4 =\n"
    assert read_ledger("a3 b9 c4 =\n") == [3, 9, 4]
    assert written_steps([3, 9, 4]) == "b+9=12\nc+4=16\n#16"
    task = make_task(TaskConfig(), 0)
    item = TaskItem(question="a3 b9 c4 =\n", answer="16")
    assert _value(task, item, "b+9=12\nc+4=16\n#16") == 1.0
    assert _value(task, item, "#15\n#16\n") == 1.0
    assert _value(task, item, "#16\n#15") == 0.0
    assert _value(task, item, "16") == 0.0


def test_steps_lengths_spread_by_a_factor_of_five_and_more() -> None:
    task = make_task(TaskConfig(), 0)
    lengths = [len(written_steps(read_ledger(task.item("train", i).question))) for i in range(64)]
    assert max(lengths) >= 5 * min(lengths)
    assert max(lengths) <= 60


def test_reasoning_gym_scores_by_the_datasets_own_rule_with_the_answer_found_in_free_text() -> None:
    task = make_task(TaskConfig(name="reasoning_gym:chain_sum", options={"max_terms": 2, "max_digits": 1}), 3)
    item = task.item("eval", 5)
    assert item.answer is not None
    assert _value(task, item, f"Let me think. The result is {item.answer}.") == 1.0
    assert _value(task, item, f"<answer>{item.answer}.00</answer> or 1000") == 1.0  # trailing decimals are equal
    assert _value(task, item, "I do not know") == 0.0


def test_reasoning_gym_text_answers_are_taken_whole() -> None:
    task = make_task(TaskConfig(name="reasoning_gym:letter_counting"), 0)
    item = task.item("train", 0)
    assert _value(task, item, f"There are {item.answer}") == 1.0
    task = make_task(TaskConfig(name="reasoning_gym:spell_backward"), 0)
    item = task.item("train", 0)
    assert item.answer is not None
    assert _value(task, item, f" {item.answer}\n") == 1.0


@pytest.mark.parametrize("name", EVALUATING)
def test_answers_that_reasoning_gym_evaluates_run_nothing(name: str, tmp_path: Path) -> None:
    told = tmp_path / "ran"
    task = make_task(TaskConfig(name=f"reasoning_gym:{name}"), 0)
    item = task.item("train", 0)
    hostile = (
        f"__import__('pathlib').Path('{told}').touch()",
        f"[__import__('pathlib').Path('{told}').touch()]",
        f"[f\"{{open('{told}', 'w')}}\"]",
        f"open('{told}', 'w').fileno()",
        "().__class__.__base__.__subclasses__()",
        f"[x for __builtins__['str'] in [__builtins__['exec']] for x in [\"open('{told}', 'w')\"]]",
        "[0 for __builtins__['abs'] in [__builtins__['eval']]]",
        "9**9**9",
    )
    for answer in hostile:
        assert _value(task, item, f"<answer>{answer}</answer>") <= 0.05
    assert not told.exists() and abs(-1) == 1
    if item.answer is not None:
        assert _value(task, item, f"<answer>{item.answer}</answer>") == 1.0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chain_sum", {"symbols": ["__import__('os').system('true')"]}),
        ("spell_backward", {"data_file": "../../../../etc/passwd"}),
        ("spell_backward", {"data_file": "/dev/zero"}),
        ("composite", {"datasets": [{"name": "chain_sum", "config": {"symbols": ["f(1)"]}, "weight": 1}]}),
    ],
)
def test_options_that_reasoning_gym_would_evaluate_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="has brackets, quotes or a path in it"):
        make_task(TaskConfig(name=f"reasoning_gym:{name}", options=options), 0)
    with pytest.raises(ValueError, match="has brackets, quotes or a path in it"):
        SecondTry(dataset=name, **options)


@pytest.mark.parametrize(
    ("name", "answer"),
    [("prime_factorization", "two times three"), ("coin_flip", "1e999"), ("boxnet", "[[1]]"), ("game_of_life", "{}")],
)
def test_an_answer_that_a_dataset_cannot_read_is_wrong_and_no_failed_sample(name: str, answer: str) -> None:
    task = make_task(TaskConfig(name=f"reasoning_gym:{name}"), 0)
    item = task.item("train", 0)
    assert _value(task, item, f"<answer>{answer}</answer>") < 0.1


def test_a_question_that_a_dataset_cannot_make_is_told_in_a_sentence() -> None:
    task = make_task(TaskConfig(name="reasoning_gym:pool_matrix"), 0)
    with pytest.raises(DataError, match="cannot make question"):
        task.item("train", 2**40)


def test_reasoning_gym_evaluates_answers_nowhere_else() -> None:
    import reasoning_gym  # which takes half a second, and every process of tests has this module

    folder = Path(reasoning_gym.__file__).parent
    evaluates = {
        path.stem
        for path in folder.rglob("*.py")
        if re.search(r"\b(?:eval|exec|parse_expr|sympify)\(", path.read_text())
    }
    of_their_own = {"codeio", "generators_00_49", "generators_50_99", "bitwise_arithmetic", "basic_arithmetic"}
    of_their_own |= {"number_sorting", "propositional_logic"}  # what they made themselves, or a function of that name
    assert evaluates - of_their_own == {*EVALUATING, *REFUSED}


@pytest.mark.parametrize("name", REFUSED)
def test_datasets_that_evaluate_any_expression_are_refused_also_among_others(name: str) -> None:
    composite: dict[str, Any] = {"datasets": [{"name": name, "weight": 1}]}
    for dataset, options in ((name, {}), ("composite", composite)):
        with pytest.raises(DataError, match=f"{name} evaluates answers as Python"):
            make_task(TaskConfig(name=f"reasoning_gym:{dataset}", options=options), 0)


def test_answers_in_other_forms_are_still_scored_where_they_are_evaluated() -> None:
    is_list, is_arithmetic = EVALUATING["spiral_matrix"], EVALUATING["countdown"]
    assert is_list("['A', 'B', 1, -2]") and is_list("0 1\n1 0") and is_list("_ Q _ _") and is_list("ABBA")
    assert not is_list("f(1)") and not is_list("oracle_answer") and not is_list("1 and oracle_answer")
    assert is_arithmetic("(3 + 4)*5 - 2/1.5")
    for text in ("S('x')", "x", "x.y", "[1]", "lambda: 1", "(1).real", "__import__", "9**9", "9e9", "1" * 301):
        assert not is_arithmetic(text)


def test_reasoning_gym_datasets_that_prepare_their_items_are_reached_too() -> None:
    task = make_task(TaskConfig(name="reasoning_gym:acre", options={"size": 50}), 0)
    assert task.item("train", 1_000_000).question


def test_an_entry_that_comes_out_otherwise_is_an_error_not_a_zero() -> None:
    task = make_task(TaskConfig(name="reasoning_gym:chain_sum"), 3)
    item = task.item("train", 0)
    changed = TaskItem(question="?", answer="1", metadata={**item.metadata, "question": "another"})
    with pytest.raises(ValueError, match="not reproducible"):
        task.respond(_prompt(changed), ["1"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TaskConfig(name="reasoning_gym:chain_sums"), "nearest: chain_sum"),
        (TaskConfig(name="reasoning_gym:chain_sum", options={"max_digit": 1}), "max_digit"),
        (TaskConfig(name="reasoning_gym:chain_sum", options={"seed": 1}), "run.seed"),
        (TaskConfig(name="steps", options={"terms": 1}), "min_terms, max_terms"),
        (TaskConfig(name="steps", options={"min_terms": 1}), "got 1 and 9"),
        (TaskConfig(name="steps", options={"min_terms": "two"}), r"integers, got \{'min_terms': 'two'\}"),
        (TaskConfig(name="steps", options={"max_terms": 3.5}), r"integers, got \{'max_terms': 3.5\}"),
        (TaskConfig(name="reasoning_gym:chain_sum", options={"min_terms": "two"}), "refuses .*'two'"),
        (TaskConfig(name="reasoning_gym:chain_sum", options={"min_terms": 2.5, "max_terms": 3.5}), "refuses .*2.5"),
    ],
)
def test_unknown_datasets_and_options_are_refused_by_name(config: TaskConfig, words: str) -> None:
    with pytest.raises(DataError, match=words):
        make_task(config, 0)


GSM8K = {"question": "How many?", "answer": "5+5=<<5+5=10>>10\n10*100 = 1,000\n#### 1,000"}
MATH = {"problem": "What?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "answer": "\\frac{1}{2}"}


def _file(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_math_reads_both_formats_and_compares_answers_as_mathematics(tmp_path: Path) -> None:
    boxed = {"problem": "Boxed only?", "solution": "First \\boxed{1}, so \\boxed{x^2+1}"}
    train = _file(tmp_path / "train.jsonl", GSM8K, MATH, "", boxed)
    task = make_task(TaskConfig(name="math", data=train, eval_fraction=0.0), 0)
    assert task.num_items("train") == 3
    items = [task.item("train", i) for i in range(3)]
    assert [item.answer for item in items] == ["1000", "\\frac{1}{2}", "x^2+1"]
    assert _value(task, items[0], "so he has 1,000 apples in 2.\nAnswer: $1,000") == 1.0
    assert _value(task, items[0], "1000 or 999") == 0.0
    assert _value(task, items[1], "thus 0.5") == 1.0
    assert _value(task, items[1], "thus \\boxed{1/2} of 10") == 1.0
    assert _value(task, items[2], "\\boxed{1 + x^2}") == 1.0
    assert _value(task, items[2], "no idea") == 0.0


@pytest.mark.parametrize(
    ("end", "answer"), [("the answer is $\\boxed 2$.", "2"), ("\\[a = \\boxed -31.\\]", "-31"), ("$\\boxed x$", "x")]
)
def test_a_solution_of_math_may_box_its_answer_without_braces(tmp_path: Path, end: str, answer: str) -> None:
    row = {"problem": "Q", "solution": f"At first $\\boxed{{7}} + 1$; {end}"}
    task = make_task(TaskConfig(name="math", data=_file(tmp_path / "t.jsonl", row), eval_fraction=0.0), 0)
    assert task.item("train", 0).answer == answer


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "got an empty file"),
        ([GSM8K, '{"question": '], r":2: not JSON .*, got '\{\"question\":'; give one JSON object a line"),
        ([GSM8K, "[1]"], ":2: got list"),
        ([{"question": "Q"}], r":1: got fields \['question'\], expected one of \['solution'\]"),
        ([{"text": "Q", "title": "T", "answer": "1"}], r":1: got fields .* one of \['prompt', 'question', 'problem'\]"),
        ([{"question": 3.5, "answer": None}], ":1: field 'answer' is NoneType"),
        ([{"question": " ", "answer": "1"}], ":1: field 'question' is blank"),
        ([{"problem": "Q", "solution": "no box"}], "no complete"),
        ([{"problem": "Q", "solution": "so $\\boxed 2 x$"}], "no complete"),
        ([{"question": "Q", "answer": "so\n####"}], "expected '#### number'"),
    ],
)
def test_a_malformed_line_is_named_with_what_was_got_and_expected(
    tmp_path: Path, lines: list[object], words: str
) -> None:
    train = _file(tmp_path / "train.jsonl", *lines)
    with pytest.raises(DataError, match=words) as caught:
        make_task(TaskConfig(name="math", data=train), 0).num_items("train")
    assert train in str(caught.value)


def test_lines_end_at_newlines_alone_and_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    text = '{"question": "one\u2028two\u0085\x1c\x0c", "answer": "1"}'
    train.write_bytes(b"\xef\xbb\xbf" + f'{text}\r\n{{"question": "three", "answer": "3"}}\n'.encode())
    with pytest.raises(DataError, match="train.jsonl:1"):  # control characters are no JSON; U+2028 and U+0085 are
        make_task(TaskConfig(name="math", data=str(train), eval_fraction=0.0), 0).num_items("train")
    train.write_bytes(train.read_bytes().replace(b"\x1c\x0c", b""))
    task = make_task(TaskConfig(name="math", data=str(train), eval_fraction=0.0), 0)
    assert [task.item("train", i).question for i in range(2)] == ["one\u2028two\u0085", "three"]
    assert [task.item("train", i).where for i in range(2)] == [f"{train}:1", f"{train}:2"]


def test_every_mistake_of_a_task_is_told(tmp_path: Path) -> None:
    config = TaskConfig(
        name="function",
        data=_file(tmp_path / "train.jsonl", "{"),
        eval_data=f"{tmp_path}/eval.jsonl",
        reward=f"{tmp_path}/mine.py:score",
    )
    mistakes = list(task_mistakes(config, 0))
    assert [mistake.key for mistake in mistakes] == ["task.data", "task.eval_data", "task.reward"]
    lines = [str(mistake) for mistake in mistakes]
    assert "train.jsonl:1: not JSON" in lines[0] and "no file or folder" in lines[1] and "eval.jsonl" in lines[1]
    assert not list(task_mistakes(TaskConfig(), 0))


def test_columns_and_a_template_go_by_name_in_lines_too(tmp_path: Path) -> None:
    train = _file(tmp_path / "train.jsonl", {"text": "1+1", "result": 2, "level": 1})
    lines = {"name": "math", "data": train, "eval_fraction": 0.0, "template": "Q: {question}"}
    item = make_task(TaskConfig(**lines, columns={"question": "text", "answer": "result"}), 0).item("train", 0)
    assert (item.question, item.answer, dict(item.metadata)) == ("Q: 1+1", "2", {"level": 1})
    for columns, words in (({"question": "txt"}, "task.columns.question: .*:1 has no column 'txt'; did you mean 'text'"),
                           ({"question": "text"}, "task.data: .*:1: .* expected one of"),):  # fmt: skip
        with pytest.raises(DataError, match=words):
            make_task(TaskConfig(**lines, columns=columns), 0).num_items("train")
    _file(tmp_path / "train.jsonl", {"text": "1+1", "result": 2}, {"text": "1+2", "answer": 3})
    with pytest.raises(DataError, match=":2: got fields .* expected 'result', which task.columns names"):
        make_task(TaskConfig(**lines, columns={"question": "text", "answer": "result"}), 0).num_items("train")
    with pytest.raises(DataError, match="task.split: .* has no split 'test'"):
        make_task(TaskConfig(name="math", data=train, split="test"), 0).num_items("train")


def test_what_a_recipe_says_of_a_task_that_brings_its_data_stands() -> None:
    plain = with_preset(TaskConfig(name="gsm8k", template="{question}", subset="socratic", split="test"))
    assert (plain.template, plain.subset, plain.split, plain.eval_split) == ("{question}", "socratic", "test", "test")
    assert plain.data == "openai/gsm8k"
    own = with_preset(TaskConfig(name="gsm8k", eval_data="mine.jsonl"))
    assert (own.eval_data, own.eval_split) == ("mine.jsonl", "") and "boxed" in own.template


def test_a_question_stays_as_it_was_written_and_what_is_compared_is_trimmed(tmp_path: Path) -> None:
    train = _file(tmp_path / "train.jsonl", {"question": " a3 b9 =\n", "answer": " 12\n"})
    own = {"name": "function", "reward": "json:dumps", "data": train, "eval_fraction": 0.0}
    for config in (TaskConfig(name="math", data=train, eval_fraction=0.0), TaskConfig(**own)):
        item = make_task(config, 0).item("train", 0)
        assert (item.question, item.answer) == (" a3 b9 =\n", "12")


def test_a_prompt_that_is_null_leaves_its_place_to_the_question(tmp_path: Path) -> None:
    rows = {"prompt": None, "question": "a", "answer": "1"}, {"prompt": "b", "question": "c", "answer": "1"}
    task = make_task(TaskConfig(name="math", data=_file(tmp_path / "a.jsonl", *rows), eval_fraction=0.0), 0)
    assert [task.item("train", place).question for place in range(2)] == ["a", "b"]


def test_white_space_at_the_ends_makes_no_other_question(tmp_path: Path) -> None:
    held = _file(tmp_path / "eval.jsonl", {"question": f"{MATH['problem']}\n", "answer": "1"})
    train = _file(tmp_path / "train.jsonl", GSM8K, MATH)
    task = make_task(TaskConfig(name="math", data=train, eval_data=held), 0)
    assert [task.item("train", i).question for i in range(task.num_items("train") or 0)] == ["How many?"]
    with pytest.raises(DataError, match="disjoint"):
        make_task(TaskConfig(name="math", data=held, eval_data=held), 0).num_items("train")
    lines = [{"question": f"Q{i}" + end, "answer": "1"} for i in range(200) for end in ("", "\n")]
    both = make_task(TaskConfig(name="math", data=_file(tmp_path / "twice.jsonl", *lines), eval_fraction=0.2), 0)
    asked = {both.item("eval", i).question.strip() for i in range(both.num_items("eval") or 0)}
    assert both.num_items("eval") == 2 * len(asked) > 0


def test_a_users_function_judges_its_own_items_or_a_bundled_tasks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, response, answer):\n    return response.count(answer)\n")
    path = f"{tmp_path}/mine.py:score"
    record = {"messages": [{"role": "user", "content": "Say ab"}], "answer": "ab", "level": 3}
    train = _file(tmp_path / "train.jsonl", record)
    task = make_task(TaskConfig(name="function", data=train, eval_fraction=0.0, reward=path), 0)
    item = task.item("train", 0)
    assert (item.question, item.answer, item.metadata) == ("Say ab", "ab", {"level": 3})
    assert item.messages == ({"role": "user", "content": "Say ab"},)
    assert _value(task, item, "abab") == 2.0
    steps = make_task(TaskConfig(reward=path), 0)
    assert steps.name == "steps"
    assert _value(steps, TaskItem(question="q", answer="7"), "777") == 3.0


def test_functions_are_imported_from_modules_and_refused_with_the_names_there_are() -> None:
    assert import_user("llamarl.environments.answers:last_number", "task.reward") is last_number
    with pytest.raises(DataError, match=r"has no 'last_numbers'; its callables are .*'last_number'"):
        import_user("llamarl.environments.answers:last_numbers", "task.reward")
    with pytest.raises(DataError, match="no module 'no_such_module'"):
        import_user("no_such_module:f", "task.reward")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import sys\nsys.exit(0)\n", None),
        ("import time\ntime.sleep(3600)\n", None),
        ("raise SystemExit\n", None),
        ("def scores(p, r, a): ...\n", r"mine.py has no 'score'; it has \['scores'\]"),
        ("def score(p, r, a:\n", "mine.py:1 is not Python"),
    ],
)
def test_a_users_module_is_read_but_never_run_where_questions_are_made(
    tmp_path: Path, body: str, words: str | None
) -> None:
    (tmp_path / "mine.py").write_text(body + ("def score(p, r, a): return 1.0\n" if words is None else ""))
    config = TaskConfig(reward=f"{tmp_path}/mine.py:score")
    if words is None:
        assert make_task(config, 0).item("train", 0).question
        return
    with pytest.raises(DataError, match=words):
        make_task(config, 0)


@pytest.mark.parametrize(
    "body",
    [
        "from math import floor as score",
        "from math import *",
        "try:\n    import numpy as score\nexcept ImportError:\n    score = None",
        "score, other = lambda p, r, a: 1.0, 2",
        "if True:\n    class score: ...",
        "globals()['score'] = print",
        "def __getattr__(name): return print",
        "async def helper(): ...\nwith open(__file__) as score: pass",
    ],
)
def test_every_way_to_bind_a_name_is_taken(tmp_path: Path, body: str) -> None:
    (tmp_path / "mine.py").write_text(body)
    check(f"{tmp_path}/mine.py:score", "task.reward")


def test_modules_are_found_without_importing_the_packages_above_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "grim_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit(0)\n")
    (package / "rewards.py").write_text("def score(p, r, a): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    check("grim_package.rewards:score", "task.reward")
    with pytest.raises(DataError, match="grim_package.rewards has no 'scare'"):
        check("grim_package.rewards:scare", "task.reward")
    check("math:floor", "task.reward")  # no source to read
    for missing in ("no_such_module:f", f"{tmp_path}/no_such.py:f"):
        with pytest.raises(DataError, match="no_such"):
            check(missing, "task.reward")
    assert "grim_package" not in sys.modules


@pytest.mark.parametrize(
    ("value", "score"), [(np.float32(0.5), 0.5), (0.5, 0.5), (Score(value=0.5), 0.5), (True, 1.0), (np.True_, 1.0)]
)
def test_real_numbers_and_scores_are_scores(value: object, score: float) -> None:
    assert as_score(value).value == score


@pytest.mark.parametrize("value", [float("nan"), np.inf, "0.5", None, 1j, [0.5], Score(value=1.0, parts={"a": np.nan})])
def test_anything_else_is_not_a_number(value: object) -> None:
    with pytest.raises(NotANumber):
        as_score(value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "chess"}, "name must be"),
        ({"name": "reasoning_gym"}, "needs a dataset"),
        ({"name": "function", "reward": "json:dumps"}, "data must name a file of JSON lines"),
        ({"name": "steps", "data": "x.parquet"}, "data is of a table"),
        ({"name": "steps", "columns": {"question": "q"}}, "columns is of a table"),
        ({"reward": "json:dumps", "rewards": [RewardPart(function="json:loads")]}, "rewards and reward"),
        ({"rewards": [RewardPart(function="json:f"), RewardPart(function="re:f")]}, "more than one is called 'f'"),
        ({"rewards": [RewardPart(function="json:f", weight=0.0)]}, "every weight is 0"),
        ({"name": "function", "data": "x.jsonl"}, "reward must name"),
        ({"reward": "no_colon"}, "module:function"),
        ({"eval_fraction": 1.0}, "eval_fraction"),
        ({"pool": {"timeout_s": 0}}, "timeout_s"),
        ({"names": "steps"}, "names"),
    ],
)
def test_a_wrong_configuration_names_the_field(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TaskConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["function", "math"])
def test_a_prompt_that_is_a_list_of_messages_is_a_conversation(name: str, tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}]
    data = _file(tmp_path / "trl.jsonl", {"prompt": talk, "answer": "2", "level": 1})
    reward = {"reward": "json:dumps"} if name == "function" else {}
    item = make_task(TaskConfig(name=name, data=data, **reward), seed=0).item("train", 0)
    assert (item.question, item.answer, item.messages) == ("Add.\n\n1 + 1?", "2", tuple(talk))
    assert dict(item.metadata) == {"level": 1}


@pytest.mark.parametrize("name", ["function", "math"])
def test_a_row_of_verl_has_its_answer_where_verl_puts_it(name: str, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "1 + 1?"}]
    row = {"data_source": "sums", "prompt": talk, "reward_model": {"style": "rule", "ground_truth": "2"}}
    own = {"reward": "json:dumps"} if name == "function" else {}
    task = make_task(TaskConfig(name=name, data=_file(tmp_path / "verl.jsonl", row), **own), seed=0)
    item = task.item("train", 0)
    assert (item.answer, item.messages, item.metadata["data_source"]) == ("2", tuple(talk), "sums")


def test_a_ground_truth_of_verl_that_is_no_text_stays_for_rewards_of_its_kind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = {"style": "rule", "ground_truth": {"target": ["two", "2"]}}
    data = _file(tmp_path / "verl.jsonl", {"prompt": "1 + 1?", "reward_model": told})
    item = make_task(TaskConfig(name="function", reward="json:dumps", data=data), seed=0).item("train", 0)
    assert (item.answer, item.metadata) == (None, {"reward_model": told})
    assert "others no answer" in caplog.text


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"Problem": "1 + 1?", "answer": "2"}, "1 + 1?"),
        ({"Instruction": "Add 1 to 1", "source": "a book", "answer": "2"}, "Add 1 to 1"),
        ({"talk": [{"role": "user", "content": "1 + 1?"}], "source": "a book"}, "1 + 1?"),
    ],
)
def test_the_column_of_the_question_is_found_by_what_it_holds_and_told(
    row: dict[str, Any], question: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = _file(tmp_path / "own.jsonl", row)
    task = make_task(TaskConfig(name="function", reward="json:dumps", data=data), seed=0)
    assert task.item("train", 0).question == question
    assert [record.getMessage().partition(" is taken")[0] for record in caplog.records] == [
        f"{data}: column {next(iter(row))!r}"
    ]


def test_a_conversation_to_learn_from_is_not_said_to_lack_an_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for name, row in (("a", {"conversations": talk}), ("b", {"conversations": talk[:1]})):
        data = _file(tmp_path / f"{name}.jsonl", row)
        kind = "demonstrations" if name == "a" else "function"
        task = TaskConfig(name=kind, reward="json:dumps" if name == "b" else "", data=data, eval_fraction=0.0)
        assert make_task(task, seed=0).num_items("train") == 1
    assert ["none for the answer" in record.getMessage() for record in caplog.records] == [False, True]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [("one", "two", "b"), ("input", "instruction", ""), ("input", "instruction", "b"), ("context", "instruction", "b")],
)
def test_of_two_columns_of_text_none_is_guessed(first: str, second: str, words: str, tmp_path: Path) -> None:
    """Alpaca's input, and Dolly's context, are blank in some rows, and hold half of the question in others."""
    data = _file(tmp_path / "own.jsonl", {first: words, second: "a", "answer": "c"})
    with pytest.raises(DataError, match=f"got fields \\['answer', '{first}', '{second}'\\], expected one of"):
        make_task(TaskConfig(name="function", reward="json:dumps", data=data), seed=0).num_items("train")
