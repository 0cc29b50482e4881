"""Micro-batches that are computed at the same time: who computes how many, and that order is all that counts."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from training_fixtures import make_groups, tiny_config, write_model

from llamarl.models.decoder import changes_with_length
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import LoraConfig, OptimizerConfig, TrainerConfig, num_at_once
from llamarl.trainer.batch import pack_sequences
from llamarl.trainer.side_by_side import in_order
from llamarl.trainer.step import Trainer


@pytest.mark.parametrize(
    ("threads", "expected"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 1), (6, 3), (7, 1), (8, 4), (10, 2), (16, 4)]
)
def test_threads_are_divided_without_rest_among_at_most_four_where_the_model_is_not_small(
    threads: int, expected: int
) -> None:
    assert num_at_once(0, threads=threads, num_parameters=20_000_000) == expected
    assert num_at_once(0, threads=threads, num_parameters=19_999_999) == 1


def test_what_is_asked_for_counts_up_to_the_threads() -> None:
    assert num_at_once(1, threads=8, num_parameters=10**8) == 1
    assert num_at_once(8, threads=8, num_parameters=10**8) == 8
    assert num_at_once(8, threads=2, num_parameters=10) == 2


def test_models_that_write_into_themselves_take_one_after_the_other() -> None:
    assert num_at_once(2, threads=4, num_parameters=10**8, reentrant=False) == 1


@pytest.mark.parametrize(("kind", "expected"), [("default", False), ("linear", False), ("dynamic", True)])
def test_a_rotary_embedding_that_follows_the_length_is_known(kind: str, expected: bool) -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    assert changes_with_length(config) is expected


def test_results_come_in_the_order_of_the_items_although_the_first_ends_last() -> None:
    second_is_done = threading.Event()

    def compute(item: int) -> int:
        if item == 0:
            assert second_is_done.wait(10)
        if item == 1:
            second_is_done.set()
        return item * item

    assert list(in_order(compute, range(5), at_once=2, threads=2)) == [0, 1, 4, 9, 16]


def test_no_more_run_at_the_same_time_than_asked_for_and_one_more_may_wait() -> None:
    began: list[int] = []
    lock, let_go = threading.Lock(), threading.Event()

    def compute(item: int) -> int:
        with lock:
            began.append(item)
        assert let_go.wait(10)
        return item

    results = in_order(compute, range(8), at_once=2, threads=2)
    found: list[int] = []
    taker = threading.Thread(target=lambda: found.extend(results))
    taker.start()
    while len(began) < 2:
        pass
    assert sorted(began) == [0, 1]
    let_go.set()
    taker.join(10)
    assert found == list(range(8))


def test_an_error_of_one_reaches_the_caller_and_ends_the_rest() -> None:
    began = []

    def compute(item: int) -> int:
        began.append(item)
        if item == 1:
            raise ArithmeticError("of the second")
        return item

    with pytest.raises(ArithmeticError, match="of the second"):
        list(in_order(compute, range(50), at_once=2, threads=2))
    assert len(began) < 10


def test_the_callers_number_of_threads_stays_and_the_computing_ones_divide_it() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert list(in_order(lambda _: torch.get_num_threads(), range(3), at_once=2, threads=4)) == [2, 2, 2]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_the_computing_threads_stand_back_and_the_caller_does_not() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found = list(in_order(lambda _: os.getpriority(os.PRIO_PROCESS, 0), range(2), at_once=2, threads=2))
    assert found == [min(19, own + 5)] * 2
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def _trained(
    folder: Path, *, threads: int, ticks: int = 3, **settings: Any
) -> tuple[dict[str, torch.Tensor], list[Any]]:
    lora = settings.pop("lora", None)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        trainer = Trainer(
            folder,
            TrainerConfig(max_tokens_per_microbatch=20, share_prompts=False, microbatches_at_once=2, **settings),
            OptimizerConfig(lr=1e-2),
            AlgorithmConfig(),
            temperature=1.0,
            lora=lora,
        )
        told: list[Any] = []
        trainer.on_tokens = lambda part, logprobs, clipped: told.append(([s.sample for s in part], logprobs.tolist()))
        metrics = [trainer.train(make_groups(seed=tick), tick) for tick in range(ticks)]
        return {name: t.clone() for name, t in trainer.parameters_for_sync().items()}, [metrics, told]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "bfloat16"}, {"activation_checkpointing": "full"}, {"lora": LoraConfig(rank=2)}],
    ids=["float32", "bfloat16", "recomputed", "adapters"],
)
def test_two_at_once_give_the_bits_of_one_thread_that_takes_them_in_turn(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = lambda *args, **named: pack_sequences(*args, **{**named, "at_once": 2})  # noqa: E731
    monkeypatch.setattr("llamarl.trainer.computes.pack_sequences", same)  # one thread would cut the batch otherwise
    folder = write_model(tmp_path / "model")
    in_turn, said_in_turn = _trained(folder, threads=1, **settings)
    at_once, said_at_once = _trained(folder, threads=2, **settings)
    assert said_at_once == said_in_turn
    for name, tensor in in_turn.items():
        assert torch.equal(tensor, at_once[name]), name
