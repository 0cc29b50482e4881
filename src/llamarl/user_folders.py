"""Where a user's own files go: what can be made again, and a key. Nothing is imported here but Python's own."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from pathlib import Path

__all__ = ["cache_folder", "key_file", "temporary_folder", "user_key"]

_KEY_BYTES = 32


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/llamarl``, else ``~/.cache/llamarl``; of a user without a home the folder
    beside the system's temporary files."""
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "llamarl"
    home = os.path.expanduser("~")
    return temporary_folder() if home == "~" else Path(home) / ".cache" / "llamarl"


def temporary_folder() -> Path:
    """The user's own among the system's temporary files. Who runs what lies there asks first whose it is."""
    return Path(tempfile.gettempdir()) / f"llamarl-{os.getuid()}"


def key_file() -> Path:
    """``$XDG_STATE_HOME/llamarl/run_key``, else ``~/.local/state/llamarl/run_key``."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "llamarl" / "run_key"


def user_key(*, create: bool) -> bytes:
    """The user's own random key, which no other user can read.

    Args:
        create: Make it where there is none.

    Raises:
        OSError: There is none and none can be made, or others may read it.
    """
    path = key_file()
    if not path.is_absolute():
        raise OSError(errno.ENOENT, "this user has no home folder")
    if create and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # another process was faster: its key counts
                os.link(new, path)
        finally:
            os.close(descriptor)
            os.unlink(new)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found, key = os.fstat(descriptor), os.read(descriptor, _KEY_BYTES + 1)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise OSError(errno.EACCES, "it is not a file of this user's alone (chmod 600)")
    if len(key) != _KEY_BYTES:
        raise OSError(errno.EINVAL, f"it does not hold {_KEY_BYTES} bytes")
    return key
