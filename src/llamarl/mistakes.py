"""From plain values to a configuration, or to every mistake in them at once.

    plain values ─▶ shape (unknown keys, types) ─▶ sections' own checks, checks across sections ─▶ checks of the world
                          │                              │                                              │
                          └────────── what failed goes on as its default, so that the rest is judged ───┘

A message that speaks of a key which is already listed is left out: it was judged with a stand-in, and may be no mistake.

Types are taken as TOML gives them: ``"5"`` is no number, ``2.0`` and ``true`` are no integers; a whole number is a number.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from llamarl.strict import Mistakes

__all__ = ["Judged", "Reader", "list_mistakes", "mistakes_of", "walk_fields"]

T = TypeVar("T")
_WORD = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


@dataclasses.dataclass(frozen=True)
class Judged(Generic[T]):
    """What became of plain values."""

    config: T | None
    """None where not even the parts without a mistake make a configuration."""
    mistakes: tuple[str, ...]
    """One line each; with any, ``config`` holds defaults in place of what failed."""


class Reader(Generic[T]):
    """Reads plain values into one tree of configuration dataclasses.

    Args:
        root: The pydantic dataclass at its top; sections are its fields that are such dataclasses.
    """

    def __init__(self, root: type[T]) -> None:
        self._root = root
        self._adapter: TypeAdapter[T] = TypeAdapter(root)
        self.keys: dict[str, Any] = dict(walk_fields(root))
        """Every key, dotted -> pydantic's field."""

    def read(self, raw: Mapping[str, Any], checks: Sequence[Callable[[T], Iterable[str]]] = ()) -> Judged[T]:
        """Validate, and go on after every mistake.

        Args:
            checks: What is asked of the outside world once values agree with each other; each gives messages that begin
                with a key.
        """
        lines: list[str] = []
        doubtful: set[str] = set()
        clean = self._shape(self._root, raw, "", lines, doubtful)
        config: T | None = None
        while config is None:
            try:
                config = self._adapter.validate_python(clean)
            except ValidationError as error:
                stale: set[str] = set()
                for section, message in _messages(error):
                    stale |= self._judge(message, section, lines, doubtful)
                doubtful |= stale
                if not any([_drop(clean, key) for key in sorted(stale)]):
                    break
        if config is not None:
            for check in checks:
                for message in check(config):
                    self._judge(message, "", lines, doubtful)
        return Judged(config, tuple(lines))

    def nearest(self, key: str) -> tuple[str | None, str]:
        """For a key that does not exist: the key it is probably meant to be, if any is near, and words for the user."""
        *path, last = key.split(".")
        section = ".".join(path)
        siblings = _names(_class_at(self._root, path))
        near = difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)
        homes = [known for known in self.keys if known.rsplit(".", 1)[-1] == last]
        if near:
            best = ".".join([*path, near[0]])
        else:
            best = homes[0] if homes else next(iter(difflib.get_close_matches(key, self.keys, n=1, cutoff=0.8)), "")
        if best:
            return best, f"did you mean {best!r}?"
        return None, f"{f'[{section}] has' if section else 'the sections are'} {', '.join(siblings)}"

    def _shape(
        self, cls: Any, raw: Mapping[str, Any], prefix: str, lines: list[str], doubtful: set[str]
    ) -> dict[str, Any]:
        """The known keys with values of the right type; the others become lines."""
        clean: dict[str, Any] = {}
        for name, value in raw.items():
            key = f"{prefix}{name}"
            info = cls.__pydantic_fields__.get(name)
            if info is None:
                meant, words = self.nearest(key)
                lines.append(f"{key}: unknown key; {words}")
                doubtful.update(self._below(meant) if meant else ())
            elif dataclasses.is_dataclass(info.annotation):
                if isinstance(value, Mapping):
                    clean[name] = self._shape(info.annotation, value, f"{key}.", lines, doubtful)
                else:
                    lines.append(f"{key}: expected a section with keys such as {key}.{_names(info.annotation)[0]}, "
                                 f"got {_shown(value)}")  # fmt: skip
                    doubtful.update(self._below(key))
            elif _accepts(info.annotation, value):
                clean[name] = value
            else:
                lines.append(f"{key}: expected {_expected(info.annotation)}, got {_shown(value)}{_hint(info, value)}")
                doubtful.add(key)
        return clean

    def _below(self, key: str) -> set[str]:
        return {known for known in self.keys if known == key or known.startswith(f"{key}.")}

    def _judge(self, message: str, section: str, lines: list[str], doubtful: set[str]) -> set[str]:
        """List a message unless it follows from one before it; returns the keys that it speaks of."""
        inside = f"{section}." if section else ""
        words = _WORD.findall(message)
        spoken = {key for word in words for key in (word, f"{inside}{word}") if key in self.keys}
        if not spoken & doubtful:
            head = words[0] if words and message.startswith(words[0]) else ""
            known = next((key for key in (f"{inside}{head}", head) if key in self.keys), None)
            if known is not None:
                message = known + message[len(head) :]
            if len(spoken) == 1:  # of several keys that do not go together, any may be the wrong one
                doubtful |= spoken
            lines.append(message if known is not None or not section else f"{section}: {message}")
        return spoken


