"""The key by which a controller may use daemons: 32 bytes in a file that is its owner's alone, the same on all hosts."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from llamarl.errors import ConfigError
from llamarl.transports.run_key import KEY_BYTES, new_key, read_key

__all__ = ["key_file", "parse_key", "take_key"]


def key_file(named: str) -> Path:
    """The file that the user names, or the one in the folder of their settings."""
    if named:
        return Path(named).expanduser()
    settings = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(settings) / "llamarl" / "worker.key"


def take_key(path: Path) -> tuple[bytes, bool]:
    """The key in ``path``, and whether it had to be made now.

    Raises:
        ConfigError: It can neither be read nor made.
    """
    if path.exists():
        return read_key(path), False
    key = new_key()
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(key.hex() + "\n")
        try:
            os.link(new, path)  # whole, and never over another: workers of several hosts may begin at once in one home
        finally:
            new.unlink()
    except FileExistsError:
        return read_key(path), False
    except OSError as error:
        raise ConfigError(f"{path}: cannot write a new key there: {error.strerror}") from error
    return key, True


def parse_key(text: str) -> bytes:
    """A key as hexadecimal digits.

    Raises:
        ConfigError: It is none. The message does not repeat it.
    """
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"expected a key of {2 * KEY_BYTES} hexadecimal digits on the first line of standard input")
    return key
