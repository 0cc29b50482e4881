"""A host's files in this process: the client asks the agent's own method, without a cluster between them."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llamarl.files.file_client import FileClient
from llamarl.files.host_files import HostFiles
from llamarl.runtime.hosts.agent import HostAgent

__all__ = ["FarHost", "far_host"]


class FarHost:
    """One host that shares nothing with this one but a folder's parent."""

    on_the_way: Callable[[str, tuple[Any, ...]], tuple[Any, ...]] = staticmethod(lambda method, values: values)
    """Changes the arguments of a call, or its answer under the name ``answer``."""

    def __init__(self, base: Path) -> None:
        self.files = HostFiles(base)

    def client(self, name: str = "b") -> FileClient:
        return FileClient(name, self._ask, stall_s=10.0)

    def _ask(self, method: str, *arguments: Any) -> Future[tuple[Any, str, bool]]:
        agent: Any = SimpleNamespace(_files=self.files)
        result, *told = asyncio.run(HostAgent.files(agent, method, *self.on_the_way(method, arguments)))
        answer: Future[Any] = Future()
        answer.set_result((*self.on_the_way(f"answer of {method}", (result,)), *told))
        return answer


@contextlib.contextmanager
def far_host(base: Path, **how: int) -> Iterator[FarHost]:
    yield FarHost(base, **how)
