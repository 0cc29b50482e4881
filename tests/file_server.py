"""A host's end of the file service on a thread of this process, reached over socket pairs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from llamarl.files.client import FileClient
from llamarl.files.host_files import HostFiles
from llamarl.files.service import serve_files

__all__ = ["FarHost", "far_host"]


class FarHost:
    """One host that shares nothing with this one but a folder's parent."""

    def __init__(self, base: Path, *, stall_s: float = 10.0, max_object_bytes: int = 1 << 40) -> None:
        self.files = HostFiles(base, max_object_bytes=max_object_bytes)
        self.dialled = 0
        self.connections: list[socket.socket] = []
        """This process's ends."""
        self._stall_s = stall_s
        self._serving: list[Future[None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def dial(self) -> socket.socket:
        """A connection that has proved whatever had to be proved."""
        ours, theirs = socket.socketpair()
        self.dialled += 1
        self.connections.append(ours)
        self._serving.append(asyncio.run_coroutine_threadsafe(self._serve(theirs), self._loop))
        return ours

    def client(self, name: str = "b", *, stall_s: float = 10.0) -> FileClient:
        return FileClient(name, self.dial, stall_s=stall_s)

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        with contextlib.suppress(OSError, EOFError):
            await serve_files(reader, writer, self.files, stall_s=self._stall_s)
        writer.close()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for serving in self._serving:
            serving.result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)


@contextlib.contextmanager
def far_host(base: Path, **how: float) -> Iterator[FarHost]:
    host = FarHost(base, **how)  # type: ignore[arg-type]
    try:
        yield host
    finally:
        host.close()
