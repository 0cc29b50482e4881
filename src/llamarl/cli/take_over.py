"""On a standby host: go on with the copy of a run whose controller is gone, on those of its hosts that are left.

python -m llamarl.cli.take_over FOLDER [WORDS for llamarl train --resume]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from llamarl.config import RunConfig, load_config
from llamarl.controller.job_hosts import key_for
from llamarl.errors import ConfigError
from llamarl.runtime.config import Worker, parse_workers
from llamarl.runtime.hosts.connection import ask
from llamarl.runtime.hosts.keys import key_file, read_key

__all__ = ["hosts_that_are_left", "main"]


def main(arguments: Sequence[str]) -> int:
    """The exit code of ``llamarl train``."""
    from llamarl.cli.main import main as llamarl

    folder, *words = arguments
    config = load_config(Path(folder) / "config.toml")
    left = hosts_that_are_left(config, _answers(config))
    return llamarl(["train", "--resume", folder, '--hosts.standby=""', *left, *words])


def hosts_that_are_left(config: RunConfig, answers: Callable[[Worker], str]) -> list[str]:
    """Words by which the run goes on with those of its hosts that answer now, as any resume does; where none is left, with this one.

    Args:
        answers: Why a host does not; empty: it does.
    """
    hosts = config.hosts
    words = [] if not hosts.key or key_file(hosts.key).exists() else ['--hosts.key=""']
    if hosts.start != "running" or not hosts.workers:
        return words
    absent = [why_not for worker in parse_workers(hosts.workers) if (why_not := answers(worker))]
    if not absent:
        return words
    if len(absent) < len(hosts.workers):
        return [*words, "--hosts.absent_after_s=0"]  # it has waited already
    print("\n".join(f"left out: {why}" for why in absent), file=sys.stderr)
    return [*words, "--hosts", "here"]


def _answers(config: RunConfig) -> Callable[[Worker], str]:
    def why_not(worker: Worker) -> str:
        file = key_file(config.hosts.key)
        try:
            ask([worker], key_for(config, read_key(file if file.exists() else key_file(""))))
        except ConfigError as error:
            return str(error)
        return ""

    return why_not


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
