"""Files from outside: recipes, data, model folders, what earlier runs left. Whatever lies there
becomes a value or one message. And where they are: a recipe by its name (``tiny`` is
``llamarl/recipes/tiny.toml``), the user's own folders.

    path ─▶ read_bytes (a regular file, of bounded size) ─▶ read_text (UTF-8) ─▶ parse_json, parse_toml (bounded values)

Nothing here waits: a pipe or a device is refused before it is read. What a parser alone would let
through and break later is refused at the door: values nested so deep that walking them ends in a
``RecursionError``, whole numbers that no machine word holds, halves of surrogate pairs that no
encoder takes.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import json
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from llamarl.errors import ConfigError, FileError

__all__ = [
    "MAX_DEPTH",
    "cache_folder",
    "find_recipe",
    "open_regular",
    "parse_json",
    "parse_toml",
    "read_bytes",
    "read_json",
    "read_lines",
    "read_object",
    "read_text",
    "read_toml",
    "refuse_pipes",
    "shipped_or_path",
    "shipped_recipes",
    "user_path",
    "with_paths_from",
]

MAX_DEPTH = 64
"""Lists and objects inside each other, at most. Configurations and samples need fewer than ten."""

_MAX_BYTES = 1 << 30
_MAX_TOML_BYTES = 1 << 24  # the parser is slow, and no recipe is longer than a page
_LONG_NUMBER = re.compile(r"\d{19}")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_RECIPES = Path(__file__).resolve().parent / "recipes"
_MAY_BE_FOLDERS = ("path", "data", "eval_data", "rollouts")
"""Keys of a recipe."""


def user_path(path: str | os.PathLike[str], what: str) -> Path:
    """A path that somebody named, its ``~`` expanded. Whether anything is there is another question.

    Args:
        what: The key or flag that gave it, for errors.

    Raises:
        FileError: Nothing can be there: a NUL character, too long, a loop of symbolic links, no
            such user's home, no text.
    """
    text = os.fspath(path)
    expanded = os.path.expanduser(text)
    if expanded == text and text.startswith("~"):
        problem: str | None = "no home folder is known for it"
    else:
        problem = "it is not UTF-8 text" if _half_pair(text) else _unreachable(expanded)
    if problem:
        raise FileError(f"{what} {_named(text)!r}: {problem}; give another path")
    return Path(expanded)


def _unreachable(path: str) -> str | None:
    try:
        os.stat(path)
    except ValueError:
        return "it holds a NUL character"
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return str(error.strerror).lower()
    return None


@contextlib.contextmanager
def open_regular(path: str | os.PathLike[str], *, max_bytes: int | None = _MAX_BYTES) -> Iterator[BinaryIO]:
    """Open a regular file for reading, and never wait for it: a pipe or a device is refused.

    Args:
        max_bytes: A larger file is refused; None: no limit but memory.

    Raises:
        FileError: It cannot be read, is a folder, a pipe or a device, or too large.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for somebody to write to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError:  # a NUL character, or one that the system's encoding does not have
        raise FileError(f"{str(path)!r:.200} is no file name") from None
    except OSError as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        raise FileError(f"{_named(path)} cannot be read ({error.strerror})", missing=missing) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no file")
            raise FileError(f"{_named(path)} is {kind}, expected a file")
        if max_bytes is not None and found.st_size > max_bytes:
            raise FileError(f"{_named(path)} has {found.st_size:,} bytes, expected at most {max_bytes:,}")
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    except OSError as error:
        raise FileError(f"{_named(path)} cannot be read ({error.strerror})") from error
    finally:
        os.close(descriptor)


