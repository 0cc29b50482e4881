"""Right answers in the wrappings that people and models write, and wrong answers that look right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent


def _wrappings() -> dict[str, list[str]]:
    """Templates of ``math_wrappings.txt`` by section."""
    sections: dict[str, list[str]] = {}
    for line in (HERE / "math_wrappings.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            sections[line.removeprefix("== ")] = []
        elif "@" in line and not line.startswith("# How"):
            sections[list(sections)[-1]].append(line.replace("⏎", "\n"))
    return sections


WRAPPINGS = _wrappings()
SEPARATORS = {"commas": ",", "thin spaces": "\\,", "braced commas": "{,}", "commas, drawn together": ",\\!"}


def wrapped(gold: str) -> Iterator[tuple[str, str]]:
    """(wrapping, response) for a reference answer."""
    number = re.fullmatch(r"-?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?", gold)
    for form in WRAPPINGS["any answer"] + (WRAPPINGS["plain numbers"] if number else []):
        if not ("," in gold and ("(@)" in form or "[@]" in form)):  # (1,250) is a pair
            yield form, form.replace("@", gold)
    plain = gold.replace(",", "")
    if number and len(plain.lstrip("-").partition(".")[0]) > 3:
        grouped = f"{int(plain):,}" if "." not in plain else f"{float(plain):,}"
        for name, separator in SEPARATORS.items():
            yield name, f"\\boxed{{{grouped.replace(',', separator)}}}"
            yield f"{name}, answer", f"The answer is ${grouped.replace(',', separator)}$."


def load_golds() -> dict[str, dict[str, int]]:
    """How often each reference answer stands in GSM8K (train, test) and MATH-500, both under the MIT licence, by set."""
    golds: dict[str, dict[str, int]] = json.loads((HERE / "math_golds.json").read_text(encoding="utf-8"))
    return golds


OWN_GOLDS = [
    *["0", "7", "-7", "12", "1000", "1,250", "40000", "1,234,567", "0.5", "-3.25", "18.90", ".25"],
    *[
        "\\frac{3}{7}",
        "-\\frac{35}{9}",
        "\\dfrac{17}{50}",
        "\\frac 59",
        "1\\frac{2}{3}",
        "2/3",
        "10^6",
        "6.02 \\times 10^{5}",
    ],
    *["2\\sqrt{7}", "\\sqrt{51}", "5 - 2\\sqrt{3}", "16\\pi", "\\frac{\\pi}{6}", "4 + 3i", "e^{2}", "\\log_2 3"],
    *["45^\\circ", "30\\%", "\\$7.50", "12 \\text{ cm}^2", "31_7", "(1011)_{2}"],
    *["2k + 1", "x^2 - 5x + 6", "(x+1)(x-4)", "a - b", "\\sin 2x", "x = 3", "y = 3x - 1", "2x + 3y = 6"],
    *[
        "(1, -4)",
        "(2,8)",
        "\\left( 3, \\frac{\\pi}{2} \\right)",
        "(1,2,3)",
        "2, 3, 5",
        "-1,4",
        "3 \\pm \\sqrt{2}",
        "\\{1, 2, 6\\}",
    ],
    *["[0,5)", "(-\\infty, 3]", "(0,4) \\cup (4,9)", "x \\in [1,6]", "x > 3"],
    *["\\begin{pmatrix} 2 \\\\ -5 \\end{pmatrix}", "\\begin{pmatrix} 1 & 0 \\\\ 3 & 1/2 \\end{pmatrix}"],
    *["\\text{(B)}", "\\text{odd}", "\\text{Priya}", "Tuesday"],
]
"""Reference answers of our own in the forms that data sets hold."""

HEDGES = [
    *[
        "@ or #",
        "@ and #",
        "@, #",
        "@; #",
        "@ #",
        "@/#",
        "@-#",
        "@–#",
        "@:#",
        "@ to #",
        "@ vs. #",
        "@ | #",
        "@ (#)",
        "@ or maybe #",
    ],
    *[
        "either @ or #",
        "between @ and #",
        "from @ to #",
        "@, no, #",
        "@... no, wait, #",
        "@, or possibly #",
        "@ (or #)",
    ],
    *["@, but it could be #", "@ or else #", "either @ or else #", "not @ but #", "@ (maybe #)", "both @ and #"],
]
"""Two answers, @ and #, of which one may be right."""

