"""What every section of a recipe shares: one pydantic setting, one way to refuse values, and how
plain values become a configuration, or every mistake in them at once.

    plain values ─▶ sections, from the innermost: keys, types, ranges (pydantic), then each section's own checks ─▶ checks
                    of the world (files, models)
                       │
                       └── what failed goes on as its default, so that the rest is judged

A mistake about a key that is at fault in one listed before is left out: it was judged with a stand-in, and may be none.
It lives below all packages, so that ``settings/`` can import it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

import annotated_types
from pydantic import AfterValidator, ConfigDict, Strict, ValidationError

from llamarl.errors import Mistake
from llamarl.other_names import our_name

__all__ = [
    "Effect",
    "IN_STATE",
    "ListOf",
    "Mistakes",
    "NO_BITS",
    "Reader",
    "SAVED",
    "STRICT",
    "bounds",
    "holding",
    "is_import_path",
    "list_mistakes",
    "mistakes_of",
    "named",
    "refuse",
    "walk_fields",
    "why_no_name",
]

T = TypeVar("T")

SAVED = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)
"""Of what a file holds that llamarl wrote itself: unknown keys are refused."""

STRICT = ConfigDict(strict=True, **SAVED)
"""Of a recipe's sections. Types are taken as TOML gives them: ``"5"`` is no number, ``2.0`` and
``true`` are no integers; a whole number is a number. The string under a field is its description,
shown by ``--help`` and beside a wrong value."""

ListOf = Annotated[tuple[T, ...], Strict(False)]
"""A field that takes a list, and keeps it as a tuple."""


class Effect(enum.Enum):
    """What another value of a key would do to a run that has begun. A field without a mark changes
    bits, which is the safe assumption about one that nobody thought of."""

    BITS = "bits"
    """What is sampled or learned from then on is other than in a run that always had the old value:
    refused on resume."""

    NO_BITS = "no bits"
    """Where, how long, how fast, what is shown or kept: free to change on resume. Written
    ``Annotated[int, NO_BITS]``."""

    IN_STATE = "in state"
    """As BITS, and the states in a checkpoint are of that value: not even a fork of the run may change it."""


NO_BITS = Effect.NO_BITS
IN_STATE = Effect.IN_STATE


class Mistakes(ValueError):
    """All that is wrong with values of one section that do not go together, so that a user need not
    mend it one run at a time."""

    def __init__(self, found: Iterable[Mistake]) -> None:
        self.found = tuple(found)
        super().__init__("; ".join(str(mistake) for mistake in self.found))

    def __reduce__(self) -> tuple[type[Mistakes], tuple[tuple[Mistake, ...]]]:
        return Mistakes, (self.found,)


def refuse(mistakes: Iterable[Mistake]) -> None:
    """Raise ``Mistakes`` if there are any."""
    found = tuple(mistakes)
    if found:
        raise Mistakes(found)


def holding(test: Callable[[Any], object], words: str) -> AfterValidator:
    """Make a field's own check: a value for which ``test`` is false is refused by ``words``, and told.

    Args:
        words: Such as "must contain {question}".
    """

    def check(value: Any) -> Any:
        if not test(value):
            raise ValueError(f"{words}, got {list(value) if isinstance(value, tuple) else value!r}")
        return value

    return AfterValidator(check)


def is_import_path(name: str) -> bool:
    """Whether a name is written as an import path; whether there is such a thing, ``llamarl.import_path`` knows."""
    where, _, attribute = name.rpartition(":")
    return bool(where and attribute)


def why_no_name(name: str, built_in: Collection[str], example: str) -> str:
    """What is wrong with a name that is neither built in nor an import path, or nothing.

    Args:
        example: An import path that would do.
    """
    if name in built_in or is_import_path(name):
        return ""
    near = difflib.get_close_matches(name.lower(), built_in, n=1, cutoff=0.6)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"{name!r} is unknown; {meant}It is one of {', '.join(built_in)}, or your own as package.module:name or "
        f"path/to/file.py:name, such as {example}"
    )


def named(built_in: Collection[str], example: str) -> AfterValidator:
    """Make a field's own check: a name that is neither built in nor an import path is refused, as ``why_no_name`` says."""

    def check(name: str) -> str:
        if why := why_no_name(name, built_in, example):
            raise ValueError(why)
        return name

    return AfterValidator(check)