def refuse_pipes(folder: Path) -> None:
    """Refuse a folder that holds a pipe, a socket or a device, or a link to one, at any depth:
    whoever opens one may wait for ever, or cannot.

    Raises:
        FileError: Names the first.
    """
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            try:
                kind = stat.S_IFMT(os.stat(path).st_mode)
            except OSError:  # a link to nothing, or gone by now
                continue
            if kind in _KINDS and kind != stat.S_IFDIR:
                raise FileError(f"{_named(path)} is {_KINDS[kind]}, expected a file")


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int | None = _MAX_BYTES) -> bytes:
    """Read all of a regular file.

    Raises:
        FileError: As ``open_regular``.
    """
    with open_regular(path, max_bytes=max_bytes) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], *, max_bytes: int | None = _MAX_BYTES) -> str:
    """UTF-8 text, without a byte order mark; every line ends in a newline alone.

    Raises:
        FileError: As ``read_bytes``, or the bytes are not UTF-8.
    """
    data = read_bytes(path, max_bytes=max_bytes)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        other = "; it looks like UTF-16: save it as UTF-8" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise FileError(f"{_named(path)} is not UTF-8 text (byte {error.start}){other}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """(``file:line``, text) of each line that is not blank.

    Lines end at newlines alone: ``splitlines`` would also cut at U+2028, which JSON allows inside text.

    Raises:
        FileError: As ``read_text``.
    """
    with open_regular(path, max_bytes=None) as file:
        try:
            for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8-sig"), start=1):
                if line.strip():
                    yield f"{path}:{number}", line.removesuffix("\n")
        except UnicodeDecodeError:
            read_text(path, max_bytes=None)  # says where
            raise


def read_json(path: str | os.PathLike[str], *, big_integers: bool = False) -> Any:
    """The value in a JSON file.

    Args:
        big_integers: As ``parse_json``.

    Raises:
        FileError: As ``read_text`` and ``parse_json``.
    """
    return parse_json(read_text(path), str(path), big_integers=big_integers)


def read_object(path: str | os.PathLike[str], *, big_integers: bool = False) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        big_integers: As ``parse_json``.

    Raises:
        FileError: As ``read_json``, or it holds another kind of value.
    """
    value = read_json(path, big_integers=big_integers)
    if not isinstance(value, dict):
        raise FileError(f"{path} holds {type(value).__name__} {value!r:.60}, expected a JSON object")
    return value


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        FileError: As ``read_text`` and ``parse_toml``.
    """
    return parse_toml(read_text(path, max_bytes=_MAX_TOML_BYTES), str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """TOML, with whole numbers of at most 64 bits and at most ``MAX_DEPTH`` levels.

    Raises:
        FileError: It is not; names ``where``.
    """
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise FileError(f"{where} is not valid TOML: {_TOO_DEEP}") from None
    except ValueError as error:  # also a number of too many digits
        raise FileError(f"{where} is not valid TOML: {_told(error)}{_unquoted(text, str(error))}") from None
    if problem := _problem(value, big_integers=False, lone_surrogates=False):
        raise FileError(f"{where} is not valid TOML: {problem}")
    return value


def parse_json(text: str | bytes, where: str, *, big_integers: bool = False, lone_surrogates: bool = False) -> Any:
    """One JSON value.

    Args:
        where: File, and line if it is one of several values, for errors.
        big_integers: Allow whole numbers beyond 64 bits, up to the 4,300 digits that Python reads.
        lone_surrogates: Allow text with halves of surrogate pairs.

    Raises:
        FileError: It is not JSON, or holds what is not allowed; names ``where``.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise FileError(f"{where}: not UTF-8 text (byte {error.start})") from None
    try:
        value = json.loads(text)
    except RecursionError:
        raise FileError(f"{where}: {_TOO_DEEP}") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.rstrip("\n") else ""
        raise FileError(
            f"{where}: not JSON ({error.msg} at {line}column {error.colno}), got {text.strip()[:80]!r}"
        ) from None
    except ValueError as error:  # a number of too many digits
        raise FileError(f"{where}: {_told(error)}") from None
    deep = text.count("[") + text.count("{") > MAX_DEPTH
    if deep or "\\u" in text or _LONG_NUMBER.search(text):  # the walk is slow, and most text cannot need it
        problem = _problem(value, big_integers=big_integers, lone_surrogates=lone_surrogates)
        if problem:
            raise FileError(f"{where}: {problem}")
    return value


def _unquoted(text: str, error: str) -> str:
    """Advice where the line that TOML's parser names has a value that is text without quotes."""
    named = re.search(r"at line (\d+)", error)
    line = text.splitlines()[int(named[1]) - 1] if named and int(named[1]) <= len(text.splitlines()) else ""
    found = re.fullmatch(r"\s*([\w.\-]+)\s*=\s*([A-Za-z./~][^\s\"'#]*)\s*(#.*)?", line)
    return f'; text stands in quotes: {found[1]} = "{found[2]}"' if found and found[2] not in ("true", "false") else ""


_TOO_DEEP = f"lists or objects more than {MAX_DEPTH} levels deep"


def _told(error: ValueError) -> str:
    return "a whole number of thousands of digits" if "int_max_str_digits" in str(error) else str(error)


def _problem(value: Any, *, big_integers: bool, lone_surrogates: bool) -> str | None:
    """What is not allowed in plain values; None: all is."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, str):
                if not lone_surrogates and (half := _half_pair(item)):
                    return f"half of a surrogate pair ({half}), which is no character, in {item!r:.80}"
            elif isinstance(item, int) and not big_integers and not -(1 << 63) <= item < 1 << 64:
                return f"the whole number {str(item)[:20]}... is beyond 64 bits"
        if not below:
            return None
        level = below
    return _TOO_DEEP


def _half_pair(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X}"
    return None


def _named(path: str | os.PathLike[str]) -> str:
    """A path for a message; one that no file can have may be long."""
    text = os.fspath(path)
    return text if len(text) <= 300 else f"{text[:200]}... ({len(text)} characters)"


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/llamarl``, else ``~/.cache/llamarl``; of a user without a home the folder
    beside the system's temporary files."""
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "llamarl"
    home = os.path.expanduser("~")
    if home == "~":
        return Path(tempfile.gettempdir()) / f"llamarl-{os.getuid()}"
    return Path(home) / ".cache" / "llamarl"


def shipped_recipes() -> dict[str, str]:
    """Name -> what it is for: the comment in its first line."""
    return {path.stem: _first_comment(path) for path in sorted(_RECIPES.glob("*.toml"))}


def find_recipe(named: str | os.PathLike[str]) -> Path:
    """The file that a user means: a path, or the bare name of a recipe that ships with llamarl. A file comes first.

    Raises:
        ConfigError: A bare name of neither. Whether a path's file is there is found out when it is read.
    """
    text = os.fspath(named)
    if os.path.exists(text) or os.path.basename(text) != text or text.endswith(".toml"):
        return Path(text)
    shipped = shipped_recipes()
    if text not in shipped:
        near = difflib.get_close_matches(text, shipped, n=1, cutoff=0.6)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"recipe {text!r}: no such file, and llamarl ships none of that name; {meant}"
            f"It has {', '.join(shipped)} (llamarl recipes); a file of your own ends in .toml"
        )
    return _RECIPES / f"{text}.toml"


