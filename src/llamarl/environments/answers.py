"""Finding the answer in what a policy wrote. Plain string work; the rules are in docs/environments.md.

    response ─▶ thinking cut off ─▶ <answer>, \\boxed{}, ####, "the answer is ..." ─▶ its first sentence ─▶ a quantity
                                └─▶ no marker: the last sentence with a quantity ──────────────────────────▶ or none

The *last* marker of a kind wins, since a policy that reasons answers at the end. A quantity is read whole, with all that
belongs to it (``3/4``, ``10^3``, ``x = 5``, ``2, 3 and 5``), or not at all: a fragment of one is another answer. Each
function looks at a response once, so that a long one costs milliseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["AnswerFrom", "extract_answer", "final_answer", "is_number", "last_boxed", "last_number", "last_quantity"]

AnswerFrom = Literal["auto", "tag", "boxed", "last_number", "last_line", "whole"]

MAX_ANSWER_CHARS = 2000
"""How much of a response is looked at behind a marker, or at its end where there is none."""

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}\\]|[{}]")
_BETWEEN_BOXES = re.compile(r"[\s$.]*(?:,|;|,?\s*\b(?:and|or)\b)[\s$]*(?:\\?[A-Za-z](?:_\w)?\s*=\s*)?[\s$]*")
_IS_NUMBER = re.compile(r"[-−+]?[\d,]*\.?\d+")
_PHRASE = re.compile(
    r"\banswers?\b[^\n.:：=]{0,80}?(?:\bis\b|\bare\b|[:：=])|\bfinal answer\b[*_\s#]*\n|答案[是为:：]", re.IGNORECASE
)
_MATH = re.compile(
    r"\$\$(?P<display>(?:\\\$|[^$])+)\$\$|\\\[(?P<bracket>.+?)\\\]|\\\((?P<paren>.+?)\\\)"
    r"|(?<!\\)\$(?=[^\s$])(?P<dollar>(?:\\\$|[^$\n])*?)(?<=[^\s\\])\$(?!\d)",
    re.DOTALL,
)
_PLACE = re.compile("\x01(\\d+)\x01")
_MARKDOWN = re.compile(r"(?<![\w)\]}])(?:\*\*|__|`+)|(?:\*\*|__|`+)(?![\w(\[{\\])")
_CALCULATOR = re.compile(r"<<[^<>]*>>")
_FILLER = frozenset(
    "therefore thus hence simply just only indeed exactly approximately approx about around roughly so then a an the "
    "equal equals to given by as follows final result value total of".split()
)
_LEADING_WORDS = re.compile(r"[A-Za-z]{3,}(?:\s+[A-Za-z]|:)")
_OPERATORS = frozenset("+ - − – * / = ^ × ÷ · ± < > ≤ ≥ ≈ ∪ & | : ⋅".split())
_WORD_OPERATORS = {"times": "*", "plus": "+", "minus": "-", "equals": "="}
_JOINS = frozenset("and or to plus minus times over by x & -".split())
_CLAUSE = frozenset(
    "because since as so where which when if after given for from with who that this out in on per each of at making".split()
)
_CHANGES_VALUE = frozenset(
    "not isn't isn’t aren't aren’t wasn't wasn’t never than twice double triple root log ln sqrt sin cos tan".split()
)
"""Words that deny the quantity behind them, or make another one of it: ``less than 12``, ``twice 12``."""
_PART_OF = frozenset(
    "half halves third thirds quarter quarters fourth fifth tenth percent root square cube log double triple out".split()
)
"""The same with "of" behind them: ``half of 12``."""
_NEGATIVE = frozenset(("negative", "minus"))
_COMPOUND_UNITS = frozenset(
    "year years month months week weeks day days hour hours hr hrs h minute minutes min mins feet foot ft yard yards "
    "mile miles meter meters metre metres m km kilometers kilometres pound pounds lb lbs kilogram kilograms kg "
    "dollar dollars gallon gallons quart quarts degrees of".split()
)
"""Between two numbers, such a word makes one quantity of them: ``2 hours 30 minutes``; so does "of"."""
_LETTERS_WITH_OPERATORS = re.compile(r"\(*[A-Za-z]\)*(?:[-+*^]\(*[A-Za-z]\)*)+")
_TRAILING = ".,;:!?\"'”’"


def extract_answer(text: str, how: AnswerFrom = "auto", *, numeric: bool = False) -> str | None:
    """The answer a response gives, or None where it gives none of the form asked for.

    Args:
        how: ``tag``: inside the last ``<answer>...</answer>``; ``boxed``: inside the last ``\\boxed{...}``;
            ``last_number``; ``last_line``: the last line that is not blank; ``whole``: everything, stripped;
            ``auto``: the tag, else the box, else what follows the last ``####``, else the last number if ``numeric``,
            else everything.
        numeric: The reference answer is a number.
    """
    if how == "tag":
        return _last_tag(text)
    if how == "boxed":
        return last_boxed(text)
    if how == "last_number":
        return last_number(text)
    if how == "last_line":
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else None
    if how == "whole":
        return text.strip() or None
    for marked in (_last_tag(text), last_boxed(text)):
        if marked is not None:
            return marked
    if "####" in text:
        return text.rpartition("####")[2].strip() or None
    return last_number(text) if numeric else text.strip() or None


def final_answer(text: str, *, words: bool = False) -> str | None:
    """The final answer of a solution, as it was written (a unit behind it included), or None.

    Args:
        words: The reference is words (a name, a choice), not a quantity: the marked text is taken as it stands.
    """
    thought, end, said = text.rpartition("</think>")
    if end and said.strip():
        text = said
    tagged = _last_tag(text)
    if tagged is not None:
        marked = _marked(tagged, words)
        return marked if marked is not None else (tagged if words else _only_quantity(tagged))
    marked = _marked(text, words)
    if marked is not None:
        return marked
    if words:
        lines = [line.strip() for line in text[-MAX_ANSWER_CHARS:].splitlines() if line.strip()]
        formulas = list(_MATH.finditer(lines[-1])) if lines else []
        return _inside(formulas[-1]) if formulas else (lines[-1] if lines else None)
    return last_quantity(text) or (text.strip() and _segment(text.strip().rpartition("\n")[2], words)) or None


def is_number(text: str) -> bool:
    """True for one plain decimal number, with sign and thousands separators allowed."""
    return _IS_NUMBER.fullmatch(text.strip()) is not None


def last_number(text: str) -> str | None:
    """The last quantity of the text if it is a plain decimal number, without dollar sign and thousands separators.

    In ``5 - 9 = -4`` the number is -4; ``3/4``, ``5-3``, ``10^3`` and ``1.5e3`` are quantities, but no plain numbers.
    """
    quantity = last_quantity(text)
    if quantity is None:
        return None
    number = quantity.rpartition("=")[2].strip().replace("$", "").replace("\\", "").replace("−", "-")
    match = re.match(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)?(?:\.\d+)?(?=%|\s+[A-Za-z]|$)", number, re.ASCII)
    found = match.group() if match else ""
    return found.replace(",", "").removeprefix("+") if found.strip("+-") else None


def last_boxed(text: str) -> str | None:
    """Content of the last complete ``\\boxed{...}`` that is not empty, braces balanced; in one pass.

    Boxes joined by a comma, "and" or "or" are one answer (``\\boxed{1}`` or ``\\boxed{-2}``): their contents, with commas.
    """
    opened: list[tuple[int, int] | None] = []  # (where the box's command starts, where its content does)
    boxes: list[tuple[int, int, str]] = []
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "}":
            box = opened.pop() if opened else None
            if box is not None:
                content = text[box[1] : match.start()] if not boxes or boxes[-1][0] < box[0] else ""
                if content.strip():
                    boxes.append((box[0], match.end(), content.strip()))
        elif token == "{":
            opened.append(None)
        elif token[-1] == "{" and len(token) > 2:
            opened.append((match.start(), match.end()))
    if not boxes:
        return None
    answer = [boxes[-1]]
    for box_ in reversed(boxes[:-1][-8:]):
        between = text[box_[1] : answer[0][0]]
        if len(between) > 40 or not _BETWEEN_BOXES.fullmatch(between):
            break
        answer.insert(0, box_)
    return ", ".join(dict.fromkeys(content for _, _, content in answer))


def last_quantity(text: str) -> str | None:
    """The last quantity of free text, whole and with the words behind it, or None where it is part of a larger one.

    Between "and", "or" or an operator of words and an earlier quantity of its sentence, a number is such a part: there is
    no last quantity in ``2 hours and 30 minutes``.
    """
    for sentence in reversed(_sentences(text[-MAX_ANSWER_CHARS:])):
        if sentence.runs:
            return sentence.last()
    return None


@dataclass(slots=True)
class _Run:
    """Neighbouring tokens that are one quantity."""

    start: int
    end: int
    text: str
    formula: bool = False
    """It is one formula, whose ends are known."""


@dataclass(slots=True)
class _Sentence:
    tokens: list[str]
    runs: list[_Run] = field(default_factory=list)

    def first(self) -> str | None:
        """The quantity that the sentence begins with, fillers apart, and the words behind it; else its last one."""
        if not self.runs:
            return self._letters()
        run = self.runs[0]
        before = [_bare(token) for token in self.tokens[: run.start]]
        if "not" in before:
            return None
        if any(word and word not in _FILLER for word in before):
            return self._letters() or self.last()
        if len(self.runs) == 1:
            return self._with_words(run, len(self.tokens))
        following = self.runs[1]
        between = [_bare(token) for token in self.tokens[run.end : following.start]]
        clause = next((place for place, word in enumerate(between) if word in _CLAUSE), None)
        opens = next((i for i, token in enumerate(self.tokens[run.end : following.start]) if token[0] in "(["), None)
        stop = min((place for place in (clause, opens) if place is not None), default=None)
        if stop is not None or self.tokens[following.start].startswith(("(", "[")):
            return self._with_words(run, run.end + (len(between) if stop is None else stop))
        return self.last() if following.text.startswith("=") else None

    def _letters(self) -> str | None:
        """One or two letters, or letters with operators, that stand alone or before an explanation: ``C``, ``xy``, ``n!``."""
        tokens = [token for token in self.tokens if _bare(token) not in _FILLER or len(_bare(token)) == 1]
        if not tokens:
            return None
        letters = tokens[0].strip(_TRAILING.replace("!", "") + "*_")
        if len(tokens) > 1 and not (len(letters) == 1 and (_bare(tokens[1]) in _CLAUSE or tokens[1][0] == "(")):
            return None
        alone = letters.strip("()").isalpha() and len(letters.strip("()")) <= 2
        return letters if alone or re.fullmatch(r"[-+*/!^()A-Za-z]*[-+*/!^][-+*/!^()A-Za-z]*", letters) else None

    def last(self) -> str | None:
        run = self.runs[-1]
        before = _bare(self.tokens[run.start - 1]) if run.start else ""
        if len(self.runs) > 1 and (
            before in _JOINS or (before in _COMPOUND_UNITS and self.runs[-2].end == run.start - 1)
        ):
            return None
        if run.text.startswith("="):
            return self._with_words(_Run(run.start, run.end, run.text.lstrip("= ")), len(self.tokens))
        if run.text[0] in "+*/^×÷·-−–" and run.text[1:2] in ("", " "):
            if run.start:  # "3 apples + 4": a part of a sum
                return None
            run = _Run(run.start, run.end, run.text[1:].strip())  # a bullet
        if (
            run.start and "=" in run.text and not run.formula
        ):  # its left side may begin in the words before it: "half of 24 = 12"
            run = _Run(run.start, run.end, run.text.rpartition("=")[2].strip())
        elif self._is_changed(run):
            return None
        elif before in _NEGATIVE and run.text[:1] not in "-−+":
            run = _Run(run.start, run.end, "-" + run.text)
        return self._with_words(run, len(self.tokens))

    def _is_changed(self, run: _Run) -> bool:
        """Whether the words right before a quantity deny it or make another one of it."""
        words = [_bare(token) for token in self.tokens[max(0, run.start - 3) : run.start]]
        while words and words[-1] in ("the", "exactly"):
            words.pop()
        if words[-1:] == ["of"]:
            return words[-2:-1] != [] and words[-2] in _PART_OF
        return bool(words) and words[-1] in _CHANGES_VALUE

    def _with_words(self, run: _Run, end: int) -> str | None:
        words = []
        for token in self.tokens[run.end : end][:12]:
            if token[0] in "([" or token in ("–", "—"):
                break
            words.append(token)
        return " ".join([run.text, *words]).strip() or None


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


def _bare(token: str) -> str:
    return token.strip(_TRAILING + "()[]*_").lower()


def _last_tag(text: str) -> str | None:
    """Inside of the last ``<answer>...</answer>`` that is not blank."""
    found, start = None, None
    for match in _TAG.finditer(text):
        if not match.group(1):
            start = match.end()
        elif start is not None:
            found, start = text[start : match.start()].strip() or found, None
    return found


def _marked(text: str, words: bool) -> str | None:
    """What the box, the ``####`` or the last phrase that gives an answer marks."""
    boxed = last_boxed(text)
    if boxed is not None:
        if not words and _LEADING_WORDS.match(boxed):
            return _segment(boxed.replace("\\text", " ").replace("{", " ").replace("}", " "), words)
        return boxed
    if "####" in text:
        return _segment(text.rpartition("####")[2], words)
    ends = [match.end() for match in _PHRASE.finditer(text)]
    for end in reversed(ends[-8:]):
        found = _segment(text[end : end + MAX_ANSWER_CHARS], words)
        if found is not None:
            return found
    return None


