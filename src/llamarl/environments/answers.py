"""Finds the answer in what a policy wrote.

    response ─▶ tidied, once ─▶ thinking cut off ─▶ <answer>, \\boxed{}, ####, "the answer is ..." ─▶ one quantity
                                                 └─▶ no marker: the last sentence with a quantity ─▶ one or none

The *last* ``####`` or phrase wins, since a policy that reasons answers at the end. Final answers
that differ are wrong: each box and tag counts, and a mark behind the last of them. So is an answer
that a word beside it denies or leaves open (``not``, ``may be``, ``at least``, a question mark). A
quantity is read whole (``3/4``, ``10^3``, ``x = 5``, ``2, 3 and 5``) or not at all: a fragment of
one is another answer. Each function passes over a response once, so a long one costs milliseconds.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

__all__ = [
    "extract_answer", "final_answers", "is_number", "is_taken_back", "last_boxed", "last_number", "quantity",
    "tidy",
]  # fmt: skip

MAX_ANSWER_CHARS = 2000
"""How much of a response is looked at behind a marker, or at its end where there is none."""

_SIGNS = {
    "−": "-", "–": " - ", "—": " — ", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "∕": "/", "⁄": "/",
    "π": "\\pi ", "∞": "\\infty ", "°": "^\\circ ", "≤": "\\le ", "≥": "\\ge ", "∪": "\\cup ", "∩": "\\cap ",
    "±": "\\pm ", "≠": "\\neq ", "∉": "\\notin ", "∈": "\\in ", "θ": "\\theta ", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}",
    "⅓": "\\frac{1}{3}", "⅔": "\\frac{2}{3}", "′": "'", "’": "'", "≈": "=", "。": ". ", "、": ", ", "✅": " ", "✔": " ",
    "٫": ".", "٬": ",", "\ufe0f": " ", "👉": " ", "➡": " ", "→": " ", "⇒": " ", "∴": " ", "\u200b": "", "\u2060": "",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_NUMBER = r"[-+]?\$?\d[\d,]*(?:\.\d+)?"
_TEXT = (
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|hbox|math(?:rm|bf|it|sf|tt)|operatorname|emph|underline"
    r"|(?:text)?color\{\w+\})"
)


def _words_of(match: re.Match[str]) -> str:
    """The words of a ``\\text{...}``, set apart, but for a formula's dollar signs."""
    start, end = match.span()
    before, behind = match.string[start - 1 : start], match.string[end : end + 1]
    return " " * (before != "$") + match[1].strip() + " " * (behind != "$")


