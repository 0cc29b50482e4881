"""The proof that a host sees the controller's run folder holds in both directions or not at all."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.checkpoint.shared_folder import FolderQuestion, answer, ask, judge, withdraw
from llamarl.errors import CheckpointError


def test_one_folder_is_shared_and_nothing_stays_in_it(tmp_path: Path) -> None:
    question = ask(tmp_path)
    assert judge(question, "b", answer(question, "b")) == ""
    assert judge(question, "c/d e", answer(question, "c/d e")) == ""
    withdraw(question)
    assert not list(tmp_path.iterdir())


def test_the_word_does_not_travel_with_the_question(tmp_path: Path) -> None:
    question = ask(tmp_path)
    assert (tmp_path / question.name).read_text() not in repr(question)


def test_a_host_without_the_folder_says_so_and_makes_none(tmp_path: Path) -> None:
    question = ask(tmp_path)
    elsewhere = replace(question, folder=str(tmp_path / "missing"))
    assert judge(question, "b", answer(elsewhere, "b")) == f"it has no folder {tmp_path / 'missing'}"
    assert not (tmp_path / "missing").exists()


def test_a_folder_of_the_same_name_on_another_disk_is_not_shared(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    question = ask(here)
    found = answer(replace(question, folder=str(there)), "b", patience_s=0)
    assert judge(question, "b", found) == f"its {there} is another folder"


def test_a_copy_that_was_taken_with_the_word_in_it_is_not_shared(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    question = ask(here)
    shutil.copytree(here, there)
    found = answer(replace(question, folder=str(there)), "b")
    assert judge(question, "b", found, patience_s=0) == f"what it writes into {here} is not seen here"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_the_host_only_reads_is_not_shared(tmp_path: Path) -> None:
    question = ask(tmp_path)
    tmp_path.chmod(0o500)
    try:
        assert "cannot write" in judge(question, "b", answer(question, "b"))
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        ("word", "word", ""),
        ("word", "other", "its {folder} is another folder"),
        ("word", "", "what it writes into {folder} is not seen here"),
        ("", "word", "its {folder} is another folder"),
        ("", "", "what it writes into {folder} is not seen here"),  # two empty words are no proof
    ],
)
def test_shared_only_where_the_word_itself_comes_back(tmp_path: Path, ours: str, theirs: str, why: str) -> None:
    question = ask(tmp_path)
    (tmp_path / question.name).write_text(ours)
    (tmp_path / f"{question.name}-b").write_text(theirs)
    assert judge(question, "b", "", patience_s=0) == why.format(folder=tmp_path)  # whatever the host says


def test_an_answer_that_was_given_twice_does_not_overwrite_the_first(tmp_path: Path) -> None:
    question = ask(tmp_path)
    answer(question, "b")
    assert "cannot write" in answer(question, "b")


@pytest.mark.parametrize("name", ["../etc/passwd", "x", ".shared-", ".shared-0123456789abcdef/../x"])
def test_a_question_for_another_file_is_not_answered(tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_text("word")
    assert answer(FolderQuestion(folder=str(tmp_path), name=name), "b")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"run\.dir: cannot write into .*missing"):
        ask(tmp_path / "missing")
