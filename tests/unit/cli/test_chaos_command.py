"""What ``llamarl chaos`` refuses before it runs anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.cli.main import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kills", "-1"], "--kills must be 0 or more, got -1"),
        (["--kills", "0"], "nobody would be struck"),
        (["--run.dir", "here"], "--keep DIR says where"),
        (["--keep", "."], "is not empty"),
    ],
)
def test_bad_input_is_refused_in_words(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "something").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["chaos", "tiny", *words]) == 2
    assert said in capsys.readouterr().err