_RULES = tuple(
    (re.compile(pattern, re.MULTILINE | re.IGNORECASE), new)
    for pattern, new in (
        # What ends a turn, calculators of GSM8K, HTML.
        (r"<\|[^|<>\n]{1,40}\|>|<｜[^｜<>\n]{1,40}｜>|</?s>|<(?:(?:start|end)_of_turn|bos|eos|pad|eot)>|\[/?inst\]", " "),
        (r"<<[^<>\n]*>>", ""),
        (r"</?(?:b|i|u|em|strong|p|br|span|div|center|code|mark|sup|h[1-6]|final|final_answer|result|output)\s*/?>", " "),
        (rf"<\s*({_NUMBER}(?:/\d+)?)\s*>", r" \1 "),
        (r"[\"']answer[\"']\s*:\s*(?:[\"']([^\"'\n]{0,300})[\"']|([^\"'{},\n]{1,100}))\s*[,}]", r"\n#### \1\2\n"),  # JSON
        (r"\b(?:one|two|three)[ -](?:hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?),? \(?(?:i\.e\.|that is|or),? ", ""),
        # Markdown: powers apart, then bold, code, italics; quotes, list items, headings of other depth than GSM8K's mark.
        (r"(?<=[0-9)])\*\*(?=[0-9(])|(?<=\b[a-z])\*\*(?=[0-9(])", "^"),
        (r"\*\*|(?<!\w)__(?=\S)|(?<=\S)__(?!\w)|`+|~~", ""),
        (r"(?<![\w*)\]}])\*(?=[^\s*])([^*\n]*[^\s*])\*(?![\w*({\\])", r"\1"),
        (r"(?<!\w)_(?=[^\s_])([^_\n{}]*[^\s_])_(?!\w)", r"\1"),
        (r"^(?:[ \t]*(?:>|\|))*[ \t]*(?:[-*•]\s+|#{1,3}\s+|#{5,6}\s+)?(?:\d{1,2}[.)]\s+(?=[A-Z])|step \d{1,2}: *)?", ""),
        (r"(?<=[^\W\d]) *\| *(?=[-$\d])|(?<![<=])=>", ": "),
        # LaTeX: boxes without braces, spaces, words, degrees, percent, separators.
        (r"\\(?:boxed|fbox)\s*(?:([-+]?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?)|([A-Za-z])(?![A-Za-z]))", r"\\boxed{\1\2}"),
        (r"(?<=[0-9])(?:\\[,;:! ]|\{,\}\s*|,\s*\\!\s*|~|,\\,)(?=[0-9]{3}(?![0-9]))", ""),
        (r"(?<=[0-9])\{,\}(?=[0-9])", "."),
        (r"(?<!\\)\\(?:left|right|displaystyle|bigg?[lr]?)(?![a-z]) *", ""),
        (r"(?<!\\)\\(?:[,;:! ]|q?quad\b)", " "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\^\{ *\}", ""),
        (rf"{_TEXT}\s*\{{([^{{}}]*)\}}(?:\s*\^\s*(?:[0-9]|\{{[0-9]\}}))?", _words_of),
        (r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:\{?\b[CF]\b\}?)?|\\degree\b", " "),
        (r"\s*\\?%|\s*\b(?:percent(?:age)?|per cent|pct)\b(?!\s*points)", "%"),
        (r"(?<=\d) ?(?=(?:[cmk]m|k?g|mg|hrs?|mins?|secs?|lbs?|oz|ft|mph|kmph|km/h|m/s|m[lL]|cents?|am|pm|yrs?)\b)", " "),
        (rf"(?<=[{_CJK}])(?=[^{_CJK}\s])|(?<=[^{_CJK}\s])(?=[{_CJK}])", " "),
    )
)  # fmt: skip
"""What surrounds an answer and is no part of it: each rule is applied once, before anything is judged."""

_BLANKS, _BLANK_LINES = re.compile(r"[^\S\n]{3,}"), re.compile(r"(?:[^\S\n]{0,2}\n){4,}")
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_TAGGED = re.compile(r"<answer>(?:(?!<answer>)[\s\S])*?</answer>", re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}\\]|[{}]")
_BETWEEN_BOXES = re.compile(r"[\s$.]*(?:,|;|,?\s*\b(?:and|or)\b)[\s$]*(?:\\?[A-Za-z](?:_\w)?\s*=\s*)?[\s$]*")
_IS_NUMBER = re.compile(r"[-−+]?[\d,]*\.?\d+")
_ANSWER = (
    "réponse|respuesta|resposta|antwort|risposta|antwoord|svaret?|vastaus|odpowied[źz]|odpověď|cevap|yan[ıi]t|jawaban|"
    "đáp án|đáp số|ответ|відповідь|απάντηση|उत्तर|الجواب|الإجابة|答案|答え|解答|正解|答|정답|답"
)
_IS = "finale?|final|correct[ae]?|est|es|é|è|ist|lautet|is|är|on|to|je|adalah|là|είναι|है|هو|هي|是|为|為|は|은|는"
_MARK = re.compile(
    r"####+|\b(?:answers?|ans|final result)\b[^\n.:=]{0,80}?(?:\bis\b|\bare\b|[:=~]|-+>)"
    r"|\bfinal answer[ \t#]*\n|(?<!\w )(?<!\w)answer[ \t#]*\n"
    rf"|(?:{_ANSWER})(?: ?(?:{_IS})){{0,3}}\s*[:=]?",
    re.IGNORECASE,
)
_MATH = re.compile(
    r"\$\$(?P<display>(?:\\\$|[^$])+)\$\$|\\\[(?P<bracket>.+?)\\\]|\\\((?P<paren>.+?)\\\)"
    r"|(?<!\\)\$(?=[^\s$])(?P<dollar>(?:\\\$|[^$\n])*?)(?<=[^\s\\])\$(?!\d)",
    re.DOTALL,
)
_HARD = "\x02"
"""A space within a formula, which is one token."""
_RETRACTED = re.compile(
    r"[\s.…,;:!?()*-]*(?:no|wait|actually|sorry|correction|oops|hmm+|rather|or|alternatively|maybe|perhaps|possibly|nope|"
    r"i mean|(?:scratch|strike) that|just kidding|on second thought|my bad|edit(?=:)|update(?=:)|not|but (?:it )?(?:could|might|may)|i am not sure|i'm not sure)\b",
    re.IGNORECASE,
)
_NOT_SO = re.compile(r"[^.\n]{0,20}\b(?:is|was) (?:not|wrong|incorrect|false)\b", re.IGNORECASE)
"""Behind an answer: it is none."""
_OPEN = re.compile(r"[\s.,;(]*(?:alternatively|or|maybe|perhaps|possibly)\b", re.IGNORECASE)
"""Before a mark: what it marks is another answer beside an earlier one."""
_ANOTHER_WAY = re.compile(r"\W*(?:or|alternatively)\b(?!\W*\d)", re.IGNORECASE)
"""Behind a box: another solution of the same problem follows, not another answer."""
_DECLINED = re.compile(
    r"\W*(?:sorry,? )?(?:i|we|it|this|that|the answer) (?:can ?not|can['’]?t|could(?: not|n['’]?t)|am unable to) "
    r"(?:be )?(?:determined?|answer(?:ed)?|solved?|found|find|know|known)\b",
    re.IGNORECASE,
)
"""A last sentence that gives no answer, or the one before it: a quantity there is none."""
_HEDGE = re.compile(r"\b(?:or|maybe|perhaps|possibly|wait|could|might)\b|\bno\W", re.IGNORECASE)
"""Between two quantities: which of them is meant stays open."""
_OPERATORS = {
    "times": "*", "plus": "+", "minus": "-", "negative": "-", "equals": "=", "is": "=", "are": "=", "was": "=", "be": "=",
    **{sign: sign for sign in "+ - * / = ^ < > & | :".split()},
}  # fmt: skip
_CLAUSE = frozenset(
    "because since as so where which when if after given for from with who that this out in on per each of at making —".split()
)
_DENIES = frozenset(
    "not isn't aren't wasn't never than twice double triple half root log ln sqrt sin cos tan between neither "
    "maybe perhaps possibly nicht pas non не".split()
)
_NEGATIONS = frozenset("not isn't never maybe perhaps possibly nicht pas не".split())
"""Those that deny a formula too: "less than x is 12" and "at most 12" give 12 where it is boxed."""
_DOUBTS = frozenset("cannot can't couldn't could might may".split())
"""Before ``be``."""
_DENIED_BEFORE = re.compile(
    r"\b(?:(?:do(?:n['’]?t| not) (?:think|believe)|(?<!no )(?<!without )doubts?|(?:nobody|no one) would say)\b[\w\s'’]*"
    r"|(?:wrong|false|untrue|incorrect|mistaken) (?:that|to say)\b[\w\s'’]*|(?:mistake|error) is to \w+"
    r"|(?:can|could|should|must|would|will|do|does)(?:n['’]?t| ?not)(?: \w+)?(?: be| equal)?|anything but)\s*$",
    re.IGNORECASE,
)
"""Before an answer, in its own sentence and clause: it is denied."""
_OTHER_BEFORE = re.compile(
    r"\b(?:far from|nowhere near|close to|differs? from|exceeds?|almost|nearly|(?:^|is |be |are )up to|divisible by"
    r"|(?:multiple|factor|divisor|reciprocal|inverse|opposite|negative) of)\s*$",
    re.IGNORECASE,
)
"""Before a quantity that is no equation: another one is given."""
_OF_ANOTHER = re.compile(
    r"\b(?:(?:wrong|incorrect|mistaken|previous|(?:twice|double|triple|half)(?: the)?)"
    r"|(?:opposite|sum|product|square|double|half|negative|reciprocal|inverse) of the)\s+(?:final )?$",
    re.IGNORECASE,
)
"""Before a mark: it gives something else than the answer."""
_TO_ANOTHER = re.compile(
    r"\b(?:times|plus|minus|multiplied|squared|doubled|halved|previous|earlier|and \d)\b", re.IGNORECASE
)
"""Within a mark."""
_SPELLED = {
    word: str(number)
    for number, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen twenty".split()
    )
}
_DENIES_IN_CJK = ("不是", "不为", "并非")
_IF = frozenset("if when unless otherwise else".split())
_PART_OF = frozenset(
    "half halves third thirds quarter quarters fourth fifth tenth percent root square cube log double triple out".split()
)
_JOINS = frozenset("and or to over by x times plus minus".split())
_MULTIPLIERS = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_NOT_UNITS = frozenset(
    "below half halves third thirds fourth fourths fifth fifths tenth tenths hundredths thousandths squared cubed factorial "
    "plus minus times divided over or and to modulo mod percentage-points pi sqrt root negative not is if but no wrong "
    "more-or-less score".split()
)
_UNIT = re.compile(r"(?:[cmkd]?m|in|ft|inch(?:es)?|feet|units?|yards?|miles?|meters?)\s*\^?\{?[23]\}?")
_FUNCTIONS = frozenset(
    "sqrt sin cos tan cot sec csc log exp arcsin arccos arctan sinh cosh tanh infinity inf pi".split()
)
_WORD = re.compile(r"(?<![\\A-Za-z^_{])(?:[^\W\d_]{3,}|or|is|km|cm|mm|kg|ft|hr|or|no|to|of|am|pm|oz|lb)(?![A-Za-z(])")
_EXPRESSION = re.compile(
    r"\(*[A-Za-z]\)*(?:[-+*^/]\(*[A-Za-z]\)*)+!?|\(*[A-Za-z]{1,3}\)*(?:[+*^]\(*[A-Za-z]{1,3}\)*)+|[A-Za-z]!"
)
_BARE = re.compile(r"[-+$\d.,/%]+[.;:!?]?")
"""A sentence that is a number; two of them one after the other are guesses."""
_TRAILING = ".,;:!?\"'"
_ABBREVIATIONS = frozenset("approx. rs. e.g. i.e. vs. no. mr. mrs. ms. dr. st.".split())


