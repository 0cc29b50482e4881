"""A run's folder kept on another host too, some seconds behind: what is new or changed is sent, then what is gone is removed.

    once a second: scan ─▶ changes(here, there) ─▶ FileClient.send, FileClient.remove

What is sent can be resumed from at every moment. The journal goes first and checkpoints after it, each with its manifest at last;
what they make superfluous is removed when they are there. A journal and a checkpoint prove their own bytes.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from llamarl.checkpoint.snapshot import MANIFEST, FileRecord, checksum_file
from llamarl.errors import TransferError
from llamarl.files.below import Below
from llamarl.files.client import FileClient

__all__ = ["Mirror", "changes"]

_NOT_SENT = (".incoming", ".lock")
_UNFINISHED = re.compile(r"(^|/)checkpoints/tick_\d+\.\w+/|\.(new|partial|tmp)$")
_FINAL = ("checkpoints/", "model/")
"""Below these nothing changes once it has its name; other files may grow while they are read, and are sent as they were."""
_EVERY_S = 1.0
_AGAIN_S = 10.0
Seen = Mapping[str, tuple[int, int]]
"""Path below the run's folder -> bytes, and time of writing in ns."""


def changes(here: Seen, there: Seen) -> tuple[list[str], list[str]]:
    """What to send, in order, and then what to remove. Pure.

    Args:
        here: The run's folder.
        there: What the other host was sent, as it was then.
    """
    new = [path for path, seen in here.items() if there.get(path) != seen]
    return sorted(new, key=_turn), sorted(path for path in there if path not in here)


def _turn(path: str) -> tuple[bool, bool, str]:
    is_checkpoint = path.startswith("checkpoints/")
    return is_checkpoint, is_checkpoint and path.endswith(f"/{MANIFEST}"), path


class Mirror:
    """See the module. Its thread alone uses ``client``.

    Args:
        run: By which the host knows its folder of the run.
        tell: Called, from the thread, with a line when the host cannot be reached, and when it can again.
    """

    def __init__(self, folder: Path, client: FileClient, run: str, tell: Callable[[str], None]) -> None:
        self._folder, self._client, self._run, self._tell = folder, client, run, tell
        self._there: dict[str, tuple[int, int]] = {}
        self._ending = threading.Event()
        self.lost = False
        """Whether the host has said that it keeps no such run any more."""
        self._behind_since_s: float | None = None
        self._thread = threading.Thread(target=self._go_on, name="llamarl-mirror", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, limit_s: float) -> None:
        """End, within ``limit_s`` seconds. What has not been sent by then is not."""
        self._ending.set()
        self._client.hurry()
        self._thread.join(limit_s)

    def once(self) -> None:
        """Bring the other host up to date.

        Raises:
            TransferError: It cannot be reached, has no room, or keeps no such run.
        """
        here = {
            path: (num_bytes, mtime_ns)
            for path, num_bytes, mtime_ns in Below(self._folder).walk(_NOT_SENT)
            if not _UNFINISHED.search(path)
        }
        send, remove = changes(here, self._there)
        for path in send:
            if self._ending.is_set():
                return
            if self._send(path):
                self._there[path] = here[path]
        for path in remove:
            self._client.remove(self._run, path)
            del self._there[path]

    def _send(self, path: str) -> bool:
        source = self._folder / path
        try:
            if path.startswith(_FINAL):
                self._send_as_it_is(source, path)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    self._send_as_it_is(Path(shutil.copyfile(source, os.path.join(folder, "copy"))), path)
        except FileNotFoundError:  # removed since it was seen: the next look says so
            return False
        return True

    def _send_as_it_is(self, source: Path, path: str) -> None:
        num_bytes, checksum = checksum_file(source)
        self._client.send(source, FileRecord(path=path, num_bytes=num_bytes, xxh3_128=checksum), run=self._run)

    def _is_lost(self) -> bool:
        try:
            return not self._client.keeps(self._run)
        except TransferError:  # it cannot be asked
            return False

    def _go_on(self) -> None:
        while not self._ending.wait(_EVERY_S if self._behind_since_s is None else _AGAIN_S):
            try:
                self.once()
            except (TransferError, OSError) as error:
                if self._ending.is_set():
                    return
                if self._is_lost():
                    self.lost = True
                    return
                if self._behind_since_s is None:
                    self._behind_since_s = time.monotonic()
                    self._tell(f"the standby is not up to date, and is tried again every {_AGAIN_S:g} s: {error}")
            else:
                if self._behind_since_s is not None:
                    behind_s = time.monotonic() - self._behind_since_s
                    self._tell(f"the standby is up to date again, after {behind_s:.0f} s")
                self._behind_since_s = None
