"""The math judge: right answers as people and models write them, wrong ones that look right, and ones meant to hurt."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from math_answers import NEAR_MISSES, OWN_GOLDS, RIGHT, WRAPPINGS, hedged, load_golds, wrapped

from llamarl.config import validate
from llamarl.controller.preflight import check_reward
from llamarl.environments import math_equivalence
from llamarl.environments.answers import final_answers, last_boxed, tidy
from llamarl.environments.factory import make_task
from llamarl.environments.math import check_references, judge_answer, math_item
from llamarl.environments.math_equivalence import same_answer, why_unreadable
from llamarl.errors import DataError
from llamarl.settings.environments import TaskConfig


def _wrongly_judged(golds: list[str]) -> list[tuple[str, str]]:
    """Of each answer every second wrapping, of the next one the others: each wrapping meets half of the answers."""
    return [
        (gold, response)
        for number, gold in enumerate(golds)
        for _, response in list(wrapped(gold))[number % 2 :: 2]
        if judge_answer(response, gold).value != 1.0
    ]


def test_the_tables_hold_300_wrappings_and_120_near_misses_and_hedges() -> None:
    forms = WRAPPINGS["any answer"] + WRAPPINGS["plain numbers"]
    assert len(set(forms)) == len(forms) >= 300
    assert len(set(NEAR_MISSES)) == len(NEAR_MISSES) >= 120
    assert len(set(hedged())) >= 120


def test_wrappings_of_our_own_answers_are_right() -> None:
    assert min(sum(1 for _ in wrapped(gold)) for gold in OWN_GOLDS) >= 200
    assert not _wrongly_judged(OWN_GOLDS)


def test_wrappings_of_a_sample_of_published_answers_are_right() -> None:
    golds = load_golds()
    assert {name: sum(counts.values()) for name, counts in golds.items()} == {
        "GSM8K train": 7473,
        "GSM8K test": 1319,
        "MATH-500": 500,
    }
    draw = random.Random(0)
    assert not _wrongly_judged([gold for counts in golds.values() for gold in draw.sample(sorted(counts), 12)])


def test_every_published_answer_can_be_read() -> None:
    distinct = {gold for counts in load_golds().values() for gold in counts}
    assert not {gold: why_unreadable(gold) for gold in distinct if why_unreadable(gold)}


def test_a_response_that_offers_two_answers_is_wrong_whichever_is_right() -> None:
    assert not [(gold, text) for text in hedged() for gold in ("12", "13") if judge_answer(text, gold).value != 0.0]


@pytest.mark.parametrize(("reference", "response"), RIGHT)
def test_the_same_answer_in_another_form_is_right(reference: str, response: str) -> None:
    assert judge_answer(response, reference).value == 1.0


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}"),
        ("e^{-40}", "e^{-41}"),
        ("\\frac{1}{3 \\cdot 2^{2006}}", "\\frac{2^{2005}+1}{3 \\cdot 2^{2006}}"),  # the latter is close to 1/6
    ],
)
def test_numbers_are_not_equal_because_they_are_small(answer: str, reference: str) -> None:
    assert not same_answer(answer, reference)
    assert same_answer(f"2 \\cdot {reference} - {reference}", reference)


@pytest.mark.parametrize(("reference", "response"), NEAR_MISSES)
def test_a_near_miss_is_wrong(reference: str, response: str) -> None:
    assert judge_answer(response, reference).value == 0.0


def test_parts_tell_a_wrong_answer_from_none() -> None:
    assert judge_answer("#### 12", "12").parts == {"correct": 1.0, "answered": 1.0}
    assert judge_answer("#### 13", "12").parts == {"correct": 0.0, "answered": 1.0}
    assert judge_answer("I do not know", "12").parts == {"correct": 0.0, "answered": 0.0}
    assert judge_answer("It takes 2 hours and 30 minutes.", "30").parts == {"correct": 0.0, "answered": 0.0}


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 4000,
        "\\boxed{1}" * 4000,
        "<answer>" * 4000,
        "#### " * 6000,
        "answer " * 5000,
        "the answer is " * 3000,
        r"\boxed{{" + r"\{\}" * 40 + "{{}}}}",
        r"\boxed{" + r"\x_1=1" * 40 + ",,1}",
    ]
    + ["$" * 28000, "\\(" * 14000, "12 " * 9000, "1," * 14000, "{" * 28000, "**" * 14000, "<<" * 14000, "x = " * 7000],
    ids=lambda text: text[:12],
)
def test_a_long_response_is_read_in_one_pass(text: str) -> None:
    started = time.process_time()
    judge_answer(text, "12")
    assert time.process_time() - started < 1.0  # milliseconds; a search that begins anew at each box takes many seconds


def test_the_last_box_that_is_not_empty_counts_and_an_unfinished_one_does_not() -> None:
    assert last_boxed("\\boxed{a{b}c} then \\boxed{ } and \\boxed{d") == "a{b}c"
    assert last_boxed("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"
    assert last_boxed("\\boxed{\\text{so \\boxed{5}}}") == "5"


@pytest.mark.parametrize(
    "bomb",
    [
        "x^{999}",
        "((((((((x))))))))^{999}",
        "10^{10^{10}}",
        "9^{9^{9}}",
        "10^10^10",
        "((10^{99})^{99})^{99}",
        "(((2^{99})^{99})^{99})^{99}",
        "10^{999999999}",
        "(10^9)!",
        "1000000!",
        "((9!)!)!",
        "9!!!!",
        "\\binom{1000000}{500000}",
        "\\binom{10^{9}}{5}",
        "(1000000)_{500}",
        "(a+b+c+d+e+f)^{60}",
        "|a+b+c+d+e+f|^{60}",
        "\\left|a+b+c+d+e+f\\right|^{60}",
        "\\frac{a+b+c+d+e+f}{1}^{60}",
        "\\exp(60\\ln(a+b+c+d+e+f))",
        "e^{60\\ln(a+b+c+d+e+f)}",
        "((a+b+c)^{9}+d)^{9}",
        "\\sqrt{(a+b+c+d)^{2 \\cdot 30}}",
        "(a+b)(c+d)(e+f)(g+h)(i+j)(k+l)(m+n)(o+p)(q+r)",
        "\\frac{1}{(1+\\sqrt{2}+\\sqrt{3}+\\sqrt{5})^{-60}}",
        "\\sum_{k=1}^{1000000000} k",
        "\\prod_{k=1}^{100000} k",
        "\\int_0^1 x^{x^{x}} dx",
        "\\lim_{n \\to \\infty} n",
        "\\exp(\\exp(\\exp(99)))",
        "e^{e^{e^{9}}}",
        "\\sqrt{" * 40 + "2" + "}" * 40,
        "(" * 100 + "1" + ")" * 100,
        "{" * 100 + "1" + "}" * 100,
        "\\frac{1}{" * 30 + "2" + "}" * 30,
        "1" + "+1" * 2000,
        "x^2+" * 400 + "1",
        "\\begin{pmatrix}" + "1 & " * 500 + "1 \\end{pmatrix}",
        "\\{" + "1," * 500 + "2\\}",
        "7" * 100_000,
        "1e9999",
        "1e999999999",
        "٣" * 10,
        "x" * 5000,
        "\x01" * 20,
    ],
    ids=lambda bomb: bomb[:24],
)
def test_what_exceeds_the_limits_is_wrong_and_never_reaches_the_library(
    bomb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(text: str) -> None:
        raise AssertionError(f"math-verify was asked for {text[:60]!r}")

    target = "12"
    monkeypatch.setattr(math_equivalence, "_parse", refuse)
    for response in (f"\\boxed{{{bomb}}}", f"#### {bomb}", f"The answer is ${bomb}$.", bomb):
        score = judge_answer(response, target)
        assert score.value == 0.0


def test_a_comparison_over_the_call_limit_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert same_answer("\\frac{\\cos x}{\\sin x}", "\\cot x")
    monkeypatch.setattr(math_equivalence, "MAX_COMPARE_CALLS", 50)
    assert not same_answer("\\frac{\\cos x}{\\sin x}", "\\cot x")


_PIECES = (
    "\\frac \\sqrt \\sum \\int \\log \\sin \\pi \\infty \\cup \\le \\{ \\} \\left( \\right) \\cdot \\pm \\binom{9}{5} \\% "
    "\\text{or} \\begin{pmatrix} \\end{pmatrix} & \\\\ ^ _ ! ( ) { } [ ] | , ; = + - * / < > x y e i 2 3 9 99 0.5 1e9 "
    "^{2} ^{99} {x+1} (x-y)^2 \\frac{1}{2} e^{x} 5! n! ½ √ π ² ∞ ٣ $ . #### \\boxed{ answer is"
).split()
_GOLDS = [
    "2",
    "\\frac{1}{2}",
    "3\\sqrt{13}",
    "x^3+3x-6",
    "(3,4]",
    "3, 5, 7",
    "y = -2x",
    "1 \\pm \\sqrt{19}",
    "\\text{even}",
]


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(pieces=st.lists(st.sampled_from(_PIECES), max_size=20), gold=st.sampled_from(_GOLDS), boxed=st.booleans())
def test_whatever_a_policy_writes_is_judged_and_soon(pieces: list[str], gold: str, boxed: bool) -> None:
    soup = " ".join(pieces)
    started = time.process_time()
    score = judge_answer(f"\\boxed{{{soup}}}" if boxed else soup, gold)
    assert score.value in (0.0, 1.0)
    assert time.process_time() - started < 6.0


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(text=st.text(max_size=60))
def test_any_text_is_judged(text: str) -> None:
    assert judge_answer(text, "12").value in (0.0, 1.0)
    assert not final_answers(tidy(text), words=True) or text.strip()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("10^{10^{10}}", "powers beyond the limit"),
        ("\\frac{1}{2", "brackets that do not match"),
        ("x" + "+x" * 400, "longer than 300 characters"),
        ("\\sum_{k=1}^{n} k", "sums, integrals"),
        ("3 4", "two numbers"),
    ],
)
def test_a_reference_that_no_answer_could_equal_is_refused_with_its_line(answer: str, words: str) -> None:
    with pytest.raises(DataError, match=rf"train.jsonl:7: answer .* cannot be judged \({words}"):
        math_item({"question": "Q", "answer": answer}, "train.jsonl:7")
    with pytest.raises(ValueError, match=words):
        same_answer("1", answer)


def test_a_reference_that_the_library_cannot_parse_is_an_error_not_a_zero() -> None:
    assert "math-verify" in why_unreadable("+ / \\le")
    with pytest.raises(ValueError, match="math-verify"):
        same_answer("12", "+ / \\le")


def test_references_that_the_library_cannot_parse_are_told_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    rows = [
        {"question": f"Q{i}", "answer": answer} for i, answer in enumerate(["12", "x^2", "+ / \\le", "\\text{east}"])
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    task = TaskConfig(name="math", data=str(file), eval_fraction=0.0)
    with pytest.raises(DataError, match=r"train.jsonl:3: answer .*math-verify cannot parse it\nno answer could equal"):
        check_reward(validate({"task": {"name": "math", "data": str(file)}}))
    file.write_text("\n".join(map(json.dumps, rows[:2] + rows[3:])))
    check_references(make_task(task, 0))


def test_the_library_says_nothing_about_its_time_limits(capfd: pytest.CaptureFixture[str]) -> None:
    assert judge_answer("\\boxed{2x}", "x + x").value == 1.0
    assert "imeout" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("piece", ["\n> ", "> ", "<b>", "<b> \n", "|\n", "</s>", "**\n", "\\left ", "$\\quad$", "`\n"])
def test_markup_that_leaves_blanks_behind_costs_no_more_than_its_length(piece: str) -> None:
    began = time.process_time()
    score = judge_answer(piece * 13_000 + "\nThe answer is 12", "12")
    assert time.process_time() - began < 2.0, "a square of the length is 3 s and more"
    assert score.value == 1.0


@pytest.mark.parametrize("text", ["12{}x", "{}12", "12{}", "a{}12{}b"])
@pytest.mark.parametrize("blank", [" ", "\n", "\t", " \n", "\u00a0"])
def test_a_run_of_blanks_costs_no_more_than_its_length(text: str, blank: str) -> None:
    began = time.process_time()
    long = judge_answer(text.replace("{}", blank * 20_000), "12")
    assert time.process_time() - began < 2.0, "a square of the length is 8 s and more"
    assert long == judge_answer(text.replace("{}", blank * 4), "12")
