"""A function of a script or notebook becomes a module that other processes can import."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from llamarl.api.functions import import_path_of
from llamarl.errors import ConfigError

SCRIPT = """
import json as j
from pathlib import Path
from statistics import mean
BONUS = {"a": 0.25, "b": [1, 2]}
THRESHOLD = -0.5
class Marker:
    sign = "#"
def helper(text):
    return len(text.split(Marker.sign))
def again(depth):
    return 0 if depth == 0 else again(depth - 1)
def reward(prompt: str, response: str, answer: str, scale: float = THRESHOLD) -> float:
    sum = [helper(response) for _ in range(2)]
    return mean(sum) + BONUS["a"] + j.loads("1") + again(2) + scale
UNUSED = object()
from llamarl.api.functions import import_path_of
"""


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    return subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=60)


def load(path: str) -> Any:
    file, _, name = path.rpartition(":")
    spec = importlib.util.spec_from_file_location("standalone", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def test_a_function_of_a_script_goes_with_all_that_it_uses(tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT + "print(import_path_of(reward), reward('', 'a#b', ''))\n")
    path, value = done.stdout.split()
    assert path.startswith(str(tmp_path / "llamarl_functions" / "reward_"))
    assert load(path)("", "a#b", "") == float(value) == 2 + 0.25 + 1 + 0 - 0.5
    assert "UNUSED" not in Path(path.rpartition(":")[0]).read_text()


def test_compiled_patterns_of_a_script_go_with_it(tmp_path: Path) -> None:
    script = """
import re
BOXED, LINE = re.compile(r"\\\\boxed\\{(.*)'\\}", re.DOTALL | re.IGNORECASE), re.compile("^x$", re.M)
def reward(prompt, response, answer):
    return float(BOXED.search(response)[1] == answer) + len(LINE.findall(response))
from llamarl.api.functions import import_path_of
print(import_path_of(reward), reward("", "x\\n\\\\BOXED{a\\nb'}\\nx", "a\\nb"))
"""
    done = run_script(tmp_path, script)
    path, value = done.stdout.split()
    assert load(path)("", "x\n\\BOXED{a\nb'}\nx", "a\nb") == float(value) == 3.0


def test_the_same_function_gives_the_same_path_and_another_another(tmp_path: Path) -> None:
    first = run_script(tmp_path, SCRIPT + "print(import_path_of(reward))").stdout
    (file,) = (tmp_path / "llamarl_functions").iterdir()
    written_ns = file.stat().st_mtime_ns
    assert run_script(tmp_path, SCRIPT + "print(import_path_of(reward))").stdout == first
    assert file.stat().st_mtime_ns == written_ns, "workers of another run may be importing it"
    assert run_script(tmp_path, SCRIPT.replace("0.25", "0.75") + "print(import_path_of(reward))").stdout != first


def test_the_script_itself_is_not_run_again(tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT + "print(import_path_of(reward)); open('ran', 'a').write('x')")
    load(done.stdout.strip())
    assert (tmp_path / "ran").read_text() == "x"


def test_decorators_of_another_module_do_not_hide_what_a_function_uses(tmp_path: Path) -> None:
    (tmp_path / "timing.py").write_text(
        "import functools\ndef timed(f):\n    return functools.wraps(f)(lambda *given: f(*given))\n"
    )
    script = """
import functools
import math
from timing import timed
BASE = 4
@functools.cache
def helper(text):
    return math.log(len(text), BASE)
@timed
def reward(prompt, response, answer):
    return helper(response) + BASE
from llamarl.api.functions import import_path_of
print(import_path_of(reward), reward("", "xx", ""))
"""
    path, value = run_script(tmp_path, script).stdout.split()
    text = Path(path.rpartition(":")[0]).read_text()
    assert (
        float(value) == 4.5 and "import math" in text and "BASE = 4" in text and "@functools.cache\ndef helper" in text
    )


def test_modules_inside_a_package_go_with_it(tmp_path: Path) -> None:
    script = """
import xml.etree.ElementTree
import xml.dom as d, xml.dom.minidom
def helper(text):
    return d.minidom.parseString(text).documentElement.tagName
def reward(prompt, response, answer):
    return float(xml.etree.ElementTree.fromstring(response).text) + len(helper(response))
from llamarl.api.functions import import_path_of
print(import_path_of(reward), reward("", "<ab>3</ab>", ""))
"""
    path, value = run_script(tmp_path, script).stdout.split()
    file, _, name = path.rpartition(":")
    alone = f"import runpy; print(runpy.run_path({file!r})[{name!r}]('', '<ab>3</ab>', ''))"
    done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), value) == ("5.0", "5.0"), done


@pytest.mark.parametrize("module", ["my_parsing", "a_folder.of_modules.parsing"])
def test_modules_beside_a_script_are_found_from_elsewhere(tmp_path: Path, module: str) -> None:
    file = tmp_path / f"{module.replace('.', '/')}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("def parsed(text):\n    return float(text)\n")
    script = f"""
