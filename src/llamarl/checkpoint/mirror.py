"""A copy of a run's folder in a storage that outlives the machine: uploaded beside the run, proved, resumed from.

    a checkpoint is finished ─▶ thread: list RUN ─▶ plan ─▶ upload what is new ─▶ manifest ─▶ delete what it no longer names
    URL ─▶ restore: manifest ─▶ every file, proved by its checksum ─▶ RUN, by one rename

    URL/manifest.json        which run, who writes, every file with size and checksum
    URL/files/PATH           a file of RUN
    URL/versions/N/PATH      one that has changed, while files/PATH is what the manifest before names

An object that the manifest names is never written again, so that half an upload leaves the last whole one as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import xxhash

from llamarl.checkpoint.snapshot import MANIFEST, FileRecord, Manifest, checksum_file
from llamarl.checkpoint.storage import CheckpointStore, RunIdentity
from llamarl.checkpoint.written import files_below, is_inside, what_is_wrong
from llamarl.errors import CheckpointError, ConfigError, RunFolderLost
from llamarl.plural import format_bytes, plural
from llamarl.reading import read_bytes
from llamarl.settings.checkpoint import why_no_storage

__all__ = ["Mirror", "Storage", "check_mirror", "mirrored", "plan_upload", "restore"]

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_REACHED_S = 60.0
"""For which a storage that does not answer is asked again, before anything has begun."""
_OBJECT_S = 600.0
"""For which an object is asked for again while its storage fails."""
_LASTING = (FileNotFoundError, PermissionError, ConfigError, CheckpointError)
"""What is missing, refused or wrong stays so; whatever else a storage says may pass."""
_CHUNK_BYTES = 1 << 22
_MOST_OPEN = 256
_PASSING = (".partial", ".replaced", ".deleted", ".new", ".lock", ".incoming", "journal")
"""How names end that mean nothing on another machine."""
_FINISHED = re.compile(rf"checkpoints/tick_(\d+)/{re.escape(MANIFEST)}")


def plan_upload(
    local: Mapping[str, FileRecord], remote: Manifest | None, others: Iterable[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Say what makes a mirror hold a folder, without a moment at which what it holds now is not whole.

    Args:
        local: Path -> file, of the folder.
        remote: What the mirror holds.
        others: Objects that may be there besides, left by uploads that were torn.

    Returns:
        Every path -> its object, where those to be sent are the ones that ``remote`` has otherwise
        or not at all; and the objects to be deleted once a manifest names the former.
    """
    had = {record.path: record for record in remote.files} if remote else {}
    named = objects_of(remote)
    taken = set(named.values())
    number = remote.run["number"] + 1 if remote else 0
    objects = {}
    for path, record in sorted(local.items()):
        plain = f"files/{path}"
        new = plain if plain not in taken else f"versions/{number}/{path}"
        objects[path] = named[path] if had.get(path) == record else new
    return objects, sorted(taken.union(others) - set(objects.values()))


def objects_of(manifest: Manifest | None) -> dict[str, str]:
    """Path -> object that holds it."""
    if manifest is None:
        return {}
    return {one.path: manifest.run["objects"].get(one.path, f"files/{one.path}") for one in manifest.files}