def bounds(metadata: Iterable[Any], kind: object = float) -> str:
    """What a field's constraints leave of the numbers, in words: ">= 1", "in [0, 1)"; empty where that is all of them.

    Args:
        metadata: As pydantic keeps it of a field: ``Field(gt=0)`` and the like.
        kind: The field's type: of integers, > 0 is told as >= 1.
    """
    low = high = ""
    for mark in metadata:
        match mark:
            case annotated_types.Gt(gt=limit):
                low = f">= {int(str(limit)) + 1}" if kind is int else f"> {limit}"
            case annotated_types.Ge(ge=limit):
                low = f">= {limit}"
            case annotated_types.Lt(lt=limit):
                high = f"< {limit}"
            case annotated_types.Le(le=limit):
                high = f"<= {limit}"
    if low and high:
        opening, closing = "[" if "=" in low else "(", "]" if "=" in high else ")"
        return f"in {opening}{low.split(' ')[1]}, {high.split(' ')[1]}{closing}"
    return low or high


_TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a table",
    "literal_error": "one of its choices",
}
"""pydantic's kind of error -> what it expected."""

_LIMITS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}


class Reader(Generic[T]):
    """Reads plain values into one tree of configuration dataclasses, all of whose fields have defaults.

    Args:
        root: The pydantic dataclass at its top; sections are its fields that are such dataclasses.
    """

    def __init__(self, root: type[T]) -> None:
        self._root = root
        self.keys: dict[str, Any] = dict(walk_fields(root))
        """Every key, dotted -> pydantic's field."""

    def read(
        self, raw: Mapping[str, Any], checks: Sequence[Callable[[T], Iterable[Mistake]]] = ()
    ) -> tuple[T, list[Mistake]]:
        """Validate, and go on after every mistake.

        Args:
            checks: What is asked of the outside world once values agree with each other.

        Returns:
            The configuration, with defaults in place of what failed, and what failed.
        """
        listed: list[Mistake] = []
        wrong: set[str] = set()
        config: T = self._section(self._root, _copy(raw), "", listed, wrong)
        for check in checks:
            for mistake in check(config):
                _list(mistake, listed, wrong)
        return config, listed

    def nearest(self, key: str) -> tuple[str | None, str]:
        """For a key that does not exist: the key it is probably meant to be, if any is near, and words for the user."""
        *path, last = key.split(".")
        section = ".".join(path)
        siblings = _names(_class_at(self._root, path))
        near = difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)
        misspelt = bool(difflib.get_close_matches(last, near, cutoff=0.8))
        homes = [known for known in self.keys if known.rsplit(".", 1)[-1] == last]
        homes = [home for home in homes if section and _within(home, section)] or homes
        best = ".".join([*path, near[0]]) if near else ""
        if not misspelt and len({home.rsplit(".", 2)[-2] for home in homes}) == 1:
            best = homes[0]  # a word that one kind of section has; "name" is in many, and means another thing in each
        elif not misspelt and not homes:
            ours, words = our_name(last)
            if words:
                return ours if ours in self.keys else None, words
        if best:
            return best, f"did you mean {best!r}?"
        if len(homes) == 2:
            return None, f"did you mean {homes[0]!r} or {homes[1]!r}?"
        return None, f"{f'[{section}] has' if section else 'the sections are'} {', '.join(siblings)}"

    def _section(self, cls: Any, raw: dict[str, Any], prefix: str, listed: list[Mistake], wrong: set[str]) -> Any:
        """An instance of ``cls``. Keys that are at fault are removed from ``raw``, until what is left makes one."""
        while True:
            values = self._subsections(cls, raw, prefix, listed, wrong)
            try:
                return cls(**values)
            except ValidationError as error:
                faulty: set[str] = set()
                for found in mistakes_of(error, cls):
                    faulty |= {found.key, *found.others}
                    found = Mistake(f"{prefix}{found.key}", found.text, tuple(prefix + key for key in found.others))
                    if found.key.removeprefix(prefix).partition(".")[0] in (*_names(cls), ""):
                        if not _list(
                            found, listed, wrong
                        ):  # its keys go as well: what is said of them then may be false
                            wrong |= {found.key, *found.others} - {""}
                    else:
                        meant, words = self.nearest(found.key)
                        _list(Mistake(found.key, f": unknown key; {words}"), listed, wrong)
                        wrong |= {meant} if meant else set()
                wrong |= {prefix + key for key in faulty - {""}}  # from now on stand-ins
                if not any([_drop(raw, key) for key in sorted(faulty)]):
                    return cls()

    def _subsections(
        self, cls: Any, raw: dict[str, Any], prefix: str, listed: list[Mistake], wrong: set[str]
    ) -> dict[str, Any]:
        """The values of ``raw``, with instances in place of the sections among them."""

        def made(section: Any, key: str, value: Any) -> Any:
            if isinstance(value, dict):
                return self._section(section, value, f"{key}.", listed, wrong)
            such = f"{key}.{_names(section)[0]}"
            _list(Mistake(key, f": expected a section with keys such as {such}, got {_shown(value)}"), listed, wrong)
            wrong.add(key)
            return section()

        values = dict(raw)
        for name, value in raw.items():
            key, kind = f"{prefix}{name}", getattr(cls.__pydantic_fields__.get(name), "annotation", None)
            if dataclasses.is_dataclass(kind):
                values[name] = made(kind, key, value)
            elif (own := _named_section(kind)) and isinstance(value, dict):
                values[name] = {given: made(own, f"{key}.{given}", one) for given, one in value.items()}
            elif (own := _listed_section(kind)) and isinstance(value, (list, tuple)):
                values[name] = [made(own, f"{key}.{place}", one) for place, one in enumerate(value)]
        return values


