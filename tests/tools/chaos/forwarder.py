"""A link that can be cut by who has no rights over it: bytes go both ways until it is told to stop.

controller ─▶ Forwarder, on this machine ─▶ worker on a host      cut: both ends see their connections end, and none comes again
"""

from __future__ import annotations

import contextlib
import socket
import threading

from llamarl.errors import ConfigError
from llamarl.runtime.config import Worker

__all__ = ["Forwarder"]

_DIAL_S = 10.0
_CHUNK = 1 << 18


class Forwarder:
    """Passes connections on to a worker, until it is cut. What travels is not looked at, so keys and TLS stay between the ends.

    It listens on that address of this machine by which the worker is reached, since the ranks there dial the controller by the address
    that it has towards them.

    Raises:
        ConfigError: Nothing answers there.
    """

    def __init__(self, to: Worker) -> None:
        self._to = (to.address, to.port)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._cut = False
        try:
            with socket.create_connection(self._to, _DIAL_S) as tried:
                own, family = tried.getsockname()[0], tried.family
            self._listener = socket.create_server((own, 0), family=family, backlog=128)
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
            raise ConfigError(
                f"host {to.name}: nothing answers at {to.address}:{to.port} ({why}): run `llamarl worker` there"
            ) from error
        self.address, self.port = own, int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="llamarl-forwarder", daemon=True).start()

    @property
    def name(self) -> str:
        """By which a run names it among its hosts."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    def cut(self) -> None:
        """End all connections, and take no more. Idempotent."""
        with self._lock:
            self._cut = True
            ends = [*self._open, self._listener]
            self._open.clear()
        for end in ends:
            with contextlib.suppress(OSError):  # it has ended by itself
                end.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._cut:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(near,), name="llamarl-forwarder", daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near:
            try:
                far = socket.create_connection(self._to, _DIAL_S)
            except OSError:
                return  # the worker has ended: who dialled sees that nobody is there
            with far:
                far.settimeout(None)
                with self._lock:
                    if self._cut:
                        return
                    self._open |= {near, far}
                back = threading.Thread(target=_pass_on, args=(far, near), name="llamarl-forwarder", daemon=True)
                back.start()
                _pass_on(near, far)
                back.join()
                with self._lock:
                    self._open -= {near, far}


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
