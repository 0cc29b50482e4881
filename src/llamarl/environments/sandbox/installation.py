"""The Python installation, as files that a box must be able to read; everything else of the machine stays outside."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

__all__ = ["Installation", "find_installation", "without_nested"]

_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""Where the C library and its loader lie."""


@dataclass(frozen=True, slots=True)
class Installation:
    """What is bound into a box."""

    python: str
    """The interpreter, not the link to it that a virtual environment has."""
    packages: tuple[str, ...]
    """Folders of installed packages, put behind the standard library."""
    readable: tuple[str, ...]
    """Files and folders, none inside another."""
    links: tuple[tuple[str, str], ...]
    """Symbolic links at the top, such as /lib, and what they say."""


@cache
def find_installation() -> Installation:
    """Of the interpreter that runs this."""
    python = os.path.realpath(sys.executable)
    packages = dict.fromkeys(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    base = {name: sys.base_prefix for name in ("base", "platbase", "installed_base", "installed_platbase")}
    stdlib = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    libraries = [os.path.join(os.path.dirname(os.path.dirname(python)), name) for name in ("lib", "lib64")]
    if library := sysconfig.get_config_var("LIBDIR"):
        libraries.append(library)
    links, readable = [], [python, *packages, *stdlib, *libraries]
    for path in _SYSTEM:
        if os.path.islink(path):
            links.append((path, os.readlink(path)))
        else:
            readable.append(path)
    return Installation(python, tuple(packages), without_nested(filter(os.path.exists, readable)), tuple(links))


def without_nested(paths: Iterable[str]) -> tuple[str, ...]:
    """Without those that lie inside another, in order of their names."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths}):
        if not any(path.startswith(outer + "/") for outer in kept):
            kept.append(path)
    return tuple(kept)
