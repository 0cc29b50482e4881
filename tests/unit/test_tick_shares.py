"""Who gets which prompts: ticks worked by hand, the present dealing for equal shares, shares that hold in the long run."""

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.tick_shares import Dealing, smallest_quota


def test_what_is_left_goes_to_the_largest_remainder_and_is_carried() -> None:
    """Quotas 2.5 and 1.5: a tie goes to the first, who then has had half a group too much."""
    dealing = Dealing([5, 3], 4)
    assert [dealing.counts(tick) for tick in range(5)] == [(3, 1), (2, 2), (3, 1), (2, 2), (3, 1)]


def _in_rounds(counts: Sequence[int]) -> list[int]:
    """Deal a tick's prompts like cards: the replica that each goes to, in the order of the prompts."""
    return [replica for dealt in range(max(counts)) for replica, count in enumerate(counts) if count > dealt]


@given(st.integers(1, 6), st.integers(1, 5), st.floats(0.1, 9), st.integers(0, 400))
def test_equal_shares_that_divide_are_dealt_like_cards(replicas: int, each: int, share: float, number: int) -> None:
    dealing = Dealing([share] * replicas, replicas * each)
    assert dealing.counts(number) == (each,) * replicas
    assert [dealing.prompt_index(r, number) for r in range(replicas)] == [
        number * replicas + r for r in range(replicas)
    ]


_SHARES = st.lists(st.integers(1, 40).map(lambda tenths: tenths / 10), min_size=1, max_size=7)


@given(_SHARES, st.integers(1, 9), st.integers(1, 60))
def test_every_prompt_goes_to_one_replica_in_its_tick(shares: list[float], more: int, ticks: int) -> None:
    groups = _enough(shares) + more
    dealing = Dealing(shares, groups)
    found = []
    for replica in range(len(shares)):
        number = 0
        for tick in range(ticks):
            for _ in range(dealing.counts(tick)[replica]):
                index = dealing.prompt_index(replica, number)
                assert index // groups == tick
                assert _in_rounds(dealing.counts(tick))[index % groups] == replica
                found.append(index)
                number += 1
    assert sorted(found) == list(range(ticks * groups))


@given(_SHARES, st.integers(0, 9), st.integers(1, 300))
def test_shares_hold_at_each_tick_and_in_the_long_run(shares: list[float], more: int, ticks: int) -> None:
    groups = _enough(shares) + more
    dealing = Dealing(shares, groups)
    quotas = [Fraction(str(share)) * groups / sum(Fraction(str(s)) for s in shares) for share in shares]
    had = [0] * len(shares)
    for tick in range(ticks):
        counts = dealing.counts(tick)
        assert sum(counts) == groups
        for replica, (count, quota) in enumerate(zip(counts, quotas, strict=True)):
            assert count >= 1 and abs(count - quota) < 1
            had[replica] += count
            assert abs(had[replica] - (tick + 1) * quota) < 2


def test_another_order_of_questions_changes_no_answer() -> None:
    late, early = Dealing([0.7, 2, 1.3], 11), Dealing([0.7, 2, 1.3], 11)
    late.prompt_index(2, 1000)
    assert [late.counts(tick) for tick in range(90)] == [early.counts(tick) for tick in range(90)]


def test_shares_are_the_numbers_that_are_written() -> None:
    """0.1 + 0.2 is 0.3, so half of the 12 groups are those of the third, at every tick."""
    assert {Dealing([0.1, 0.2, 0.3], 12).counts(tick) for tick in range(50)} == {(2, 4, 6)}


def test_groups_of_ticks_ahead() -> None:
    assert Dealing([5, 3], 4).ahead(1, 2, 3) == [1, 2, 1]


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Dealing([1, 0], 4)
    with pytest.raises(ValueError, match="a group a tick"):
        Dealing([9, 1], 4)
    assert smallest_quota([9, 1], 4) == (1, pytest.approx(0.4))


def _enough(shares: list[float]) -> int:
    """Groups of which each replica gets one at least."""
    return -(-sum(Fraction(str(s)) for s in shares) // min(Fraction(str(s)) for s in shares)).__int__()
