"""Which folders are models, and what is said of the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamarl.errors import ModelError
from llamarl.models.folders import resolve_model_path


def test_an_id_of_the_hub_that_cannot_be_asked_is_answered_with_the_command_that_fetches_it() -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model_path("nobody/no-such-model")
    assert "no folder nobody/no-such-model here" in str(caught.value)
    assert "hf download nobody/no-such-model)" in str(caught.value)


@pytest.mark.parametrize("path", ["/no/such", "a/b/c", "./models/x", "models", "bundled:none", "~/models"])
def test_what_can_be_no_id_gets_no_such_command(path: str) -> None:
    with pytest.raises(ModelError, match="bundled:tiny") as caught:
        resolve_model_path(path)
    assert "hf download" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [("x" * 5000, "file name too long"), ("a\0b", "NUL character"), ("~nobody-here/x", "no home folder"), ("\ud800", "not UTF-8")],
    ids=["long", "nul", "home", "surrogate"],
)  # fmt: skip
def test_a_name_that_nothing_can_have_is_refused(path: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        resolve_model_path(path)


def test_a_loop_of_links_and_a_pipe_among_the_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ModelError, match="too many levels of symbolic links"):
        resolve_model_path(tmp_path / "loop")
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors is a pipe, socket or device"):
        resolve_model_path(tmp_path)
