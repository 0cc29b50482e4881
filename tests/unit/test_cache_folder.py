"""Where what can be made again is kept."""

import os
import tempfile
from pathlib import Path

import pytest

from llamarl.reading import cache_folder


def test_cache_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/of/the/user")
    assert cache_folder() == Path("/of/the/user/llamarl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/llamarl")


def test_a_user_without_a_home_has_it_among_the_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a number that has no name, without HOME
    assert cache_folder() == Path(tempfile.gettempdir()) / f"llamarl-{os.getuid()}"
