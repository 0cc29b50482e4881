"""What a checkpoint is: a folder of files and a manifest that proves every byte of them.

    RUN/checkpoints/tick_000009/
        manifest.json                 format, tick, who wrote it, every file with its size and checksum
        generator/rank_0/...          written by generator rank 0 after its own tick 9
        trainer/rank_0/...            written by trainer rank 0 after its own tick 9

The manifest is canonical JSON (sorted keys, one spelling) that carries a checksum of itself, so a
change of any byte of the folder is found: in a file by its checksum, in the manifest by the
spelling or by its own checksum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from llamarl.errors import FileError
from llamarl.reading import parse_json

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Checkpoint",
    "FileRecord",
    "Manifest",
    "canonical_json",
    "checksum_bytes",
    "checksum_file",
]

FORMAT = 3
"""Version of the manifest. A reader refuses one that it does not know."""

MANIFEST = "manifest.json"

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint, with ``/``."""
    num_bytes: int
    xxh3_128: str

    @classmethod
    def of(cls, path: str, file: Path) -> FileRecord:
        """What ``file`` holds now, under the name ``path``."""
        num_bytes, checksum = checksum_file(file)
        return cls(path=path, num_bytes=num_bytes, xxh3_128=checksum)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a reader must know to prove a checkpoint and to judge whether a run may go on from it."""

    tick: int
    files: tuple[FileRecord, ...]
    platform: Mapping[str, str] = field(default_factory=dict)
    """What wrote it (see ``platform_facts``)."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """What the run says of itself: ``config``, the resolved configuration as nested plain values
    (what ``config.toml`` holds)."""
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """The canonical file: the same manifest always gives the same bytes."""
        body = {
            "format": self.format,
            "tick": self.tick,
            "platform": dict(self.platform),
            "run": dict(self.run),
            "files": [{"path": f.path, "bytes": f.num_bytes, "xxh3_128": f.xxh3_128} for f in self.files],
        }
        return canonical_json(body | {"xxh3_128": checksum_bytes(canonical_json(body))})

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse and prove a manifest.

        Raises:
            ValueError: It is not JSON, of another format, or not byte for byte what was written.
        """
        try:
            body = parse_json(data, "the manifest")
        except FileError as error:
            raise ValueError(f"is not whole JSON ({error})") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            found = body.get("format") if isinstance(body, dict) else None
            raise ValueError(f"has format {found!r}, this llamarl reads format {FORMAT}")
        try:
            manifest = cls(
                tick=body["tick"],
                files=tuple(
                    FileRecord(path=f["path"], num_bytes=f["bytes"], xxh3_128=f["xxh3_128"]) for f in body["files"]
                ),
                platform=body["platform"],
                run=body["run"],
            )
            whole = type(manifest.tick) is int and all(
                (type(f.path), type(f.num_bytes), type(f.xxh3_128)) == (str, int, str) for f in manifest.files
            )
            again = manifest.to_bytes() if whole else b""
        except (KeyError, TypeError) as error:
            raise ValueError(f"was altered (entry {error} is missing or of another kind)") from error
        if again != data:
            raise ValueError("was altered (it does not match its own checksum)")
        return manifest


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose bytes were proved."""

    path: Path
    manifest: Manifest

    @property
    def tick(self) -> int:
        """Every executor's state is the one after its own tick of this number; a resumed run starts at the next."""
        return self.manifest.tick

    @property
    def run(self) -> Mapping[str, Any]:
        """What the run that wrote it said of itself."""
        return self.manifest.run


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys, shortest round-trip floats and a final newline.

    Raises:
        ValueError: The value holds a NaN or infinity.
        TypeError: The value holds something that JSON has no word for.
    """
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def checksum_bytes(data: bytes) -> str:
    """XXH3, 128 bits, in hexadecimal: finds accidents, not forgery."""
    return xxhash.xxh3_128(data).hexdigest()


def checksum_file(path: str | os.PathLike[str]) -> tuple[int, str]:
    """Size in bytes and checksum of a file, read once in chunks."""
    digest = xxhash.xxh3_128()
    num_bytes = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            num_bytes += count
    return num_bytes, digest.hexdigest()
