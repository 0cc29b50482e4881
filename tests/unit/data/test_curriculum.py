"""Choices by pass rates: what is known of an item decides, and nothing else does."""

import pytest
from made_responses import made_group, made_response

from llamarl.data.curriculum import BANDS, PassRates, bands, outcomes_of
from llamarl.types import OWN_PROMPTS, Failure, Group, Score


def rates(*counts: tuple[int, int, int], window: int = 100) -> PassRates:
    """Of items of task "t", each asked as prompt 0: (item, right, wrong)."""
    return PassRates(window, [("t", item, 0, right, wrong) for item, right, wrong in counts])


def test_an_item_of_which_a_quarter_to_not_all_answers_are_right_is_chosen_before_others() -> None:
    known = rates((0, 4, 4), (1, 0, 8), (2, 8, 0), (3, 1, 7), (4, 2, 6))
    known.add([("other", 9, 0, 0, 80)])
    assert known.choose("t", [1, 3, 2, 0], 1) == 0
    assert known.choose("t", [3, 4, 0], 1) == 4, "of equal ones the first"
    assert known.choose("t", [3, 1, 2], 1) == 3
    assert rates().choose("t", [5, 4], 0) == 5


def test_an_unknown_item_counts_as_the_tasks_mean_one_and_comes_before_what_does_not_teach() -> None:
    within, beyond = rates((0, 4, 4), (1, 0, 8)), rates((0, 4, 4), (1, 0, 8), (2, 0, 8))
    assert within.choose("t", [1, 7, 0], 1) == 7, "4 of 16 are right"
    assert beyond.choose("t", [1, 7, 0], 1) == 0, "4 of 24 are right"
    assert beyond.choose("t", [1, 7, 2], 1) == 7


def test_what_is_known_of_an_item_counts_for_a_window_of_prompts() -> None:
    known = rates((0, 8, 8), (1, 0, 8), window=10)
    assert known.choose("t", [1, 0], 9) == 0
    assert known.choose("t", [1, 0], 10) == 1, "8 of 24 are right"
    known.add([("t", 1, 4, 0, 8)])
    assert known.choose("t", [1, 0], 13) == 0
    assert known.choose("t", [1, 0], 14) == 1


def test_the_last_group_of_an_item_is_what_is_known_of_it() -> None:
    known = rates((0, 8, 0), (1, 4, 4))
    known.add([("t", 0, 1, 4, 4), ("t", 1, 2, 0, 8)])
    again = PassRates(100, known.state())
    assert known.state() == [("t", 0, 1, 4, 4), ("t", 1, 2, 0, 8)]
    for one in (known, again):
        assert one.choose("t", [1, 0], 3) == 0
        assert one.choose("t", [1, 2, 0], 3) == 2, "4 of 16 are right, not 8 of 24"
        one.add([("t", 0, 3, 0, 8)])
        assert one.choose("t", [1, 0], 4) == 1


def test_a_state_that_nobody_saved_is_refused() -> None:
    with pytest.raises(ValueError, match="item 3 of task 't' has -1 right and 2 wrong answers"):
        rates((3, -1, 2))


def group(item: int, *rewards: float | None, task: str = "t", index: int = 5) -> Group:
    outcomes = (Failure(kind="crash", detail="") if reward is None else Score(value=reward) for reward in rewards)
    responses = (made_response(number, tokens=(), outcome=outcome) for number, outcome in enumerate(outcomes))
    return made_group(responses, index=index, task=task, item=item)


def test_outcomes_count_right_answers_and_leave_failures_out() -> None:
    groups = [group(4, 1.0, 0.9, None, 2.0), group(4, 0.0), group(3, None), group(4, 1.0, task="other")]
    assert outcomes_of(groups) == [("other", 4, 5, 1, 0), ("t", 4, 5, 2, 2)]
    assert outcomes_of([]) == []


def test_what_a_second_generator_answers_is_not_known_of_an_item() -> None:
    """Its prompts are counted from another number on, which the window would never leave behind."""
    assert outcomes_of([group(4, 1.0, 1.0, index=OWN_PROMPTS + 5), group(4, 1.0, 0.0)]) == [("t", 4, 5, 1, 1)]


def test_bands_count_items_by_the_share_of_right_answers() -> None:
    outcomes = [("t", item, 0, right, 12 - right) for item, right in enumerate((0, 1, 3, 4, 8, 9, 11, 12, 12))]
    assert bands(outcomes) == dict(zip(BANDS, (1, 2, 2, 2, 2), strict=True))
    assert bands([]) == dict.fromkeys(BANDS, 0)
