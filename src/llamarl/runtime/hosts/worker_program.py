"""What ``llamarl worker`` does between its flags and :func:`serve_host`: settings, key, the lines that it prints, signals."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import ssl
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from llamarl.errors import ConfigError
from llamarl.runtime.config import DEFAULT_PORT, parse_ports
from llamarl.runtime.hosts.addresses import own_address
from llamarl.runtime.hosts.daemon import serve_host
from llamarl.runtime.hosts.door import listen
from llamarl.runtime.hosts.keys import key_file, parse_key, take_key
from llamarl.transports.network import TlsFiles
from llamarl.transports.segment_wire import server_tls

__all__ = ["READY", "WorkerSettings", "lend_this_host", "worker_settings"]

READY = "llamarl-worker "
"""Begins the line that tells who started this program where it listens: JSON follows."""
_KEY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Of one daemon."""

    bind: str
    why: str
    """Why that address, where nobody said."""
    ports: tuple[int, int]
    """To listen on."""
    rank_ports: tuple[int, int]
    """For ranks."""
    key: bytes = field(repr=False)
    from_stdin: bool
    tls: TlsFiles | None
    space: str = ""


def worker_settings(
    *, bind: str, port: int | None, port_range: str, key: str, tls: tuple[Path | None, ...], space: str = ""
) -> WorkerSettings:
    """From the flags of the same names.

    Raises:
        ConfigError: Naming every mistake.
    """
    mistakes = []
    rank_ports = (0, 0)
    try:
        rank_ports = parse_ports(port_range) if port_range else rank_ports
    except ValueError as error:
        mistakes.append(f"--port-range: {error}")
    if port is not None and not 0 <= port <= 65535:
        mistakes.append(f"--port must lie in 0 .. 65535, got {port}")
    if any(tls) and not all(tls):
        mistakes.append("--tls-cert, --tls-key and --tls-ca belong together: give all three or none")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    certificate, private_key, authority = tls
    files = None
    if certificate is not None and private_key is not None and authority is not None:
        files = TlsFiles(
            certificate=certificate.resolve(), private_key=private_key.resolve(), authority=authority.resolve()
        )
    if port is None:
        port = 0 if key == "-" else DEFAULT_PORT
    address, why = (bind, "--bind says so") if bind else own_address()
    return WorkerSettings(
        bind=address,
        why=why,
        ports=(port, port),
        rank_ports=rank_ports,
        key=_key_of_stdin() if key == "-" else _key_of_file(key),
        from_stdin=key == "-",
        tls=files,
        space=space,
    )


def _key_of_file(named: str) -> bytes:
    path = key_file(named)
    key, made = take_key(path)
    if made:
        print(
            f"a new key is in {path}: copy it to every host of your jobs, and to the controller, such as by\n"
            f"  ssh OTHER mkdir -p {path.parent} && scp -p {path} OTHER:{path}",
            flush=True,
        )
    return key


def _key_of_stdin() -> bytes:
    if not select.select([0], [], [], _KEY_S)[0]:
        raise ConfigError(f"--key -: no key came on standard input within {_KEY_S:g} s")
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):  # no byte beyond the line: its end is waited for later
        line += byte
    return parse_key(line.decode("ascii", "replace"))


def lend_this_host(settings: WorkerSettings) -> int:
    """Serve until a signal, or the end of standard input where the key came from there; the exit code.

    Raises:
        ConfigError: It cannot listen there, or its TLS files are wrong.
    """
    tls = server_tls(settings.tls) if settings.tls is not None else None
    try:
        listener = listen(settings.bind, settings.ports)
    except OSError as error:
        taken = f"{settings.bind}:{settings.ports[0]}"
        raise ConfigError(
            f"cannot listen on {taken}: {error.strerror or error}; choose another by --bind and --port, or end the worker that "
            "listens there"
        ) from error
    asyncio.run(_serve(listener, settings, tls))
    return 0


async def _serve(listener: socket.socket, settings: WorkerSettings, tls: ssl.SSLContext | None) -> None:
    loop, until = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, until.set)
    address, port = listener.getsockname()[:2]
    if settings.from_stdin:
        threading.Thread(target=_wait_for_stdin, args=(loop, until), daemon=True).start()
        where = {"address": address, "port": port, "node": os.environ.get("SLURM_NODEID", "0")}
        print(READY + json.dumps(where), flush=True)
    else:
        safely = "TLS" if settings.tls else "the key is asked for, what travels is not encrypted"
        print(f"llamarl worker listens on {address}:{port} ({settings.why}); {safely}", flush=True)
    await serve_host(
        listener,
        settings.key,
        tls=tls,
        tls_files=settings.tls,
        ports=settings.rank_ports,
        space=settings.space,
        say=lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True),
        until=until,
        forget=settings.from_stdin,
    )


def _wait_for_stdin(loop: asyncio.AbstractEventLoop, until: asyncio.Event) -> None:
    """Whoever started this program holds the other end: an ssh, an srun."""
    while os.read(0, 4096):
        continue
    loop.call_soon_threadsafe(until.set)
