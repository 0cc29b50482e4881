"""Right answers in the wrappings that people and models write, and wrong answers that look right: ``math_*.txt`` beside this file."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent


def _sections(file: str) -> dict[str, list[str]]:
    """Lines by section, as they are meant."""
    sections: dict[str, list[str]] = {}
    for line in (HERE / file).read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            sections[line.removeprefix("== ")] = []
        elif line and not line.startswith("-- "):
            sections[list(sections)[-1]].append(line.replace("⏎", "\n"))
    return sections


def _pairs(lines: list[str]) -> list[tuple[str, str]]:
    return [
        (reference.rstrip(" "), response.lstrip(" ")) for reference, _, response in (x.partition("⇒") for x in lines)
    ]


_ANSWERS = _sections("math_answers.txt")
WRAPPINGS = _sections("math_wrappings.txt")
SEPARATORS = {"commas": ",", "thin spaces": "\\,", "braced commas": "{,}", "commas, drawn together": ",\\!"}
OWN_GOLDS = _ANSWERS["own references"]
NEAR_MISSES = _pairs(_ANSWERS["near misses"])
"""(reference, response): each looks right to a careless judge, and is wrong."""
RIGHT = _pairs(_ANSWERS["right"])
"""(reference, response): the same answer in another form."""
RIGHT += [(letter, words.replace("@", letter)) for letter in "AB" for words in _ANSWERS["letters"]]
RIGHT += [("12", "x" * place + " for what she said, and all of it is\n#### 12") for place in range(160, 180)]


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


def hedged() -> Iterator[str]:
    """Responses that offer 12 and 13, in both orders: each is wrong for 12 and for 13."""
    hedges = [place.replace("@", hedge) for hedge in _ANSWERS["hedges"] for place in _ANSWERS["places"]]
    for first, second in (("12", "13"), ("13", "12")):
        for form in _ANSWERS["two answers"] + hedges:
            yield form.replace("@", first).replace("#### ", "\0").replace("#", second).replace("\0", "#### ")