HEDGED = [
    "The answer is {}.", "The answer is {}", "#### {}", "{}", "<answer>{}</answer>", "\\boxed{{{}}}", "**Answer:** {}",
    "So it is {}.",
]  # fmt: skip
"""Where a hedge stands."""

TWO_ANSWERS = [
    *["\\boxed{@} \\boxed{#}", "\\boxed{@} or \\boxed{#}", "\\boxed{@}, \\boxed{#}", "\\boxed{@}\n\n\\boxed{#}"],
    *["First guess: \\boxed{@}. On reflection it is this:\n\n\\boxed{#}", "\\boxed{@}. Hmm. \\boxed{#}"],
    *[
        "$\\boxed{@}$ (or $\\boxed{#}$)",
        "<answer>@</answer><answer>#</answer>",
        "<answer>@</answer> no, <answer>#</answer>",
    ],
    *["The answer is @. No, #.", "The answer is @. Wait, it is #.", "The answer is @? Or #?", "The answer is @. Or #."],
    *[
        "Answer: @. Actually, #.",
        "#### @. Sorry, #.",
        "The answer is @. Maybe #.",
        "The answer is \\boxed{@ \\text{ or } #}.",
    ],
    *[
        "\\boxed{@ \\text{ and } #}",
        "\\boxed{\\{@, #\\}}",
        "\\boxed{(@, #)}",
        "\\boxed{@ \\pm #}",
        "\\boxed{@ \\le x \\le #}",
    ],
    *["\\boxed{x \\in \\{@, #\\}}", "\\boxed{x = @ \\text{ or } x = #}", "\\boxed{x = @, x = #}", "\\boxed{[@, #]}"],
]
"""Whole responses with two answers."""


def hedged() -> Iterator[str]:
    """Responses that offer 12 and 13, in both orders: each is wrong for 12 and for 13."""
    for first, second in (("12", "13"), ("13", "12")):
        for form in TWO_ANSWERS + [place.format(hedge) for hedge in HEDGES for place in HEDGED]:
            yield form.replace("@", first).replace("#### ", "\0").replace("#", second).replace("\0", "#### ")