class Storage:
    """Objects under one address, by fsspec, whose errors and the client's come out as they are."""

    def __init__(self, url: str) -> None:
        """
        Raises:
            ConfigError: The address is none, or a package is missing.
        """
        if why := why_no_storage(url):
            raise ConfigError(f"the address of a storage {why}")
        import fsspec

        options: dict[str, Any] = {"auto_mkdir": True} if url.startswith("file:") else {"use_listings_cache": False}
        if url.startswith("s3:"):
            options["config_kwargs"] = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}
        self.url = url.rstrip("/")
        self.fs, self.root = fsspec.url_to_fs(self.url, skip_instance_cache=True, **options)

    def manifest(self) -> Manifest | None:
        """What is there; None: nothing.

        Raises:
            CheckpointError: It is not as it was written.
        """
        try:
            found = Manifest.from_bytes(self.fs.cat_file(f"{self.root}/{MANIFEST}"))
            objects = objects_of(found)
            types = [type(found.run[key]) for key in ("run_id", "writer", "number")]
            if types != [str, str, int] or not all(map(is_inside, [*objects, *objects.values()])):
                raise ValueError("names what is no file of a run")
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.url}/{MANIFEST} is refused: it {error}") from error
        return found

    def put_manifest(self, manifest: Manifest) -> None:
        new = f"{self.root}/{MANIFEST}.new"
        self.fs.pipe_file(new, manifest.to_bytes())
        self.fs.mv(new, f"{self.root}/{MANIFEST}")  # whole or not at all also where files are written in place

    def put(self, name: str, path: str, source: BinaryIO, num_bytes: int) -> FileRecord:
        """Send the first ``num_bytes`` of an open file; what was sent."""
        digest, left = xxhash.xxh3_128(), num_bytes
        with self.fs.open(f"{self.root}/{name}", "wb") as target:
            while left and (data := source.read(min(left, _CHUNK_BYTES))):
                target.write(data)
                digest.update(data)
                left -= len(data)
        record = FileRecord(path=path, num_bytes=num_bytes - left, xxh3_128=digest.hexdigest())
        if wrong := what_is_wrong(record, self.fs.info(f"{self.root}/{name}")["size"], None):
            raise OSError(f"{self.url}/{name}: {wrong}")
        return record

    def get(self, name: str, record: FileRecord, target: Path) -> str:
        """Bring an object that is to hold ``record``, unless ``target`` does already; what is wrong
        with it, empty: nothing."""
        found: tuple[int, str] | tuple[None, None] = checksum_file(target) if target.is_file() else (None, None)
        if what_is_wrong(record, *found):
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                _patiently(lambda: self.fs.get_file(f"{self.root}/{name}", str(target)), _OBJECT_S)
                found = checksum_file(target)
        if wrong := what_is_wrong(dataclasses.replace(record, path=f"{self.url}/{name}"), *found):
            target.unlink(missing_ok=True)
        return wrong

    def listed(self) -> set[str]:
        """Names of objects that hold files, as far as a listing knows them."""
        folders = [f"{self.root}/{name}" for name in ("files", "versions")]
        found = [name for folder in folders if self.fs.exists(folder) for name in self.fs.find(folder)]
        return {name[len(self.root) + 1 :] for name in found}

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{self.root}/{name}")


def check_mirror(url: str) -> None:
    """See whether a new run can have its mirror there. Makes nothing.

    Raises:
        ConfigError: It holds something, or cannot be reached.
    """
    storage = Storage(url)
    try:
        remote, others = _patiently(lambda: (storage.manifest(), storage.listed()), _REACHED_S)
    except Exception as error:
        raise _unusable(url, error) from error
    _refuse_others(url, remote, others, "")


def _unusable(url: str, error: Exception) -> ConfigError:
    told = f"run.mirror: {url} cannot be used: {_words(error)}"
    return ConfigError(told) if isinstance(error, _LASTING) else ConfigError.for_now(told)


def _refuse_others(url: str, remote: Manifest | None, others: Iterable[str], run_id: str) -> None:
    if remote is None and any(others):
        raise ConfigError(f"run.mirror: {url} holds files that are no run's: choose another one")
    if remote is not None and remote.files and remote.run["run_id"] != run_id:
        raise ConfigError(
            f"run.mirror: {url} holds another run, of {remote.run['writer']}: choose another one, remove it, or go on with that "
            f"run by --resume {url}"
        )


