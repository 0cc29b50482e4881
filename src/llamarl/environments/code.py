"""Code as the answer: the program in a response is run against unit tests, in boxes.

    response ──last code block──▶ program ──▶ box ◀──calls, values──▶ box of the tests ──counts──▶ Score
                                              (statements, test files; see ``sandbox.tester``)
                                          ──▶ box ──standard output──▶ compared here ──▶ Score
                                              (input and output)

What a program does is a score: over its time, its memory or its output, crashed or not even Python,
its tests fail. What goes wrong with a box is none: ``BoxFailed`` fails the sample.

A line or row has a question and ``tests``, in one of three forms:

    ["assert double(2) == 4", ...]                 statements, each a test
    [{"input": "2\\n", "output": "4\\n"}, ...]      what a whole program reads and must write
    "def test_double():\\n    ..."                  a test file: test_ functions, unittest, or check(candidate)
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import re
import signal
import socket
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llamarl.data.items import Split, TaskItem
from llamarl.environments.items import TableItems, question_item
from llamarl.environments.sandbox import run
from llamarl.environments.sandbox.limits import BoxFailed, BoxLimits, BoxResult
from llamarl.environments.sandbox.memory_group import find_parent_of_groups
from llamarl.environments.sandbox.run import Kind
from llamarl.errors import DataError, Mistake
from llamarl.process_tree import hide_memory
from llamarl.running_time import running_s
from llamarl.settings.environments import MixedTask, RewardPoolConfig, TaskConfig, TaskSection
from llamarl.strict import STRICT, Reader
from llamarl.types import Prompt, Score

__all__ = [
    "CodeOptions",
    "CodeTask",
    "Verdict",
    "code_item",
    "judge_program",
    "last_program",
    "same_output",
    "warning_of_boxes",
]

_HERE = Path(run.__file__).parent
_LIMITS = ("time", "memory", "processes", "disk", "output")
_TESTER_OUTPUT = 16 << 20
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^`\n]*)$")
_PYTHON = ("", "python", "py", "python3", "py3")
_FORMS = (
    'a list of statements ("assert f(2) == 4"), a list of {"input": ..., "output": ...}, or the text of a test file'
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CodeOptions:
    """How programs are run and scored."""

    timeout_s: Annotated[float, Field(ge=0.5)] = 10.0
    """Seconds that all tests of a sample may take together, the start of the boxes included."""

    memory_mb: Annotated[int, Field(ge=64)] = 512
    """MiB that a program may take; an interpreter takes some 30."""

    score: Literal["all", "share"] = "all"
    """all: 1 where every test passes, else 0. share: the share of the tests that pass."""

    box: Kind = "bwrap"
    """bwrap: bubblewrap; where it does not work the run is refused. plain is no box, and is taken
    only by name: limits hold, but programs can read what the user can."""

    @classmethod
    def read(cls, options: Mapping[str, Any], pool: RewardPoolConfig | None = None) -> CodeOptions:
        """Options of a recipe.

        Args:
            pool: Of the worker around the box, whose time and memory must be enough for it; None: not looked at.

        Raises:
            DataError: Options that there are not, or values that cannot be; all mistakes at once.
        """
        made, found = Reader(cls).read(options)
        mistakes = [Mistake(f"task.options.{one.key}", one.text) for one in found]
        if pool and made.timeout_s + 1 > pool.timeout_s:
            text = (
                f"must be at most task.pool.timeout_s ({pool.timeout_s}) less 1, got {made.timeout_s}: a worker over its "
                "time fails the sample, a program over its time is a wrong answer"
            )
            mistakes.append(Mistake("task.options.timeout_s", text, ("task.pool.timeout_s",)))
        if pool and 0 < pool.memory_limit_mb < made.memory_mb:
            text = f"must be at most task.pool.memory_limit_mb ({pool.memory_limit_mb}), got {made.memory_mb}"
            mistakes.append(Mistake("task.options.memory_mb", text, ("task.pool.memory_limit_mb",)))
        if mistakes:
            raise DataError("\n".join(map(str, mistakes)), mistakes=mistakes)
        return made


def warning_of_boxes(config: TaskConfig) -> str:
    """Say what the boxes of a recipe's programs do not hold; empty where they hold all, or none runs."""
    tasks = list(config.tasks.values()) if isinstance(config, TaskSection) else []
    boxes = {task.options.get("box") for task in tasks or [config] if task.name == "code"}
    if boxes and "plain" not in boxes and find_parent_of_groups() is None:
        return (
            "no control group can be made here: of programs' memory, what the kernel holds for them (buffers, locks, "
            "mappings; some hundred MiB) is in no limit (docs/code.md)"
        )
    if "plain" not in boxes:
        return ""
    return (
        "task.options.box = 'plain' is NO BOX: programs that the policy writes can read, and send to other processes of this "
        "machine, whatever the user who runs them can (docs/code.md)"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests said of a program."""

    num_tests: int
    num_passed: int
    compiled: bool
    """It was Python, as far as was seen."""
    limit: str | None = None
    """That it met, of ``sandbox.limits.Limit``."""
    crashed: bool = False
    """A signal ended it."""

    @property
    def share(self) -> float:
        """Of the tests, 0 to 1."""
        return self.num_passed / self.num_tests


class CodeTask:
    """Questions of a table whose answers are programs. Single-turn.

    Raises:
        DataError: Options or data are wrong.
    """

    name = "code"

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        pool = None if isinstance(config, MixedTask) else config.pool  # a mixture's pool is of all its tasks
        self._options = CodeOptions.read(config.options, pool)
        self._items = TableItems(config, code_item, seed=seed)

    def prepare(self) -> None:
        """Find out which box there is, where programs will be judged.

        Raises:
            DataError: None that the recipe allows.
        """
        _check_box(self._options.box)

    def num_items(self, split: Split) -> int | None:
        return self._items.num_items(split)

    def item(self, split: Split, index: int) -> TaskItem:
        return self._items.item(split, index)

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        """Run the program of the last turn, in a box that ``prepare`` has tried.

        Raises:
            BoxFailed: The box did not come up or broke; nothing is known of the program.
        """
        tests, entry_point = prompt.metadata["tests"], prompt.metadata.get("entry_point", "")
        program = last_program(turns[-1])
        if program is None:
            return _score(Verdict(num_tests=1, num_passed=0, compiled=False), self._options.score, answered=False)
        verdict = judge_program(program, tests, self._options, entry_point=entry_point)
        return _score(verdict, self._options.score, answered=True)


def _check_box(kind: Kind) -> None:
    """Try the box that programs will run in.

    Raises:
        DataError: It does not work here.
    """
    if why := run.why_no_box(kind):
        cure = (
            ""
            if kind == "plain"
            else (
                ". Install bubblewrap and allow it namespaces (docs/code.md), or set options = { box = 'plain' }, which is no box: "
                "programs can then read what the user can"
            )
        )
        raise DataError.at("task.options.box", f": programs cannot be run in a box of kind {kind} here: {why}{cure}")
    if kind == "plain":
        hide_memory()  # programs run as this user: what is expected of them is in this process


def _score(verdict: Verdict, how: str, *, answered: bool) -> Score:
    correct = float(verdict.num_passed == verdict.num_tests)
    parts = {
        "correct": correct,
        "passed": verdict.share,
        "compiled": float(verdict.compiled),
        "answered": float(answered),
    }
    parts |= {f"{limit}_limit": float(verdict.limit == limit) for limit in _LIMITS}
    parts["crashed"] = float(verdict.crashed)
    return Score(value=correct if how == "all" else verdict.share, parts=parts)


def judge_program(program: str, tests: Any, options: CodeOptions, *, entry_point: str = "") -> Verdict:
    """Run a program against tests, which have one of the three forms.

    Args:
        entry_point: Name in the program that the tests mean even where Python has it too, such as ``sum``; what
            ``check(candidate)`` gets.

    Raises:
        BoxFailed: A box did not come up or broke.
    """
    if isinstance(tests, list) and isinstance(tests[0], Mapping):
        return _judge_output(program, tests, options)
    return _judge_calls(program, tests, options, entry_point)


def same_output(given: str, wanted: str) -> bool:
    """Equal but for white space at the ends of lines and blank lines at the end."""

    def lines(text: str) -> list[str]:
        return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().split("\n")

    return lines(given) == lines(wanted)


def _judge_output(program: str, tests: Sequence[Mapping[str, str]], options: CodeOptions) -> Verdict:
    """Each input in a box of its own; what is expected never enters one."""
    end = running_s() + options.timeout_s
    passed, limit, crashed, compiled = 0, None, False, True
    for test in tests:
        left = end - running_s()
        if left <= 0:
            limit = "time"
            break
        limits = BoxLimits(wall_s=left, memory_mb=options.memory_mb)
        box = run.Program(source=program, stdin=test["input"], limits=limits)
        (found,) = run.run_together([box], options.box)
        if _was_killed(found):
            (found,) = run.run_together([box], options.box)
        passed += found.ok and same_output(found.stdout, test["output"])
        limit, crashed = limit or found.limit, crashed or found.signal is not None
        last = found.stderr.rstrip().rpartition("\n")[2]
        if found.status == 1 and last.startswith(("SyntaxError", "IndentationError", "TabError")):
            compiled = False
            break
        if found.limit == "time":
            break
    return Verdict(num_tests=len(tests), num_passed=passed, compiled=compiled, limit=limit, crashed=crashed)


@cache
def _script(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _was_killed(found: BoxResult) -> bool:
    """Whether it may have been killed from outside, by the machine for want of memory or by a
    person: that says nothing of the program, so it is run once more. One that kills itself does so
    again."""
    return found.signal == signal.SIGKILL and found.limit is None


def _judge_calls(program: str, tests: Any, options: CodeOptions, entry_point: str) -> Verdict:
    """Tests in one box, the program in another, a line between them.

    Raises:
        BoxFailed: The tests never began to run, or were killed twice.
    """
    counted, played = _play_tests(program, tests, options, entry_point)
    if _was_killed(counted) or _was_killed(played):
        counted, played = _play_tests(program, tests, options, entry_point)
    if _was_killed(counted):
        raise BoxFailed("the box of the tests was killed from outside, twice")
    return _count(counted, played, 1 if isinstance(tests, str) else len(tests))


def _play_tests(program: str, tests: Any, options: CodeOptions, entry_point: str) -> tuple[BoxResult, BoxResult]:
    """How the tests' box ended, and how the program's."""
    job = {
        "tests": [tests] if isinstance(tests, str) else tests,
        "file": isinstance(tests, str),
        "entry_point": entry_point,
    }
    tests_end, program_end = socket.socketpair()
    with tests_end, program_end:
        tester = run.Program(
            source=_script("tester.py"),
            stdin=json.dumps(job),
            files={"link.py": _script("link.py")},
            channel=tests_end.fileno(),
            may_hide=True,
            limits=BoxLimits(
                wall_s=options.timeout_s, memory_mb=max(512, options.memory_mb), output_bytes=_TESTER_OUTPUT
            ),
        )
        player = run.Program(
            source=_script("player.py"),
            files={"link.py": _script("link.py"), "solution.py": program},
            channel=program_end.fileno(),
            limits=BoxLimits(wall_s=options.timeout_s, memory_mb=options.memory_mb),
        )
        counted, played = run.run_together([tester, player], options.box, close=(tests_end, program_end))
    return counted, played


def _count(counted: BoxResult, played: BoxResult, num_tests: int) -> Verdict:
    """The verdict, from what the tests' box said and how both ended.

    Raises:
        BoxFailed: The tests never began to run.
    """
    lines = [json.loads(line) for line in counted.stdout.splitlines() if line.endswith("}")]
    said: dict[str, Any] = {key: value for line in lines for key, value in line.items()}
    if "ready" not in said and counted.limit != "time":
        raise BoxFailed(f"the tests did not start: {counted.stderr.strip()[-500:] or counted}")
    limit = played.limit or ("time" if counted.limit == "time" else None)
    return Verdict(
        num_tests=said.get("planned", num_tests),
        num_passed=sum("passed" in line for line in lines),
        compiled=said.get("loaded") in ("yes", "raised"),
        limit=limit,
        crashed=played.signal is not None,
    )


def last_program(response: str) -> str | None:
    """The inside of the last closed fence of three or more backticks or tildes whose language is Python; where there is
    none, whose language is not given.

    What stands before a last ``</think>`` does not count. A fence that was never closed, and one in
    another language, is none. Indentation that the fence has is taken off its lines.
    """
    found: str | None = None
    named = False
    opened, language, indent = "", "", 0
    lines: list[str] = []
    for line in response.rpartition("</think>")[2].splitlines():
        fence = _FENCE.match(line)
        if not opened:
            if fence:
                indent, opened, lines = len(fence[1]), fence[2], []
                language = (fence[3].split() or [""])[0].strip("{}.").lower()
        elif fence and not fence[3].strip() and fence[2][0] == opened[0] and len(fence[2]) >= len(opened):
            if language in _PYTHON and (language or not named):  # what a program prints is shown without a language
                found, named = "\n".join(lines) + "\n", bool(language)
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
    tests = _read_tests(record["tests"], where, entry_point)
    return dataclasses.replace(item, metadata={**item.metadata, "tests": tests, "entry_point": entry_point})


def _read_tests(tests: Any, where: str, entry_point: str) -> Any:
    if isinstance(tests, Mapping) and set(tests) == {"input", "output"}:  # a table may have columns for rows
        ends = tests["input"], tests["output"]
        if all(isinstance(end, list) for end in ends) and len(ends[0]) == len(ends[1]):
            tests = [{"input": given, "output": wanted} for given, wanted in zip(*ends, strict=True)]
    if isinstance(tests, str) and tests.strip():
        text = textwrap.dedent(tests)
        body = _parsed(text, where, "tests")
        if not any(_acts(node) or _is_found(node, entry_point) for node in body):
            raise _idle(where, text)
        return text
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        sources = [textwrap.dedent(test).strip() for test in tests]
        bodies = [_parsed(source, where, f"tests[{place}]") for place, source in enumerate(sources)]
        if not any(map(_acts, itertools.chain(*bodies))):
            raise _idle(where, sources[0])
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


def _parsed(source: str, where: str, name: str) -> list[ast.stmt]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{where}: {name} is no Python: {error}: {source[:80]!r}; fix or remove the line") from error


def _idle(where: str, source: str) -> DataError:
    return DataError(
        f"{where}: every program passes tests such as {source[:80]!r}: nothing in them is run; expected {_FORMS}; "
        "check(candidate) needs the field entry_point"
    )


def _acts(node: ast.stmt) -> bool:
    """False for what may stand around tests, and for a value alone: tests in JSON, a comparison without assert."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Compare))
    if isinstance(node, ast.If) and "__name__" in ast.dump(node.test):
        return False  # tests are no main program
    return not isinstance(
        node, (ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    )


def _is_found(node: ast.stmt, entry_point: str) -> bool:
    """Whether a test file's function or class is looked at for tests."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return node.name.startswith("test") or bool(entry_point) and node.name == "check"
    return isinstance(node, ast.ClassDef)
