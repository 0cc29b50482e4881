"""The folder of a run: who may make it, who holds it, and whether this user has begun it.

RUN/config.toml   resolved configuration: there is a run, or one was tried
RUN/.run_id       tells this run from every other (``checkpoint.storage.RunIdentity``)
RUN/.lock         held (``flock``) by the one process that writes here; the system frees it when that process ends
RUN/.begun_by     a mark that nobody else can make: config.toml and the working directory, signed (HMAC) with the user's key

The mark is written where a run's configuration names code, before that configuration is: a resume of the same user's
proves it. It holds for these settings alone, wherever the folder is moved; where they hold relative paths, in the same
working directory alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import platform
import secrets
import shlex
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from llamarl.checkpoint.storage import RUN_ID_FILE, CheckpointStore, RunIdentity
from llamarl.config import RunConfig
from llamarl.errors import ConfigError, FileError, LlamaRLError, RunFolderLost
from llamarl.observability.writing import replace_file
from llamarl.reading import read_bytes
from llamarl.roles import ROLES

__all__ = [
    "CONFIG_FILE",
    "MARK_FILE",
    "RunFolder",
    "held",
    "key_file",
    "make_folder",
    "mark",
    "refuse_a_run",
    "refuse_if_held",
    "user_key",
    "who_holds",
    "why_not_own",
]

CONFIG_FILE = "config.toml"
_LOCK_FILE = ".lock"
_ON = " on "
_KEY_BYTES = 32
_LOOKED_AT_S = 0.2
"""Longest time for which somebody who only asks whether a folder is held may seem to hold it."""
_EXPORTS = tuple(product.folder for role in ROLES.values() for product in role.products)
"""Folders that are replaced as a whole, under their names, at the run's end."""
_TRACES = ("metrics.jsonl", "checkpoints", *_EXPORTS)
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