NEAR_MISSES: list[tuple[str, str]] = [
    # A fragment of a quantity is not the quantity.
    ("2", "So it is 1/2."),
    ("1", "So it is 1/2."),
    ("4", "The ratio is 3/4"),
    ("3", "We get 10^3"),
    ("10", "We get 10^3"),
    ("3", "We get $10^3$."),
    ("2", "This is x^2"),
    ("2", "The result is $x^2$."),
    ("1.5", "It is 1.5e3"),
    ("3", "It is 1.5e3"),
    ("4", "in the ratio 3:4"),
    ("3", "in the ratio 3:4"),
    ("30", "He arrives at 12:30."),
    ("5", "It equals 5-3"),
    ("3", "It equals 5-3"),
    ("3", "The answer is 2 + 3"),
    ("2", "The answer is 2 * 3."),
    ("5", "so it is 3 1/5"),
    ("1/5", "so it is 3 1/5"),
    ("2", "The answer is \\frac{1}{2}"),
    ("3", "Hence \\sqrt{3}"),
    ("3", "Hence the length is $2\\sqrt{3}$."),
    ("2", "It is 2\\pi"),
    ("5", "We have 5x."),
    ("30", "It takes 2 hours and 30 minutes."),
    ("2", "It takes 2 hours and 30 minutes."),
    ("2", "The answer is 2 hours and 30 minutes."),
    ("4", "He has 3 apples + 4 apples"),
    ("4", "It lies between 3 and 4."),
    ("50", "He paid 12 dollars and 50 cents."),
    ("3", "See section 1.2.3"),
    ("30", "It takes 2 hours 30 minutes."),
    ("3", "He is 12 feet 3 inches tall."),
    ("12", "It is 10% of 12."),
    ("12", "He got 5 out of 12."),
    # The words before a quantity may deny it or make another one of it.
    ("12", "It is less than 12."),
    ("12", "That isn't 12."),
    ("12", "The answer is half of 12."),
    ("12", "The answer is twice 12."),
    ("12", "The answer is the square root of 12."),
    ("12", "The result is log 12."),
    ("12", "The answer is negative 12."),
    ("12", "It is minus 12."),
    ("3", "on the 3rd"),
    ("19", "due to COVID-19"),
    ("12", "It is more than 12."),
    ("12", "The answer is half of the 12."),
    ("12", "The answer is never 12."),
    ("12", "The answer is a third of 12."),
    ("12", "The answer is 12, not really."),
    ("12", "The answer is 5 dozen and 12."),
    # A unit is a word; a word that changes the value is not a unit.
    ("12", "#### 12 thousand"),
    ("12", "\\boxed{12 \\text{ million}}"),
    ("12", "The answer is 12 squared."),
    ("12", "\\boxed{12 \\text{ or } 13}"),
    ("12", "The answer is 12 or 13."),
    ("12", "#### 12 or 13"),
    ("3", "#### 3 dozen"),
    ("5", "\\boxed{5x}"),
    ("5", "\\boxed{5k}"),
    ("2", "\\boxed{2t}"),
    ("2t", "\\boxed{2}"),
    ("12", "\\boxed{12!}"),
    ("5", "\\boxed{5 \\pi}"),
    # An equation that does not hold, or does not say what is asked, answers nothing.
    ("7", "\\boxed{6=7}"),
    ("7", "#### 6 = 7"),
    ("10", "\\boxed{2x = 10}"),
    ("4", "\\boxed{x^2 = 4}"),
    ("5", "\\boxed{x \\ne 5}"),
    ("5", "\\boxed{x > 5}"),
    ("x=5", "\\boxed{y=5}"),
    ("y = -2x", "\\boxed{y = 2x}"),
    ("5x - 7y + 11z + 4 = 0", "\\boxed{5x - 7y + 11z - 4 = 0}"),
    # Other values.
    ("12", "#### 13"),
    ("12", "#### -12"),
    ("-12", "\\boxed{12}"),
    ("12", "\\boxed{1.2}"),
    ("12", "\\boxed{12.01}"),
    ("1234", "\\boxed{1, 234}"),
    ("1234", "\\boxed{1.234}"),
    ("1234", "\\boxed{12,34}"),
    ("1234", "\\boxed{(1,234)}"),
    ("1200", "The answer is 12%."),
    ("12", "The answer is 0.12."),
    (".0000672", "\\boxed{0.0000674}"),
    (".0000672", "\\boxed{6.71 \\times 10^{-5}}"),
    ("0", "\\boxed{0.0000001}"),
    ("\\frac{1}{3}", "\\boxed{0.33}"),
    ("0.33", "\\boxed{\\frac{1}{3}}"),
    ("3.14", "\\boxed{\\pi}"),
    ("\\pi", "\\boxed{\\frac{22}{7}}"),
    ("3\\sqrt{13}", "\\boxed{13\\sqrt{3}}"),
    ("1 \\pm \\sqrt{19}", "\\boxed{1 + \\sqrt{19}}"),
    ("6 - 5i", "\\boxed{6 + 5i}"),
    ("52_8", "\\boxed{52_9}"),
    ("52_8", "\\boxed{42}"),
    ("52", "\\boxed{52_8}"),
    ("110", "\\boxed{(11)_{2}}"),
    ("1\\frac{4}{5}", "\\boxed{\\frac{4}{5}}"),
    ("42", "\\boxed{42!}"),
    ("120", "The answer is 5!"),
    ("12", "#### 12/2"),
    ("12", "The answer is 1/12"),
    ("0.5", "\\boxed{5}"),
    ("5", "\\boxed{0{,}5}"),
    ("12", "\\boxed{(a+b+c+d+e+f)^{60}}"),
    ("12", "#### 12 hundred"),
    ("12", "#### 12 cubed"),
    ("12", "#### 12 / 100"),
    ("12", "\\boxed{12^{2}}"),
    ("12", "\\boxed{12 \\text{ dozen}}"),
    # Tuples keep their order, sets their number, intervals their ends.
    ("(6,31,-1)", "\\boxed{(31,6,-1)}"),
    ("(-2,1)", "\\boxed{(1,-2)}"),
    ("(8,-2)", "\\boxed{(9,-3)}"),
    ("(1,2)", "\\boxed{\\{1,2\\}}"),
    ("(1,2)", "\\boxed{{1,2}}"),
    ("\\{1,2\\}", "\\boxed{(1,2)}"),
    ("3, 5, 7", "\\boxed{3, 5}"),
    ("3, 5, 7", "\\boxed{3, 5, 7, 9}"),
    ("7", "\\boxed{3, 5, 7}"),
    ("7", "The answer is 3, 5, 7."),
    ("3", "\\boxed{3} or \\boxed{4}"),
    ("1,-2", "\\boxed{1}"),
    ("(3,4]", "\\boxed{[3,4]}"),
    ("(3,4]", "\\boxed{(3,4)}"),
    ("(2,\\infty)", "\\boxed{(-\\infty,2)}"),
    ("(0,9) \\cup (9,36)", "\\boxed{(0,36)}"),
    (
        "\\begin{pmatrix} -2 \\\\ -14 \\\\ -7 \\end{pmatrix}",
        "\\boxed{\\begin{pmatrix} -2 \\\\ -14 \\\\ 7 \\end{pmatrix}}",
    ),
    ("2:30", "\\boxed{1:15}"),
    ("\\text{A,C}", "\\boxed{C}"),
    # Expressions and words.
    ("p - q", "\\boxed{q - p}"),
    ("\\cot x", "\\boxed{\\tan x}"),
    ("x^3+3x-6", "\\boxed{x^3+3x+6}"),
    ("(a+5)(b+2)", "\\boxed{(a+2)(b+5)}"),
    ("\\text{Evelyn}", "\\boxed{\\text{Navin}}"),
    ("\\text{Evelyn}", "\\boxed{\\text{Evelyn or Navin}}"),
    ("\\text{Evelyn}", "The answer is not Evelyn."),
    ("\\text{(C)}", "\\boxed{\\text{(B)}}"),
    ("\\text{(C)}", "The answer is (B) or (C)."),
    ("\\text{even}", "The answer is uneven."),
    ("C", "The answer is B."),
    ("C", "#### CD"),
    ("0.1\\overline{6}", "\\boxed{0.16}"),
    # No answer, or another one behind it.
    ("12", "I had 12, no wait: the answer is 13."),
    ("12", "\\boxed{12} was wrong, it is \\boxed{13}"),
    ("12", "<think>\\boxed{12}</think> The answer is 13."),
    ("12", "The answer is not 12."),
    ("12", "I do not know."),
    ("12", ""),
    ("12", "\\boxed{}"),
    ("12", "\\boxed{12"),
    ("1000", "1000 or 999"),
    ("999", "1000 or 999"),
    ("12", "\\boxed{\\text{twelve or so}}"),
    ("12", "\\boxed{?}"),
]
"""(reference, response): each looks right to a careless judge, and is wrong."""

