"""A trainer's state from a stranger: read, or refused by name; never run."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from llamarl.checkpoint import tensor_index
from llamarl.errors import CheckpointError
from llamarl.models.parallel import ParameterShard
from llamarl.trainer.sharded_state import read_state, stage, write_state

SHARDS = {"a": ParameterShard(shape=(2, 3), dtype="float32", box=((0, 2), (0, 3)), cuts=())}


def written(folder: Path) -> Path:
    tensors = {
        "weight/a": torch.arange(6.0).reshape(2, 3),
        "exp_avg/a": torch.ones(2, 3, dtype=torch.bfloat16),
        "step/a": torch.tensor(3.0),
    }
    write_state(folder, stage(tensors, SHARDS, {"policy_version": 3}), rank=0, group=None)
    return folder


class _Runs:
    """A pickle that calls ``function(*arguments)`` when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def test_an_honest_state_is_read_whole(tmp_path: Path) -> None:
    tensors, values = read_state(written(tmp_path / "state"), lambda kind: SHARDS)
    assert values == {"policy_version": 3}
    torch.testing.assert_close(tensors["weight/a"], torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]))
    assert tensors["exp_avg/a"].dtype == torch.bfloat16 and tensors["step/a"].item() == 3.0


@pytest.mark.parametrize("where", ["alone", "inside an index"])
def test_an_index_that_runs_a_command_is_refused_by_name_and_runs_nothing(tmp_path: Path, where: str) -> None:
    state, proof = written(tmp_path / "state"), tmp_path / "ran"
    command = _Runs(os.system, f"touch {proof}")
    index: Any = command
    if where == "inside an index":
        index = pickle.loads((state / ".metadata").read_bytes())
        index.planner_data = command
    data = pickle.dumps(index)
    (state / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{state}/\.metadata is refused: it names posix\.system"):
        read_state(state, lambda kind: SHARDS)
    assert not proof.exists()
    pickle.loads(data)  # the same bytes under the library's own reader
    assert proof.exists()


@pytest.mark.parametrize(
    "name", ["builtins.eval", "torch.load", "torch.hub.load", "torch.classes", "pickle.loads", "os.path.join"]
)
def test_only_what_makes_an_index_is_looked_up(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    program = b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b"."
    pickletools.dis(program, io.StringIO())  # it is a pickle
    with pytest.raises(pickle.UnpicklingError, match=f"it names {name}"):
        tensor_index._IndexUnpickler(io.BytesIO(program)).load()


@pytest.mark.parametrize("place", ["../../secret", "/etc/passwd", "..", "a/b", 3])
def test_a_tensor_that_lies_outside_the_folder_is_refused(tmp_path: Path, place: Any) -> None:
    state = written(tmp_path / "state")
    index: Metadata = pickle.loads((state / ".metadata").read_bytes())
    stored = {MetadataIndex("weight/a", torch.Size([0, 0])): _StorageInfo(place, 0, 10)}
    index.storage_data = stored
    (state / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"no file of this folder"):
        read_state(state, lambda kind: SHARDS)


@pytest.mark.parametrize("data", [b"", b"\x80", b"not a pickle", pickle.dumps({"state_dict_metadata": {}})])
def test_what_is_no_index_is_refused_with_its_place(tmp_path: Path, data: bytes) -> None:
    state = written(tmp_path / "state")
    (state / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"state/\.metadata is refused"):
        read_state(state, lambda kind: SHARDS)


def test_a_tensor_file_with_code_in_it_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    state, proof = written(tmp_path / "state"), tmp_path / "ran"
    (file,) = state.glob("*.distcp")
    code = io.BytesIO()
    torch.save(_Runs(os.system, f"touch {proof}"), code)
    index: Metadata = pickle.loads((state / ".metadata").read_bytes())
    for stored in index.storage_data.values():
        stored.offset, stored.length = 0, len(code.getvalue())
    (state / ".metadata").write_bytes(pickle.dumps(index))
    file.write_bytes(code.getvalue())
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(state, lambda kind: SHARDS)
    assert not proof.exists()
