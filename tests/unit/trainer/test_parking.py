"""The trainer moved out between its ticks. Moved here from host memory to host memory, which takes the way of a GPU."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from training_fixtures import make_groups, write_model

from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from llamarl.trainer.parking import Parking, in_pieces
from llamarl.trainer.step import Trainer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # stored in another precision than computed in, so that parameters are no pages of the file
    return write_model(tmp_path_factory.mktemp("parking") / "model", "qwen3", dtype=torch.bfloat16)


def make(folder: Path, *, move: bool = True, lora: bool = False, **kwargs: Any) -> Trainer:
    trainer = Trainer(
        folder,
        TrainerConfig(**kwargs),
        OptimizerConfig(lr=1e-2, weight_decay=0.01),
        AlgorithmConfig(),
        temperature=0.9,
        lora=LoraConfig(rank=2) if lora else None,
    )
    trainer.parking = Parking(CPU, move=move)
    return trainer


def held_bytes(trainer: Trainer) -> int:
    tensors = [*trainer.policy.model.parameters(), *trainer.weights.tensors.values(), *trainer.weights.state().values()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def equal_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    bits = ({name: t.detach().reshape(-1).view(torch.uint8) for name, t in side.items()} for side in (one, other))
    ours, theirs = bits
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_views_of_a_parked_storage_are_views_again_with_the_same_bits() -> None:
    base = torch.arange(12, dtype=torch.float32)
    base[3] = float("nan")
    row, transposed = base[4:8], base.view(3, 4).t()
    values, address = base.clone(), base.untyped_storage()._cdata
    parking = Parking(CPU, move=True)
    assert parking.park([row, transposed]) == 48
    assert base.untyped_storage().nbytes() == 0
    torch.testing.assert_close(parking.where(transposed), values.view(3, 4).t(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(parking.where(row), values[4:8], rtol=0, atol=0)
    parking.unpark()
    torch.testing.assert_close(base, values, rtol=0, atol=0, equal_nan=True)
    base[4] = 7.0
    assert row[0] == 7.0 and transposed[0, 1] == 7.0 and base.untyped_storage()._cdata == address


def test_derived_tensors_come_back_as_zeros_and_host_memory_is_used_again() -> None:
    kept, derived = torch.ones(1000), torch.ones(10)
    parking = Parking(CPU, move=True)
    places = []
    for _ in range(2):
        assert parking.park([kept], [derived]) == 4040
        places.append(parking.where(kept).data_ptr())
        parking.unpark()
        assert torch.equal(kept, torch.ones(1000)) and torch.equal(derived, torch.zeros(10))
        derived.fill_(1.0)
    assert places[0] == places[1]


def test_host_memory_is_taken_in_powers_of_two_which_several_storages_fill() -> None:
    large, small = torch.full((5 << 20,), 2.0), torch.full((3,), 3.0)  # 20 MiB, 12 bytes
    parking = Parking(CPU, move=True)
    parking.park([large, small])
    pieces = {
        parking.where(t).untyped_storage().data_ptr(): parking.where(t).untyped_storage().nbytes()
        for t in (large, small)
    }
    assert list(pieces.values()) == [32 << 20]
    parking.unpark()
    assert (large == 2.0).all() and (small == 3.0).all()


@pytest.mark.parametrize(
    ("sizes", "pieces", "places"),
    [
        ([], [], []),
        ([1], [64], [(0, 0)]),
        ([64, 256, 128, 64], [512], [(0, 384), (0, 0), (0, 256), (0, 448)]),
        ([320] * 3, [512, 512, 512], [(0, 0), (1, 0), (2, 0)]),
        ([192] * 5, [512, 512, 256], [(0, 0), (0, 192), (1, 0), (1, 192), (2, 0)]),
    ],
)
def test_pieces_by_hand(sizes: list[int], pieces: list[int], places: list[tuple[int, int]]) -> None:
    assert in_pieces(sizes) == (pieces, places)


def test_little_more_is_pinned_than_is_parked() -> None:
    """Qwen2.5-7B: float32 weights and two moments; torch would round each up by itself."""
    hidden, inside, cached, vocabulary = 3584, 18944, 512, 152064
    layer = [hidden * hidden, hidden, hidden * cached, cached, hidden * cached, cached, hidden * hidden]
    layer += [hidden * inside] * 3 + [hidden] * 2
    sizes = [4 * n for n in 3 * (28 * layer + 2 * [vocabulary * hidden] + [hidden])]
    pieces, places = in_pieces(sizes)
    assert sum(sizes) / 1e9 == pytest.approx(91.4, abs=0.1)
    assert sum(pieces) / 1e9 == pytest.approx(91.4, abs=0.5)
    assert sum(1 << (size - 1).bit_length() for size in sizes) / 1e9 == pytest.approx(174, abs=1)
    ends = sorted((piece, start, start + size) for (piece, start), size in zip(places, sizes, strict=True))
    assert all(end <= pieces[piece] for piece, _, end in ends)
    assert all(a[0] < b[0] or a[2] <= b[1] for a, b in pairwise(ends)), "no two overlap"


def test_on_a_cpu_nothing_is_moved() -> None:
    tensor = torch.ones(4)
    parking = Parking(CPU)
    assert parking.park([tensor]) == 0
    assert parking.where(tensor).data_ptr() == tensor.data_ptr() and tensor.untyped_storage().nbytes() == 16
    parking.unpark()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"offload_optimizer": True},
        {"offload_optimizer": True, "dtype": "bfloat16"},
        {"lora": True},
        {"lora": True, "dtype": "bfloat16"},
    ],
    ids=lambda s: "-".join(str(v) for v in s) or "plain",
)
def test_a_trainer_parked_between_ticks_gives_the_bits_of_one_that_stays(
    model_folder: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    if "lora" in settings:
        pytest.importorskip("peft")
    stays, parked = make(model_folder, **settings), make(model_folder, **settings)
    for tick in range(3):
        groups = make_groups(seed=tick)
        assert parked.train(groups, tick) == stays.train(groups, tick)
        freed = held_bytes(parked)
        assert parked.park() == freed > 0 and held_bytes(parked) == 0
        assert equal_bits(parked.parameters_for_sync(), stays.parameters_for_sync())
        state, expected = parked.stage(), stays.stage()
        assert equal_bits(
            {key: shard.tensor for key, shard in state.shards.items()},
            {key: shard.tensor for key, shard in expected.shards.items()},
        )
        parked.unpark()
        assert held_bytes(parked) == freed


def test_training_while_parked_is_refused(model_folder: Path) -> None:
    trainer = make(model_folder)
    trainer.park()
    with pytest.raises(AssertionError, match="call unpark first"):
        trainer.train(make_groups(), 0)
