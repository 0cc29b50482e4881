"""The hosts of a job as it begins: asked what they are, waited for where the run had them before, left out where they do not come.

What is decided stands in :mod:`llamarl.runtime.absent_hosts`; here it is asked and waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from llamarl.errors import ConfigError
from llamarl.runtime.absent_hosts import Absence, Verdict, verdict, why_refused
from llamarl.runtime.config import HostsConfig
from llamarl.runtime.hosts.connection import Answer, HostLost, HostRefuses, WorkerKey, ask_each
from llamarl.runtime.hosts.inventory import Inventory
from llamarl.runtime.hosts.sources import Workers, open_workers, start_by_ssh

__all__ = ["Gathered", "gather"]

_AGAIN_S = 1.0


@dataclass(frozen=True)
class Gathered:
    """Hosts that have said what they are."""

    workers: Workers
    key: WorkerKey
    inventories: Sequence[Inventory]
    """In the order of ``workers``."""
    here: str
    """Address of this machine towards the first of them."""
    named: tuple[str, ...]
    """All hosts of the job, as the user calls them, in the user's order."""
    absent: dict[str, str] = field(default_factory=dict)
    """Those that are left out -> why."""


def gather(
    config: HostsConfig,
    key_of: Callable[[bytes], WorkerKey],
    *,
    begun_with: Collection[str] = (),
    tell: Callable[[str], None],
) -> Gathered:
    """The hosts that a configuration names; they are started where it says so.

    Args:
        key_of: By which workers that hold these bytes may be used.
        begun_with: Hosts that the run had before: it may go on without some of them. They are waited for ``absent_after_s``, and as
            long as an attempt to reach them takes (15 s).
        tell: Takes a line of news for the user.

    Raises:
        ConfigError: Some cannot take part, and must; each is named with its reason.
    """
    began_s = time.monotonic()
    workers = open_workers(config)
    try:
        key, answers = key_of(workers.key), dict[str, Answer]()
        named = tuple(config.workers) or tuple(worker.name for worker in workers.workers)
        told = False
        while True:
            absent = [Absence(name, why) for name, why in workers.failed.items()]
            absent += _ask_those_left(workers, key, answers)
            left_s = began_s + config.absent_after_s - time.monotonic()
            match verdict(absent, len(named), begun_with=begun_with, left_s=left_s):
                case Verdict.GO_ON:
                    break
                case Verdict.REFUSE:
                    waited_s = round(time.monotonic() - began_s)
                    raise ConfigError(why_refused(absent, begun_with=begun_with, waited_s=waited_s))
            if not told:
                tell(
                    "\n".join([*(one.why for one in absent), f"waited for, {left_s:.0f} s more (hosts.absent_after_s)"])
                )
                told = True
            time.sleep(min(_AGAIN_S, left_s))
            if workers.failed:
                start_by_ssh(workers, config, list(workers.failed))
    except BaseException:
        workers.close()
        raise
    workers.workers = sorted((w for w in workers.workers if w.name in answers), key=lambda w: named.index(w.name))
    found = [answers[worker.name] for worker in workers.workers]
    inventories = [inventory for inventory, _ in found]
    return Gathered(workers, key, inventories, found[0][1], named, {one.name: one.why for one in absent})


def _ask_those_left(workers: Workers, key: WorkerKey, answers: dict[str, Answer]) -> list[Absence]:
    """Ask those that have not answered; who does is added to ``answers``."""
    asked = [worker for worker in workers.workers if worker.name not in answers]
    absent = []
    for worker, answer in zip(asked, ask_each(asked, key), strict=True):
        if isinstance(answer, HostLost):
            absent.append(Absence(worker.name, str(answer), refuses=isinstance(answer, HostRefuses)))
        else:
            answers[worker.name] = answer
    return absent