def tidy(text: str) -> str:
    """What was written, with its signs in LaTeX and without what surrounds answers: markup, tokens,
    spaces, ``\\text``."""
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}", text.replace(_HARD, " "))
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    text = unicodedata.normalize("NFKC", text)
    if not text.isascii():
        text = re.sub(r"\d", lambda match: str(int(match.group())), text)
    for pattern, new in _RULES:  # they look on from each blank of a run, and may leave one behind
        text = pattern.sub(new, _BLANK_LINES.sub("\n\n\n", _BLANKS.sub("  ", text)))
    return text


def extract_answer(text: str, *, numeric: bool = False) -> str | None:
    """The answer a response gives, or None where it gives none: inside the last ``<answer>...</answer>``, else the last
    ``\\boxed{...}``, else what follows the last ``####``, else the last number if ``numeric``, else everything. What
    stands behind a last ``</think>`` is the response.

    Args:
        numeric: The reference answer is a number.
    """
    said = text.rpartition("</think>")[2]
    text = said if said.strip() else text
    for marked in (_last(_tags(text)), last_boxed(text)):
        if marked is not None:
            return marked
    if "####" in text:
        return text.rpartition("####")[2].strip() or None
    return last_number(text) if numeric else text.strip() or None


def final_answers(text: str, *, words: bool = False) -> list[str]:
    """The final answers of a tidied solution, as they were written; empty where it gives none, or hedges.

    Several only where several boxes or tags stand: a solution answers right if each is.

    Args:
        words: The reference is words (a name, a choice), not a quantity: the marked text is taken as it stands.
    """
    thought, end, said = text.rpartition("</think>")
    said = said.partition("<think>")[0]  # thoughts that were cut off are no answer
    if said.strip() or not end:
        text = said
    answers: list[str | None] = []
    for part in _tags(text):
        answers += list(_boxed(part)) or [_marked(part, words, tagged=True)]
    rest = _TAGGED.sub("\n", text) if answers else text
    boxes = _boxes(rest)
    answers += [content for _, _, content in boxes]
    if not answers:
        answers = [_marked(text, words, tagged=False)]
        return [answer for answer in answers if answer]
    if boxes:
        answers += _taken_back(rest[: boxes[0][0]], rest[boxes[-1][1] :])
    if not words:
        answers += _later(rest[boxes[-1][1] :] if boxes else text[text.lower().rfind("</answer>") :])
    found = dict.fromkeys(answers)
    return [answer for answer in found if answer] if None not in found and "" not in found else []


