import random
from collections.abc import Sequence

import pytest
from made_responses import made_group, made_response

from llamarl.algorithms.dynamic_sampling import has_signal, oldest_version, select_groups
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.types import Failure, FinishReason, Group, Response, Score

PLAIN = AlgorithmConfig()


def response(
    reward: float | None,
    *,
    index: int = 0,
    length: int = 2,
    versions: Sequence[int] | None = None,
    finish: FinishReason = "stop",
    trained: bool = True,
) -> Response:
    written = list(versions) if versions is not None else [0] * length
    outcome = Failure(kind="timeout", detail="") if reward is None else Score(value=reward)
    return made_response(
        index=index, tokens=[0] * len(written), versions=written, mask=trained, finish_reason=finish, outcome=outcome
    )


def group(index: int, rewards: Sequence[float | None], version: int = 0) -> Group:
    return made_group((response(r, index=index, versions=[version, version]) for r in rewards), index=index)


def good(index: int, version: int = 0) -> Group:
    return group(index, [0.0, 1.0], version)


def indices(groups: Sequence[Group]) -> list[int]:
    return [g.prompt.index for g in groups]


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [
        ([1.0, 0.0], True),
        ([1.0, 1.0], False),
        ([0.0, 0.0, 0.0], False),
        ([0.1, 0.1, 0.1], False),  # their mean is not 0.1 in float64
        ([1.0, None, 0.0], True),
        ([1.0, None], False),  # a failed sample is no zero
        ([None, None], False),
        ([], False),
    ],
)
def test_a_signal_is_two_different_rewards(rewards: list[float | None], signal: bool) -> None:
    assert has_signal(group(0, rewards), PLAIN) is signal


def test_the_over_long_penalty_is_part_of_the_signal() -> None:
    both_right = made_group([response(1.0, length=4), response(1.0, length=9)])
    assert not has_signal(both_right, PLAIN)
    assert has_signal(both_right, AlgorithmConfig(overlong_buffer=4, overlong_limit=10))
    assert not has_signal(both_right, AlgorithmConfig(overlong_buffer=1, overlong_limit=10))  # both below the buffer


def test_a_group_of_which_nothing_trains_has_no_signal() -> None:
    cut = made_group([response(1.0, finish="length"), response(0.0, finish="length")])
    assert has_signal(cut, PLAIN)
    assert not has_signal(cut, AlgorithmConfig(train_truncated=False))
    half = made_group([response(1.0), response(0.0, finish="length")])
    assert has_signal(half, AlgorithmConfig(train_truncated=False))
    assert not has_signal(made_group([response(1.0, trained=False), response(0.0, length=0)]), PLAIN)


def test_the_oldest_version_ignores_tokens_that_no_policy_wrote() -> None:
    mixed = made_group([response(1.0, versions=[-1, 4, 5]), response(0.0, versions=[3])])
    assert oldest_version(mixed) == 3
    assert oldest_version(made_group([response(1.0, versions=[-1])])) is None


def test_fresh_groups_go_first_in_prompt_order_and_the_rest_waits() -> None:
    fresh = [good(7, 4), group(5, [1.0, 1.0], 4), good(4, 4), good(6, 4)]
    chosen = select_groups(fresh, [good(1, 3)], PLAIN, tick=5, num_wanted=2, max_staleness=3)
    assert indices(chosen.chosen) == [4, 6]
    assert indices(chosen.spares) == [1, 7]  # 1 is 3 versions old at tick 6, 7 is 2
    assert (chosen.num_no_signal, chosen.num_refilled, chosen.num_expired) == (1, 0, 0)


def test_spares_fill_what_is_missing_oldest_first() -> None:
    spares = [good(1, 4), good(2, 3), good(3, 4)]
    chosen = select_groups([good(9, 4)], spares, PLAIN, tick=5, num_wanted=3, max_staleness=4)
    assert indices(chosen.chosen) == [1, 2, 9]
    assert indices(chosen.spares) == [3]
    assert chosen.num_refilled == 2


def test_a_group_that_would_pass_the_bound_is_dropped_and_counted() -> None:
    fresh = [good(1, 4), good(2, 4), good(3, 3)]
    chosen = select_groups(fresh, [], PLAIN, tick=5, num_wanted=1, max_staleness=2)
    assert indices(chosen.spares) == [2]  # at tick 6, 2 is 2 versions old, 3 would be 3
    assert chosen.num_expired == 1


def test_a_spare_of_a_run_with_a_higher_bound_is_dropped_and_not_trained() -> None:
    found = select_groups([], [good(0, 2), good(1, 4)], PLAIN, tick=5, num_wanted=2, max_staleness=1)
    assert indices(found.chosen) == [1] and indices(found.dropped) == [0] and found.num_expired == 1
    assert (found.num_refilled, found.spares) == (1, ())


def test_a_short_batch_is_short_and_an_empty_one_empty() -> None:
    assert indices(select_groups([good(1)], [], PLAIN, tick=0, num_wanted=3, max_staleness=1).chosen) == [1]
    nothing = select_groups([group(1, [1.0, 1.0])], [], PLAIN, tick=0, num_wanted=3, max_staleness=1)
    assert nothing.chosen == nothing.spares == () and nothing.num_no_signal == 1


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_over_many_ticks_every_group_trains_once_or_is_counted_and_none_too_late(max_staleness: int) -> None:
    rng = random.Random(max_staleness)
    spares: Sequence[Group] = ()
    seen, trained = 0, []
    dropped = expired = refilled = short = 0
    for tick in range(60):
        fresh = [
            group(seen + i, [0.0, float(rng.random() < 0.5)], max(0, tick - rng.choice([1, 1, min(2, max_staleness)])))
            for i in range(6)
        ]
        seen += 6
        other_order = rng.sample(fresh, 6)
        now, same = (
            select_groups(given, spares, PLAIN, tick=tick, num_wanted=3, max_staleness=max_staleness)
            for given in (fresh, other_order)
        )
        assert indices(now.chosen) == indices(same.chosen) and indices(now.spares) == indices(same.spares)
        for g in now.chosen:
            assert tick - (oldest_version(g) or 0) <= max_staleness
        trained += indices(now.chosen)
        dropped, expired = dropped + now.num_no_signal, expired + now.num_expired
        refilled, short = refilled + now.num_refilled, short + 3 - len(now.chosen)
        spares = now.spares
    assert len(set(trained)) == len(trained)
    assert len(trained) + dropped + expired + len(spares) == seen
    assert short > 0 and expired > 0 and (refilled > 0) == (max_staleness > 1)
