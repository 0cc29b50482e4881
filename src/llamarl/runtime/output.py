"""What the processes of a job print reaches the user line by line, with the executor's name before it.

Each process writes into two pipes made for it; one thread here reads them all. A pipe outlives its
writer: what a killed process printed last is still read. Lines go to ``sys.stdout`` and
``sys.stderr`` of the controller, whatever these are when the line arrives, so a live console that
redirects them keeps its picture whole.
"""

from __future__ import annotations

import os
import selectors
import sys
import threading
import time

__all__ = ["OutputReader"]

_LONGEST_LINE = 1 << 16


class OutputReader:
    """Pipes and the thread that reads them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe()
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        self._buffers: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._stop_by: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="llamarl-output", daemon=True)
        self._thread.start()

    def pipe(self, label: str, stream: str) -> int:
        """The write end of a new pipe whose lines are to start with ``[label]``, for a child's
        ``stdout`` or ``stderr``."""
        read, write = os.pipe()
        with self._lock:
            self._buffers[read] = b""
            self._selector.register(read, selectors.EVENT_READ, (label, stream))
        os.write(self._wake_w, b"x")
        return write

    def close(self, timeout_s: float) -> None:
        """Read what is still in the pipes until every writer has gone, for at most ``timeout_s`` seconds."""
        if self._closed:
            return
        self._closed = True
        self._stop_by = time.monotonic() + timeout_s
        os.write(self._wake_w, b"x")
        self._thread.join(timeout_s + 1.0)
        if not self._thread.is_alive():  # the thread may end before it has been woken, so the pipe is not its to close
            os.close(self._wake_r)
            os.close(self._wake_w)

    def _loop(self) -> None:
        while True:
            stop_by = self._stop_by
            timeout = None
            if stop_by is not None:
                timeout = stop_by - time.monotonic()
                if timeout <= 0 or not self._buffers:
                    break
            for key, _ in self._selector.select(timeout):
                if key.data is None:
                    os.read(self._wake_r, 4096)
                else:
                    self._read(key.fd, *key.data)
        for fd, rest in self._buffers.items():
            label, stream = self._selector.get_key(fd).data
            self._emit(label, stream, rest)
            os.close(fd)
        self._selector.close()

    def _read(self, fd: int, label: str, stream: str) -> None:
        data = os.read(fd, 1 << 16)
        if not data:  # the last writer has gone
            with self._lock:
                self._selector.unregister(fd)
                rest = self._buffers.pop(fd)
            os.close(fd)
            self._emit(label, stream, rest)
            return
        *lines, rest = (self._buffers[fd] + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:  # a progress bar that never ends its line
            lines, rest = [*lines, rest], b""
        self._buffers[fd] = rest
        if lines:
            self._emit(label, stream, b"\n".join(lines))

    def _emit(self, label: str, stream: str, data: bytes) -> None:
        if not data:
            return
        target = sys.stdout if stream == "stdout" else sys.stderr
        encoding = getattr(target, "encoding", None) or "utf-8"
        said = data.decode(errors="replace").encode(encoding, "replace").decode(encoding)  # what it has letters for
        text = "".join(f"[{label}] {line}\n" for line in said.split("\n"))
        try:
            target.write(text)
            target.flush()
        except (OSError, ValueError, AttributeError):  # the user closed the controller's own output (`| head`), or it
            # began without one: nowhere left to say so
            return
