"""A runtime by its name in the configuration."""

from __future__ import annotations

import difflib
import time
from types import SimpleNamespace

from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorContext, ExecutorSpec
from llamarl.runtime.base import JobStart, Runtime
from llamarl.runtime.inline import InlineRuntime
from llamarl.runtime.processes import ProcessRuntime
from llamarl.runtime.tick_log import TickLog
from llamarl.runtime.worker import CHANNEL_FACTORY

__all__ = ["RUNTIMES", "make_runtime", "probe_processes"]

RUNTIMES = ("local", "inline")


def make_runtime(
    name: str,
    *,
    collective_timeout_s: float = 600.0,
    channel_factory: str = CHANNEL_FACTORY,
    log: TickLog | None = None,
) -> Runtime:
    """Make the runtime called ``name``.

    Args:
        name: ``local`` (processes) or ``inline`` (this process).
        collective_timeout_s: Longest wait of one collective inside an executor's process group (not ``inline``).
        channel_factory: Module, or file, with ``make_sender`` and ``make_receiver``.
        log: See ``ProcessRuntime`` (not ``inline``, where nobody can be brought up again).

    Raises:
        ConfigError: The name is unknown.
    """
    if name not in RUNTIMES:
        near = difflib.get_close_matches(name, RUNTIMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"runtime {name!r} is unknown, expected one of {list(RUNTIMES)}{hint}")
    if name == "inline":
        return InlineRuntime(channel_factory=channel_factory)
    return ProcessRuntime(
        collective_timeout_s=collective_timeout_s,
        channel_factory=channel_factory,
        log=log,
    )


def probe_processes(deadline_s: float) -> float:
    """Seconds to bring one rank's process up and down again: can this machine start one and talk to it?

    Raises:
        LlamaRLError: It does not; the message says why.
    """
    began = time.monotonic()
    runtime = make_runtime("local")
    try:
        probe = ExecutorSpec(name="probe", factory=f"{__name__}:_idle_executor")
        runtime.start(JobStart(executors=[probe], channels=[], deadline_s=deadline_s))
    finally:
        runtime.close()
    return time.monotonic() - began


def _idle_executor(config: object, context: ExecutorContext) -> SimpleNamespace:
    return SimpleNamespace(name=context.name, setup=lambda: None, close=lambda: None)
