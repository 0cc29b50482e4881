"""One forward, one backward: against tables worked by hand. Ranks that carry them out are ``test_trainer_meshes``'."""

from collections.abc import Sequence

import pytest

from llamarl.trainer.pipeline import Action, schedule

COST = {"F": 1, "B": 2}


def words(actions: Sequence[Action]) -> str:
    return " ".join(f"{kind}{i}" for kind, i in actions)


def most_alive(actions: list[Action]) -> int:
    """Most micro-batches at once whose forward pass is done and whose backward pass is not."""
    alive = most = 0
    for kind, _ in actions:
        alive += 1 if kind == "F" else -1
        most = max(most, alive)
    return most


def test_fewer_micro_batches_than_stages_by_hand() -> None:
    assert words(schedule(0, 4, 2)) == "F0 F1 B0 B1"
    assert words(schedule(2, 4, 2)) == "F0 F1 B0 B1"
    assert words(schedule(3, 4, 2)) == "F0 B0 F1 B1"
    assert schedule(0, 4, 0) == []


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 8, 20])
def test_a_stage_keeps_no_more_micro_batches_than_there_are_stages_from_it_on(
    num_stages: int, num_microbatches: int
) -> None:
    for stage in range(num_stages):
        actions = schedule(stage, num_stages, num_microbatches)
        assert most_alive(actions) == min(num_stages - stage, num_microbatches)
        for kind in ("F", "B"):
            assert [i for k, i in actions if k == kind] == list(range(num_microbatches))


def finish_times(num_stages: int, num_microbatches: int) -> float:
    """When the last pass ends, each begun as soon as its stage is free and what it reads is there; raises if nobody can go on."""
    left = [schedule(stage, num_stages, num_microbatches) for stage in range(num_stages)]
    free = [0] * num_stages
    ends: dict[tuple[str, int, int], int] = {}
    while any(left):
        ready = []
        for stage, actions in enumerate(left):
            if actions:
                kind, i = actions[0]
                other = stage - 1 if kind == "F" else stage + 1
                needs = (kind, i, other) if 0 <= other < num_stages else None
                if needs is None or needs in ends:
                    ready.append((max(free[stage], ends.get(needs, 0) if needs else 0), stage))
        assert ready, "every stage waits for another"
        start, stage = min(ready)
        kind, i = left[stage].pop(0)
        ends[kind, i, stage] = free[stage] = start + COST[kind]
    return max(free)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 2), (2, 8), (3, 4), (4, 4), (4, 16), (8, 32)])
def test_with_equal_costs_the_pipeline_is_idle_for_the_share_that_theory_says(
    num_stages: int, num_microbatches: int
) -> None:
    busy = num_microbatches * sum(COST.values())
    whole = finish_times(num_stages, num_microbatches)
    assert 1 - busy / whole == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))
