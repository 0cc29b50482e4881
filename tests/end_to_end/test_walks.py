"""The walk of a start, as docs/walks.md names it, is the one that a start takes."""

import json
import os
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from forked_command import Started, run_llamarl

import llamarl

PAGE = Path(__file__).parents[2] / "docs" / "walks.md"
MOST = 45
"""Files on it."""
ROOT = str(Path(llamarl.__file__).parent) + os.sep


class _Arrived(BaseException):
    pass


def _follow() -> int:
    """In a process of its own: ``llamarl train tiny`` up to its loop, and the files of which functions are called meanwhile."""
    from llamarl.cli.main import main
    from llamarl.runtime.fork_server import allow_fork_of_this_process

    walked: dict[str, None] = {}

    def importing(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "_find_and_load":
                return True
            frame = frame.f_back
        return False

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name == "<module>" or not code.co_flags & 2:
            return
        if not code.co_filename.startswith(ROOT):
            return
        if code.co_filename not in walked and not importing(frame.f_back):
            walked[code.co_filename] = None
        if code.co_name == "run_graph":
            sys.setprofile(None)
            threading.setprofile(None)
            raise _Arrived

    for module in [module for name, module in sys.modules.items() if name.startswith("llamarl.")]:
        for value in list(vars(module).values()):  # what this process has asked before is asked again
            if clear := getattr(value, "cache_clear", None):
                clear()
    allow_fork_of_this_process()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        main(["train", "tiny"])
    except _Arrived:
        Path("walked.json").write_text(json.dumps([path.removeprefix(ROOT) for path in walked]))
    os._exit(0)


def named() -> list[str]:
    """In the first columns of the tables on the start."""
    start = PAGE.read_text(encoding="utf-8").partition("## A version of the weights")[0]
    return [
        path
        for row in start.splitlines()
        if row.startswith("| ")
        for path in re.findall(r"`(\S+\.py)`", row[: row.index(" | ")])
    ]


def test_a_start_walks_the_files_that_the_page_names_and_no_other(tmp_path: Path) -> None:
    checked = run_llamarl(["train", "tiny", "--dry-run"], cwd=tmp_path)  # the model passes its check here
    assert checked.returncode == 0, checked.stderr
    start = Started([], cwd=tmp_path, program=_follow)
    start.wait(120)
    assert (tmp_path / "walked.json").is_file(), start.err
    walked = json.loads((tmp_path / "walked.json").read_text())
    assert len(named()) == len(set(named())) <= MOST
    assert sorted(set(walked)) == sorted(named())
