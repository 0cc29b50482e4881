"""A runtime by its name in the configuration."""

from __future__ import annotations

import difflib
import importlib.util
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorContext, ExecutorSpec
from llamarl.runtime.base import Runtime
from llamarl.runtime.inline import InlineRuntime
from llamarl.runtime.worker import CHANNEL_FACTORY

__all__ = ["RUNTIMES", "make_runtime", "probe_processes"]

RUNTIMES = ("monarch", "inline")


def make_runtime(
    name: str,
    *,
    pull_deadline_s: float = 60.0,
    collective_timeout_s: float = 600.0,
    channel_factory: str = CHANNEL_FACTORY,
    deterministic: bool = True,
    hosts: Mapping[str, Any] | None = None,
) -> Runtime:
    """The runtime called ``name``: ``monarch`` (processes) or ``inline`` (this process).

    Args:
        name: ``monarch`` or ``inline``.
        pull_deadline_s: Longest wait of a rank for one payload of a channel.
        collective_timeout_s: Longest wait of one collective inside an executor's process group (``monarch``).
        channel_factory: Module, or file, with ``make_sender`` and ``make_receiver``.
        deterministic: Pin repeatable kernels where torch has them.
        hosts: Executor -> Monarch ``HostMesh`` that gets its processes (``monarch``); the others go to this machine.

    Raises:
        ConfigError: The name is unknown, or Monarch is not installed.
    """
    if name == "inline":
        if hosts:
            raise ConfigError(f"runtime 'inline' has one process, hosts for {sorted(hosts)} need runtime 'monarch'")
        return InlineRuntime(
            pull_deadline_s=pull_deadline_s, channel_factory=channel_factory, deterministic=deterministic
        )
    if name != "monarch":
        near = difflib.get_close_matches(name, RUNTIMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"runtime {name!r} is unknown, expected one of {list(RUNTIMES)}{hint}")
    if importlib.util.find_spec("monarch") is None:
        raise ConfigError(
            "runtime 'monarch' needs the package torchmonarch, which is not installed: `pip install torchmonarch` "
            "(wheels exist for Linux), or take runtime 'inline', which runs everything in one process"
        )
    from llamarl.runtime.monarch import MonarchRuntime

    return MonarchRuntime(
        pull_deadline_s=pull_deadline_s,
        collective_timeout_s=collective_timeout_s,
        channel_factory=channel_factory,
        deterministic=deterministic,
        hosts=hosts,
    )


def probe_processes(deadline_s: float) -> float:
    """Seconds to bring one worker process up and down again: does Monarch work on this machine?

    Raises:
        LlamaRLError: It does not; the message says why.
    """
    began = time.monotonic()
    runtime = make_runtime("monarch")
    try:
        runtime.start(
            [ExecutorSpec(name="probe", factory=f"{__name__}:_idle_executor")],
            [],
            run_dir=None,
            seed=0,
            first_tick=0,
            load_from=None,
            deadline_s=deadline_s,
        )
    finally:
        runtime.close()
    return time.monotonic() - began


def _idle_executor(config: object, context: ExecutorContext) -> SimpleNamespace:
    return SimpleNamespace(name=context.name, setup=lambda: None, close=lambda: None)
