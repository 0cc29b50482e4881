"""A trainer's state on disk: any layout reads what another wrote; a stranger's is read, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llamarl.errors import CheckpointError
from llamarl.models.parallel import ParameterShard
from llamarl.trainer import sharded_state
from llamarl.trainer.sharded_state import read_state, read_tensors, share_out, stage, write_state


def shard(*box: tuple[int, int], shape: tuple[int, ...] = (2, 3)) -> dict[str, ParameterShard]:
    return {"a": ParameterShard(shape=shape, dtype="float32", box=box, cuts=())}


WHOLE = shard((0, 2), (0, 3))


def written(folder: Path) -> Path:
    tensors = {
        "weight/a": torch.arange(6.0).reshape(2, 3),
        "exp_avg/a": torch.ones(2, 3, dtype=torch.bfloat16),
        "step/a": torch.tensor(3.0),
    }
    write_state(folder, stage(tensors, WHOLE, {"policy_version": 3}), rank=0, group=None)
    return folder


def rewrite(file: Path, **changes: Any) -> None:
    """Change what a file's header says of ``weight/a``."""
    with safe_open(file, framework="pt") as opened:
        parts = json.loads(opened.metadata()["parts"])
    shape, box, dtype = parts["weight/a"]
    new = {"shape": shape, "box": box, "dtype": dtype} | changes
    parts["weight/a"] = [new["shape"], new["box"], new["dtype"]]
    save_file({name: tensor.clone() for name, tensor in load_file(file).items()}, file, {"parts": json.dumps(parts)})


def test_a_state_is_read_whole_with_its_dtypes(tmp_path: Path) -> None:
    tensors, values = read_state(written(tmp_path / "state"), lambda kind: WHOLE)
    assert values == {"policy_version": 3}
    torch.testing.assert_close(tensors["weight/a"], torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]))
    assert tensors["exp_avg/a"].dtype == torch.bfloat16 and tensors["step/a"].item() == 3.0


def test_a_rank_of_another_layout_reads_its_slice_out_of_several_files(tmp_path: Path) -> None:
    rows = torch.arange(12.0).reshape(4, 3)
    for rank, (start, stop) in enumerate([(0, 3), (3, 4)]):  # uneven
        cut = shard((start, stop), (0, 3), shape=(4, 3))
        part = stage({"weight/a": rows[start:stop]}, cut, {})
        write_state(tmp_path / f"of_{rank}", part, rank=0, group=None)
        (tmp_path / f"of_{rank}" / "rank_0.safetensors").rename(tmp_path / f"rank_{rank}.safetensors")
    (tmp_path / "values.json").write_text("{}")
    read, _ = read_state(tmp_path, lambda kind: shard((2, 4), (1, 3), shape=(4, 3)))
    assert read["weight/a"].tolist() == [[7.0, 8.0], [10.0, 11.0]]
    nothing, _ = read_state(tmp_path, lambda kind: shard((0, 0), (0, 3), shape=(4, 3)))
    assert nothing["weight/a"].shape == (0, 3)
    (tmp_path / "rank_1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="9 of 12 numbers of weight/a are there"):
        read_state(tmp_path, lambda kind: shard((0, 1), (0, 3), shape=(4, 3)))


def test_tensors_come_in_the_order_asked_from_files_that_are_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def open_one(path: Path, framework: str) -> Any:
        opened.append(path.name)
        return safe_open(path, framework=framework)

    monkeypatch.setattr(sharded_state, "safe_open", open_one)
    found = read_tensors(written(tmp_path), lambda kind: WHOLE, ["weight/a", "exp_avg/a"])
    assert [key for key, _ in found] == ["weight/a", "exp_avg/a"] and opened == ["rank_0.safetensors"]


def test_replicas_write_a_part_once_and_share_the_work() -> None:
    whole, top, bottom = ((0, 4),), ((0, 2),), ((2, 4),)
    held = [
        {"a": (top, 8), "b": (whole, 16)},
        {"a": (bottom, 8), "b": (whole, 16)},
        {"b": (whole, 16), "c": (whole, 4)},
    ]
    assert share_out(held) == {("a", top): 0, ("a", bottom): 1, ("b", whole): 2, ("c", whole): 2}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"shape": [2, 3, 1], "box": [[0, 2], [0, 3], [0, 1]]}, "another model: it holds a of shape"),
        ({"box": [[0, 2], [0, 2]]}, "does not fit"),
        ({"box": [[5, 7], [0, 3]], "shape": [9, 3]}, "another model"),
        ({"box": [["x", 2], [0, 3]]}, "cannot be read"),
        ({"dtype": "int32"}, "header says int32"),
        ({"dtype": "load"}, "header says load"),
        ({"dtype": 3}, "cannot be read"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    state = written(tmp_path / "state")
    rewrite(state / "rank_0.safetensors", **changes)
    with pytest.raises(CheckpointError, match=why):
        read_state(state, lambda kind: WHOLE)


@pytest.mark.parametrize("data", [b"", b"\x80", b"no tensors", b"\x02\0\0\0\0\0\0\0{}"])
def test_what_holds_no_tensors_is_refused_with_its_place(tmp_path: Path, data: bytes) -> None:
    state = written(tmp_path / "state")
    (state / "rank_0.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="state cannot be read"):
        read_state(state, lambda kind: WHOLE)


def test_a_folder_without_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "values.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no tensors"):
        read_state(tmp_path, lambda kind: WHOLE)