def _taken_back(before: str, behind: str) -> list[str]:
    """An empty answer where the words beside a box deny it or leave it open."""
    words = before.rpartition("\n")[2].rstrip("$\\([ {*").lower().split()[-2:]
    doubted = (
        _is_denied_before(_sentence_before(before, len(before)), equals=False)
        or any(word in _NEGATIONS or word.endswith(_DENIES_IN_CJK) for word in words)
        or "d" in _kinds(words)
    )
    sentences = _sentences(behind[:MAX_ANSWER_CHARS].lstrip("$\\)]} \t"))[:2]
    if sentences and re.match(r"\W*not\W{1,3}\d", sentences[0]):
        sentences = sentences[1:]  # "12, not 13"
    denied = doubted or bool(sentences) and (sentences[0][0] == "?" or _NOT_SO.match(sentences[0]))
    retracted = any(_RETRACTED.match(one) and not _ANOTHER_WAY.match(one) for one in sentences)
    return [""] if denied or retracted else []


def _later(text: str) -> list[str]:
    """The quantities that marks give right behind themselves, in a text behind the last box or tag."""
    found = []
    for mark in list(_MARK.finditer(text))[-8:]:
        sentences = _sentences(text[mark.end() : mark.end() + MAX_ANSWER_CHARS].lstrip("*_:= \t\r\n#"))[:1]
        given = [quantity(sentence) or "" for sentence in sentences if _kinds(sentence.split())[:1] == "Q"]
        found += [one for one in given if "=" not in one]  # an equation checks an answer
    return found