def shipped_or_path(text: str) -> str:
    """What a command takes that reads other things than recipes too: the name of one that ships is
    its file, the rest stays."""
    return os.fspath(find_recipe(text)) if text in shipped_recipes() else text


def with_paths_from(folder: Path, settings: Any, key: str = "") -> Any:
    """Settings of a recipe in ``folder``, with the files that they name beside it (``FILE`` or ``FILE.py:NAME``; of
    models and data also folders) as seen from the working directory. What is not there stays: the name of
    something else, or a path that counts from the working directory."""
    if isinstance(settings, Mapping):
        return {name: with_paths_from(folder, value, name) for name, value in settings.items()}
    if isinstance(settings, list):
        return [with_paths_from(folder, value, key) for value in settings]
    if not isinstance(settings, str) or not settings:
        return settings
    kind, file, name = "", settings, ""
    if found := re.fullmatch(r"(\w+:)?(.+?\.py)(:[\w.]+(?:://.*)?)", settings):
        kind, file, name = found[1] or "", found[2], found[3]
    beside = os.path.join(folder, file)
    is_meant = "." in file and os.path.isfile(beside) or key in _MAY_BE_FOLDERS and os.path.isdir(beside)
    return f"{kind}{beside}{name}" if is_meant else settings


def _first_comment(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        first = lines.readline()
    return first.removeprefix("#").strip() if first.startswith("#") else ""
