"""Files that a flag names, on a disk that is full."""

import argparse
from typing import Any

import pytest

from llamarl.cli import eval as evaluation
from llamarl.cli.flags import OutputFile
from llamarl.errors import LlamaRLError


def test_a_full_disk_is_told_by_the_flag_and_is_no_traceback() -> None:
    full = r"^--output /dev/full: cannot write: No space left on device$"
    with pytest.raises(LlamaRLError, match=full), OutputFile("/dev/full", "--output") as output:
        output.write_line("an answer")


def test_an_evaluation_whose_responses_the_disk_refuses_prints_its_scores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(*_: Any, **__: Any) -> Any:
        return {"accuracy": 0.25, "samples": 4, "failed": 0}, iter([{"response": "2"}])

    monkeypatch.setattr(evaluation, "_evaluate", evaluate)
    monkeypatch.setattr(evaluation, "_compute_as_in_a_run", lambda threads: None)
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    args = parser.parse_args(["bundled:tiny", "--json", "--responses", "/dev/full"])
    args.overrides = []
    with pytest.raises(LlamaRLError, match="--responses /dev/full: cannot write: No space left on device"):
        evaluation.run(args)
    assert capsys.readouterr().out == '{"accuracy": 0.25, "samples": 4, "failed": 0}\n'