def _sentence_before(text: str, end: int) -> str:
    """What stands before a place in its own line and sentence."""
    start = max(0, end - 200)
    line = text[start:end].rpartition("\n")
    near = line[2] if line[1] or not start else line[2].partition(" ")[2]  # no word that is cut
    return re.split(r"[.!?]\s", near)[-1].rstrip("$\\([ {*") + " "


def is_taken_back(behind: str) -> bool:
    """Whether what stands behind an answer corrects it or leaves it open."""
    return _RETRACTED.match(behind) is not None


def is_number(text: str) -> bool:
    """True for one plain decimal number, with sign and thousands separators allowed."""
    return _IS_NUMBER.fullmatch(text.strip()) is not None


def last_number(text: str) -> str | None:
    """The last quantity of the text if it is a plain decimal number, without dollar sign and thousands separators.

    In ``5 - 9 = -4`` the number is -4; ``3/4``, ``5-3``, ``10^3`` and ``1.5e3`` are quantities, but no plain numbers.
    """
    number = (_last_quantity(tidy(text[-MAX_ANSWER_CHARS:])) or "").rpartition("=")[2]
    match = re.fullmatch(r"\s*([-+]?)\s*\\?\$?\s*(\d{1,3}(?:,\d{3})+|\d+)?(\.\d+)?%?\s*", number, re.ASCII)
    found = match[1] + (match[2] or "").replace(",", "") + (match[3] or "") if match else ""
    return found.removeprefix("+") if found.strip("+-") else None


def last_boxed(text: str) -> str | None:
    """Content of the last complete ``\\boxed{...}`` that is not empty; see ``_boxed``."""
    return _last(_boxed(text))