def mistakes_of(error: ValidationError) -> list[str]:
    """The messages of one dataclass's mistakes, each beginning with its field."""
    return [message for _, message in _messages(error)]


def list_mistakes(lines: Sequence[str], where: str = "the configuration") -> str:
    """All of them as one text."""
    count = f"{len(lines)} mistake{'s' * (len(lines) > 1)} in {where}:\n"
    return count + "\n".join(f"  - {line}" for line in lines)


def walk_fields(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, pydantic field) of every value in a tree of configuration dataclasses."""
    for name in _names(cls):
        info = cls.__pydantic_fields__[name]
        if dataclasses.is_dataclass(info.annotation):
            yield from walk_fields(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def _messages(error: ValidationError) -> Iterator[tuple[str, str]]:
    """(section, message) of everything that pydantic found."""
    for found in error.errors():
        location = ".".join(str(part) for part in found["loc"])
        cause = found.get("ctx", {}).get("error")
        if isinstance(cause, Mistakes):
            yield from ((location, message) for message in cause.messages)
        elif cause is not None:
            yield location, str(cause)
        else:
            yield "", f"{location}: {found['msg'].lower()}, got {_shown(found.get('input'))}"


def _drop(raw: dict[str, Any], key: str) -> bool:
    *path, last = key.split(".")
    node: Any = raw
    for part in path:
        node = node.get(part, {})
    return node.pop(last, node) is not node


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def _class_at(cls: Any, path: Sequence[str]) -> Any:
    for part in path:
        info = getattr(cls, "__pydantic_fields__", {}).get(part)
        cls = None if info is None else info.annotation
    return cls


def _accepts(annotation: Any, value: Any) -> bool:
    """Whether a TOML value is of a field's type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return any(type(choice) is type(value) and choice == value for choice in arguments)
    if origin in (Union, types.UnionType):
        return any(_accepts(choice, value) for choice in arguments)
    if origin is tuple:
        return isinstance(value, (list, tuple)) and all(_accepts(arguments[0], item) for item in value)
    if origin is dict:
        return isinstance(value, Mapping)
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is annotation if annotation in (int, bool, str) else True


def _expected(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal or origin in (Union, types.UnionType):
        choices = [repr(choice) if origin is Literal else _expected(choice) for choice in arguments]
        return " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)
    if origin is tuple:
        return f"a list of {_expected(arguments[0])}"
    if origin is dict:
        return "a table"
    return {int: "an integer", float: "a number", bool: "true or false", str: "text"}.get(annotation, str(annotation))


def _hint(info: Any, value: Any) -> str:
    if isinstance(value, str):
        choices = [choice for choice in _choices(info.annotation) if isinstance(choice, str)]
        near = difflib.get_close_matches(value, choices, n=1, cutoff=0.6)
        if near:
            return f"; did you mean {near[0]!r}?"
        if get_origin(info.annotation) is tuple:
            return f"; write [{value!r}]"
        for kind in (int, float):
            try:
                number = kind(value)
            except ValueError:
                continue
            return "; leave out the quotes" if _accepts(info.annotation, number) else ""
        return ""
    return "; text stands in quotes" if info.annotation is str and not isinstance(value, (list, Mapping)) else ""


def _choices(annotation: Any) -> Iterator[Any]:
    for argument in get_args(annotation):
        if get_origin(annotation) is Literal:
            yield argument
        else:
            yield from _choices(argument)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