import math
from {module} import parsed
def reward(prompt, response, answer):
    return math.ceil(parsed(response))
from llamarl.api.functions import import_path_of
print(import_path_of(reward))
"""
    path = run_script(tmp_path, script).stdout.strip()
    assert f"sys.path += [{str(tmp_path)!r}]" in Path(path.rpartition(":")[0]).read_text()
    alone = f"from llamarl.import_path import resolve; print(resolve({path!r})('', '3.5', ''))"
    done = subprocess.run([sys.executable, "-P", "-c", alone], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "4", done


@pytest.mark.parametrize("main", ["del __file__", "__file__ = linecache.__file__"], ids=["jupyter", "marimo"])
def test_a_class_of_a_notebook_goes_with_it_as_it_was_last_defined(tmp_path: Path, main: str) -> None:
    script = f"import linecache\n{main}  # its cells are known by their lines alone"
    script += """
from llamarl.api.functions import import_path_of
CELLS = [
    "class Mark:\\n    sign = '?'",
    "import enum\\nclass Mark(enum.Enum):\\n    sign = '#'",
    "def reward(prompt, response, answer):\\n    return response.count(Mark.sign.value)",
    "class Mark(",
]
for number, text in enumerate(CELLS):
    name = f"/tmp/ipykernel_1/{number}.py"
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    if number < 3:
        exec(compile(text, name, "exec"))
print(import_path_of(reward), reward("", "#?#", ""))
"""
    path, value = run_script(tmp_path, script).stdout.split()
    assert load(path)("", "#?#", "") == int(value) == 2


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import_path_of(lambda p, r, a: 0.0)", "no plain function"),
        ("import_path_of(''.join)", "no plain function"),
        ("handle = open(__file__)\ndef f(p, r, a): return handle.read()\nimport_path_of(f)", "uses handle"),
        ("exec('def f(p, r, a): return 0.0')\nimport_path_of(f)", "source of f is not known"),
        ("def f(p, r, a): return 0.0\nopen(__file__, 'w').write('def g(): pass\\n' * 9)\nimport_path_of(f)", "f is not known"),
        ("def outer():\n    x = object()\n    def f(p, r, a): return x\n    return f\nimport_path_of(outer())", "plain function"),
    ],
)  # fmt: skip
def test_what_cannot_stand_alone_is_refused_by_name(tmp_path: Path, code: str, told: str) -> None:
    done = run_script(tmp_path, f"from llamarl.api.functions import import_path_of\n{code}\n")
    assert done.returncode == 1
    assert "ConfigError: reward: " in done.stderr and told in done.stderr


def a_reward_of_a_module(prompt: str, response: str, answer: str) -> float:
    return 1.0


def test_a_function_of_a_module_is_named_by_its_file() -> None:
    assert import_path_of(a_reward_of_a_module) == f"{Path(__file__).resolve()}:a_reward_of_a_module"


def test_a_function_of_a_module_in_a_zip_is_named_by_its_module(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("zipped_judge.py", "def reward(completions):\n    return [1.0]\n")
    script = "import sys\nfrom llamarl.api.functions import import_path_of\nsys.path.insert(0, 'code.zip')\n"
    done = run_script(tmp_path, script + "from zipped_judge import reward\nprint(import_path_of(reward))")
    assert done.stdout.strip() == "zipped_judge:reward", done


def test_text_is_taken_as_it_is() -> None:
    assert import_path_of("my.module:f") == "my.module:f"


def test_the_error_names_the_key() -> None:
    with pytest.raises(ConfigError, match="^algorithm.name: "):
        import_path_of(lambda x: x, "algorithm.name")


def test_a_function_whose_module_needs_its_package_is_named_by_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    files = {"limits": "MOST = 3\n", "plain": "def reward(completions):\n    return [1.0]\n"}
    files["__init__"] = files["judges"] = "from .limits import MOST\ndef reward(completions):\n    return [MOST]\n"
    for name, text in files.items():
        (tmp_path / "mine" / f"{name}.py").write_text(text)
    script = """
import mine
from mine import judges, plain
from llamarl.api.functions import import_path_of
from llamarl.import_path import check, import_user
for module in (judges, mine, plain):
    check(path := import_path_of(module.reward), "task.reward")
    print(path, import_user(path, "task.reward")(["x"]))
"""
    done = run_script(tmp_path, script)
    alone = f"{tmp_path / 'mine' / 'plain.py'}:reward [1.0]"
    assert done.stdout.splitlines() == ["mine.judges:reward [3]", "mine:reward [3]", alone], done
