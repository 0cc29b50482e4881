"""Find a transport by its name or import path; only the one asked for is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llamarl.errors import ConfigError
from llamarl.import_path import resolve
from llamarl.settings.job import TRANSPORTS
from llamarl.strict import why_no_name
from llamarl.transports.network import mine

if TYPE_CHECKING:  # who only asks for a name needs no torch
    from llamarl.transports.base import Transport

__all__ = ["name_here", "transport_kind"]


def transport_kind(name: str) -> type[Transport]:
    """The transport of a name, or of an import path.

    Raises:
        ValueError: Unknown name.
        ConfigError: A class of the user's own lacks what a transport has.
    """
    if why := why_no_name(name, TRANSPORTS, "my_transport.py:Name"):
        raise ValueError(f"transport {why}")
    found: Any = resolve(TRANSPORTS.get(name, name))
    if missing := [part for part in ("source", "sink", "on_device", "between_hosts") if not hasattr(found, part)]:
        raise ConfigError.at(
            "schedule.transport", f"{name!r} lacks {', '.join(missing)} (llamarl.transports.base.Transport)"
        )
    kind: type[Transport] = found
    return kind


def name_here(name: str) -> str:
    """What carries the bytes of a channel that was given ``name``: in a job on several hosts memory that is shared on
    one goes between them by sockets."""
    return "tcp" if name == "shared_memory" and mine() is not None else name