RIGHT: list[tuple[str, str]] = [
    # Punctuation, markdown, units and sentences around the answer.
    ("12", "#### 12."),
    ("12", "#### 12 dollars"),
    ("12", "#### $12.00"),
    ("12", "#### 12\nSo she has 12 left after 3 days."),
    ("12", "#### **12**"),
    ("12", "#### \\boxed{12}"),
    ("12", "\\boxed{12.}"),
    ("12", "\\boxed{12 dollars}"),
    ("12", "\\boxed{12 \\text{ dollars per day}}"),
    ("12", "\\boxed{12\\ \\mathrm{cm}^2}"),
    ("12", "\\boxed{12\\text{ cm}^{2}}"),
    ("12", "\\boxed{\\mathbf{12}}"),
    ("12", "\\boxed{ 12 }\\boxed{}"),
    ("12", "\\boxed {12}"),
    ("12", "\\fbox{12}"),
    ("12", "\\boxed{\\boxed{12}}"),
    ("12", "\\boxed{\\text{Bob has } 12 \\text{ apples}}"),
    ("12", "\\boxed{Bob has 12 apples}"),
    ("12", "\\boxed{x = 12}"),
    ("12", "\\boxed{m+n = 12}"),
    ("12", "\\boxed{f(2) = 12}"),
    ("12", "\\boxed{3 \\cdot 4 = 12}"),
    ("12", "\\boxed{\\$12}"),
    ("12", "\\boxed{12\\%}"),
    ("12", "\\boxed{12^\\circ}"),
    ("12", "\\boxed{12^{\\circ}\\text{C}}"),
    ("12", "\\boxed{12°}"),
    ("12", "\\boxed{12kg}"),
    ("12", "\\boxed{12 km/h}"),
    ("12", "\\boxed{12 cm^2}"),
    ("12", "\\boxed{12 cm²}"),
    ("12", "<answer>12.</answer>"),
    ("12", "<answer> The answer is 12. </answer>"),
    ("12", "<Answer>$12$</Answer>"),
    ("12", "The answer is 12, since 3 * 4 = 12."),
    ("12", "The answer is 12 (3 boxes of 4)."),
    ("12", "The answer is 12 dollars for 5 days."),
    ("12", "The answer to 3*4 is 12."),
    ("12", "The answer is therefore approximately $12$ meters."),
    ("12", "The answer is: **12**. Let me check that the answer is right."),
    ("12", "The correct answer is = 12"),
    ("12", "ANSWER: 12"),
    ("12", "Answer = 12"),
    ("12", "**Final Answer**\n\n12"),
    ("12", "**Final Answer:**\n\\[ 12 \\]"),
    ("12", "<think>10? 11?</think>\n12"),
    ("12", "It cost $5 a day, so Tom paid $7 + $5 = $12."),
    ("12", "So that makes <<3*4=12>>12 eggs."),
    ("12", "Therefore, he needs 12 eggs. Good luck!"),
    ("12", "half of 24 = 12"),
    ("12", "16 eggs - 4 eggs = 12 eggs"),
    ("12", "3 times 4 = 12"),
    ("12", "- 12"),
    ("12", "12"),
    ("12", "１２"),
    ("42", "It is 42!"),
    ("42", "\\boxed 42"),
    ("42", "\\boxed42"),
    ("0.5", "\\boxed{0{,}5}"),
    # Ways to write a number.
    ("1234", "\\boxed{1\\,234}"),
    ("1234", "\\boxed{1{,}234}"),
    ("1234", "\\boxed{1 234}"),
    ("1234", "The answer is 1,234."),
    ("1234", "The answer is $1\\,234$ dollars."),
    ("1234567", "#### 1,234,567 people"),
    ("12000", "\\boxed{12 thousand}"),
    ("2500000", "The answer is $2.5 million."),
    ("36", "#### 3 dozen eggs"),
    ("1500", "It is 1.5e3"),
    ("1500", "\\boxed{1.5 \\times 10^3}"),
    ("1500", "\\boxed{1.5 × 10³}"),
    ("-7", "\\boxed{−7}"),
    ("-7", "\\boxed{-7.0}"),
    ("-7", "\\boxed{-\\$7}"),
    ("7", "\\boxed{+7}"),
    ("7", "\\boxed{007}"),
    ("0.5", "\\boxed{.5}"),
    ("0.5", "\\boxed{1/2}"),
    ("0.5", "\\boxed{50\\%}"),
    ("0.125", "\\boxed{12.5\\%}"),
    ("12.5", "\\boxed{12.5\\%}"),
    ("\\frac{1}{2}", "thus 0.5"),
    ("\\frac{1}{2}", "\\boxed{½}"),
    ("\\frac{1}{2}", "\\boxed{\\frac12}"),
    ("\\frac{1}{2}", "\\boxed{\\dfrac{2}{4}}"),
    ("\\frac{1}{2}", "The answer is 1/2."),
    ("\\frac{1}{2}", "Answer: $1/2$"),
    ("\\frac{1}{2}", "\\boxed{P = \\frac{1}{2}}"),
    ("-\\frac{35}{9}", "\\boxed{\\frac{-35}{9}}"),
    ("-\\frac{35}{9}", "\\boxed{-35/9}"),
    ("\\frac{1}{3}", "\\boxed{0.333333}"),
    ("\\frac{3}{4}", "in the ratio 3:4"),
    ("1\\frac{4}{5}", "\\boxed{1 4/5}"),
    ("1\\frac{4}{5}", "\\boxed{\\frac{9}{5}}"),
    ("1\\frac{4}{5}", "\\boxed{1.8}"),
    (".0000672", "\\boxed{6.72 \\times 10^{-5}}"),
    ("1000", "We get 10^3"),
    ("1024", "\\boxed{2^{10}}"),
    ("1024", "The answer is 2**10."),
    ("120", "\\boxed{5!}"),
    # Expressions.
    ("3\\sqrt{13}", "\\boxed{\\sqrt{117}}"),
    ("3\\sqrt{13}", "\\boxed{3√13}"),
    ("3\\sqrt{13}", "The answer is 3*sqrt(13)."),
    ("3\\sqrt{13}", "Hence the length is $3\\sqrt{13}$ units."),
    ("\\frac{\\sqrt{3}}{3}", "\\boxed{\\frac{1}{\\sqrt{3}}}"),
    ("12\\pi", "\\boxed{12π}"),
    ("12\\pi", "The answer is 12*pi."),
    ("6+9i", "\\boxed{9i + 6}"),
    ("x=5", "\\boxed{5}"),
    ("x=5", "The answer is x = 5."),
    ("p - q", "The answer is p - q."),
    ("p - q", "p - q"),
    ("\\cot x", "\\boxed{\\frac{\\cos x}{\\sin x}}"),
    ("x^3+3x-6", "\\boxed{3x - 6 + x^3}"),
    ("x^3+3x-6", "The answer is f(x) = x^3 + 3x - 6."),
    ("x^3+3x-6", "\\boxed{x³+3x-6}"),
    ("(a+5)(b+2)", "\\boxed{(b+2)(a+5)}"),
    ("2k", "The answer is 2k."),
    ("5r^5", "\\boxed{5r^{5}}"),
    ("y = 2x + 3", "\\boxed{2x+3}"),
    ("y = -2x", "\\boxed{2x + y = 0}"),
    ("5x - 7y + 11z + 4 = 0", "\\boxed{10x - 14y + 22z + 8 = 0}"),
    ("52_8", "\\boxed{52_{8}}"),
    ("4210_{5}", "\\boxed{4210_5}"),
    ("90^\\circ", "\\boxed{90}"),
    ("90^\\circ", "The answer is 90 degrees."),
    ("5.4 \\text{ cents}", "\\boxed{5.4}"),
    ("864 \\mbox{ inches}^2", "\\boxed{864 \\text{ square inches}}"),
    ("\\$18.90", "#### 18.9"),
    ("10,\\!080", "\\boxed{10080}"),
    ("11,\\! 111,\\! 111,\\! 100", "\\boxed{11,111,111,100}"),
    ("0.1\\overline{6}", "\\boxed{\\frac{1}{6}}"),
    ("\\frac{3}{11}", "\\boxed{0.\\overline{27}}"),
    ("C", "The answer is C."),
    ("C", "#### C"),
    ("C", "Answer: C because 3 + 4 = 7"),
    ("C", "C"),
    ("n!", "#### n!"),
    ("ab + bc + ca", "The answer is bc+ab+ca."),
    ("a^{2^n}", "\\boxed{a^{2^{n}}}"),
    # Tuples, sets, intervals, matrices.
    ("3, 5, 7", "\\boxed{7, 3, 5}"),
    ("3, 5, 7", "\\boxed{\\{3,5,7\\}}"),
    ("3, 5, 7", "The answer is 3, 5, and 7."),
    ("3, 5, 7", "The answers are $3$, $5$ and $7$."),
    ("1,-2", "\\boxed{1} or \\boxed{-2}"),
    ("1,-2", "\\boxed{x = 1} and \\boxed{x = -2}"),
    ("1,-2", "\\boxed{x = 1, x = -2}"),
    ("1,-2", "\\boxed{1 \\text{ and } -2}"),
    ("1 \\pm \\sqrt{19}", "\\boxed{1+\\sqrt{19}, 1-\\sqrt{19}}"),
    ("(-2,1)", "The answer is (-2, 1)."),
    ("(-2,1)", "\\boxed{\\left(-2,1\\right)}"),
    ("(-2,1)", "\\boxed{(x,y) = (-2,1)}"),
    ("(2,12) \\cup (12,102)", "\\boxed{(2, 12) ∪ (12, 102)}"),
    ("(3,4]", "\\boxed{3 < x \\le 4}"),
    ("x \\in [-2,7]", "\\boxed{[-2, 7]}"),
    ("x \\in [-2,7]", "\\boxed{-2 \\le x \\le 7}"),
    ("(-\\infty, 0]", "\\boxed{x \\in (-\\infty, 0]}"),
    (
        "\\begin{pmatrix} 1/5 \\\\ -18/5 \\end{pmatrix}",
        "\\boxed{\\begin{bmatrix} 0.2 \\\\ -3.6 \\end{bmatrix}}",
    ),
    # Words.
    ("\\text{Evelyn}", "The answer is **Evelyn**."),
    ("\\text{Evelyn}", "\\boxed{Evelyn}"),
    ("\\text{Evelyn}", "The answer is Evelyn because she ran 5 m/s."),
    ("\\text{Evelyn}", "evelyn"),
    ("\\text{(C)}", "\\boxed{C}"),
    ("\\text{(C)}", "The answer is (C) 12."),
    ("\\text{(C)}", "Answer: \\textbf{(C)}"),
    ("Monday", "\\boxed{\\text{Monday}}"),
]
"""(reference, response): the same answer in another form."""