def _segment(text: str, words: bool) -> str | None:
    """The answer at the beginning of a text, in its first line that is not blank."""
    text = text[:MAX_ANSWER_CHARS].lstrip("*_:：= \t\r\n")
    if words:
        formula = _MATH.match(text)
        return _inside(formula) if formula else text.partition("\n")[0].strip() or None
    for sentence in _sentences(text):
        if any(_bare(token) for token in sentence.tokens):
            return sentence.first()
    return None


def _only_quantity(text: str) -> str | None:
    """Of a marked text: its one line's answer, or the last quantity of several lines."""
    return last_quantity(text) if "\n" in text.strip() else _segment(text, words=False)


def _sentences(text: str) -> list[_Sentence]:
    """Lines cut into sentences and their tokens, formulas as one token each, and the quantities among them."""
    formulas: list[str] = []

    def keep(match: re.Match[str]) -> str:
        formulas.append(_inside(match))
        return f" \x01{len(formulas) - 1}\x01 "

    text = _MATH.sub(keep, _CALCULATOR.sub("", text.replace("\x01", " ")))
    text = _MARKDOWN.sub(" ", re.sub("(\x01) (?=[.,;:!?])", r"\1", text))
    sentences = []
    for line in text.split("\n"):
        line = re.sub(r"\b(multiplied|divided) by\b", lambda m: "*" if m[1] == "multiplied" else "/", line)
        tokens: list[str] = []
        for token in line.split():
            if not tokens and token in ("*", "-", "•", "–") or token.startswith("#") and not token.strip("#"):
                continue
            tokens.append(token)
            if token[-1] in ".!?;" and token[-2:-1] != "\\" and token.lower() not in ("approx.", "rs."):
                sentences.append(_Sentence(tokens))
                tokens = []
        if tokens:
            sentences.append(_Sentence(tokens))
    for sentence in sentences:
        sentence.runs = _runs(sentence.tokens, formulas)
    return sentences


