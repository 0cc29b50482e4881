"""Questions whose answer is a program, and the program in a response.

A line or row has a question and ``tests``, in one of three forms:

    ["assert double(2) == 4", ...]                 statements, each a test
    [{"input": "2\\n", "output": "4\\n"}, ...]      what a whole program reads and must write
    "def test_double():\\n    ..."                  a test file: test_ functions, unittest, or check(candidate)
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llamarl.data.items import TaskItem
from llamarl.environments.items import question_item
from llamarl.errors import DataError

__all__ = ["code_item", "last_program"]

_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^`\n]*)$")
_PYTHON = ("", "python", "py", "python3", "py3")
_FORMS = (
    'a list of statements ("assert f(2) == 4"), a list of {"input": ..., "output": ...}, or the text of a test file'
)


def last_program(response: str) -> str | None:
    """The inside of the last closed fence of three or more backticks or tildes whose language is Python or not given.

    What stands before a last ``</think>`` does not count. A fence that was never closed, and one in
    another language, is none. Indentation that the fence has is taken off its lines.
    """
    found: str | None = None
    opened, language, indent = "", "", 0
    lines: list[str] = []
    for line in response.rpartition("</think>")[2].splitlines():
        fence = _FENCE.match(line)
        if not opened:
            if fence:
                indent, opened, lines = len(fence[1]), fence[2], []
                language = (fence[3].split() or [""])[0].strip("{}.").lower()
        elif fence and not fence[3].strip() and fence[2][0] == opened[0] and len(fence[2]) >= len(opened):
            if language in _PYTHON:
                found = "\n".join(lines) + "\n"
            opened = ""
        else:
            blank = len(line) - len(line.lstrip(" \t"))
            lines.append(line[min(indent, blank) :])
    return found


def code_item(record: Mapping[str, Any], where: str) -> TaskItem:
    """One line or row; fields besides the question stay in the metadata, ``tests`` in one of its three forms.

    Raises:
        DataError: No question, no tests, or tests that are none of the three forms or no Python; names ``where``.
    """
    if "tests" not in record:
        raise DataError(f"{where}: got fields {sorted(record)}, expected 'tests': {_FORMS}")
    item = question_item(record, where)
    entry_point = record.get("entry_point", "")
    if not isinstance(entry_point, str) or (entry_point and not entry_point.isidentifier()):
        raise DataError(f"{where}: field 'entry_point' is {entry_point!r:.60}, expected the name of a function")
    tests = _read_tests(record["tests"], where)
    return replace(item, metadata={**item.metadata, "tests": tests, "entry_point": entry_point})


def _read_tests(tests: Any, where: str) -> Any:
    if isinstance(tests, Mapping) and set(tests) == {"input", "output"}:  # a table may have columns for rows
        ends = tests["input"], tests["output"]
        if all(isinstance(end, list) for end in ends) and len(ends[0]) == len(ends[1]):
            tests = [{"input": given, "output": wanted} for given, wanted in zip(*ends, strict=True)]
    if isinstance(tests, str) and tests.strip():
        text = textwrap.dedent(tests)
        _check_python(text, where, "tests")
        return text
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        sources = [textwrap.dedent(test).strip() for test in tests]
        for place, source in enumerate(sources):
            _check_python(source, where, f"tests[{place}]")
        return sources
    if isinstance(tests, list) and tests and all(isinstance(test, Mapping) for test in tests):
        for place, test in enumerate(tests):
            ends = test.get("input"), test.get("output")
            if set(test) != {"input", "output"} or not all(isinstance(end, str) for end in ends):
                raise DataError(
                    f"{where}: tests[{place}] is {dict(test)!r:.80}, expected the texts input and output alone"
                )
        return [dict(test) for test in tests]
    raise DataError(f"{where}: field 'tests' is {type(tests).__name__} {tests!r:.60}, expected {_FORMS}")


def _check_python(source: str, where: str, name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{where}: {name} is no Python: {error}: {source[:80]!r}; fix or remove the line") from error
    if not parsed.body:
        raise DataError(f"{where}: {name} is blank, expected {_FORMS}")