def quantity(sentence: str, *, last: bool = False) -> str | None:
    """The one quantity that a tidied sentence gives; None if it has none, "" if it denies it or offers more than one.

    Words before it say nothing about it, words behind it are its unit, and a clause or a bracket behind it explains it.

    Args:
        last: Of several, the last, as in the last sentence of a calculation, unless a word makes one quantity of them.
    """
    tokens = sentence.split()
    kinds = _kinds(tokens)
    runs = [match.span() for match in re.finditer(r"o*[Ql](?:[oj]+[Ql]|Q)*", kinds)]
    if not runs:
        return None
    start, end = runs[-1] if last else runs[0]
    if _is_denied(sentence, tokens, kinds, runs, last=last):
        return ""
    before = tokens[:start]
    equals = [place for place in range(start, end) if _OPERATORS.get(tokens[place].lower()) == "="]
    if equals and equals[0] > start and before and not before[-1].endswith(":"):
        start = equals[-1] + 1  # "half of 24 = 12": the left side may begin in the words before
    run = [_OPERATORS.get(token.lower(), token) for token in tokens[start:end]]
    if run[0] in ("+", "*", "/", "^") and before:
        return ""  # "3 apples + 4": a part of a sum
    text = " ".join("," if kind == "j" else token for kind, token in zip(kinds[start:end], run, strict=True))
    text = re.sub(r"[,;]\s*,|;", ",", text.lstrip("= "))
    text = re.sub(r"(?<=\d)!+$", "", text).replace(_HARD, " ").strip(" :").rstrip(",.;:? ")  # "It is 42!"
    near = re.split(r"[cdpn]", kinds[end:])[0] and tokens[end : end + 2]
    return _with_unit(text, [token.strip(_TRAILING + "()").lower() for token in near])


def _is_denied(sentence: str, tokens: list[str], kinds: str, runs: Sequence[tuple[int, int]], *, last: bool) -> bool:
    """Whether a sentence denies or doubts its quantity, takes it back, makes it hang on a
    condition, or offers another one.

    Args:
        kinds: As of ``_kinds``.
        runs: Begin and end of each quantity among the tokens.
        last: As of ``quantity``.
    """
    start, end = runs[-1] if last else runs[0]
    if "?" in tokens[end - 1] or tokens[end : end + 1] == ["(?)"]:
        return True
    since = tokens[(runs[-2][1] if last and len(runs) > 1 else end) - 1 :]
    if sum(token.strip(_TRAILING).lower() in _IF for token in since) > 1 or _NOT_SO.match(" ".join(tokens[end:])):
        return True
    equals = any(_OPERATORS.get(token.lower()) == "=" for token in tokens[start:end])
    near = kinds[max(0, start - 3) : start] if last else kinds[:start]
    if "d" in near or "n" in near and not (last and equals):
        return True
    if last and len(runs) > 1:
        between = tokens[runs[-2][1] : start]
        joined = len(between) == 1 or tokens[start - 1].lower() in _JOINS
        if joined and not equals or _HEDGE.search(" ".join(between)):
            return True
    if _is_denied_before(" ".join(tokens[:start]), equals=equals):
        return True
    if last and _RETRACTED.match(sentence):
        return True
    if (
        not last
        and len(runs) > 1
        and not tokens[end - 1].endswith(":")
        and not set("cp") & set(kinds[end : runs[1][0]])
    ):
        return True
    places = (end, *(end + aside.start() for aside in re.finditer("p", kinds[end:])))
    return any(_RETRACTED.match(" ".join(tokens[place:])) for place in places)


def _is_denied_before(words: str, *, equals: bool) -> bool:
    """Whether the words before an answer deny it, or what follows is another quantity."""
    return bool(_DENIED_BEFORE.search(words) or not equals and _OTHER_BEFORE.search(words))


def _with_unit(text: str, words: list[str]) -> str:
    """The quantity times what the word behind it stands for; "" where the word makes another quantity of it."""
    if words and words[0].removesuffix("s") in _MULTIPLIERS:
        return f"{text} \\times {_MULTIPLIERS[words[0].removesuffix('s')]}"
    if words[:1] == ["is"] and words[1:] in (["the"], ["my"], ["our"], ["correct"]):
        return text  # "18 is the final result"
    return "" if words and (words[0] in _NOT_UNITS or "or" in words) else text


