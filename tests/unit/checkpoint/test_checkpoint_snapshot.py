"""What a manifest says of its run, and when a run may not go on from it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from llamarl.checkpoint.config import CheckpointConfig
from llamarl.checkpoint.snapshot import (
    FileRecord,
    Manifest,
    canonical_json,
    config_digest,
    describe_run,
    run_differences,
)

CONFIG = {
    "run": {"dir": "a", "seed": 1, "num_ticks": 10},
    "trainer": {"lr": 0.001, "betas": (0.9, 0.95)},
    "checkpoint": {"every": 5},
    "observability": {"console": "plain"},
}


def test_the_digest_ignores_what_may_change_on_resume_and_nothing_else() -> None:
    moved = CONFIG | {
        "run": {"dir": "b", "seed": 1, "num_ticks": 99},
        "checkpoint": {"every": 1},
        "observability": {"console": "rich"},
    }
    assert config_digest(moved) == config_digest(CONFIG)
    assert config_digest(CONFIG | {"trainer": {"lr": 0.002, "betas": (0.9, 0.95)}}) != config_digest(CONFIG)
    assert config_digest(CONFIG | {"run": {"dir": "a", "seed": 2, "num_ticks": 10}}) != config_digest(CONFIG)


def test_the_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert config_digest(dict(reversed(CONFIG.items()))) == config_digest(CONFIG)


def test_differences_name_the_key_and_both_values() -> None:
    saved = describe_run(CONFIG, {"generator": 1, "trainer": 1})
    now = describe_run(CONFIG | {"trainer": {"lr": 0.01, "betas": [0.9, 0.95]}}, {"generator": 1, "trainer": 2})
    assert run_differences(saved, saved) == []
    assert run_differences(saved, now) == [
        "threads of trainer: it has 1, this run 2",
        "trainer.lr: it has 0.001, this run 0.01",
    ]


def test_what_was_written_to_a_manifest_compares_equal_after_reading() -> None:
    described = describe_run(CONFIG, {"trainer": 1})
    manifest = Manifest(tick=3, files=(FileRecord(path="a/b", num_bytes=2, xxh3_128="00"),), run=described)
    read = Manifest.from_bytes(manifest.to_bytes())
    assert read.files == manifest.files and read.tick == 3
    assert run_differences(read.run, described) == []


def test_a_manifest_of_another_format_is_refused() -> None:
    data = Manifest(tick=3, files=()).to_bytes().replace(b'"format": 2', b'"format": 1')
    with pytest.raises(ValueError, match="has format 1, this llamarl reads format 2"):
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


@pytest.mark.parametrize("field", ["every", "keep"])
def test_negative_settings_are_refused_by_name(field: str) -> None:
    with pytest.raises(ValidationError, match=f"checkpoint.{field} must be >= 0"):
        CheckpointConfig(**{field: -1})
