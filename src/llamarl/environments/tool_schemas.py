"""From a typed method with a docstring to the JSON schema that chat templates show, and the check of a call's arguments.

The schema is the one of ``transformers.utils.get_json_schema``, made here because that imports torch: the processes in which
environments live hold no model. Arguments are checked by pydantic against the same annotations, so ``"3"`` is taken for an
``int``: policies often quote numbers.
"""

from __future__ import annotations

import enum
import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, ValidationError, create_model

__all__ = ["BadArguments", "Tool", "tools_of"]

_BASIC: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_SECTION = re.compile(r"^[ \t]*(Args|Returns|Raises):[ \t]*$", re.MULTILINE)


class BadArguments(Exception):
    """A call's arguments do not fit; the text says what was expected."""


class Tool:
    """A function that the policy may call.

    Args:
        function: With a docstring, in Google style where it has parameters, and an annotation for each of them.

    Raises:
        ValueError: The function has no docstring, or a parameter without annotation or description.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self.function = function
        doc = inspect.getdoc(function)
        if not doc:
            raise ValueError(f"tool {self.name!r} has no docstring: say in it what the tool does")
        parts = _sections(doc)
        hints = get_type_hints(function)
        described = _arguments(parts.get("Args", ""))
        properties: dict[str, Any] = {}
        required: list[str] = []
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            name = parameter.name
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise ValueError(f"tool {self.name!r}: parameter {name!r} must be one that can be given by name")
            if name not in hints:
                raise ValueError(f"tool {self.name!r}: parameter {name!r} has no annotation, such as {name}: str")
            if name not in described:
                raise ValueError(f"tool {self.name!r}: parameter {name!r} has no line under Args: in the docstring")
            schema = _schema(hints[name], f"tool {self.name!r}: parameter {name!r}")
            properties[name] = {**schema, "description": described[name]}
            if parameter.default is parameter.empty:
                required.append(name)
            fields[f"f{len(fields)}"] = (  # known by its alias: a parameter may be called like a method of pydantic's
                hints[name],
                Field(... if parameter.default is parameter.empty else parameter.default, alias=name),
            )
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if required:
            parameters["required"] = required
        self._names = list(properties)
        self._model = create_model(f"arguments of {self.name}", __config__=ConfigDict(extra="forbid"), **fields)
        body: dict[str, Any] = {"name": self.name, "description": parts[""], "parameters": parameters}
        if "return" in hints and _expressible(hints["return"]):
            said = parts.get("Returns", "").strip()
            body["return"] = {**_schema(hints["return"], ""), **({"description": said} if said else {})}
        self.schema: dict[str, Any] = {"type": "function", "function": body}

    @property
    def usage(self) -> str:
        """Name and parameters, for the policy: ``add(x: integer, y: integer, optional)``."""
        body = self.schema["function"]["parameters"]
        required = body.get("required", [])
        shown = [
            f"{name}: {_type_name(schema)}{'' if name in required else ', optional'}"
            for name, schema in body["properties"].items()
        ]
        return f"{self.name}({'; '.join(shown)})"

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the annotations want them; those left out take the function's own defaults.

        Raises:
            BadArguments: One is missing, unknown or of a wrong type.
        """
        try:
            model = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:4]]
            raise BadArguments(f"{'; '.join(wrong)}. Expected {self.usage}") from error
        values = [getattr(model, field) for field in type(model).model_fields]
        return {name: value for name, value in zip(self._names, values, strict=True) if name in arguments}


def tools_of(instance: object, *, leave_out: frozenset[str]) -> dict[str, Tool]:
    """The public methods of an object, in the order of their definition, as tools.

    Raises:
        ValueError: One of them has no docstring or annotations; or there is none.
    """
    found: dict[str, Tool] = {}
    for cls in reversed(type(instance).__mro__[:-1]):
        for name, member in vars(cls).items():
            if (
                name.startswith("_")
                or name in leave_out
                or isinstance(member, type)
                or not callable(getattr(cls, name))
            ):
                continue
            found[name] = Tool(getattr(instance, name))
    if not found:
        raise ValueError(f"{type(instance).__name__} has no public method that could be a tool")
    return found


def _sections(doc: str) -> dict[str, str]:
    """What stands before the first heading under ``""``, and the text under each heading."""
    pieces = _SECTION.split(doc)
    return {"": pieces[0].strip(), **dict(zip(pieces[1::2], pieces[2::2], strict=True))}


def _arguments(block: str) -> dict[str, str]:
    """Parameter -> its description, the lines of one joined by spaces."""
    lines = [line for line in block.splitlines() if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        head = re.match(r"(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line[indent:])
        if head and not line[indent : indent + 1].isspace():
            name = head[1]
            found[name] = head[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _expressible(hint: Any) -> bool:
    try:
        _schema(hint, "")
    except ValueError:
        return False
    return True


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of an annotation.

    Raises:
        ValueError: It has none; ``where`` begins the message.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is None:
        if hint in _BASIC:
            return dict(_BASIC[hint])
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _one_of([member.value for member in hint])
    elif origin is Literal:
        return _one_of(list(arguments))
    elif origin in (Union, types.UnionType):
        kinds = [_schema(kind, where) for kind in arguments if kind is not type(None)]
        if len(kinds) == 1:
            union = kinds[0]
        elif all(set(kind) == {"type"} and isinstance(kind["type"], str) for kind in kinds):
            names = sorted({kind["type"] for kind in kinds})
            union = {"type": names[0] if len(names) == 1 else names}
        else:
            union = {"anyOf": kinds}
        return {**union, "nullable": True} if type(None) in arguments else union
    elif origin is list:
        return {"type": "array", "items": _schema(arguments[0], where)}
    elif origin is tuple and ... not in arguments and len(arguments) > 1:
        return {"type": "array", "prefixItems": [_schema(kind, where) for kind in arguments]}
    elif origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], where)}
    raise ValueError(
        f"{where} has the type {hint!r}, which has no JSON schema: use str, int, float, bool, list, dict, Literal or Enum"
    )


def _one_of(values: list[Any]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _type_name(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    kind = schema.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