def has_words(text: str) -> bool:
    """Whether there is more in a text than mathematics."""
    return any(
        word.lower() not in _FUNCTIONS for word in _WORD.findall(re.sub(r"\\(?:begin|end)\s*\{[a-z*]+\}", " ", text))
    )


def _kinds(tokens: list[str]) -> str:
    """One letter a token: Q quantity, l letter, o operator, j and/or, c clause, p aside, n denial, d doubt, w word."""
    kinds = ""
    for place in range(len(tokens)):
        kinds += _kind_of_word(tokens, place, kinds) or _kind_of_thing(tokens, place, kinds)
    return kinds


def _bare(token: str, kinds: str) -> str:
    bare = token.strip(_TRAILING + "*_").lower()
    choice = re.fullmatch(r"\(([a-z])\)", bare)
    return choice[1] if choice and "Q" not in kinds else bare


def _kind_of_word(tokens: list[str], place: int, kinds: str) -> str:
    """The kind of a token that joins, denies, doubts or begins a clause; empty for any other.

    Args:
        kinds: Of the tokens before it.
    """
    token, bare, previous = tokens[place], _bare(tokens[place], kinds), kinds[-1:]
    following = tokens[place + 1].lower() if place + 1 < len(tokens) else ""
    if bare in _OPERATORS or token in _OPERATORS:
        return "o"
    if bare in ("and", "or"):
        return "j"
    if token[0] in "([" and "Q" in kinds and (previous == "w" or tokens[place - 1][-1] in "0123456789}%"):
        return "Q" if re.fullmatch(r"[(\[][-\d.,$]+[)\]][.,;:!?]*", token) and previous == "Q" else "p"
    if bare.endswith(_DENIES_IN_CJK) or bare in ("least", "most") and tokens[:place][-1:] in (["at"], ["At"]):
        return "n"
    if bare == "no" and following in ("es", "son", "é"):
        return "n"
    if bare in _DOUBTS and following.rstrip(_TRAILING) in ("be", "not"):
        return "d"
    if bare in _DENIES or bare == "of" and (previous == "Q" or place and tokens[place - 1].lower() in _PART_OF):
        return "n" if previous != "Q" or bare not in ("of", "sin", "log") else "c"
    return "c" if bare in _CLAUSE else ""


def _kind_of_thing(tokens: list[str], place: int, kinds: str) -> str:
    """The kind of any other token: a quantity, a letter, a unit or another word."""
    token, bare, previous = tokens[place], _bare(tokens[place], kinds), kinds[-1:]
    following = tokens[place + 1].lower() if place + 1 < len(tokens) else ""
    if previous == "Q" and _UNIT.fullmatch(bare):
        return "w"
    if len(bare) == 1 and bare.isascii() and bare.isalpha():
        alone = bare not in "ai" or not following or following in _OPERATORS or previous == "o"
        unit = previous == "Q" and token.strip(_TRAILING) in "mgshlLAVWNJKCF" and following not in _OPERATORS
        return "w" if unit or not alone else "Q" if previous == "Q" else "l"
    digits = not bare.strip("()[]|") or any(char.isdigit() or char in "\\^{}=<>" + _HARD for char in bare)
    return "Q" if digits or _EXPRESSION.fullmatch(token.strip(".,;:?\"'")) else "w"


def _last(found: list[str]) -> str | None:
    return found[-1] if found else None


def _tags(text: str) -> list[str]:
    """Insides of each ``<answer>...</answer>`` that is not blank."""
    found, start = [], None
    for match in _TAG.finditer(text):
        if not match.group(1):
            start = match.end()
        elif start is not None:
            found += [text[start : match.start()].strip()]
            start = None
    return [inside for inside in found if inside]


