"""Where the ranks of a job are among hosts, as the runtime asks for it when it brings an executor up, the first time or again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from llamarl.runtime.worker import RankReport, WorkerPlan
from llamarl.transports.network import Network

__all__ = ["Places"]


class Places(Protocol):
    """Hosts may go while the job runs; others then take their places."""

    def adapt(self, plan: WorkerPlan) -> WorkerPlan:
        """A rank's plan as the host needs it where the rank is now: folders and files have other paths there."""
        ...

    def has_place(self, executor: str) -> bool:
        """Whether it can be brought up again: its hosts are there, or others for those that are not."""
        ...

    def settle(self, executor: str) -> Sequence[Network]:
        """Give ranks whose hosts are gone other hosts. Where each rank is now."""
        ...

    def prepare(self, executor: str, load_from: Path | None) -> None:
        """Have the hosts of its ranks hold what these read, before they start; any thread.

        Raises:
            ConnectionError: One of them is gone, too.
            LlamaRLError: One cannot take it.
        """
        ...

    def bring_files(self, executor: str, report: RankReport) -> None:
        """Have what a rank has written into the run's folder in the controller's, before its report counts; any thread.

        Raises:
            LlamaRLError: It did not come.
        """
        ...
