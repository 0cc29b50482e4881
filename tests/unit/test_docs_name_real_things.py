"""Keys, flags, verbs, links and TOML that the documentation names exist."""

import argparse
import importlib
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from markdown_blocks import Block, blocks_of
from tools.other_names import page_of, with_table

import llamarl.errors
from llamarl.api.run import Run
from llamarl.cli.main import VERBS
from llamarl.config import key_effects, known_keys, validate
from llamarl.environments.reasoning_gym import EVALUATING, REFUSED
from llamarl.errors import ConfigError, LlamaRLError
from llamarl.observability import findings
from llamarl.other_names import other_names
from llamarl.reading import parse_toml
from llamarl.strict import Effect

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FOREIGN_NAMES = {page_of(program).name for program in other_names()}
"""Pages whose tables have another program's names in the first column."""

_PLACEHOLDERS = {"section.key"}
_SECTIONS = {key.partition(".")[0] for key in known_keys()} | {"executors"}
_OVERRIDE = re.compile(r"--([a-z_]+(?:\.[a-z_0-9]+)+)")
_SPAN = re.compile(r"`([^`\n]+)`")
_KEY = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+)(?:\s*=.*|\s+\d\S*)?")
_FILES = re.compile(r"\.(py|toml|md|json|jsonl|html|png|ipynb)$")
_LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


def _ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _is_key(name: str) -> bool:
    """A key, or a section inside a section."""
    keys = known_keys()
    return name in keys or any(key.startswith(f"{name}.") for key in keys) or name.startswith("executors.")


def _is_attribute_of_run(name: str) -> bool:
    """``run.metrics``: Python, not a key."""
    first, _, rest = name.partition(".")
    return first == "run" and rest in dir(Run)


def _prose(page: Path) -> str:
    """Without what is shown as a mistake, and without other programs' names."""
    text = page.read_text(encoding="utf-8")
    for block in blocks_of(page):
        if block.mark == "output" or block.word("exit"):
            text = text.replace(block.text, "")
    if page.name in FOREIGN_NAMES:
        text = re.sub(r"^\|[^|\n]*\|", "|", text, flags=re.M)
    return text


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_every_override_that_a_page_shows_is_a_key(page: Path) -> None:
    assert [name for name in _OVERRIDE.findall(_prose(page)) if name not in _PLACEHOLDERS and not _is_key(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_every_section_and_key_in_code_type_is_a_key(page: Path) -> None:
    unknown = []
    for span in _SPAN.findall(re.sub(r"```.*?```", "", _prose(page), flags=re.S)):
        found = _KEY.fullmatch(span.strip())
        if found is None or found[1].partition(".")[0] not in _SECTIONS or _FILES.search(found[1]):
            continue
        if not _is_key(found[1]) and not _is_attribute_of_run(found[1]):
            unknown.append(span)
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_toml_on_a_page_loads_through_the_configuration(page: Path) -> None:
    for block in (block for block in blocks_of(page) if block.language == "toml"):
        raw = parse_toml(block.text, str(block))
        try:
            validate(raw)
        except ConfigError as error:  # a part of a recipe may lack what stands elsewhere; but what it has is known
            wrong = [m for m in error.mistakes if {m.key, *m.others} <= _leaves(raw) or "unknown key" in m.text]
            assert not wrong, f"{block}: {wrong}"


def _leaves(raw: dict[str, Any], path: str = "") -> set[str]:
    found = set()
    for key, value in raw.items():
        found |= _leaves(value, f"{path}{key}.") if isinstance(value, dict) else {path + key}
    return found


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_every_llamarl_command_on_a_page_has_that_verb_and_these_flags(page: Path) -> None:
    for block in blocks_of(page):
        if block.language in ("", "sh", "bash", "console") and not block.word("exit") and block.mark != "output":
            for line in _commands(block):
                verb, *words = line
                assert verb in VERBS, f"{block}: llamarl {verb}"
                flags = {word.partition("=")[0] for word in words if word.startswith("--") and "." not in word}
                assert flags <= _flags(verb), f"{block}: llamarl {verb} has no {flags - _flags(verb)}"


def _commands(block: Block) -> list[list[str]]:
    """The words after ``llamarl`` of each line that begins with it."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.strip().removeprefix("$ ").startswith("llamarl "):
            try:
                words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            except ValueError:
                continue
            if re.fullmatch(r"[a-z-]+", words[1]):
                found.append(words[1:])
    return found


@cache
def _flags(verb: str) -> frozenset[str]:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"llamarl.cli.{verb}").add_arguments(parser)
    return frozenset(parser._option_string_actions)


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    broken = []
    for target, anchor in _LINK.findall(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)):
        if "://" in target:
            continue
        there = (page.parent / target).resolve() if target else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor[1:] not in _anchors(there)):
            broken.append(target + anchor)
    assert broken == []


@pytest.mark.parametrize("program", other_names())
def test_the_names_of_other_programs_on_a_page_are_those_of_the_table(program: str) -> None:
    text = page_of(program).read_text(encoding="utf-8")
    assert text == with_table(program, text), "run: python tests/tools/other_names.py"


@cache
def _anchors(page: Path) -> frozenset[str]:
    """As GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S), re.M)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    return frozenset(plain)


