"""What besides the configuration decides the bits of a run: library versions and the kind of processor.

Kernels are chosen by the processor's instruction sets, and sums are ordered by kernels.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

import llamarl

__all__ = ["joint_facts", "platform_differences", "platform_facts"]

_PACKAGES = ("torch", "transformers", "numpy")
_CPUINFO = Path("/proc/cpuinfo")
_INSTRUCTION_SETS = ("asimddp", "sve", "bf16", "avx2", "avx512", "avx_vnni", "amx")
"""Beginnings of the flags by which kernels for matrix products are chosen."""


@cache
def platform_facts() -> Mapping[str, str]:
    """Package -> version, and ``processor``: its name and instruction sets. Imports none of the packages."""
    found = {"llamarl": llamarl.__version__, "python": platform.python_version(), "processor": _processor()}
    for name in _PACKAGES:
        try:
            found[name] = installed_version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def joint_facts(machines: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """Of all machines that hold ranks of a job: where they are alike, those of each; else every
    value that there is, in order."""
    names = sorted({name for facts in machines for name in facts})
    return {name: " and ".join(sorted({facts.get(name, "absent") for facts in machines})) for name in names}


def platform_differences(saved: Mapping[str, str], now: Mapping[str, str] | None = None) -> list[str]:
    """One line for each fact that is not the same.

    Args:
        now: Of the hosts that hold the ranks; None: of this machine.
    """
    here, whose = (now, "the hosts") if now is not None else (platform_facts(), "this machine")
    return [
        f"{name}: it has {saved.get(name, 'absent')!r}, {whose} {here.get(name, 'absent')!r}"
        for name in sorted(saved.keys() | here.keys())
        if saved.get(name) != here.get(name)
    ]


def _processor() -> str:
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}".strip()
    return describe_processor(platform.machine(), text)


def describe_processor(machine: str, cpuinfo: str) -> str:
    """The first processor of a ``/proc/cpuinfo``: machine, model name, instruction sets."""
    fields: dict[str, str] = {}
    for line in cpuinfo.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip()
    flags = fields.get("flags", fields.get("features", "")).split()
    sets = sorted(flag for flag in flags if flag.startswith(_INSTRUCTION_SETS))
    return " ".join([machine, fields.get("model name", fields.get("cpu part", "")), *sets]).replace("  ", " ").strip()
