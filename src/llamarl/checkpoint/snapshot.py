"""What a checkpoint is: a folder of files and a manifest that proves every byte of them.

    RUN/checkpoints/tick_000009/
        manifest.json                 format, tick, who wrote it, every file with its size and checksum
        generator/rank_0/...          written by generator rank 0 after its own tick 9
        trainer/rank_0/...            written by trainer rank 0 after its own tick 9

The manifest is canonical JSON (sorted keys, one spelling) that carries a checksum of itself, so a change of any byte of the
folder is found: in a file by its checksum, in the manifest by the spelling or by its own checksum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

__all__ = [
    "FORMAT",
    "FREE_TO_CHANGE",
    "MANIFEST",
    "Checkpoint",
    "FileRecord",
    "Manifest",
    "canonical_json",
    "checksum_bytes",
    "checksum_file",
    "config_digest",
    "describe_run",
    "run_differences",
]

FORMAT = 2
"""Version of the manifest. A reader refuses one that it does not know."""

MANIFEST = "manifest.json"

_CHUNK_BYTES = 1 << 22

FREE_TO_CHANGE = frozenset(
    {"run.dir", "run.num_ticks", "schedule.transport", "schedule.colocated", "checkpoint", "observability"}
)
"""Configuration keys (or whole tables) that may differ on resume: they say how long and where, not what is computed."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint, with ``/``."""
    num_bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a reader must know to prove a checkpoint and to judge whether a run may go on from it."""

    tick: int
    files: tuple[FileRecord, ...]
    platform: Mapping[str, str] = field(default_factory=dict)
    """What wrote it (see ``platform_facts``)."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """What the run says of itself (see ``describe_run``): configuration, its digest, threads of each executor."""
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
            body = json.loads(data)
        except ValueError as error:
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
        except (KeyError, TypeError) as error:
            raise ValueError(f"was altered (entry {error} is missing or of another kind)") from error
        if manifest.to_bytes() != data:
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


def config_digest(config: Mapping[str, Any], *, ignore: Collection[str] = FREE_TO_CHANGE) -> str:
    """Digest of a resolved configuration (nested plain values), without the keys that may change on resume."""
    return checksum_bytes(canonical_json(_flatten(config, ignore)))


def describe_run(config: Mapping[str, Any], threads: Mapping[str, int]) -> dict[str, Any]:
    """What a checkpoint records of its run: pass it to ``CheckpointStore.finish``.

    Args:
        config: The resolved configuration as nested plain values (what ``config.toml`` holds).
        threads: Executor -> CPU threads of each of its ranks; the bits depend on them.
    """
    return {"config": dict(config), "config_digest": config_digest(config), "threads": dict(threads)}


def run_differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, ignore: Collection[str] = FREE_TO_CHANGE
) -> list[str]:
    """Why going on from ``saved`` would not give the bits of an uninterrupted run; empty if it would.

    Both are what ``describe_run`` returns. Each line names one setting with both values.
    """
    old, new = _flatten(saved.get("config", {}), ignore), _flatten(current.get("config", {}), ignore)
    old |= {f"threads of {name}": count for name, count in saved.get("threads", {}).items()}
    new |= {f"threads of {name}": count for name, count in current.get("threads", {}).items()}
    missing = "absent"
    return [
        f"{key}: it has {old.get(key, missing)!r}, this run {new.get(key, missing)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, missing) != new.get(key, missing)
    ]


def _flatten(config: Mapping[str, Any], ignore: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Nested tables -> {"table.key": value}, without ignored keys and tables."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if key in ignore:
            continue
        if isinstance(value, Mapping):
            flat |= _flatten(value, ignore, f"{key}.")
        else:
            flat[key] = list(value) if isinstance(value, tuple) else value
    return flat