def mistakes_of(error: ValidationError, cls: Any = None) -> list[Mistake]:
    """What pydantic found in the values of one class: one mistake a key, but for checks of several keys.

    Args:
        cls: The dataclass, if its fields are plain values: their ranges, meanings and choices are then told too.
    """
    mistakes: list[Mistake] = []
    by_key: dict[str, list[Any]] = {}
    fields = getattr(cls, "__pydantic_fields__", {})
    for found in error.errors():
        cause = found.get("ctx", {}).get("error")
        if isinstance(cause, Mistakes):
            mistakes += cause.found
        else:
            location = found["loc"][:1] if fields else found["loc"]
            by_key.setdefault(".".join(map(str, location)), []).append(found)
    return [*(Mistake(key, _words(founds, fields.get(key))) for key, founds in by_key.items()), *mistakes]


def list_mistakes(mistakes: Sequence[Mistake | str], where: str = "the configuration") -> str:
    """All of them as one text."""
    count = f"{len(mistakes)} mistake{'s' * (len(mistakes) > 1)} in {where}:\n"
    return count + "\n".join(f"  - {mistake}" for mistake in mistakes)


def walk_fields(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, pydantic field) of every value in a tree of configuration dataclasses."""
    for name in _names(cls):
        info = cls.__pydantic_fields__[name]
        if dataclasses.is_dataclass(info.annotation):
            yield from walk_fields(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def _list(mistake: Mistake, listed: list[Mistake], wrong: set[str]) -> bool:
    """List a mistake unless it may follow from one before it; whether it was listed."""
    keys = {mistake.key, *mistake.others} - {""}
    if any(_within(known, key) or _within(key, known) for known in wrong for key in keys):
        return False
    listed.append(mistake)
    if len(keys) == 1:  # of several keys that do not go together, any may be the wrong one
        wrong |= keys
    return True


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _words(founds: Sequence[Mapping[str, Any]], info: Any) -> str:
    """What is wrong with one value: all that pydantic found, one error for each type that it may have."""
    value = founds[0]["input"]
    found = next((found for found in founds if found["type"] not in _TYPES), None)
    if found is None:
        place = founds[0]["loc"][1:] if info is not None and get_origin(info.annotation) in (tuple, dict) else ()
        types = dict.fromkeys(_expected(found, info) for found in founds)
        return (
            f"{''.join(f'[{part}]' for part in place)}: expected {' or '.join(types)}, got {_shown(value)}"
            f"{_hint(founds[0]['type'], info, value)}"
        )
    kind, context, value = found["type"], found.get("ctx", {}), found["input"]
    if (cause := context.get("error")) is not None:
        return str(cause)
    if kind in _LIMITS:
        limits = bounds(info.metadata, info.annotation) if info is not None else ""
        limits = limits or f"{_LIMITS[kind]} {next(iter(context.values()))}"
        return f"must be {limits}, got {value!r}{_meaning(info)}"
    if kind == "finite_number":
        return f"must be a finite number, got {value!r}{_meaning(info)}"
    if kind in ("string_too_short", "too_short"):
        return f"must not be empty{_meaning(info)}"
    return f": {found['msg'].lower()}, got {_shown(value)}"


def _expected(found: Mapping[str, Any], info: Any) -> str:
    if found["type"] == "literal_error":
        return str(found["ctx"]["expected"])
    if found["type"] == "tuple_type" and info is not None:
        item = get_args(info.annotation)[0]
        if dataclasses.is_dataclass(item):
            return "a list of tables, each headed by the name in two brackets, [[ ]]"
        return {str: "a list of text", float: "a list of numbers"}.get(
            getattr(item, "__origin__", item), "a list of integers"
        )
    return _TYPES[found["type"]]


def _meaning(info: Any) -> str:
    """The first sentence of a field's description, which says its unit and special values."""
    text = " ".join((info.description or "").split()) if info else ""
    return f" ({text.split('. ')[0].removesuffix('.')})" if text else ""


