"""Executors that send parts of their tick before it ends, and work ahead on parts of the next, driven alone."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import RunConfig, validate
from llamarl.executors.base import ExecutorContext
from llamarl.executors.generator_shard import ActiveGroup
from llamarl.executors.leaving_parts import LeavingParts
from llamarl.executors.reward import RewardExecutor
from llamarl.executors.trainer import TrainerExecutor
from llamarl.types import Failure, Group, Prompt, Response, Score

sys.path.append(str(Path(__file__).resolve().parents[1] / "trainer"))
from training_fixtures import make_groups, write_model

Sent = list[tuple[int, int, list[int]]]
"""Tick, part, prompt indices."""


def active(*indices: int) -> list[ActiveGroup]:
    return [ActiveGroup(Prompt(index=index, tokens=np.zeros(1, np.int32), text=""), 0) for index in indices]


def leaving(sent: Sent, *, num_shards: int = 1, groups: int = 4, parts: int = 2) -> LeavingParts:
    def send(tick: int, part: int, groups: Sequence[Group]) -> None:
        sent.append((tick, part, [group.prompt.index for group in groups]))

    return LeavingParts(
        7,
        send,
        num_parts=parts,
        num_shards=num_shards,
        groups_per_shard=groups,
        to_group=lambda one: Group(prompt=one.prompt, responses=()),
    )


def test_a_part_is_sent_in_order_of_admission_when_its_last_group_is_complete_and_the_last_part_never() -> None:
    sent: Sent = []
    tick = leaving(sent)
    tick.leave(0, active(3))
    assert sent == []
    tick.leave(0, active(3, 1))
    assert sent == [(7, 0, [1, 3])]
    tick.leave(0, active(3, 1, 0, 2))
    assert sent == [(7, 0, [1, 3])]
    assert [(group.prompt.index, group.part) for group in tick.whole(0)] == [(0, 1), (1, 0), (2, 1), (3, 0)]


def test_groups_that_are_complete_at_once_may_fill_several_parts() -> None:
    sent: Sent = []
    leaving(sent, parts=4).leave(0, active(2, 0, 3))
    assert sent == [(7, 0, [2]), (7, 1, [0]), (7, 2, [3])]


def test_a_part_waits_for_every_shard_of_its_rank() -> None:
    sent: Sent = []
    tick = leaving(sent, num_shards=2, groups=2)
    tick.leave(0, active(4, 0))
    assert sent == []
    tick.leave(1, active(1))
    assert sent == [(7, 0, [4, 1])]
    tick.leave(1, active(1, 5))
    assert [[(group.prompt.index, group.part) for group in tick.whole(place)] for place in (0, 1)] == [
        [(0, 1), (4, 0)],
        [(1, 0), (5, 1)],
    ]


CONFIG = validate(
    {
        "schedule": {"prompts_per_step": 4, "max_staleness": 0, "parts": 2},
        "generator": {"group_size": 4},
        "observability": {"rollouts": False},
    }
)
COMPLETIONS = ChannelSpec(name="completions", kind=ChannelKind.GATHER, source="generator", sink="reward", parts=2)
SCORED = ChannelSpec(name="scored", kind=ChannelKind.SCATTER, source="reward", sink="trainer", parts=2)
PARTS = (1, 0, 1, 0)


class Pool:
    """Gives every response its number of tokens, and remembers what it was asked together."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def score(self, groups: Sequence[Group], *, limit_s: float | None = None) -> list[Group]:
        self.asked.append([group.prompt.index for group in groups])

        def judged(response: Response) -> Response:
            return dataclasses.replace(response, outcome=Score(value=float(len(response.tokens))))

        return [dataclasses.replace(g, responses=tuple(map(judged, g.responses))) for g in groups]


def tick_of(seed: int, *, judged: bool = False) -> list[Group]:
    groups = make_groups(len(PARTS), seed=seed, failed=False)
    groups = [dataclasses.replace(group, part=part) for group, part in zip(groups, PARTS, strict=True)]
    if judged:
        return Pool().score(groups)
    none = [tuple(dataclasses.replace(r, outcome=None) for r in group.responses) for group in groups]
    return [dataclasses.replace(group, responses=responses) for group, responses in zip(groups, none, strict=True)]


def part_of_tick(groups: Sequence[Group], part: int) -> list[Group]:
    return [group for group in groups if group.part == part]


def reward_executor(sent: list[Any]) -> tuple[RewardExecutor, Pool]:
    context = ExecutorContext(
        name="reward",
        rank=0,
        num_ranks=1,
        device="cpu",
        run_dir=None,
        seed=0,
        reads=(COMPLETIONS,),
        writes=(SCORED,),
        send_part=lambda *part: sent.append(part),
    )
    executor = RewardExecutor(CONFIG, context)
    executor.pool = pool = Pool()  # type: ignore[assignment]
    return executor, pool


