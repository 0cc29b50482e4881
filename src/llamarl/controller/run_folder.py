"""The folder of a run: who may make it, and who holds it.

RUN/config.toml   resolved configuration: there is a run, or one was tried
RUN/.lock         held (``flock``) by the one process that writes here; the system frees it when that process ends
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from llamarl.errors import ConfigError

__all__ = ["CONFIG_FILE", "held", "make_folder", "refuse_a_run"]

CONFIG_FILE = "config.toml"
_LOCK_FILE = ".lock"
_TRACES = ("metrics.jsonl", "checkpoints", "model", "adapter")
"""What a run leaves once an executor has finished a tick; empty ones do not count."""


def make_folder(run_dir: Path) -> None:
    """Make ``run_dir`` and its parents.

    Raises:
        ConfigError: It cannot be made or written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot make {run_dir}: {error.strerror}; choose another --run.dir") from error
    if not os.access(run_dir, os.W_OK):
        raise ConfigError(f"run.dir: {run_dir} is not writable; choose another --run.dir")


def refuse_a_run(run_dir: Path) -> None:
    """Let nobody start a run over another one. A folder whose run ended before its first tick holds nothing to lose.

    Raises:
        ConfigError: ``run_dir`` holds a run.
    """
    if (run_dir / CONFIG_FILE).exists() and any(_holds_something(run_dir / name) for name in _TRACES):
        raise ConfigError(
            f"run.dir: {run_dir} already holds a run: go on with it by --resume {run_dir}, or choose another --run.dir"
        )


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Be the only process that writes into ``run_dir``.

    Raises:
        ConfigError: Another process is.
    """
    try:
        descriptor = os.open(run_dir / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write {run_dir / _LOCK_FILE}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                owner = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
                raise ConfigError(
                    f"run.dir: {run_dir} is in use by another llamarl train (process {owner}): wait for it or stop it, "
                    f"or choose another --run.dir"
                ) from error
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # file systems without locks
                raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _holds_something(path: Path) -> bool:
    if path.is_dir():
        return any(path.iterdir())
    return path.is_file() and path.stat().st_size > 0
