"""A run whose ranks are put into spaces, in a process that has imported torch: ranks are its forks."""

import os
from pathlib import Path

from forked_command import ENVIRONMENT

from llamarl.config import load_config
from llamarl.controller import run as run_module
from llamarl.controller.prepare import start_fork_servers
from llamarl.controller.run import start_run
from llamarl.errors import ExecutorFailed
from llamarl.runtime.fork_server import allow_fork_of_this_process
from llamarl.runtime.processes import ProcessRuntime
from llamarl.transports.network import Network

__all__ = ["train"]


def train(recipe: Path, words: list[str], networks: dict[str, list[Network]] | None, failure: Path) -> None:
    """To ``failure``: what an executor's failure said, or nothing."""
    os.environ.update(ENVIRONMENT)
    allow_fork_of_this_process()

    class OverSpaces(ProcessRuntime):
        def __init__(self, **_: object) -> None:
            super().__init__(networks=networks)

    run_module.ProcessRuntime = OverSpaces  # type: ignore[assignment]
    config, said = load_config(recipe, words), ""
    start_fork_servers(config)
    try:
        start_run(config)
    except ExecutorFailed as error:
        said = str(error)
    failure.write_text(said)
