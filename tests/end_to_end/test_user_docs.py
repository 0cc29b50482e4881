"""The user's pages, executed: each in an empty folder, its marked blocks in order, every word as its reader sees it."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked_command import Started, as_python
from markdown_blocks import Block, blocks_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
SOURCE = DOCS.parent / "src"
PAGES = [
    page for page in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))] if any(b.mark for b in blocks_of(page))
]

FIRST_PAGES = {"README", "quick_start", "from_trl", "from_verl", "when_it_stops"}


def test_the_pages_that_are_run_are_those_that_a_user_begins_with() -> None:
    assert {page.stem for page in PAGES} >= FIRST_PAGES | {"your_own_task"}


def test_no_comment_of_a_page_holds_a_setting_that_its_reader_does_not_see() -> None:
    for page in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        for comment in re.findall(r"<!--.*?-->", page.read_text(encoding="utf-8"), re.S):
            assert "--" not in comment.removeprefix("<!--").removesuffix("-->"), f"{page.name}: {comment}"


def test_every_snippet_of_python_on_a_page_is_run_or_written_to_a_file_but_for_those_of_other_programs() -> None:
    others = re.compile(r"^(import|from) (trl|verifiers)\b", re.M)
    for page in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        for block in (block for block in blocks_of(page) if block.language == "python"):
            assert block.mark in ("run", "file") or others.search(block.text), f"{block} is not run"


NOT_RUN = {
    "quick_start": r"pip install \.",
    "hosts": r"--cluster|llamarl cluster|ray start|sbatch|docker build",
    "survival": r"until llamarl train|kill_runs",
    "forecast": r"runs/mine",
    "when_slow": r"runs/mine",
    "when_it_stops": r"recipe\.toml \|\| case",
    "when_it_does_not_learn": r"llamarl report runs/tiny",
}
"""What of a page's shell needs a cluster, another machine, a network or a run of the reader's own."""


def test_every_snippet_of_shell_on_a_page_is_run_but_for_those_that_need_more_than_this_machine() -> None:
    for page in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        for block in (block for block in blocks_of(page) if block.language in ("sh", "bash")):
            needs_more = NOT_RUN.get(page.stem, "")
            assert block.mark == "run" or needs_more and re.search(needs_more, block.text), f"{block} is not run"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_list_of_commands_in_readme_runs_as_printed(tmp_path: Path) -> None:
    environment = _environment(tmp_path / "bin")
    (block,) = [one for one in blocks_of(DOCS.parent / "README.md") if "llamarl new my-task" in one.text]
    here, cluster, _ = block.text.partition("pip install")
    assert cluster, "what comes behind needs a cluster"
    for line in ["llamarl train tiny", *here.splitlines()]:
        one = dataclasses.replace(block, text=line, language="sh")
        printed = _run(one, tmp_path, environment)
        assert printed is not None and ("--replay" not in line or "equal bits" in printed), printed


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            p,
            id=str(p.relative_to(DOCS.parent).with_suffix("")),
            marks=() if p.stem in FIRST_PAGES and p.parent.name != "algorithms" else pytest.mark.long,
        )
        for p in PAGES
    ],
)
def test_every_marked_block_of_the_page_does_what_the_page_says(page: Path, tmp_path: Path) -> None:
    environment = _environment(tmp_path / "bin")
    folder = tmp_path / "empty"
    folder.mkdir()
    printed: str | None = ""
    for block in blocks_of(page):
        if block.mark == "file":
            path = folder / block.words[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.mark == "run":
            started = _fork(block, folder) if importable(block) else None
            if started is not None:
                assert started.wait(600) == int(block.word("exit") or 0), f"{block}: {started.out}"
                printed = started.out
            else:
                printed = _run(block, folder, environment)
        elif block.mark == "output" and printed is not None:
            lines = {_without_numbers(line) for line in printed.splitlines()}
            missing = [line for line in block.text.splitlines() if line.strip() not in ("", "...")]
            missing = [line for line in missing if _without_numbers(line) not in lines]
            assert not missing, f"{block}: not printed: {missing}\nprinted:\n{printed}"


def importable(block: Block) -> bool:
    """Whether what it needs is there."""
    module = block.word("needs")
    return not module or importlib.util.find_spec(module) is not None


def _fork(block: Block, folder: Path) -> Started | None:
    """Start what needs no shell and no Python of its own. README's script has one, as its reader's has."""
    if (words := _one_command(block)) is not None:
        return Started(words, cwd=folder, together=True)
    if block.language == "python" and block.page.stem in FIRST_PAGES - {"README"}:
        return Started([str(_script_of(block, folder))], cwd=folder, together=True, program=as_python)
    return None


def _script_of(block: Block, folder: Path) -> Path:
    script = folder / f"script_{block.line}.py"
    script.write_text(block.text)
    return script


def _one_command(block: Block) -> list[str] | None:
    """The words of a block that is one ``llamarl`` command and nothing else, as the shell would hand them over."""
    if block.language == "python" or not re.fullmatch(r"llamarl [^|&;<>\n]*\n?", block.text):
        return None
    told = 'llamarl() { printf "%s\\0" "$@"; }\n' + block.text
    words = subprocess.run(["bash", "-euc", told], capture_output=True, text=True, check=True).stdout
    return words.split("\0")[:-1]


def _run(block: Block, folder: Path, environment: dict[str, str]) -> str | None:
    """What it printed; None where it was left out."""
    if not importable(block):
        return None
    if block.language == "python":
        command = [sys.executable, str(_script_of(block, folder))]
    else:
        command = ["bash", "-euo", "pipefail", "-c", block.text]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=600,
    )
    assert done.returncode == int(block.word("exit") or 0), f"{block}: status {done.returncode}\n{done.stdout}"
    return done.stdout


def _environment(commands: Path) -> dict[str, str]:
    """Return variables by which ``llamarl``, ``python`` and ``pytest`` are this environment's."""
    commands.mkdir()
    python = f'exec "{sys.executable}"'
    for name, line in {
        "llamarl": f'{python} -m llamarl.cli.main "$@"',
        "python": f'{python} "$@"',
        "pytest": f'{python} -m pytest -q -p no:cacheprovider "$@"',
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{line}\n")
        (commands / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(commands), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }


def _without_numbers(line: str) -> str:
    """A line as every machine prints it: numbers, bars and the width of columns differ."""
    line = re.sub(r"\d[\d.,:]*", "#", line)
    line = re.sub(r"[█░]+", "█", line)
    return " ".join(re.sub(r"/\S*/(?=runs|my-task)", "", line).split())


# The notebook.


ROOT = Path(__file__).resolve().parents[2]


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    for cell in book.cells:
        cell.source = cell.source.replace("NUM_TICKS = 30", "NUM_TICKS = 2")
        cell.source = cell.source.replace('"prompts_per_step": 16', '"prompts_per_step": 2')
        cell.source = cell.source.replace(
            "num_ticks=NUM_TICKS,", 'num_ticks=NUM_TICKS, run={"runtime": "inline", "cores": 1},'
        )
    nbclient.NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    last = book.cells[-1].outputs[-1]["data"]["text/plain"]
    assert "4 of 4 ticks" in last
    texts = [str(output) for cell in book.cells for output in cell.get("outputs", [])]
    assert any("tick" in text and "reward" in text for text in texts), "no progress was shown"
