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
    return llamarl(
        ["train", "--resume", folder, '--hosts.standby=""', *hosts_that_are_left(config, _answers(config)), *words]
    )


def hosts_that_are_left(config: RunConfig, answers: Callable[[Worker], str]) -> list[str]:
    """Words that have the run's hosts be those that answer, without naming them where all do. Where none is left, it is this one.

    Args:
        answers: Why a host does not; empty: it does.
    """
    hosts = config.hosts
    words = [] if not hosts.key or key_file(hosts.key).exists() else ['--hosts.key=""']
    if hosts.start != "running" or not hosts.workers:
        return words
    lost = {}
    for worker in parse_workers(hosts.workers):
        if why_not := answers(worker):
            lost[worker.name] = why_not
            print(f"left out: {why_not}", file=sys.stderr)
    if not lost:
        return words
    left = [name for name in hosts.workers if name not in lost]
    if not left:
        return [*words, "--hosts", "here"]
    return [*words, "--hosts", ",".join(left)]


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