class Mirror:
    """Keeps a storage like a run's folder, on a thread that nothing waits for before the run's end."""

    def __init__(self, storage: Storage, folder: RunIdentity) -> None:
        """
        Args:
            folder: That of the run, which the caller holds.

        Raises:
            ConfigError: The storage holds another run, more of this one, or something else; or it cannot be reached.
        """
        self._storage, self._folder = storage, folder
        self._me = f"process {os.getpid()} of {socket.gethostname()}, {secrets.token_hex(8)}"
        self._changed = threading.Condition()
        self._asked, self._done = 0, 0
        self._ended, self._trouble = "", ""
        """Why it is not kept any more; why the last try failed."""
        self._told: list[str] = []
        self._left: dict[str, int] = {}
        """Path -> bytes, of what is still to be sent."""
        self._sent: dict[str, tuple[FileRecord, FileRecord]] = {}
        """Object that no manifest names yet -> what it was to hold, and holds."""
        self._seen: dict[str, tuple[tuple[int, int, int], FileRecord]] = {}
        """Path -> size, time of writing and inode, with what the file held then."""
        try:
            _patiently(self._claim, _REACHED_S)
        except ConfigError:
            raise
        except Exception as error:
            raise _unusable(storage.url, error) from error
        threading.Thread(target=self._work, name="mirror", daemon=True).start()

    def wake(self) -> None:
        """There is more to be uploaded. Returns at once."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def news(self) -> list[str]:
        """What the user is to be told of: when it begins to fail, and when that is over. Returns at once."""
        told, self._told = self._told, []
        return told

    def close(self, limit_s: float) -> str:
        """Wait until the storage holds all that the folder holds now; what it lacks, empty: nothing."""
        self.wake()
        with self._changed:
            for wait_s in (min(5.0, limit_s), limit_s):
                if (
                    self._changed.wait_for(lambda: self._done == self._asked or self._ended, wait_s)
                    or wait_s == limit_s
                ):
                    break
                print(f"run.mirror: {self._behind()}; waiting, up to {limit_s:.0f} s (Ctrl-C ends it)", file=sys.stderr)
            lacks = "" if self._done == self._asked else self._ended or self._behind()
            self._ended = self._ended or "the run has ended"
            self._changed.notify_all()
        return lacks

    # -- on the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        failures = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._asked > self._done)
                asked = self._asked
                if self._ended:
                    return
            try:
                self._upload()
            except (ConfigError, RunFolderLost) as error:
                self._ended = str(error)
                self._told.append(f"{error}. The run goes on without its mirror")
            except Exception as error:  # whatever a storage's client raises: tried again, and told of
                self._trouble, failures = _words(error), failures + 1
                if failures == 2:  # a checkpoint that gives way to a newer one fails once
                    self._told.append(f"run.mirror: {self._behind()}. The run goes on, and it is tried again")
                with self._changed:
                    self._changed.wait(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures, 9)))
            else:
                if failures > 1:
                    self._told.append("run.mirror has caught up")
                failures, self._trouble, self._done = 0, "", asked
            with self._changed:
                self._changed.notify_all()

    def _behind(self) -> str:
        left = dict(self._left)
        names = ", ".join([*left][:3]) + (", .." if len(left) > 3 else "")
        lacks = f"{plural(len(left), 'file')} of {format_bytes(sum(left.values()))} not there yet ({names})"
        return f"{self._storage.url}: " + "; ".join(filter(None, [lacks if left else "not up to date", self._trouble]))

    def _claim(self) -> None:
        """
        Raises:
            ConfigError: The storage is not for this run.
        """
        url, remote = self._storage.url, self._storage.manifest()
        self._others = self._storage.listed()
        _refuse_others(url, remote, self._others, self._folder.run_id)
        newest = max((_tick(path) for path in self._checkpoints()), default=-1)
        if remote is not None and remote.tick > newest:
            raise ConfigError(
                f"run.mirror: {url} holds this run up to tick {remote.tick}, {self._folder.path} up to tick {newest}: go on by "
                f"--resume {url} --run.dir NEW, or without it by --run.mirror ''"
            )
        self._put_manifest(remote.files if remote else (), objects_of(remote), remote)

    def _put_manifest(self, files: Iterable[FileRecord], objects: Mapping[str, str], before: Manifest | None) -> None:
        files = tuple(sorted(files, key=lambda record: record.path))
        finished = [found for one in files if (found := _FINISHED.fullmatch(one.path))]
        tick = max((int(found[1]) for found in finished), default=-1)
        run = {"run_id": self._folder.run_id, "writer": self._me, "number": before.run["number"] + 1 if before else 0}
        moved = {path: name for path, name in objects.items() if name != f"files/{path}"}
        self._storage.put_manifest(Manifest(tick=tick, files=files, run=run | {"objects": moved}))

    def _own(self) -> Manifest | None:
        """What the storage holds.

        Raises:
            ConfigError: It is another's by now.
            RunFolderLost: What lies under the folder's name must not take this run's place.
        """
        if change := self._folder.change():
            raise RunFolderLost(f"run.mirror: the run's folder {self._folder.path} {change}")
        remote = self._storage.manifest()
        if remote is not None and remote.run["writer"] != self._me:
            raise ConfigError(f"run.mirror: {self._storage.url} was taken over by {remote.run['writer']}")
        return remote

    def _upload(self) -> None:
        remote = self._own()
        had = {record.path: record for record in remote.files} if remote else {}
        with contextlib.ExitStack() as stack:
            local, held = self._list(stack, had)
            objects, deletes = plan_upload(local, remote, self._others.union(self._sent))
            new = {path: record for path, record in local.items() if had.get(path) != record}
            self._left = {path: record.num_bytes for path, record in new.items()}
            for path, record in new.items():
                if not self._ended:
                    local[path] = self._send(objects[path], record, held.get(path))
                    del self._left[path]
        before = self._own()  # the upload may have taken long
        if self._ended:
            return
        if remote is not None and before is None:
            raise OSError("somebody emptied it")
        if new or deletes or before is None:
            self._put_manifest(local.values(), objects, before)
        self._sent, self._others = {}, set(deletes)
        for name in deletes:
            self._storage.delete(name)
            self._others.discard(name)

    def _send(self, name: str, record: FileRecord, held: BinaryIO | None) -> FileRecord:
        """Upload a file, unless a try before this one has done it; what was sent of one that grows meanwhile."""
        if name not in self._sent or self._sent[name][0] != record:
            path = self._folder.path / record.path
            with contextlib.nullcontext(held) if held is not None else open(path, "rb") as source:
                source.seek(0)
                sent = self._storage.put(name, record.path, source, record.num_bytes)
            if record.path.startswith("checkpoints/") and (
                wrong := what_is_wrong(record, sent.num_bytes, sent.xxh3_128)
            ):
                raise CheckpointError(f"{self._folder.path}: {wrong}")
            self._sent[name] = record, sent
        return self._sent[name][1]

    def _list(
        self, stack: contextlib.ExitStack, had: Mapping[str, FileRecord]
    ) -> tuple[dict[str, FileRecord], dict[str, BinaryIO]]:
        """Every file that means something elsewhere; those of new checkpoints are held open, as
        they may be removed meanwhile."""
        local: dict[str, FileRecord] = {}
        held: dict[str, BinaryIO] = {}
        for folder in self._checkpoints():  # first, so that no row up to one of them is missed
            manifest = Manifest.from_bytes(read_bytes(folder / MANIFEST, max_bytes=None))
            own = FileRecord.of(MANIFEST, folder / MANIFEST)
            for one in (*manifest.files, own):
                path = f"checkpoints/{folder.name}/{one.path}"
                local[path] = dataclasses.replace(one, path=path)
                if had.get(path) != local[path] and len(held) < _MOST_OPEN:
                    held[path] = stack.enter_context(open(folder / one.path, "rb"))
        for file in files_below(self._folder.path):
            path = file.relative_to(self._folder.path).as_posix()
            passing = path.startswith("checkpoints/") or any(part.endswith(_PASSING) for part in path.split("/"))
            if not passing and file.is_file() and not file.is_symlink():
                facts = file.stat()
                seen = facts.st_size, facts.st_mtime_ns, facts.st_ino
                if path not in self._seen or self._seen[path][0] != seen:
                    self._seen[path] = seen, FileRecord.of(path, file)
                local[path] = self._seen[path][1]
        return local, held

    def _checkpoints(self) -> tuple[Path, ...]:
        return CheckpointStore(self._folder.path / "checkpoints").list()


def _tick(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("tick_"))


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _patiently(action: Callable[[], T], limit_s: float) -> T:
    """What ``action`` returns, which is called again while a storage fails in a way that may pass."""
    until, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
    while True:
        try:
            return action()
        except _LASTING:
            raise
        except Exception:
            if time.monotonic() + pause_s > until:
                raise
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


@contextlib.contextmanager
def mirrored(url: str, folder: RunIdentity, limit_s: float) -> Iterator[Mirror]:
    """Keep a mirror while a run goes on, and wait for it at the end, for ``limit_s`` at most.

    Raises:
        ConfigError: It is not for this run, or cannot be reached.
        CheckpointError: The run has come to its end, and the mirror lacks something of it.
    """
    mirror, failed = Mirror(Storage(url), folder), True
    try:
        yield mirror
        failed = False
    finally:
        if lacks := mirror.close(limit_s):
            text = f"run.mirror lacks something of {folder.path}, where all of it is: {lacks}"
            if not failed:
                raise CheckpointError(f"{text}. To upload it: llamarl train --resume {folder.path} --run.mirror {url}")
            print(text, file=sys.stderr)


def restore(url: str, folder: Path, *, dry_run: bool = False) -> str:
    """Bring a run from its mirror into a new folder, every byte of it proved; a download that was
    stopped is gone on with.

    Returns:
        What was brought, or would be, for the user.

    Raises:
        ConfigError: There is no run, or ``folder`` holds something.
        CheckpointError: An object is missing or altered, each is named; or the storage cannot be reached.
    """
    storage = Storage(url)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"--resume {url}: {folder} is there: go on with it by --resume {folder}, or choose another --run.dir"
        )
    partial = folder.with_name(folder.name + ".download")
    try:
        manifest = _patiently(storage.manifest, _REACHED_S)
        if manifest is None or not manifest.files:
            raise ConfigError(f"--resume: {url} holds no run: start one with --run.mirror {url}")
        size = format_bytes(sum(record.num_bytes for record in manifest.files))
        reached = f"up to tick {manifest.tick}" if manifest.tick >= 0 else "without a checkpoint"
        text = f"{url} holds {plural(len(manifest.files), 'file')} of {size}, {reached}; they go to {folder}"
        if dry_run:
            return text
        for path in {*files_below(partial)} - {partial / record.path for record in manifest.files}:
            path.unlink()  # of a download of what the mirror held before
        objects = objects_of(manifest)
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda one: storage.get(objects[one.path], one, partial / one.path), manifest.files)
            wrong = [line for line in found if line]
    except (ConfigError, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"--resume {url}: {_words(error)}; what has come stays in {partial}: try again"
        ) from error
    if wrong:
        lines = "\n".join(f"  - {line}" for line in wrong)
        raise CheckpointError(
            f"--resume {url} is refused:\n{lines}\nThe rest is in {partial}: to go on without what is damaged, remove it there (of a checkpoint, "
            f"its whole folder), rename that folder to {folder} and --resume it"
        )
    os.replace(partial, folder)
    return text
