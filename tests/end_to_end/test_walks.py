"""The walk of a start, as docs/walks.md names it, is the one that a start takes."""

import json
import re
import subprocess
import sys
from pathlib import Path

from forked_command import run_llamarl

PAGE = Path(__file__).parents[2] / "docs" / "walks.md"
MOST = 55
"""Files on it."""

FOLLOW = """
import json, os, sys, threading
from pathlib import Path
import llamarl

ROOT = str(Path(llamarl.__file__).parent) + os.sep
walked = {}

class Arrived(BaseException):
    pass

def importing(frame):
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load":
            return True
        frame = frame.f_back
    return False

def note(frame, event, argument):
    code = frame.f_code
    if event != "call" or code.co_name == "<module>" or not code.co_flags & 2 or not code.co_filename.startswith(ROOT):
        return
    if code.co_filename not in walked and not importing(frame.f_back):
        walked[code.co_filename] = code.co_name
    if code.co_name == "run_graph":
        sys.setprofile(None)
        threading.setprofile(None)
        raise Arrived

from llamarl.cli.main import main
threading.setprofile(note)
sys.setprofile(note)
try:
    main(["train", "tiny"])
except Arrived:
    Path("walked.json").write_text(json.dumps([path.removeprefix(ROOT) for path in walked]))
os._exit(0)
"""


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
    done = subprocess.run(
        [sys.executable, "-c", FOLLOW], cwd=tmp_path, timeout=120, capture_output=True, text=True, check=False
    )
    assert (tmp_path / "walked.json").is_file(), done.stderr
    walked = json.loads((tmp_path / "walked.json").read_text())
    assert len(named()) == len(set(named())) <= MOST
    assert sorted(set(walked)) == sorted(named())