def _boxed(text: str) -> list[str]:
    """Contents of the boxes of a text."""
    return [content for _, _, content in _boxes(text)]


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of the complete ``\\boxed{...}`` that are not empty, braces balanced; in one pass.

    Boxes joined by a comma, "and" or "or" are one answer (``\\boxed{1}`` or ``\\boxed{-2}``): their
    contents, with commas.
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
    groups: list[tuple[int, int, list[str]]] = []
    for start, stop, content in boxes:
        end = groups[-1][1] if groups else 0
        if groups and start - end <= 40 and _BETWEEN_BOXES.fullmatch(text[end:start]):
            groups[-1] = (groups[-1][0], stop, [*groups[-1][2], content])
        else:
            groups.append((start, stop, [content]))
    return [(start, stop, ", ".join(dict.fromkeys(group))) for start, stop, group in groups]


def _marked(text: str, words: bool, *, tagged: bool) -> str | None:
    """What the last ``####`` or phrase that gives an answer marks; without one, the last line or quantity."""
    for mark in reversed(list(_MARK.finditer(text))[-8:]):
        found = _first(text[mark.end() : mark.end() + MAX_ANSWER_CHARS], words)
        if found is not None:
            before = _sentence_before(text, mark.start())
            hedged = (
                _OPEN.match(before)
                or _DENIED_BEFORE.search(before)
                or _OF_ANOTHER.search(before)
                or _TO_ANOTHER.search(mark.group())
                or set("dn") & set(_kinds([*mark.group().split()[-2:], "be"]))
            )
            return "" if hedged else found
    if tagged and "\n" not in text:
        return text if words else _first(text, words)
    if words:
        lines = [line.strip() for line in text[-MAX_ANSWER_CHARS:].splitlines() if line.strip()]
        formulas = [next(filter(None, match.groups())) for match in _MATH.finditer(lines[-1])] if lines else []
        return _last(formulas or lines)
    found = _last_quantity(text[-MAX_ANSWER_CHARS:])
    return found if found is not None else _first(text.strip().rpartition("\n")[2][:MAX_ANSWER_CHARS], words)


def _first(text: str, words: bool) -> str | None:
    """The answer at the beginning of a text, in its first sentence that is not blank."""
    if words:
        text = text.lstrip("*_:= \t\r\n")
        formula = _MATH.match(text)
        return next(filter(None, formula.groups())).strip() if formula else text.partition("\n")[0].strip() or None
    sentences = _sentences(text.lstrip("*_:= \t\r\n#"))
    for place, sentence in enumerate(sentences):
        if sentence.strip(_TRAILING + " "):
            retracted = any(_RETRACTED.match(later) for later in sentences[place + 1 : place + 2])
            found = quantity(sentence)
            if found is None:
                found = _SPELLED.get(sentence.strip(_TRAILING).lower())
            return "" if found and retracted else found
    return None


def _last_quantity(text: str) -> str | None:
    """The last quantity of free text; None or "" where there is none, or it is a part of a larger one."""
    sentences = _sentences(text)
    for place in range(len(sentences) - 1, -1, -1):
        found = quantity(sentences[place], last=True)
        if found is not None:
            if any(map(_DECLINED.match, sentences[max(0, place - 1) : place + 1])):
                return ""
            guesses = place and all(_BARE.fullmatch(one) for one in sentences[place - 1 : place + 1])
            return "" if guesses and quantity(sentences[place - 1]) != found else found
    return None


def _sentences(text: str) -> list[str]:
    """A tidied text's sentences, each formula without delimiters and as one token."""
    text = _MATH.sub(lambda match: " " + _HARD.join([*next(filter(None, match.groups())).split(), ""]) + " ", text)
    text = re.sub(r" (?=[.,;:!?](?:\s|$))", "", text)
    sentences = []
    for line in text.split("\n"):
        line = re.sub(r"\b(multiplied|divided) by\b", lambda m: "*" if m[1] == "multiplied" else "/", line)
        words: list[str] = []
        for word in line.split():
            words.append(word)
            if word[-1] in ".!?" and word.lower() not in _ABBREVIATIONS:
                sentences.append(" ".join(words))
                words = []
        sentences.append(" ".join(words))
    return [sentence for sentence in sentences if sentence]
