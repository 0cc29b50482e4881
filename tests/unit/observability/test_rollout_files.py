"""rollouts/*.jsonl: what the trainer saw, exactly, in deterministic bytes."""

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from made_responses import made_group, made_response

from llamarl.errors import DataError, LlamaRLError
from llamarl.observability.rollouts import read_rollouts, remove_partial, write_rollouts
from llamarl.types import Failure, Group, Response, Score


def _response(sample: int, versions: list[int], outcome: Score | Failure | None, text: str = "4") -> Response:
    length = len(versions)
    mask = np.array(versions) >= 0
    logprobs = np.where(mask, -np.arange(1, length + 1, dtype=np.float32) / np.float32(3), np.float32("nan"))
    tokens = range(10, 10 + length)
    return made_response(
        sample, index=7, tokens=tokens, logprobs=logprobs, versions=versions, mask=mask, text=text, outcome=outcome
    )


def _group(text: str = "4") -> Group:
    responses = (
        _response(0, [3, 3, 4], Score(value=1.0, parts={"b": 0.5, "a": 0.5}), text),
        _response(1, [3, -1, -1, 5, 5], Failure(kind="timeout", detail="no verdict after 1 s")),
        _response(2, [], None),
    )
    return made_group(responses, index=7, tokens=[1, 2], text="2+2?", answer="4", task="sum")


def test_a_batch_reads_back_exactly(tmp_path: Path) -> None:
    group = _group()
    path = write_rollouts(tmp_path, 12, [group])
    assert path == tmp_path / "rollouts" / "tick_000012.jsonl"
    read = list(read_rollouts(tmp_path, 12))
    for rollout, original in zip(read, group.responses, strict=True):
        assert (rollout.tick, rollout.prompt, rollout.answer, rollout.task) == (12, "2+2?", "4", "sum")
        response = rollout.response
        assert response.outcome == original.outcome
        assert (response.text, response.sample_index) == (original.text, original.sample_index)
        assert response.finish_reason == "stop"
        for name in ("tokens", "behavior_logprobs", "policy_versions", "loss_mask"):
            got, want = getattr(response, name), getattr(original, name)
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)  # NaN equals NaN, otherwise every bit


def test_a_large_tick_is_held_once_while_it_is_written(tmp_path: Path) -> None:
    groups = [_group("x" * 50_000) for _ in range(20)]
    tracemalloc.start()
    path = write_rollouts(tmp_path, 0, groups)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1.5 * path.stat().st_size


def test_what_a_kill_left_of_a_file_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left = [tmp_path / "rollouts" / ".tick_000003.jsonl.partial", tmp_path / "trained" / ".tick_000003.t.0.npz.partial"]
    whole = write_rollouts(tmp_path, 3, [_group()])
    (tmp_path / "trained").mkdir()
    for path in left:
        path.touch()
    remove_partial(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [whole]


def test_segments_are_stretches_of_one_version_and_skip_what_the_policy_did_not_write(tmp_path: Path) -> None:
    path = write_rollouts(tmp_path, 0, [_group()])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["segments"] for line in lines] == [[[3, 2], [4, 1]], [[3, 1], [5, 2]], []]
    assert lines[1]["behavior_logprobs"][1] is None
    assert lines[1]["failure"] == {"kind": "timeout", "detail": "no verdict after 1 s"} and lines[1]["reward"] is None


def test_float32_is_written_as_the_shortest_text_that_reads_back(tmp_path: Path) -> None:
    path = write_rollouts(tmp_path, 0, [_group()])
    assert '"behavior_logprobs": [-0.33333334, -0.6666667, -1.0]' in path.read_text()


@pytest.mark.parametrize("text", ["a\nb", "\u2028 and \x85", "\ud800 lone surrogate", "日本", "\x00"])
def test_any_text_survives(tmp_path: Path, text: str) -> None:
    write_rollouts(tmp_path, 0, [_group(text)])
    assert next(read_rollouts(tmp_path)).response.text == text


def test_a_failed_write_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(LlamaRLError, match="cannot write .*tick_000003.jsonl: No space left on device"):
        write_rollouts(tmp_path, 3, [_group()])
    assert list((tmp_path / "rollouts").iterdir()) == []


def test_reading_names_the_file_and_line_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no rollouts: run with observability.rollouts = true"):
        list(read_rollouts(tmp_path, 4))
    path = write_rollouts(tmp_path, 4, [_group()])
    path.write_bytes(path.read_bytes() + b'{"tick": 4}\n')
    with pytest.raises(DataError, match="tick_000004.jsonl, line 4 is not a sample"):
        list(read_rollouts(tmp_path))
