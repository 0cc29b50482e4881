"""A job on several hosts, on one machine and without rights: processes, or moments of one process, in spaces of different names."""

from collections.abc import Iterator
from contextlib import contextmanager

from llamarl.transports import network, segment_server
from llamarl.transports.network import Network, TlsFiles

KEY = bytes(range(32))


def place(space: str, *, key: bytes = KEY, ports: tuple[int, int] = (0, 0), tls: TlsFiles | None = None) -> Network:
    """A process of ``space``, reached over the loopback."""
    return Network(space=space, address="127.0.0.1", key=key, ports=ports, tls=tls)


@contextmanager
def being_at(where: Network | None) -> Iterator[None]:
    """Inside, this process is at ``where``."""
    before = network.mine()
    network.join(where)
    try:
        yield
    finally:
        network.join(before)


@contextmanager
def alone_again() -> Iterator[None]:
    """Afterwards this process is on no network and offers nothing."""
    try:
        yield
    finally:
        if segment_server._here is not None:
            segment_server._here[1].close()
            segment_server._here = None
        network.join(None)
