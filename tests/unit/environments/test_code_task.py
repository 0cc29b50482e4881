"""Programs as answers: finding them, judging them, and what a program does that wants a pass without an answer."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_responses import made_group, made_response

from llamarl.config import validate
from llamarl.environments.code import (
    CodeOptions,
    CodeTask,
    Verdict,
    code_item,
    judge_program,
    last_program,
    same_output,
    warning_of_boxes,
)
from llamarl.environments.factory import make_task
from llamarl.environments.pool import RewardPool
from llamarl.environments.sandbox import link, run
from llamarl.environments.sandbox.limits import BoxFailed, BoxResult
from llamarl.errors import DataError
from llamarl.settings.environments import RewardPoolConfig, TaskConfig, TaskSection
from llamarl.types import Failure, Group, Score

TESTS = ["assert scramble(2) == 81234567", "assert scramble(11) == -40506"]
RIGHT = "def scramble(x): return {2: 81234567, 11: -40506}[x]"


@pytest.fixture
def boxes() -> None:
    if why := run.why_no_box("bwrap"):
        pytest.skip(f"no box here: {why}")


def judge(program: str, tests: Any, entry_point: str = "", **options: Any) -> Verdict:
    return judge_program(program, tests, CodeOptions(**{"timeout_s": 8.0, **options}), entry_point=entry_point)


def passed(program: str, tests: Any, entry_point: str = "", **options: Any) -> tuple[int, int]:
    verdict = judge(program, tests, entry_point, **options)
    return verdict.num_passed, verdict.num_tests


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("no code", None),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nbetter:\n```python3\nx = 2\n```\nDone.", "x = 2\n"),
        ("```python\nx = 1\n```\nRun it:\n```bash\npython x.py\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\nx = 2\n", "x = 1\n"),
        ("```\ny = 1\n```\n```python\nx = 1\n```\nIt prints\n```\n4\n```", "x = 1\n"),
        ("```python\nx = 1", None),
        ("~~~~python\ns = '''\n```\n~~~\n'''\n~~~~", "s = '''\n```\n~~~\n'''\n"),
        ("1. so:\n   ```python\n   def f():\n       pass\n   ```", "def f():\n    pass\n"),
        ("<think>```python\nx = 1\n```</think> none", None),
        ("<think>```python\nx = 1\n```</think>\n```{.python}\nx = 3\n```", "x = 3\n"),
        ("```json\n{}\n```", None),
        ("``` python title=a.py\nx = 4\n```", "x = 4\n"),
        ("inline ```x = 1``` is none", None),
    ],
)
def test_the_last_closed_block_of_python_is_the_program(response: str, program: str | None) -> None:
    assert last_program(response) == program


def test_tests_have_three_forms() -> None:
    def read(tests: Any) -> Any:
        return code_item({"question": "q", "tests": tests, "level": 3}, "f:1").metadata

    assert read([" assert f(1) == 2 "]) == {"tests": ["assert f(1) == 2"], "entry_point": "", "level": 3}
    assert read("def test_a():\n  assert f(1)")["tests"] == "def test_a():\n  assert f(1)"
    pairs = [{"input": "1", "output": "2"}, {"input": "3", "output": "4"}]
    assert read(pairs)["tests"] == pairs == read({"input": ["1", "3"], "output": ["2", "4"]})["tests"]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"question": "q"}, "expected 'tests'"),
        ({"tests": ["assert 1"]}, "expected one of"),
        ({"question": "q", "tests": []}, "field 'tests' is list"),
        ({"question": "q", "tests": 3}, "field 'tests' is int 3"),
        ({"question": "q", "tests": ["assert f(1"]}, r"tests\[0\] is no Python"),
        ({"question": "q", "tests": "# nothing"}, "every program passes"),
        ({"question": "q", "tests": '{"inputs": ["1"], "outputs": ["2"]}'}, "every program passes"),
        ({"question": "q", "tests": "def f(): assert f(1)\nif __name__ == '__main__': f()"}, "every program passes"),
        ({"question": "q", "tests": ["import math", "f(1) == 2"]}, "every program passes"),
        ({"question": "q", "tests": "def check(candidate): assert candidate(1)"}, "needs the field entry_point"),
        ({"question": "q", "tests": [{"input": "1"}]}, "input and output alone"),
        ({"question": "q", "tests": [{"input": "1", "output": 2}]}, "input and output alone"),
        ({"question": "q", "tests": ["assert 1"], "entry_point": "a b"}, "name of a function"),
    ],
)
def test_a_line_that_cannot_be_judged_is_named(record: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=f"data.jsonl:7: .*{words}"):
        code_item(record, "data.jsonl:7")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": 3}, "task.options.timeout: unknown key; did you mean 'timeout_s'"),
        ({"box": "docker"}, "task.options.box: expected 'bwrap' or 'plain'"),
        ({"timeout_s": 0}, "task.options.timeout_s must be >= 0.5"),
        ({"memory_mb": 5.5}, "task.options.memory_mb.* integer"),
        ({"timeout_s": 20}, "must be at most task.pool.timeout_s \\(20.0\\) less 1"),
        ({"memory_mb": 9000}, "must be at most task.pool.memory_limit_mb \\(4096\\)"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        CodeOptions.read(options, RewardPoolConfig(timeout_s=20.0, memory_limit_mb=4096))


def section(**task: Any) -> TaskSection:
    return validate({"task": {"name": "code", "data": "a.jsonl", **task}}).task


@pytest.mark.parametrize("parent", [Path("/group"), None])
def test_a_run_says_what_its_boxes_do_not_hold(parent: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.environments.code.find_parent_of_groups", lambda: parent)
    assert "is NO BOX" in warning_of_boxes(section(options={"box": "plain"}))
    for boxed in (section(options={"box": "bwrap"}), section()):
        assert ("no control group" in warning_of_boxes(boxed)) == (parent is None)
    assert warning_of_boxes(validate({}).task) == ""


def test_output_is_compared_without_white_space_at_the_ends() -> None:
    assert same_output("1 2 \n3\n\n", "1 2\n3")
    assert same_output("", "\n")
    assert not same_output("1  2", "1 2")
    assert not same_output("\n1", "1")


# What right programs need.


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(x): return x", ["assert f(2) == 2", "assert f('ä\\udc80') == 'ä\\udc80'", "assert f(1.5) == 1.5 and f(None) is None"]),
        ("def f(x): return x", ["assert f([1, (2, {3})]) == [1, (2, {3})]", "assert f({(1, 2): b'x'}) == {(1, 2): b'x'}"]),
        ("def f(x): return x", ["assert f(10 ** 6000) == 10 ** 6000", "assert f(1 + 2j) == 1 + 2j", "assert f(range(3)) == [0, 1, 2]"]),
        ("def f(x): return x", ["assert f(float('inf')) > 1", "assert f(float('nan')) != 1", "assert isinstance(f(True), bool)"]),
        ("def f(x): return x", ["from decimal import Decimal\nassert f(Decimal('1.10')) == Decimal('1.10')",
                                "from fractions import Fraction\nassert f(Fraction(1, 3)) == Fraction(1, 3)"]),
        ("def f(a): a.sort(); a.append([9])", ["a = [3, 1]\nassert f(a) is None and a == [1, 3, [9]]"]),
        ("def f(d, s): d['k'] = 1; s.add(2)", ["d, s = {}, set()\nf(d, s)\nassert d == {'k': 1} and s == {2}"]),
        ("def f():\n    yield 1\n    yield 2", ["assert list(f()) == [1, 2]", "g = f()\nassert next(g) == 1 and next(g) == 2",
                                               "assert sum(f()) == 3", "assert [a for a in f()] == [1, 2]"]),
        ("class E(ValueError): pass\ndef f(): raise E('why', 3)",
         ["try: f()\nexcept ValueError as e: assert e.args == ('why', 3)\nelse: raise AssertionError",
          "import unittest\nunittest.TestCase().assertRaises(ValueError, f)"]),
        ("def f(x): return 1 / x", ["try: f(0)\nexcept ZeroDivisionError: pass\nelse: raise AssertionError"]),
        ("from collections import Counter, namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)\ndef g(s): return Counter(s)",
         ["assert f() == (1, 2)", "assert g('aab') == {'a': 2, 'b': 1}"]),
        ("from collections import deque\ndef f(d): return d.items(), deque(d)\ndef g():\n    while True: yield 7",
         ["assert f({1: 2}) == ([(1, 2)], [1])", "assert next(g()) == 7"]),
        ("import math\nLIMIT = 5\ndef f(x): return math.sqrt(x)", ["assert math.isclose(f(2), 2 ** 0.5) and LIMIT == 5"]),
        ("if __name__ == '__main__': raise SystemExit(1)\ndef f(): return 1", ["assert f() == 1"]),
        ("from __future__ import annotations\nimport solution\ndef f(): return 1", ["from solution import f as g\nassert g() == 1", "import solution\nassert solution.f() == 1"]),
        ("async def f(): return 3\ndef g():\n    import asyncio\n    return asyncio.run(f())", ["assert g() == 3"]),
        ("print('hello')\ndef f():\n    print('x' * 1000)\n    return 1", ["assert f() == 1"]),
        ("def f(n): return len(str(10 ** n))", ["assert f(5000) == 5001"]),
        (RIGHT, TESTS),
    ],
)  # fmt: skip
def test_a_right_program_passes(boxes: None, program: str, tests: list[str]) -> None:
    assert passed(program, tests) == (len(tests), len(tests))


def test_tests_are_counted_one_by_one(boxes: None) -> None:
    verdict = judge(
        "def f(x): return 2 * x",
        ["assert f(1) == 2", "assert f(1) == 3", "f(1, 2)", "import nothing", "raise SystemExit(0)"],
    )
    assert verdict == Verdict(num_tests=5, num_passed=1, compiled=True)


def test_a_test_file_has_functions_cases_of_unittest_or_check(boxes: None) -> None:
    functions = "base = f(1)\ndef test_a(): assert base == 2\ndef test_b(): assert f(2) == 5"
    assert passed("def f(x): return 2 * x", functions) == (1, 2)
    case = "import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n    def setUp(self): self.two = 2\n    def test_a(self): self.assertEqual(f(1), self.two)\n    def test_b(self):\n        with self.assertRaises(TypeError): f(None)\n    def test_c(self): self.assertEqual(f(1), 3)"
    assert passed("def f(x): return x + x", case) == (2, 3)
    check = "METADATA = {}\ndef check(candidate):\n    assert candidate(1) == 2\n"
    assert passed("def f(x): return 2 * x", check, "f") == (1, 1)
    assert passed("def f(x): return 3 * x", check, "f") == (0, 1)
    pytests = "class TestF:\n    def test_a(self): assert f(1) == 2\nasync def test_b(): assert f(2) == 4\ndef test(): assert f(3) == 6"
    assert passed("def f(x): return 2 * x", pytests) == (3, 3)
    assert passed("def f(x): return 2", pytests) == (1, 3)
    assert passed("def f(x): return 2 * x", "assert f(1) == 2\nassert f(2) == 4") == (1, 1)
    assert passed("def f(x): return 2 * x", "assert f(1) == 3") == (0, 1)


def test_a_name_that_python_has_is_pythons_unless_it_is_asked_for(boxes: None) -> None:
    assert passed("def sum(a, b): return a + b", ["assert sum(1, 2) == 3"]) == (0, 1)
    assert passed("def sum(a, b): return a + b", ["assert sum(1, 2) == 3"], "sum") == (1, 1)
    assert passed(
        "def f(): return [2]\ndef sorted(x): return [1]\ndef all(x): return True",
        ["assert sorted(f()) == [1]", "assert all([f() == 1])"],
    ) == (0, 2)


def test_whole_programs_are_judged_by_their_output(boxes: None) -> None:
    tests = [{"input": "2\n", "output": "4"}, {"input": "3\n", "output": "6\n"}]
    assert judge("print(int(input()) * 2)", tests) == Verdict(num_tests=2, num_passed=2, compiled=True)
    assert judge("print(4)", tests) == Verdict(num_tests=2, num_passed=1, compiled=True)
    assert judge("print(4)\nprint(6)\nraise SystemExit(1)", tests) == Verdict(num_tests=2, num_passed=0, compiled=True)
    assert judge("print(", tests) == Verdict(num_tests=2, num_passed=0, compiled=False)
    endless = judge("import time\nif input() == '3': time.sleep(99)\nprint(4)", tests, timeout_s=1.0)
    assert endless == Verdict(num_tests=2, num_passed=1, compiled=True, limit="time")
    assert judge("import os\nos.kill(os.getpid(), 9)", tests).crashed


# What a program may do that wants the reward and has no answer.

ANY = "class Any:\n    def __getattr__(self, n): return self\n    def __call__(self, *a, **k): return self\n" + "".join(
    f"    def __{name}__(self, *a): return {value}\n"
    for name, value in {
        "eq": True, "ne": True, "lt": True, "le": True, "gt": True, "ge": True, "contains": True, "bool": True, "hash": 0,
        "sub": "0", "rsub": "0", "add": "self", "radd": "self", "abs": "0.0", "float": "0.0", "int": "0", "index": "0", "round": "0",
        "instancecheck": True, "subclasscheck": True, "mul": "0", "rmul": "0", "truediv": "0", "and": True, "rand": True, "xor": "0",
    }.items()
)  # fmt: skip

FORGERIES = {
    "ends well at once": "import os\nos._exit(0)",
    "exits when imported": "raise SystemExit(0)",
    "ends in the function": "import os\ndef scramble(x): os._exit(0)",
    "exits in the function": "def scramble(x): raise SystemExit(0)",
    "ends in the function, later": "import os, threading\nthreading.Timer(.05, os._exit, (0,)).start()\ndef scramble(x):\n    while True: pass",
    "raises an assertion": "def scramble(x): raise AssertionError('passed')",
    "raises what frameworks skip": "import unittest\ndef scramble(x): raise unittest.SkipTest",
    "raises an error of its own that looks like another": "class Gone(BaseException): pass\ndef scramble(x): raise Gone",
    "says that it passed": "print('{\"passed\": 1}\\n{\"planned\": 2}\\n' * 9, flush=True)",
    "says so everywhere": "import os\nfor fd in range(300):\n    try: os.write(fd, b'{\"passed\": 1}\\n' * 9)\n    except OSError: pass",
    "equals everything": ANY + "def scramble(x): return Any()",
    "is a number that equals everything": "class I(int):\n    def __eq__(self, o): return True\n    __hash__ = None\ndef scramble(x): return I(1)",
    "is text that equals everything": "class S(str):\n    def __eq__(self, o): return True\n    __hash__ = None\ndef scramble(x): return S('x')",
    "is a list that equals everything": "class L(list):\n    def __eq__(self, o): return True\ndef scramble(x): return L()",
    "is a class that makes what equals everything": ANY + "scramble = Any",
    "is not there": "pass",
    "patches the built-ins": "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\nbuiltins.isinstance = lambda *a: True\ndef scramble(x): return 0",
    "patches the operators": "import operator\noperator.eq = lambda a, b: True\ndef scramble(x): return 0",
    "patches what it is run by": "import sys\nm = sys.modules['__main__']\nfor n in list(vars(m)):\n    if n.startswith('_') and callable(vars(m)[n]): setattr(m, n, lambda *a, **k: {'value': True})\ndef scramble(x): return 0",
    "patches the line": "import link, sys\nlink.encode = sys.modules['__main__'].encode = lambda v, depth=0: {'object': 0}\ndef scramble(x): return 0",
    "answers by itself": "import json, os\ndef send(m):\n    d = json.dumps(m).encode()\n    os.write(3, len(d).to_bytes(4, 'little') + d)\nsend({'loaded': 'yes', 'functions': ['scramble']})\nfor _ in range(20): send({'value': True})\nimport time\ntime.sleep(.2)",
    "answers with what was asked": "import json, os\ndef send(m):\n    d = json.dumps(m).encode()\n    os.write(3, len(d).to_bytes(4, 'little') + d)\nsend({'loaded': 'yes', 'functions': ['scramble', '__builtins__', 'AssertionError', 'check'], 'values': {'__debug__': False}})\nfor _ in range(20): send({'value': None, 'after': [5]})",
    "sends no JSON": "import os\nos.write(3, b'\\x05\\0\\0\\0hello')",
    "sends a message without end": "import os\nos.write(3, b'\\xff\\xff\\xff\\xff' + b'x' * 1000)\ndef scramble(x): return 0",
    "sends very deep data": "import os\nd = b'[' * 200000\nos.write(3, len(d).to_bytes(4, 'little') + d)",
    "sends names of built-in functions": "def scramble(x): return 0\nimport link, sys\nsys.modules['__main__'].encode = lambda v, depth=0: {'eval': 'open'}",
    "closes the line": "import os\nos.close(3)\ndef scramble(x): return 0",
    "looks for the tests": """
