"""trained/*.npz: what the trainer made of each token, in arrays that read back exactly."""

from pathlib import Path

import numpy as np
import pytest

from llamarl.errors import DataError, LlamaRLError
from llamarl.observability.rollouts import cut_after
from llamarl.observability.trained_tokens import TRAINED_FOLDER, TrainedResponse, read_trained, write_trained


def _response(prompt: int, sample: int, logprobs: list[float]) -> TrainedResponse:
    values = np.array(logprobs, np.float32)
    return TrainedResponse(
        prompt_index=prompt, sample_index=sample, advantage=0.1 * sample, policy_logprobs=values, clipped=values < -1.0
    )


def test_what_two_ranks_wrote_reads_back_to_the_bit_in_equal_bytes(tmp_path: Path) -> None:
    first = [_response(7, 0, [-0.1, -2.5, -1 / 3]), _response(7, 1, [])]
    second = [_response(9, 3, [-7.25])]
    write_trained(tmp_path, 12, "trainer", 0, first)
    write_trained(tmp_path, 12, "trainer", 1, second)
    write_trained(tmp_path, 13, "trainer", 0, [])
    read = read_trained(tmp_path, 12)
    assert [(r.prompt_index, r.sample_index, r.advantage) for r in read] == [(7, 0, 0.0), (7, 1, 0.1), (9, 3, 0.1 * 3)]
    for one, original in zip(read, [*first, *second], strict=True):
        np.testing.assert_array_equal(one.policy_logprobs, original.policy_logprobs)
        np.testing.assert_array_equal(one.clipped, original.clipped)
    assert read_trained(tmp_path, 13) == [] and read_trained(tmp_path, 14) == []
    before = (tmp_path / TRAINED_FOLDER / "tick_000012.trainer.0.npz").read_bytes()
    write_trained(tmp_path, 12, "trainer", 0, first)
    assert (tmp_path / TRAINED_FOLDER / "tick_000012.trainer.0.npz").read_bytes() == before


def test_a_torn_file_and_one_with_objects_are_refused_by_name(tmp_path: Path) -> None:
    write_trained(tmp_path, 1, "trainer", 0, [_response(1, 0, [-0.5])])
    path = tmp_path / TRAINED_FOLDER / "tick_000001.trainer.0.npz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="tick_000001.trainer.0.npz"):
        read_trained(tmp_path, 1)
    np.savez(path, prompt_index=np.array([{}], dtype=object))
    with pytest.raises(DataError, match="tick_000001.trainer.0.npz"):
        read_trained(tmp_path, 1)


def test_a_file_that_unpacks_to_gigabytes_is_refused_before_it_does(tmp_path: Path) -> None:
    (tmp_path / "trained").mkdir()
    path = tmp_path / "trained" / "tick_000000.trainer.0.npz"
    np.savez_compressed(path, clipped=np.zeros(257 << 20, np.uint8))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(DataError, match=f"{path.name} is not what a trainer wrote: it unpacks to more than 256 MiB"):
        read_trained(tmp_path, 0)


def test_a_resume_cuts_later_ticks_and_nothing_else(tmp_path: Path) -> None:
    for tick in (1, 2, 3):
        write_trained(tmp_path, tick, "trainer", 0, [])
    (tmp_path / TRAINED_FOLDER / "notes.txt").touch()
    cut_after(tmp_path / TRAINED_FOLDER, 1)
    assert sorted(path.name for path in (tmp_path / TRAINED_FOLDER).iterdir()) == [
        "notes.txt",
        "tick_000001.trainer.0.npz",
    ]
    cut_after(tmp_path / "nowhere", 0)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / TRAINED_FOLDER).touch()
    with pytest.raises(LlamaRLError, match=TRAINED_FOLDER):
        write_trained(tmp_path, 1, "trainer", 0, [])
