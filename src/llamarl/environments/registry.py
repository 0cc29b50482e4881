"""From ``task.environment`` and its options to the environment.

mastermind                      comes with llamarl
my_game.py:Game                 a class of your own, by import path: ``episode.Environment``
KIND:WHAT                       code of your own in another shape: ``KINDS``
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from pydantic import ValidationError

from llamarl.environments.episode import Environment
from llamarl.errors import DataError, Mistake
from llamarl.import_path import check, import_user, own_line, signature_of
from llamarl.strict import is_import_path, mistakes_of

__all__ = ["BUILT_IN", "KINDS", "check_environment", "make_environment"]

_GAMES = "llamarl.environments.games"
_ADAPTERS = "llamarl.environments.adapters"

BUILT_IN: Mapping[str, str] = {
    "mastermind": f"{_GAMES}.mastermind:Mastermind",
    "second_try": f"{_GAMES}.second_try:SecondTry",
}
"""Name -> where its class is."""

KINDS: Mapping[str, tuple[str, str]] = {
    "agent": ("agent:my_agent.py:function", f"{_ADAPTERS}.agent:AgentProgram"),
    "trl": ("trl:my_shop.py:Class", f"{_ADAPTERS}.trl:trl"),
}
"""What stands before the colon -> how such an environment is named in a recipe, and where the
callable is that makes one, of the words behind the colon and options."""

_KEY, _OPTIONS = "task.environment", "task.environment_options"


def make_environment(name: str, options: Mapping[str, Any], *, judged: bool = True) -> Environment:
    """Make the environment of a name.

    Args:
        name: Built in, ``KIND:WHAT``, or an import path.
        options: Keyword arguments of the class.
        judged: Whether ``task.reward`` judges its episodes too: an agent may then leave the reward to it.

    Raises:
        DataError: There is none of that name, it refuses its options, or a library that it needs is
            missing. What your own class raises is told too.
    """
    factory = _factory(name)
    if name.partition(":")[0] == "agent":
        factory = functools.partial(factory, judged=judged)
    try:
        return factory(**options)
    except DataError:
        raise
    except ValidationError as error:
        found = list(_option_mistakes(name, factory, error))
        raise DataError("\n".join(map(str, found)), mistakes=found) from error
    except ImportError as error:
        raise DataError.at(_KEY, f"{name!r} cannot be made: {error}") from error
    except Exception as error:  # the user's class may raise anything
        given = f" with {dict(options)}" if options else ""
        cause = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise DataError.at(_OPTIONS if options else _KEY, f": {name!r}{given}: {cause}{own_line(error)}") from error


def check_environment(name: str, options: Mapping[str, Any]) -> None:
    """Refuse what could not be made, as far as that shows without importing the user's code.

    Raises:
        DataError: As ``make_environment``.
    """
    kind, _, what = name.partition(":")
    if kind in KINDS:  # to make one would import the user's code
        _factory(name)
        check(what, _KEY)
    elif kind in BUILT_IN or not is_import_path(name):
        make_environment(name, options).close()
    else:
        check(name, _KEY)


def _factory(name: str) -> Callable[..., Environment]:
    kind, _, what = name.partition(":")
    if name in BUILT_IN:
        return _load(BUILT_IN[name])
    if kind in KINDS:
        if not is_import_path(what):
            raise DataError.at(_KEY, f"{name!r} must name a class or function: {KINDS[kind][0]}")
        return functools.partial(_load(KINDS[kind][1]), what)
    if is_import_path(name):
        check(name, _KEY)
        return functools.partial(_own, name, import_user(name, _KEY))
    near = difflib.get_close_matches(kind, [*BUILT_IN, *KINDS], n=1, cutoff=0.5)
    meant = f"did you mean {near[0]!r}? " if near else ""
    known = [*BUILT_IN, *(written for written, _ in KINDS.values())]
    raise DataError.at(
        _KEY,
        f"{name!r} is unknown; {meant}It is one of {', '.join(known)}, or your own as file.py:Class or package:Class",
    )


def _own(name: str, make: Callable[..., Any], /, **options: Any) -> Environment:
    """An environment of the user's own."""
    made = make(**options)
    try:
        signature_of(made.reset).bind(item=None, seed=0)
        complete = callable(made.step)
    except (TypeError, ValueError, AttributeError):
        complete = False
    if not complete:
        shapes = ", ".join(written for written, _ in KINDS.values())
        raise TypeError(
            f"{name} is no environment: it needs reset(item, seed) and step(reply), and may have close(). One of another shape is named "
            f"with its kind: {shapes}"
        )
    return cast(Environment, made)


def _load(path: str) -> Callable[..., Environment]:
    module, _, attribute = path.partition(":")
    return cast(Callable[..., Environment], getattr(importlib.import_module(module), attribute))


def _option_mistakes(name: str, factory: Callable[..., Any], error: ValidationError) -> Iterator[Mistake]:
    """What pydantic found wrong with the options of a class."""
    known = [p.name for p in inspect.signature(factory).parameters.values() if p.kind is p.KEYWORD_ONLY]
    unknown = {found["loc"][0] for found in error.errors() if found["type"] == "unexpected_keyword_argument"}
    for found in mistakes_of(error):
        if found.key not in unknown:
            yield Mistake(f"{_OPTIONS}.{found.key}", found.text)
            continue
        near = difflib.get_close_matches(found.key, known, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        yield Mistake(f"{_OPTIONS}.{found.key}", f": {name} has no such option; {meant}It has {', '.join(known)}")