def _runs(tokens: list[str], formulas: list[str]) -> list[_Run]:
    strong = [_is_quantity(token) for token in tokens]
    weak = [token in _OPERATORS or _WORD_OPERATORS.get(token, "") != "" for token in tokens]

    def near(place: int, *, operator: bool) -> bool:
        around = (place - 1, place + 1)
        return any(0 <= i < len(tokens) and (weak[i] or (strong[i] and not operator)) for i in around)

    member = list(strong)
    for place, token in enumerate(tokens):
        letter = token.strip(_TRAILING)
        if weak[place]:
            member[place] = (
                place + 1 < len(tokens) and (strong[place + 1] or len(tokens[place + 1].strip(_TRAILING)) == 1)
            ) and (token not in _WORD_OPERATORS or (place > 0 and strong[place - 1]))
        elif len(letter) == 1 and letter.isascii() and letter.isalpha():
            member[place] = near(place, operator=letter in "aAI") and not _is_unit_letter(place, letter, tokens, weak)
    for place, token in enumerate(tokens[1:-1], start=1):
        if token in ("and", "or") and strong[place - 1] and strong[place + 1]:
            member[place] = True
    runs: list[_Run] = []
    for place, inside in enumerate(member):
        if not inside:
            continue
        piece = _WORD_OPERATORS.get(tokens[place], tokens[place])
        piece = _PLACE.sub(lambda match: formulas[int(match.group(1))], piece)
        aside = tokens[place][0] in "([" and tokens[place - 1][-1:].isdigit()
        if runs and runs[-1].end == place and not aside and not tokens[place - 1].endswith((":", "：")):
            runs[-1].text += " " + piece
            runs[-1].end, runs[-1].formula = place + 1, False
        else:
            runs.append(
                _Run(place, place + 1, piece, formula=_PLACE.fullmatch(tokens[place].strip(_TRAILING)) is not None)
            )
    for run in runs:
        run.text = run.text.rstrip(_TRAILING.replace("!", "") + " ")
        if run.text[-1:] in "*_" and run.text[-2:-1].isalnum():  # *12*, whose first star went with what marks an answer
            run.text = run.text[:-1]
        opened, closed = (sum(map(run.text.count, brackets)) for brackets in ("([", ")]"))
        if run.text[:1] in ("(", "[") and opened > closed:
            run.text = run.text[1:]
        elif run.text[-1:] in (")", "]") and closed > opened:
            run.text = run.text[:-1].rstrip(_TRAILING)
    return [run for run in runs if run.text.strip("= ")]


def _is_quantity(token: str) -> bool:
    """True for a token that holds a digit, a formula, LaTeX or an expression of single letters."""
    token = token.strip(_TRAILING)
    return (
        "\x01" in token
        or any(sign in token for sign in "\\^{}=<>√π∞×÷±½¼¾")
        or any(char.isdigit() for char in token)
        or _LETTERS_WITH_OPERATORS.fullmatch(token) is not None
    )


def _is_unit_letter(place: int, letter: str, tokens: list[str], weak: list[bool]) -> bool:
    """True for a letter behind a number that only ends the sentence or precedes words: ``5 m``."""
    after_operator = place > 0 and weak[place - 1]
    before_operator = place + 1 < len(tokens) and weak[place + 1]
    return place > 0 and tokens[place - 1][-1:].isdigit() and not after_operator and not before_operator
