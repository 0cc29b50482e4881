"""The day with a card, tried without one: the checks hold on a CPU, and each section's command is one that runs."""

import importlib.util
import json
import multiprocessing
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forked_command import SERVER, Started, as_python

from llamarl.cli.gpu_checks import CHECKS
from llamarl.cli.main import main

SCRIPT = Path(__file__).parents[3] / "scripts" / "gpu_day.py"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_day", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("check", CHECKS, ids=[name for name, _, _ in CHECKS])
def test_each_check_of_a_gpu_holds_on_a_cpu(check: tuple[str, str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: SERVER)  # the other process has torch already
    assert check[2](torch.device("cpu"))  # type: ignore[operator]


def test_without_a_gpu_the_doctor_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--gpu"]) == 1
    assert "no CUDA device here" in capsys.readouterr().out


def test_a_day_leaves_what_it_has_after_each_section(tmp_path: Path) -> None:
    script = _script()
    script.sections = lambda device, out: {
        "first": (60.0, [sys.executable, "-c", "print('seen')"]),
        "second": (60.0, [sys.executable, "-c", "raise SystemExit(3)"]),
        "third": (0.5, [sys.executable, "-c", "import time; time.sleep(60)"]),
    }
    assert script.main(["first", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "results.json").read_text()).keys() == {"first"}
    assert script.main(["--out", str(tmp_path)]) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert {name: (r["held"], r["status"]) for name, r in results.items()} == {
        "first": (True, 0),
        "second": (False, 3),
        "third": (False, None),
    }
    assert (tmp_path / "first.txt").read_text() == "seen\n" and results["third"]["seconds"] < 30


def test_the_sections_of_a_day_are_commands_that_run(tmp_path: Path) -> None:
    """Tests as far as they are collected, benchmarks on a tiny model; the checks and a job are run elsewhere in the suite."""
    script = _script()
    said = {}
    for name in ("tests", "decode", "decode_8b", "train", "hand_over"):
        _, (python, *words) = script.sections("cpu", tmp_path)[name]
        assert python == sys.executable
        ran = Started(words, cwd=script.ROOT, together=True, program=as_python)
        assert ran.wait(120) == 0, ran.out  # the section's own limit is a card's
        said[name] = ran.out
    assert "tests collected" in said["tests"]
    assert json.loads((tmp_path / "decode.json").read_text())["results"]["rows"][0]["tokens_per_s"] > 0
    assert json.loads((tmp_path / "train.json").read_text())["results"]["rows"][0]["tokens_per_s"] > 0
    assert json.loads((tmp_path / "hand_over.json").read_text())["results"]["rows"][-1]["gb_per_s"] > 0
    assert sum(limit for limit, _ in script.sections("cuda", tmp_path).values()) <= 600
