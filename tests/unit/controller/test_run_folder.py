"""The folder of a run: refused if it holds something, held by one process at a time."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from llamarl.controller.run_folder import CONFIG_FILE, held, make_folder, refuse_a_run
from llamarl.errors import ConfigError


def test_a_second_process_is_refused_and_named_the_first_and_may_run_after_it(tmp_path: Path) -> None:
    with held(tmp_path):
        outcome = _in_another_process(tmp_path)
        assert "in use by another llamarl train" in outcome and f"process {os.getpid()}" in outcome
    assert _in_another_process(tmp_path) == "held"


def test_a_process_that_is_killed_frees_the_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe()
    child = context.Process(target=_hold_and_wait, args=(str(tmp_path), theirs), daemon=True)
    child.start()
    assert ours.poll(60) and ours.recv() == "held"
    with pytest.raises(ConfigError, match=f"process {child.pid}"), held(tmp_path):
        pass
    child.kill()
    child.join(60)
    with held(tmp_path):
        pass


@pytest.mark.parametrize(
    ("files", "refused"),
    [
        ({}, False),
        ({CONFIG_FILE: "x"}, False),  # set-up failed
        ({CONFIG_FILE: "x", "metrics.jsonl": ""}, False),
        ({CONFIG_FILE: "x", "metrics.jsonl": "{}\n"}, True),
        ({CONFIG_FILE: "x", "checkpoints/tick_000000/manifest.json": "{}"}, True),
        ({CONFIG_FILE: "x", "model/config.json": "{}"}, True),
        ({"metrics.jsonl": "{}\n"}, False),  # no run of ours
    ],
)
def test_only_a_folder_with_results_is_refused(tmp_path: Path, files: dict[str, str], refused: bool) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if refused:
        with pytest.raises(ConfigError, match="already holds a run"):
            refuse_a_run(tmp_path)
    else:
        refuse_a_run(tmp_path)


def test_a_folder_below_a_file_is_refused_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make .*file/run: Not a directory"):
        make_folder(tmp_path / "file" / "run")


def _in_another_process(folder: Path) -> str:
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe()
    child = context.Process(target=_try, args=(str(folder), theirs), daemon=True)
    child.start()
    assert ours.poll(60)
    outcome: str = ours.recv()
    child.join(60)
    return outcome


def _try(folder: str, pipe: object) -> None:
    try:
        with held(Path(folder)):
            pipe.send("held")  # type: ignore[attr-defined]
    except ConfigError as error:
        pipe.send(str(error))  # type: ignore[attr-defined]


def _hold_and_wait(folder: str, pipe: object) -> None:
    with held(Path(folder)):
        pipe.send("held")  # type: ignore[attr-defined]
        pipe.poll(60)  # type: ignore[attr-defined]