import os
word = ''.join(['8123', '4567'])
def scramble(x):
    for top in ('/tmp', '/etc', '/dev/shm', os.getcwd()):
        for folder, _, names in os.walk(top):
            for name in names:
                try:
                    if word in open(folder + '/' + name).read(): return int(word)
                except (OSError, UnicodeDecodeError): pass
    return 0
""",
    "looks for the tests in memory": """
import gc, sys
def scramble(x):
    word = ''.join(['8123', '4567'])
    for o in gc.get_objects():
        if isinstance(o, dict) and any(word in str(v)[:10000] for v in list(o.values()) if isinstance(v, (str, list))): return int(word)
    f = sys._getframe().f_back
    while f:
        if word in str(f.f_locals)[:10000]: return int(word)
        f = f.f_back
    return 0
""",
    "looks for the tests in other processes": "import glob\ndef scramble(x):\n    for f in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ'):\n        try:\n            if ''.join(['8123', '4567']) in open(f).read(): return 81234567\n        except OSError: pass\n    return 0",
    "never answers": "def scramble(x):\n    yield from iter(int, 1)\n",
    "puts a module of its own in the line's place": "import sys, types\nsys.modules['json'] = types.SimpleNamespace(dumps=lambda m: '{}', loads=lambda m: {})\ndef scramble(x): return 0",
    "takes all memory": "def scramble(x): return [0] * 10 ** 9",
    "returns very much": "def scramble(x): return 'x' * (40 << 20)",
    "returns itself": "def scramble(x):\n    a = []\n    a.append(a)\n    return a",
    "crashes": "import ctypes\ndef scramble(x): ctypes.string_at(0)",
    "forks": "import os\nos.fork()\ndef scramble(x): return 0",
    "is no Python": "def scramble(x) return 81234567",
    "is nothing that can be read": "\0",
    "is very deep": "x = " + "(" * 50000 + ")" * 50000,
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_program_without_the_answer_passes_nothing(boxes: None, name: str) -> None:
    tests = [
        *TESTS,
        "assert abs(scramble(3) - 3.14159) < 1e-6",
        "assert 77 in scramble(4)",
        "assert scramble(5) > 5",
        "assert 66 == scramble(6)",
    ]
    verdict = judge(FORGERIES[name], tests, timeout_s=2.0)
    assert (verdict.num_passed, verdict.num_tests) == (0, 6)


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("class V: pass\ndef f(): return V()", "f()"),
        ("class V: pass", "V()"),
        ("def f(): return print", "f()"),
        ("def f(g): return g(1)", "f(lambda x: x)"),
        ("def f(g): return 1", "f(int)"),
        ("def f(): return [object()]", "f()"),
    ],
)
def test_nothing_but_plain_data_passes_between_tests_and_program(boxes: None, program: str, test: str) -> None:
    assert passed(
        program, [f"try: {test}\nexcept TypeError as e: assert 'plain data' in str(e)\nelse: raise AssertionError"]
    ) == (1, 1)


def test_modules_of_the_tests_come_from_no_folder_that_a_program_may_write(tmp_path: Path) -> None:
    for name in ("tester", "link"):
        shutil.copy(Path(link.__file__).with_name(f"{name}.py"), tmp_path)
    (tmp_path / "tester.py").rename(tmp_path / "main.py")
    theirs, ours = socket.socketpair()
    with theirs, ours:
        start = f"import os; os.dup2({theirs.fileno()}, 3); os.execv({sys.executable!r}, ['python', '-s', '-S', '-B', 'main.py'])"
        tester = subprocess.Popen(
            [sys.executable, "-c", start], cwd=tmp_path, stdin=-1, stdout=-1, pass_fds=[theirs.fileno()], text=True
        )
        job = {"tests": ["import colorsys\nassert colorsys.rgb_to_yiq(0, 0, 0)"], "file": False, "entry_point": ""}
        assert tester.stdin is not None and tester.stdout is not None
        tester.stdin.write(json.dumps(job))
        tester.stdin.close()
        line = link.Line(ours.fileno())
        assert line.receive() == {"go": 1}
        (tmp_path / "colorsys.py").write_text("raise SystemExit")  # as a program does that now begins
        line.send({"loaded": "yes", "functions": [], "values": {}})
        assert '{"passed": 1}' in tester.stdout.read()
        assert tester.wait(20) == 0


def test_limits_that_a_program_met_are_told(boxes: None) -> None:
    assert judge("def f():\n    while True: pass", ["assert f()"], timeout_s=0.8).limit == "time"
    assert judge("import ctypes\ndef f(): ctypes.string_at(0)", ["assert f()"]).crashed
    assert judge("def f():\n    while True: print('x' * 999)", ["assert f()"]).limit == "output"


def test_the_examples_solutions_pass_their_tests(boxes: None) -> None:
    lines = (Path(__file__).parents[3] / "examples" / "code" / "questions.jsonl").read_text().splitlines()
    for line in lines:
        record = json.loads(line)
        tests = code_item(record, "questions.jsonl").metadata["tests"]
        verdict = judge(record["solution"], tests)
        assert verdict.share == 1.0, (record["question"], verdict)


# In the pool.


def group(item_metadata: dict[str, Any], *texts: str) -> Group:
    responses = (made_response(i, tokens=(), text=text) for i, text in enumerate(texts))
    return made_group(responses, tokens=(), text="q", task="", metadata=item_metadata)


def config(tmp_path: Path, **options: Any) -> TaskConfig:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "q", "tests": TESTS}) + "\n")
    pool = RewardPoolConfig(timeout_s=15.0, memory_limit_mb=2048)
    return TaskConfig(name="code", data=str(file), eval_fraction=0.0, options=options, pool=pool)


def test_hostile_answers_are_zero_and_the_pools_worker_goes_on(boxes: None, tmp_path: Path) -> None:
    right = f"```python\n{RIGHT}\n```"
    half = "```\ndef scramble(x): return 81234567\n```"
    hostile = ["no code at all", "```\nimport os\nwhile True: os.fork()\n```", "```\nimport os\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)\n```",
               "```\nimport os\nos.closerange(0, 99)\n```", "```\nx = bytearray(10 ** 10)\n```", "```\nwhile True: pass\n```"]  # fmt: skip
    task_config = config(tmp_path, timeout_s=1.0, score="share")
    metadata = dict(make_task(task_config, 0).item("train", 0).metadata)
    with RewardPool(task_config, seed=0) as pool:
        pids = pool.worker_pids
        (scored,) = pool.score([group(metadata, right, *hostile, half, right)])
        assert (pool.worker_pids, pool.num_replaced) == (pids, 0)
    outcomes = [response.outcome for response in scored.responses]
    assert all(isinstance(outcome, Score) for outcome in outcomes), outcomes
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == [1.0, *[0.0] * 6, 0.5, 1.0]
    parts = [dict(outcome.parts) for outcome in outcomes if isinstance(outcome, Score)]
    assert parts[0] == {
        "correct": 1.0, "passed": 1.0, "compiled": 1.0, "answered": 1.0, "crashed": 0.0,
        "time_limit": 0.0, "memory_limit": 0.0, "processes_limit": 0.0, "disk_limit": 0.0, "output_limit": 0.0,
    }  # fmt: skip
    assert (parts[1]["answered"], parts[6]["time_limit"], parts[7]["correct"], parts[7]["passed"]) == (
        0.0,
        1.0,
        0.0,
        0.5,
    )


def test_a_box_that_fails_fails_the_sample_and_is_no_zero(
    boxes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(config(tmp_path), 0)
    assert isinstance(task, CodeTask)
    task.prepare()
    monkeypatch.setattr(run, "_command", lambda *_: ["/bin/false"])
    prompt = group(dict(task.item("train", 0).metadata)).prompt
    with pytest.raises(BoxFailed, match="did not start"):
        task.respond(prompt, [f"```\n{RIGHT}\n```"])


KILLED = BoxResult(status=None, signal=9, stdout="", stderr="", wall_s=0.1, limit=None)


def killing(monkeypatch: pytest.MonkeyPatch, times: int, which: int) -> list[int]:
    """Boxes whose program number ``which`` is killed from outside the first ``times`` times; grows by one with each time they are run."""
    really, runs = run.run_together, []

    def run_together(programs: Any, *args: Any, **kwargs: Any) -> list[BoxResult]:
        found = list(really(programs, *args, **kwargs))
        runs.append(len(found))
        return [KILLED if i == which and len(runs) <= times else one for i, one in enumerate(found)]

    monkeypatch.setattr(run, "run_together", run_together)
    return runs


def test_a_program_that_was_killed_from_outside_is_judged_once_more(
    boxes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = killing(monkeypatch, 1, which=1)
    verdict = judge(RIGHT, TESTS)
    assert (verdict.num_passed, verdict.crashed, len(runs)) == (2, False, 2)
    runs = killing(monkeypatch, 1, which=0)
    verdict = judge("print(int(input()) + 1)", [{"input": "1\n", "output": "2"}])
    assert (verdict.num_passed, verdict.crashed, len(runs)) == (1, False, 2)


def test_a_program_that_kills_itself_is_wrong_and_tests_that_are_killed_twice_are_no_verdict(
    boxes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = judge("import os\ndef scramble(x): os.kill(os.getpid(), 9)", TESTS)
    assert (verdict.num_passed, verdict.crashed) == (0, True)
    killing(monkeypatch, 2, which=0)
    with pytest.raises(BoxFailed, match="killed from outside, twice"):
        judge(RIGHT, TESTS)


def test_without_a_box_the_pool_refuses_to_start_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(config(tmp_path), 0)
    assert isinstance(task, CodeTask)
    monkeypatch.setattr(run, "why_no_box", lambda kind: f"no {kind} today")
    with pytest.raises(DataError, match="task.options.box: .* no bwrap today. Install bubblewrap .*box = 'plain'"):
        task.prepare()
    named = make_task(config(tmp_path, box="plain"), 0)
    assert isinstance(named, CodeTask)
    with pytest.raises(DataError, match="task.options.box: .* no plain today$"):
        named.prepare()


def test_a_judge_of_the_users_own_may_judge_questions_of_code(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def score(prompt, response, metadata): return float(len(metadata['tests']))\n")
    file = config(tmp_path).data
    own = TaskConfig(name="code", data=file, eval_fraction=0.0, reward=f"{tmp_path}/own.py:score")
    with RewardPool(own, seed=0) as pool:
        (scored,) = pool.score([group(dict(make_task(own, 0).item("train", 0).metadata), "x")])
    outcome = scored.responses[0].outcome
    assert not isinstance(outcome, Failure) and outcome is not None and outcome.value == 2.0
