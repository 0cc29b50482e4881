"""A step whose parts are computed one after the other, some of them before the whole tick is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_fixtures import make_groups, write_model

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.tick_parts import split_into_parts
from llamarl.trainer.config import OptimizerConfig, TrainerConfig
from llamarl.trainer.parts import PartOfStep
from llamarl.trainer.step import Trainer
from llamarl.types import Failure, Group


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def trainer_of(folder: Path, num_parts: int, algorithm: AlgorithmConfig | None = None, **config: Any) -> Trainer:
    return Trainer(
        folder,
        TrainerConfig(max_tokens_per_microbatch=40, **config),
        OptimizerConfig(lr=1e-2),
        algorithm or AlgorithmConfig(),
        temperature=1.0,
        num_parts=num_parts,
    )


def tick_of(seed: int, parts: tuple[int, ...] = (1, 0, 2, 1)) -> list[Group]:
    groups = make_groups(len(parts), seed=seed)
    return [dataclasses.replace(group, part=part) for group, part in zip(groups, parts, strict=True)]


def begun(trainer: Trainer, groups: list[Group], num_done: int) -> list[PartOfStep]:
    """The first parts of a tick, done before it comes."""
    split = split_into_parts(groups, trainer.num_parts)
    return [trainer.train_part(split[part], first_group=sum(map(len, split[:part]))) for part in range(num_done)]


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_parts_make_the_step_of_the_whole_to_rounding(model_folder: Path, normalization: Any) -> None:
    algorithm = AlgorithmConfig(normalization=normalization, entropy_coef=0.01)
    whole, in_parts = trainer_of(model_folder, 1, algorithm), trainer_of(model_folder, 3, algorithm)
    expected = whole.train([dataclasses.replace(g, part=0) for g in tick_of(0)], 0)
    found = in_parts.train(tick_of(0), 0)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)
    for name, tensor in whole.parameters_for_sync().items():
        torch.testing.assert_close(in_parts.parameters_for_sync()[name], tensor, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_how_many_parts_came_early(model_folder: Path, dtype: str) -> None:
    never = trainer_of(model_folder, 3, dtype=dtype)
    rows = [never.train(tick_of(tick), tick) for tick in range(3)]
    for order in ([0, 1, 2], [3, 2, 0]):
        early = trainer_of(model_folder, 3, dtype=dtype)
        for tick, num_done in enumerate(order):
            groups = tick_of(tick)
            assert early.train(groups, tick, begun(early, groups, num_done)) == rows[tick]
        for name, tensor in never.parameters_for_sync().items():
            assert torch.equal(tensor, early.parameters_for_sync()[name]), name


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_micro_batches_side_by_side_in_parts_add_up_in_their_order(model_folder: Path) -> None:
    never, early = (trainer_of(model_folder, 3, microbatches_at_once=2) for _ in range(2))
    for tick, num_done in enumerate([2, 3]):
        groups = tick_of(tick)
        assert early.train(groups, tick, begun(early, groups, num_done)) == never.train(groups, tick)
    for name, tensor in never.parameters_for_sync().items():
        assert torch.equal(tensor, early.parameters_for_sync()[name]), name


def test_parts_that_are_dropped_leave_no_trace(model_folder: Path) -> None:
    plain, misled = trainer_of(model_folder, 3), trainer_of(model_folder, 3)
    begun(misled, tick_of(9), 2)
    misled.drop_parts()
    assert misled.train(tick_of(0), 0) == plain.train(tick_of(0), 0)
    for name, tensor in plain.parameters_for_sync().items():
        assert torch.equal(tensor, misled.parameters_for_sync()[name]), name


def test_a_part_without_a_response_that_trains_adds_nothing(model_folder: Path) -> None:
    groups = tick_of(0)
    failed = [dataclasses.replace(r, outcome=Failure(kind="timeout", detail="")) for r in groups[1].responses]
    groups[1] = dataclasses.replace(groups[1], responses=tuple(failed))  # all of part 0
    in_parts, without = trainer_of(model_folder, 3), trainer_of(model_folder, 1)
    found = in_parts.train(groups, 0)
    expected = without.train([dataclasses.replace(g, part=0) for g in groups], 0)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert found["tokens/trained"] == expected["tokens/trained"]


def test_a_tick_in_which_nothing_trains_leaves_the_weights(model_folder: Path) -> None:
    groups = [
        dataclasses.replace(
            g, responses=tuple(dataclasses.replace(r, outcome=Failure(kind="timeout", detail="")) for r in g.responses)
        )
        for g in tick_of(0)
    ]
    trainer = trainer_of(model_folder, 3)
    before = {name: tensor.clone() for name, tensor in trainer.parameters_for_sync().items()}
    metrics = trainer.train(groups, 0, begun(trainer, groups, 2))
    assert (metrics["step/empty"], metrics["policy_version"]) == (1.0, 1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.parameters_for_sync().items())