def who_holds(run_dir: Path) -> str | None:
    """The process that writes into a run's folder now, as far as can be told; empty: nobody does,
    None: nothing can tell."""
    try:
        descriptor = os.open(run_dir / _LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return ""
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return _owner(descriptor) if error.errno in (errno.EAGAIN, errno.EACCES) else None
    finally:
        os.close(descriptor)
    return ""


def refuse_if_held(run_dir: Path) -> None:
    """Say at once what :func:`held` would find, before work that may turn out to be for nothing.
    Where the process that holds the folder is not seen here (it has died, and what is left of it is
    about to; or it is on another machine), that is told, and :func:`held` decides.

    Raises:
        ConfigError: Another process of this machine writes into ``run_dir``.
    """
    owner = who_holds(run_dir)
    if not owner:
        return
    if _is_alive(owner):
        raise _in_use(run_dir, owner)
    print(
        f"{run_dir} is still held by a llamarl train (process {owner}) that is not on this machine, or is ending: it is looked at "
        "again when this run is checked",
        file=sys.stderr,
    )


class RunFolder:
    """The folder as the controller holds it: by its path and by a descriptor, which follows it wherever it is moved."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.identity = RunIdentity.of(path)

    def begin(self) -> None:
        """A new run begins here.

        Raises:
            ConfigError: The folder cannot be written.
        """
        try:
            replace_file(self.path / RUN_ID_FILE, f"{secrets.token_hex(16)}\n".encode())
            self.identity = RunIdentity.of(self.path)
        except OSError as error:
            raise ConfigError(f"run.dir: cannot write {self.path / RUN_ID_FILE}: {error.strerror}") from error

    def keep_id(self) -> None:
        """The run that lies here goes on; one of an earlier release is given an id."""
        if not self.identity.run_id:
            self.begin()

    def lost(self) -> str:
        """If the folder was moved, removed or started over: what happened, what is left where, and
        how to go on from it."""
        change = self.identity.change()
        if not change:
            return ""
        told = f"the run's folder {self.path} {change}, while the run wrote into it. The run ends, so that its data does not "
        told += "come to lie in two places."
        now = self._where()
        if now is None:
            return f"{told} What it had written, checkpoints too, was removed: start it anew."
        if now == self.path:
            return f"{told} What it had written, checkpoints too, was removed from it: start it anew in another folder."
        newest = next(reversed(CheckpointStore(now / "checkpoints").list()), None)
        command = shlex.join(["llamarl", "train", "--resume", str(now)])
        held = f"its last checkpoint is {newest}" if newest else "it had no checkpoint yet"
        return f"{told} It lies in {now} now; {held}; to go on: {command}"

    def check(self) -> None:
        """Call it before each write.

        Raises:
            RunFolderLost: As ``lost`` says.
        """
        if self.identity.change():
            raise RunFolderLost(self.lost())

    def _where(self) -> Path | None:
        """Where the folder is now; None if it is nowhere, or nothing can tell."""
        try:
            place = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
            return place if os.path.samestat(os.stat(place), os.fstat(self._descriptor)) else None
        except OSError:
            return None


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[RunFolder]:
    """Be the only process that writes into ``run_dir``.

    Raises:
        ConfigError: Another process is, or the lock is not a plain file of this folder, or what a
            run exports at its end could not take its place here, or a link leads out of the folder.
    """
    for export in (run_dir / name for name in _EXPORTS):
        if export.is_symlink() or (export.exists() and not export.is_dir()):
            raise ConfigError(
                f"run.dir: {export} is no folder but a {'symbolic link' if export.is_symlink() else 'file'}, and would stop the "
                f"run at its end, when the trained weights take its place: remove it"
            )
    _refuse_links(run_dir)
    lock = run_dir / _LOCK_FILE
    try:
        # Nothing that lies elsewhere is ever opened for writing, and no pipe is waited for.
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(
                f"run.dir: {lock} is a symbolic link, which llamarl never makes: remove it if you trust this folder"
            ) from error
        raise ConfigError(f"run.dir: cannot write {run_dir / _LOCK_FILE}: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise ConfigError(
                f"run.dir: {lock} is not a plain file of this folder alone: remove it if you trust this folder"
            )
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise _in_use(run_dir, _owner(descriptor)) from error
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # file systems without locks
                raise
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}{_ON}{platform.node()[:32]}\n".encode(), 0)
        except OSError as error:
            raise ConfigError(f"run.dir: cannot write {lock}: {error.strerror}") from error
        folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield RunFolder(run_dir, folder)
        finally:
            os.close(folder)
    finally:
        os.close(descriptor)


def _refuse_links(run_dir: Path) -> None:
    """What is written into a run's folder stays in it. The folder itself may be a link."""
    inside = os.path.realpath(run_dir)
    for parent, folders, files in os.walk(run_dir):
        for path in (os.path.join(parent, name) for name in (*folders, *files)):
            if os.path.islink(path) and os.path.commonpath([inside, target := os.path.realpath(path)]) != inside:
                raise ConfigError(
                    f"run.dir: {path} is a symbolic link to {target}, which the run would write to: remove it; "
                    "a run's folder as a whole may be a link"
                )


def _lock(descriptor: int) -> None:
    """Raises OSError (EAGAIN) if another process has it, and keeps it."""
    until = time.monotonic() + _LOOKED_AT_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() >= until:
                raise
        time.sleep(_LOOKED_AT_S / 10)


def _owner(descriptor: int) -> str:
    return os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"


def _is_alive(owner: str) -> bool:
    """Whether a process of this machine has that id, and has not ended (one that nobody has waited for yet has)."""
    pid, _, host = owner.partition(_ON)
    if host not in ("", platform.node()[:32]):  # in a shared folder: whoever has that id here is somebody else
        return False
    try:
        status = Path(f"/proc/{int(pid)}/stat").read_text()
    except (ValueError, OSError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def _in_use(run_dir: Path, owner: str) -> ConfigError:
    error = ConfigError(
        f"run.dir: {run_dir} is in use by another llamarl train (process {owner}): wait for it or stop it, or choose another "
        "--run.dir"
    )
    if not _is_alive(owner):  # a file server holds the lock of a machine that was lost for a minute or two
        error.exit_code = LlamaRLError.exit_code
    return error


def _holds_something(path: Path) -> bool:
    if path.is_dir():
        return any(path.iterdir())
    return path.is_file() and path.stat().st_size > 0


MARK_FILE = ".begun_by"
_MAX_BYTES = 1 << 24


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


def mark(config: RunConfig, settings: bytes, run_dir: Path) -> None:
    """Note that this user begins a run, or goes on with it.

    Args:
        settings: What its ``config.toml`` is about to hold.

    Raises:
        OSError: The run's folder cannot be written.
    """
    path = run_dir / MARK_FILE
    if not config.named_code:
        path.unlink(missing_ok=True)
        return
    try:
        key = user_key(create=True)
    except OSError as error:
        path.unlink(missing_ok=True)
        told = f"{run_dir} cannot be marked as yours ({key_file()}: {error.strerror}): whoever goes on with it names its code again"
        print(told, file=sys.stderr)
        return
    place = os.fsencode(os.getcwd())
    replace_file(path, _proof(key, settings, place) + b"\n" + place)


def why_not_own(run_dir: Path, settings: Path, *, relative: bool) -> str:
    """Why the run in a folder is not known as this user's; empty if it is.

    Args:
        settings: Its ``config.toml``.
        relative: Whether that names files by paths that mean others in another working directory.
    """
    try:
        proof, _, place = read_bytes(run_dir / MARK_FILE, max_bytes=_MAX_BYTES).partition(b"\n")
        text = read_bytes(settings, max_bytes=_MAX_BYTES)
    except FileError:
        return "it bears no mark of a run that you have begun"
    try:
        key = user_key(create=False)
    except OSError as error:
        return f"your key, which would prove it yours, cannot be read ({key_file()}: {error.strerror})"
    if not hmac.compare_digest(proof, _proof(key, text, place)):
        return "its mark is another user's, or of other settings"
    moved = relative and place != os.fsencode(os.getcwd())
    return f"its paths are those of {os.fsdecode(place)}, where it was begun" if moved else ""


def _proof(key: bytes, settings: bytes, place: bytes) -> bytes:
    signed = len(settings).to_bytes(8, "little") + settings + place
    return hmac.digest(key, signed, "sha256").hex().encode()