def _hint(kind: str, info: Any, value: Any) -> str:
    if kind == "literal_error" and isinstance(value, str) and info is not None:
        choices = [choice for choice in _choices(info.annotation) if isinstance(choice, str)]
        near = difflib.get_close_matches(value, choices, n=1, cutoff=0.6)
        return f"; did you mean {near[0]!r}?" if near else ""
    if kind == "tuple_type" and isinstance(value, str):
        return f"""; write ["{value.strip("[]'")}"], on a command line '["{value.strip("[]'")}"]'"""
    if kind == "string_type" and not isinstance(value, (list, dict)):
        return "; text stands in quotes"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        with contextlib.suppress(ValueError):
            (int if kind == "int_type" else float)(value)
            return "; leave out the quotes"
    return "; leave out the quotes" if kind == "bool_type" and value in ("true", "false") else ""


def _copy(value: Any) -> Any:
    return {key: _copy(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def _drop(raw: dict[str, Any], key: str) -> bool:
    """Remove a key, or what holds it where that is no section."""
    *path, last = key.split(".")
    node: Any = raw
    for part in path:
        node = node.get(part, {})
        if not isinstance(node, dict):
            return False
    return node.pop(last, node) is not node


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def _class_at(cls: Any, path: Sequence[str]) -> Any:
    for part in path:
        if (own := _named_section(cls) or _listed_section(cls)) is not None:
            cls = own
            continue
        info = getattr(cls, "__pydantic_fields__", {}).get(part)
        cls = None if info is None else info.annotation
    return cls


def _named_section(annotation: Any) -> Any:
    """The class of the sections in a table of them (``dict[str, Section]``); None for other types."""
    if get_origin(annotation) is dict and dataclasses.is_dataclass(section := get_args(annotation)[1]):
        return section
    return None


def _listed_section(annotation: Any) -> Any:
    """The class of the sections in a list of them (``tuple[Section, ...]``); None for other types."""
    if get_origin(annotation) is tuple and dataclasses.is_dataclass(section := get_args(annotation)[0]):
        return section
    return None


def _choices(annotation: Any) -> Iterator[Any]:
    for argument in get_args(annotation):
        if get_origin(annotation) is Literal:
            yield argument
        else:
            yield from _choices(argument)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
