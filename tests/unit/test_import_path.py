"""Import paths of installed code and of a user's own files."""

import pickle
import sys
from pathlib import Path

import pytest

from llamarl.api.run import train
from llamarl.environments.functions import how_to_call
from llamarl.environments.worker import _first_lines
from llamarl.errors import ConfigError, DataError
from llamarl.import_path import absolute_import_path, call, import_user, resolve, signature_of


def write(folder: Path, text: str, name: str = "own_task.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_dotted_path_names_installed_code() -> None:
    assert resolve("pathlib:Path.cwd")() == Path.cwd()


def test_a_file_is_loaded_once_and_its_classes_travel_by_pickle(tmp_path: Path) -> None:
    path = write(tmp_path, "class Payload:\n    number = 3\n")
    payload_class = resolve(f"{path}:Payload")
    assert resolve(f"{path}:Payload") is payload_class
    assert type(pickle.loads(pickle.dumps(payload_class()))) is payload_class


def test_the_next_run_of_a_program_reads_a_file_that_was_edited_since_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(*given: object) -> None:
        raise ConfigError(str(resolve(f"{path}:f")()))

    monkeypatch.setattr("llamarl.api.settings.run_config", config)
    for value in ("old", "mended"):
        path = write(tmp_path, f"def f():\n    return {value!r}\n")
        with pytest.raises(ConfigError, match=value):
            train("tiny")


def test_files_of_one_name_in_two_folders_do_not_meet(tmp_path: Path) -> None:
    paths = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        paths.append(write(tmp_path / str(number), f"def f():\n    return {number}\n"))
    assert [resolve(f"{path}:f")() for path in paths] == [1, 2]


def test_a_relative_file_becomes_absolute_and_a_module_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_import_path("tasks/own.py:f") == f"{tmp_path}/tasks/own.py:f"
    assert absolute_import_path("package.module:f") == "package.module:f"


@pytest.mark.parametrize(
    ("import_path", "message"),
    [
        ("no_colon", "is no import path; expected package.module:callable"),
        (":f", "is no import path"),
        ("module:", "is no import path"),
        (
            "no_such_package.module:f",
            "no module 'no_such_package.module' (nothing named 'no_such_package' on sys.path)",
        ),
        ("llamarl.no_such_module:f", "nothing named 'llamarl.no_such_module'"),
        ("no/such/file.py:f", "no file "),
        ("llamarl.determinism:no_such_name", "has no 'no_such_name'; its callables are ["),
        ("llamarl.determinism:__name__", "names a str, expected something to call"),
    ],
)
def test_a_wrong_path_is_refused_and_says_what_is_wrong(import_path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(import_path)
    assert repr(import_path) in str(caught.value) and message in str(caught.value)


def test_the_users_own_error_comes_through_and_the_next_try_starts_afresh(tmp_path: Path) -> None:
    path = write(tmp_path, "raise RuntimeError('at import')")
    with pytest.raises(RuntimeError, match="at import"):
        resolve(f"{path}:f")
    write(tmp_path, "def f():\n    return 5\n")
    assert resolve(f"{path}:f")() == 5


def test_a_missing_import_inside_the_users_module_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "import a_package_that_is_missing\n", "own_module_with_missing_import.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        resolve("own_module_with_missing_import:f")


def test_what_a_file_imports_from_beside_it_is_found(tmp_path: Path) -> None:
    (tmp_path / "beside_the_loss.py").write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "its_loss.py").write_text("from beside_the_loss import twice\n\n\ndef f(x):\n    return twice(x)\n")
    assert resolve(f"{tmp_path}/its_loss.py:f")(3) == 6


def test_an_error_of_a_library_is_told_with_the_users_line(tmp_path: Path) -> None:
    text = "import json\nclass Reader:\n    def __call__(self, x):\n        return json.loads(x)\nread = Reader()\n"
    path = f"{write(tmp_path, text)}:read"
    with pytest.raises(ConfigError, match=f"raised JSONDecodeError: .* at {tmp_path}/own_task.py:4: return json.loads"):
        call(path, "algorithm.name", "{")
    with pytest.raises(ValueError) as caught:
        resolve(path)("{")
    place = f"  at {tmp_path}/own_task.py:4: return json.loads(x)"
    assert _first_lines(caught.value, 0).splitlines()[-1] == place
    broken = write(tmp_path, "import json\nTABLE = json.loads('{')\n", "broken.py")
    with pytest.raises(DataError, match=f"cannot import .*: JSONDecodeError: .* at {broken}:2: TABLE = json.loads"):
        import_user(f"{broken}:f", "task.reward")


def test_an_error_of_llamarls_own_names_no_line_of_the_users(tmp_path: Path) -> None:
    path = write(tmp_path, "from llamarl.strict import Mistakes as raiser\n")
    with pytest.raises(ConfigError) as caught:
        call(f"{path}:raiser", "algorithm.name", 3)  # no iterable
    assert " at /" not in str(caught.value)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated when a function is made")
def test_annotations_may_name_what_type_checkers_alone_import(tmp_path: Path) -> None:
    path = write(tmp_path, "def reward(prompt, response: Sequence, answer) -> float:\n    return 0.5\n")
    reward = resolve(f"{path}:reward")
    assert list(signature_of(reward).parameters) == ["prompt", "response", "answer"]
    assert how_to_call(reward, str(path), batch_size=0)("p", "r", "a", {}) == 0.5
