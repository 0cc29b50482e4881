"""What a GPU's kernels need is asked for before a run, in a sentence with the cure."""

import pytest

from llamarl.errors import ConfigError
from llamarl.models import compiler
from llamarl.models.compiler import check_compiler


@pytest.mark.parametrize(
    ("triton", "cc", "found", "said"),
    [
        (
            None,
            "",
            {"gcc"},
            "kernels are compiled on a GPU, but Triton is not installed: pip install triton, or set x = 1",
        ),
        ("triton", "", set(), "no C compiler is found: install gcc .* or name one in the variable CC, or set x = 1"),
    ],
)
def test_what_is_missing_is_said_with_its_cure(
    triton: str | None, cc: str, found: set[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(triton, cc, found, monkeypatch)
    with pytest.raises(ConfigError, match=said):
        check_compiler("kernels", "x = 1")


@pytest.mark.parametrize(("cc", "found"), [("", {"gcc"}), ("", {"clang"}), ("/opt/cc", set())])
def test_any_c_compiler_will_do(cc: str, found: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _machine("triton", cc, found, monkeypatch)
    check_compiler("kernels")


def _machine(triton: str | None, cc: str, found: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find_spec", lambda name: triton)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: name if name in found else None)
    monkeypatch.setenv("CC", cc)
