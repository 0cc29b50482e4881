"""What ``tools.chaos`` refuses before it runs anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.chaos.__main__ import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kills", "-1"], "--kills must be 0 or more, got -1"),
        (["--kills", "0"], "nobody would be struck"),
        (["--run.dir", "here"], "--keep DIR says where"),
        (
            ["--only", "generator,foo"],
            "--only: 'foo': this job has generator, reward, trainer, evaluator, controller, env",
        ),
        (["--limit", "-1"], "--limit must be above 0 s, got -1"),
        (["--keep", "."], "is not empty"),
    ],
)
def test_bad_input_is_refused_in_words(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "something").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["tiny", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_recipe_that_is_not_there_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no_such_recipe"]) == 2
    assert "no_such_recipe" in capsys.readouterr().err
