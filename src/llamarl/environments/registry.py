"""From ``task.environment`` and its options to the environment.

    frozen_lake                     comes with llamarl
    gymnasium:FrozenLake-v1         another library's, through an adapter
    agent:my_agent.py:run           your own program that talks to an OpenAI-compatible endpoint
    my_game.py:Game                 your own, by import path: this package's shape, TRL's, or a gym over strings

What is asked of a class is told from its methods, see ``adapt``.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from llamarl.environments.episode import Environment
from llamarl.errors import DataError
from llamarl.import_path import check, import_user, is_import_path

__all__ = ["ADAPTERS", "BUILT_IN", "adapt", "check_environment", "make_environment"]

_GAMES = "llamarl.environments.games"
_ADAPTERS = "llamarl.environments.adapters"

BUILT_IN: Mapping[str, str] = {
    "frozen_lake": f"{_GAMES}.frozen_lake:FrozenLake",
    "guess_number": f"{_GAMES}.guess_number:GuessNumber",
    "mastermind": f"{_GAMES}.mastermind:Mastermind",
    "wordle": f"{_GAMES}.wordle:Wordle",
    "calculator": f"{_GAMES}.calculator:Calculator",
    "alphabet_sort": f"{_GAMES}.alphabet_sort:AlphabetSort",
    "second_try": f"{_GAMES}.second_try:SecondTry",
}
"""Name -> where its class is."""

ADAPTERS: Mapping[str, tuple[str, str]] = {
    "reasoning_gym": ("reasoning_gym:DATASET", f"{_GAMES}.second_try:SecondTry"),
    "gymnasium": ("gymnasium:ID", f"{_ADAPTERS}.gymnasium:GymnasiumEnvironment"),
    "textarena": ("textarena:ID", f"{_ADAPTERS}.strings:textarena"),
    "openenv": ("openenv:ws://HOST:PORT/ws", f"{_ADAPTERS}.openenv:OpenEnv"),
    "agent": ("agent:my_agent.py:function", f"{_ADAPTERS}.agent:AgentProgram"),
}
"""Name before the colon -> how it is written, and what is made of it: a callable of the words behind the colon and options."""

_KEY, _OPTIONS = "task.environment", "task.environment_options"


def make_environment(name: str, options: Mapping[str, Any], *, judged: bool = True) -> Environment:
    """The environment of a name.

    Args:
        name: Built in, ``ADAPTER:NAME``, or an import path.
        options: Keyword arguments of the class.
        judged: Whether ``task.reward`` judges its episodes too: an agent may then leave the reward to it.

    Raises:
        DataError: There is none of that name, it refuses its options, or a library that it needs is missing. What your own
            class raises is told too.
    """
    factory = _factory(name)
    if name.partition(":")[0] == "agent":
        factory = functools.partial(factory, judged=judged)
    _refuse_unknown(name, factory, options)
    try:
        made = factory(**options)
    except DataError:
        raise
    except ImportError as error:
        raise DataError.at(_KEY, f"{name!r} cannot be made: {error}") from error
    except Exception as error:  # the user's class may raise anything
        given = f" with {dict(options)}" if options else ""
        cause = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise DataError.at(_OPTIONS if options else _KEY, f": {name!r}{given}: {cause}") from error
    return made


def check_environment(name: str, options: Mapping[str, Any]) -> None:
    """Refuse what could not be made, as far as that shows without importing the user's code.

    Raises:
        DataError: As ``make_environment``.
    """
    kind, _, rest = name.partition(":")
    if name not in BUILT_IN and kind not in ADAPTERS and is_import_path(name):
        check(name, _KEY)
    elif kind == "agent":
        _refuse_unknown(name, _factory(name), options)
        if not is_import_path(rest):
            raise DataError.at(_KEY, f"{name!r} must name a function: {ADAPTERS[kind][0]}")
        check(rest, _KEY)
    elif kind == "openenv":
        _refuse_unknown(name, _factory(name), options)  # to make it would ask its server
    else:
        make_environment(name, options).close()


def adapt(make: Callable[..., Any], options: Mapping[str, Any]) -> Environment:
    """The environment of a class (or factory) of the user's, wrapped where it has another shape than ``Environment``.

    ``reset(item, seed)`` and ``step`` are this package's; ``reset`` without ``step`` is TRL's; ``init`` and ``step`` are
    SkyRL-gym's; ``get_observation`` and ``step`` TextArena's; another ``reset`` with ``step`` is a gym over strings.

    Raises:
        TypeError: It has none of these shapes.
    """
    from llamarl.environments.adapters.strings import string_shape
    from llamarl.environments.adapters.trl import TrlEnvironment, is_trl_shape

    if isinstance(make, type) and is_trl_shape(make):
        own, ours = _split_options(options, TrlEnvironment)
        return TrlEnvironment(functools.partial(make, **own), **ours)
    made = make(**options)
    if isinstance(made, type) or not callable(getattr(made, "step", None)):
        if is_trl_shape(made):
            return TrlEnvironment(functools.partial(make, **options))
        raise TypeError(f"{_title(make)} has no step(reply), and no reset(**row) with methods as tools")
    if _takes_item(made):
        if not callable(getattr(made, "close", None)):
            raise TypeError(f"{_title(make)} has no close()")
        return cast(Environment, made)
    shape = string_shape(made)
    if shape is None:
        raise TypeError(f"{_title(make)} has no reset(item, seed)")
    return shape(functools.partial(make, **options))


def _factory(name: str) -> Callable[..., Environment]:
    kind, _, rest = name.partition(":")
    if name in BUILT_IN:
        return cast(Callable[..., Environment], _load(BUILT_IN[name]))
    if kind in ADAPTERS:
        written, path = ADAPTERS[kind]
        if not rest:
            raise DataError.at(_KEY, f"{name!r} needs a name behind the colon: {written}")
        made = _load(path)
        return functools.partial(made, dataset=rest) if kind == "reasoning_gym" else functools.partial(made, rest)
    if is_import_path(name):
        check(name, _KEY)
        make = import_user(name, _KEY)
        return lambda **options: adapt(make, options)
    known = [*BUILT_IN, *(written for written, _ in ADAPTERS.values())]
    near = difflib.get_close_matches(kind, [*BUILT_IN, *ADAPTERS], n=1, cutoff=0.5)
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise DataError.at(
        _KEY,
        f"{name!r} is unknown; {meant}It is one of {', '.join(known)}, or your own as file.py:Class or package:Class",
    )


def _load(path: str) -> Callable[..., Any]:
    module, _, attribute = path.partition(":")
    return cast(Callable[..., Any], getattr(importlib.import_module(module), attribute))


def _refuse_unknown(name: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Options of built-in environments are known by name and type; those of the user's class are its own."""
    inner = factory.func if isinstance(factory, functools.partial) else factory
    if getattr(inner, "__module__", "").partition(".")[0] != "llamarl" or inner.__name__ == "<lambda>":
        return
    signature = inspect.signature(factory)
    bound = set(factory.keywords) if isinstance(factory, functools.partial) else set()
    known = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in bound]
    takes_more = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    hints = {p.name: p.annotation for p in inspect.signature(inner, eval_str=True).parameters.values()}
    for option, value in options.items():
        if option not in known:
            if takes_more and option not in bound:
                continue
            near = difflib.get_close_matches(option, known, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise DataError.at(f"{_OPTIONS}.{option}", f": {name} has no such option; {meant}It has {', '.join(known)}")
        try:
            TypeAdapter(hints[option]).validate_python(value, strict=True)
        except ValidationError as error:
            raise DataError.at(
                f"{_OPTIONS}.{option}", f"of {name} must be {_shown(hints[option])}, got {value!r}"
            ) from error


def _shown(hint: Any) -> str:
    choices = getattr(hint, "__args__", ())
    return " or ".join(map(repr, choices)) if choices else getattr(hint, "__name__", str(hint))


def _title(make: Callable[..., Any]) -> str:
    return getattr(make, "__name__", type(make).__name__)


def _takes_item(made: object) -> bool:
    try:
        inspect.signature(made.reset).bind(item=None, seed=0)  # type: ignore[attr-defined]
    except (TypeError, ValueError, AttributeError):
        return False
    return True


def _split_options(options: Mapping[str, Any], wrapper: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the user's class, and those of what wraps it."""
    names = {p.name for p in inspect.signature(wrapper).parameters.values() if p.kind is p.KEYWORD_ONLY}
    return {k: v for k, v in options.items() if k not in names}, {k: v for k, v in options.items() if k in names}
