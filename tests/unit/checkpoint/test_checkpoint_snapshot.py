"""What a manifest says of its run, and when a run may not go on from it."""

from __future__ import annotations

import pytest

from llamarl.checkpoint.config import CheckpointConfig
from llamarl.checkpoint.snapshot import FileRecord, Manifest, canonical_json
from llamarl.config import validate
from llamarl.errors import ConfigError


def test_what_was_written_to_a_manifest_is_equal_after_reading() -> None:
    described = {"config": {"run": {"seed": 1}, "trainer": {"lr": 0.001, "betas": [0.9, 0.95]}}}
    manifest = Manifest(tick=3, files=(FileRecord(path="a/b", num_bytes=2, xxh3_128="00"),), run=described)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_a_manifest_of_another_format_is_refused() -> None:
    data = Manifest(tick=3, files=()).to_bytes().replace(b'"format": 3', b'"format": 1')
    with pytest.raises(ValueError, match="has format 1, this llamarl reads format 3"):
        Manifest.from_bytes(data)


def test_canonical_json_refuses_nan() -> None:
    with pytest.raises(ValueError):
        canonical_json({"a": float("nan")})


@pytest.mark.parametrize(
    ("every", "at_end", "due"),
    [(0, True, [9]), (0, False, []), (4, True, [3, 7, 9]), (4, False, [3, 7]), (5, True, [4, 9])],
)
def test_checkpoints_are_due_after_each_full_count_of_ticks_and_at_the_end(every: int, at_end: bool, due: list) -> None:
    config = CheckpointConfig(every=every, at_end=at_end)
    assert [tick for tick in range(10) if config.is_due(tick, 10)] == due


@pytest.mark.parametrize("field", ["every_minutes", "every", "keep"])
def test_negative_settings_are_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint.{field} must be >= 0"):
        validate({"checkpoint": {field: -1}})
