"""A host's files in this process: the client asks the agent's own method, without Ray between them."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llamarl.errors import TransferError
from llamarl.files.host_files import HostFiles
from llamarl.files.over_ray import FileClient
from llamarl.runtime.ray.host_agent import HostAgent

__all__ = ["DirectClient", "FarHost", "far_host"]


class DirectClient(FileClient):
    """Args: see ``FileClient``; ``agent`` is whatever has ``_files``."""

    on_the_way: Callable[[str, tuple[Any, ...]], tuple[Any, ...]] | None = None
    """Changes the arguments of a call, or its answer under the name ``answer``."""

    def _ask(self, path: str, method: str, *arguments: Any) -> Any:
        if self.on_the_way is not None:
            arguments = self.on_the_way(method, arguments)
        result, trouble, missing = asyncio.run(HostAgent.files(self._agent, method, *arguments))
        if trouble:
            raise self._named(TransferError(trouble, missing=missing), path)
        if self.on_the_way is not None:
            (result,) = self.on_the_way(f"answer of {method}", (result,))
        return result


class FarHost:
    """One host that shares nothing with this one but a folder's parent."""

    def __init__(self, base: Path) -> None:
        self.files = HostFiles(base)

    def client(self, name: str = "b") -> DirectClient:
        return DirectClient(name, SimpleNamespace(_files=self.files), stall_s=10.0)


@contextlib.contextmanager
def far_host(base: Path, **how: int) -> Iterator[FarHost]:
    yield FarHost(base, **how)
