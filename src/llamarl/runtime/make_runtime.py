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
from llamarl.runtime.journal import Resumed
from llamarl.runtime.processes import ProcessRuntime
from llamarl.runtime.ranks import Launcher
from llamarl.runtime.worker import CHANNEL_FACTORY

__all__ = ["RUNTIMES", "make_runtime", "probe_processes"]

RUNTIMES = ("local", "inline", "monarch")


def make_runtime(
    name: str,
    *,
    pull_deadline_s: float = 60.0,
    collective_timeout_s: float = 600.0,
    channel_factory: str = CHANNEL_FACTORY,
    deterministic: bool = True,
    hosts: Mapping[str, Any] | None = None,
    restarts: bool = False,
    resumed: Resumed | None = None,
) -> Runtime:
    """The runtime called ``name``: ``local`` (processes), ``inline`` (this process) or ``monarch`` (processes, also on other hosts).

    Args:
        name: ``local``, ``inline`` or ``monarch``.
        pull_deadline_s: Longest wait of a rank for one payload of a channel.
        collective_timeout_s: Longest wait of one collective inside an executor's process group (not ``inline``).
        channel_factory: Module, or file, with ``make_sender`` and ``make_receiver``.
        deterministic: Pin repeatable kernels where torch has them.
        hosts: Executor -> Monarch ``HostMesh`` that gets its processes (``monarch``); the others go to this machine.
        restarts: Whether executors are to be brought up again that die (not ``inline``, where nobody can).
        resumed: See ``ProcessRuntime``.

    Raises:
        ConfigError: The name is unknown, does not fit ``hosts``, or Monarch is not installed.
    """
    if name not in RUNTIMES:
        near = difflib.get_close_matches(name, RUNTIMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"runtime {name!r} is unknown, expected one of {list(RUNTIMES)}{hint}")
    if hosts and name != "monarch":
        raise ConfigError(f"runtime {name!r} stays on this machine, hosts for {sorted(hosts)} need runtime 'monarch'")
    if name == "inline":
        return InlineRuntime(
            pull_deadline_s=pull_deadline_s, channel_factory=channel_factory, deterministic=deterministic
        )
    return ProcessRuntime(
        pull_deadline_s=pull_deadline_s,
        collective_timeout_s=collective_timeout_s,
        channel_factory=channel_factory,
        deterministic=deterministic,
        launchers=_on_hosts(hosts) if name == "monarch" else {},
        restarts=restarts,
        resumed=resumed,
    )


def _on_hosts(hosts: Mapping[str, Any] | None) -> Mapping[str, Launcher]:
    if not hosts:
        raise ConfigError(
            "runtime 'monarch' is for executors on other hosts, and got none; on one machine take 'local'"
        )
    if importlib.util.find_spec("monarch") is None:
        raise ConfigError(
            "runtime 'monarch' needs the package torchmonarch, which is not installed: `pip install 'llamarl[hosts]'` "
            "(wheels exist for Linux)"
        )
    from llamarl.runtime.monarch_hosts import MonarchLauncher

    launcher = MonarchLauncher(hosts)
    return dict.fromkeys(hosts, launcher)


def probe_processes(deadline_s: float) -> float:
    """Seconds to bring one rank's process up and down again: can this machine start one and talk to it?

    Raises:
        LlamaRLError: It does not; the message says why.
    """
    began = time.monotonic()
    runtime = make_runtime("local")
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