def test_every_page_of_the_documentation_is_in_the_index() -> None:
    listed = {target for target, _ in _LINK.findall((DOCS / "index.md").read_text(encoding="utf-8"))}
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= listed


def _table(page: str, columns: int) -> list[list[str]]:
    """Rows of the page's tables whose first cell is in code type."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    cells = [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines if line.startswith("| `")
    ]
    return [row for row in cells if len(row) == columns]


def test_when_it_stops_names_every_error_with_its_exit_code() -> None:
    errors = {name: getattr(llamarl.errors, name) for name in llamarl.errors.__all__}
    expected = {
        name: str(error.exit_code)
        for name, error in errors.items()
        if isinstance(error, type) and issubclass(error, LlamaRLError)
    }
    rows = [row for row in _table("when_it_stops.md", 4) if row[0].strip("`") in errors]
    assert {row[0].strip("`"): row[1] for row in rows} == expected
    assert all(len(cell) > 10 for row in rows for cell in row[2:]), "an error without its cause or cure"


def test_a_key_that_when_it_stops_tells_to_change_is_one_that_a_resume_takes_or_it_says_how_else() -> None:
    effects = key_effects()
    for name, status, _, cure in _table("when_it_stops.md", 4):
        for key in (span for span in _SPAN.findall(cure) if status != "2" and span in effects):
            how = {Effect.NO_BITS: "", Effect.BITS: "--fork", Effect.IN_STATE: "new run"}[effects[key]]
            assert how in cure, f"{name}: a resume refuses another {key}"


def test_when_it_stops_explains_every_exit_code() -> None:
    codes = {error.exit_code for error in _subclasses(LlamaRLError)} | {0, LlamaRLError.exit_code}
    assert {int(row[0].strip("`")) for row in _table("when_it_stops.md", 2)} == codes


def _subclasses(error: type[LlamaRLError]) -> list[type[LlamaRLError]]:
    return [error, *(below for child in error.__subclasses__() for below in _subclasses(child))]


def test_when_it_does_not_learn_tells_of_every_warning_and_finding() -> None:
    text = (DOCS / "when_it_does_not_learn.md").read_text(encoding="utf-8")
    assert [title for title, _ in findings.KINDS.values() if title not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_python_on_a_page_is_python(page: Path) -> None:
    for block in (block for block in blocks_of(page) if block.language == "python"):
        compile(block.text, str(block), "exec")


def test_the_page_on_tasks_tells_which_data_sets_evaluate_answers_and_which_are_refused_for_it() -> None:
    text = (DOCS / "environments.md").read_text(encoding="utf-8")
    assert len(EVALUATING) == 6 and "Six of its datasets" in text
    assert [name for name in REFUSED if f"`{name}`" not in text] == []


# The architecture page.


PAGE = (ROOT / "docs" / "architecture.md").read_text()


def files(text: str) -> list[str]:
    return re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)+\.(?:py|toml)|[a-z_]+\.py)`", text)


def test_files_that_the_architecture_page_sends_a_reader_to_exist() -> None:
    named = files(PAGE.split("## I want to ...")[1])
    assert len(named) > 30, "the table names files"
    places = (ROOT / "src" / "llamarl", ROOT)
    assert [path for path in named if not any((place / path).exists() for place in places)] == []


def test_a_change_touches_at_most_six_files() -> None:
    table = PAGE.split("## I want to ...")[1].split("\n## ")[0]
    crowded = {row.split("|")[1].strip(): len(set(files(row))) for row in table.splitlines() if row.startswith("| ")}
    assert len(crowded) > 10 and max(crowded.values()) <= 6, crowded