def outcomes(groups: Sequence[Group]) -> list[Score | Failure | None]:
    return [response.outcome for group in groups for response in group.responses]


def test_the_reward_judges_part_by_part_in_the_ticks_order_whether_parts_came_or_not() -> None:
    executor, pool = reward_executor([])
    result = executor.step(0, {"completions": tick_of(0)})
    assert pool.asked == [[1, 3], [0, 2]]
    assert outcomes(result.outputs["scored"]) == outcomes(tick_of(0, judged=True))
    assert [group.part for group in result.outputs["scored"]] == list(PARTS)


def test_the_reward_sends_a_judged_part_on_and_does_not_judge_it_again() -> None:
    sent: list[Any] = []
    executor, pool = reward_executor(sent)
    assert not executor.take_part(0, 1, part_of_tick(tick_of(0), 1)), "out of turn"
    assert executor.take_part(0, 0, part_of_tick(tick_of(0), 0))
    assert [(tick, part, outcomes(groups)) for tick, part, groups in sent] == [
        (0, 0, outcomes(part_of_tick(tick_of(0, judged=True), 0)))
    ]
    result = executor.step(0, {"completions": tick_of(0)})
    assert pool.asked == [[1, 3], [0, 2]]
    assert outcomes(result.outputs["scored"]) == outcomes(tick_of(0, judged=True))


def test_the_reward_judges_a_part_again_that_is_another_in_the_whole_tick() -> None:
    executor, pool = reward_executor([])
    executor.take_part(0, 0, part_of_tick(tick_of(1), 0))
    result = executor.step(0, {"completions": tick_of(0)})
    assert pool.asked == [[1, 3], [1, 3], [0, 2]]
    assert outcomes(result.outputs["scored"]) == outcomes(tick_of(0, judged=True))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def trainer_executor(folder: Path) -> TrainerExecutor:
    config: RunConfig = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, path=str(folder)))
    context = ExecutorContext(name="trainer", rank=0, num_ranks=1, device="cpu", run_dir=None, seed=0, reads=(SCORED,))
    executor = TrainerExecutor(config, context)
    executor.setup()
    return executor


def sampled_by(version: int, groups: Sequence[Group]) -> list[Group]:
    def of_version(response: Response) -> Response:
        versions = np.where(response.policy_versions >= 0, version, -1).astype(np.int32)
        return dataclasses.replace(response, policy_versions=versions)

    return [dataclasses.replace(g, responses=tuple(map(of_version, g.responses))) for g in groups]


def weights_of(executor: TrainerExecutor) -> list[bytes]:
    tensors = executor.trainer.parameters_for_sync()
    return [tensors[name].detach().numpy().tobytes() for name in sorted(tensors)]


def test_a_trainer_that_worked_ahead_on_true_or_false_parts_makes_the_same_versions(model_folder: Path) -> None:
    plain, ahead = trainer_executor(model_folder), trainer_executor(model_folder)
    ticks = [sampled_by(tick, tick_of(tick, judged=True)) for tick in range(4)]
    expected = []
    for tick, groups in enumerate(ticks):
        metrics = plain.step(tick, {"scored": groups}).metrics
        expected.append((metrics["grad_norm"], weights_of(plain)))
    took: list[list[bool]] = []
    for tick, groups in enumerate(ticks):
        first, second = part_of_tick(groups, 0), part_of_tick(groups, 1)
        if tick == 0:  # its first part, and before that one of a tick that is not its next
            took.append([ahead.take_part(1, 0, first), ahead.take_part(0, 0, first)])
        elif tick == 1:  # all, and one of them twice
            took.append([ahead.take_part(1, 0, first), ahead.take_part(1, 0, first), ahead.take_part(1, 1, second)])
        elif tick == 2:  # the first is another in the whole tick
            took.append(
                [ahead.take_part(2, 0, part_of_tick(sampled_by(2, ticks[0]), 0)), ahead.take_part(2, 1, second)]
            )
        else:  # only the second is another
            took.append([ahead.take_part(3, 0, first), ahead.take_part(3, 1, part_of_tick(sampled_by(3, ticks[1]), 1))])
        metrics = ahead.step(tick, {"scored": groups}).metrics
        assert (metrics["grad_norm"], weights_of(ahead)) == expected[tick], f"tick {tick}"
    assert took == [[False, True], [True, False, True], [True, True], [True, True]]
