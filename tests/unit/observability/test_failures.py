"""Why rewards fail: causes counted by kind, and the end of a run in which too many do."""

from __future__ import annotations

import pytest

from llamarl.observability.failures import Causes, few_causes, too_many_failed


def test_a_report_names_at_most_five_causes_and_counts_the_others() -> None:
    causes = {f"exception: Error{n}: x": n for n in range(1, 10)}
    found = few_causes(causes)
    assert list(found.items())[:2] == [("exception: Error9: x", 9), ("exception: Error8: x", 8)]
    assert len(found) == 6 and found["others: of further causes"] == 1 + 2 + 3 + 4
    assert few_causes({"timeout: 20 s": 3}) == {"timeout: 20 s": 3}


def test_causes_add_up_over_ticks_and_only_a_new_kind_is_news() -> None:
    causes = Causes()
    assert causes.add({"timeout: 20 s": 2}) == ["timeout: 20 s"]
    assert causes.add({"exception: ValueError: a": 3, "timeout: 21 s": 5}) == ["exception: ValueError: a"]
    assert causes.lines() == ["7 x timeout: 20 s", "3 x exception: ValueError: a"]


@pytest.mark.parametrize(
    ("shares", "too_many"),
    [
        ([], False),
        ([1.0, 1.0], False),  # three ticks must agree
        ([1.0, 1.0, 1.0], True),
        ([1.0, 1.0, 0.5], False),
        ([0.0, 0.51, 0.6, 1.0], True),
        ([0.6, 0.5, 0.6], False),  # more than the limit, not the limit itself
    ],
)
def test_a_run_ends_when_every_one_of_the_last_ticks_failed_beyond_the_limit(
    shares: list[float], too_many: bool
) -> None:
    assert too_many_failed(shares, max_fraction=0.5, max_ticks=3) is too_many


def test_a_limit_of_one_never_ends_a_run() -> None:
    assert not too_many_failed([1.0] * 100, max_fraction=1.0, max_ticks=1)
