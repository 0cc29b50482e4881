"""Which questions of a data set are held out: a share by their hash, and of a few at least one on each side."""

import pytest

from llamarl.data.items import held_out, split_questions


def test_of_two_questions_or_more_at_least_one_is_held_out_and_one_is_trained() -> None:
    for seed in range(50):
        for number in (2, 3, 6):
            for fraction in (0.001, 0.1, 0.999):
                questions = [f"question {i}" for i in range(number)]
                split = split_questions(questions, seed=seed, fraction=fraction)
                assert 1 <= sum(split) <= number - 1, (seed, number, fraction)


def test_the_six_rows_of_a_page_hold_out_one_at_the_default_share() -> None:
    rows = ["a3 b9 =", "a1 b2 =", "a3 b9 c4 =", "a7 b2 c4 =", "a5 b5 =", "a8 b6 c7 ="]
    assert sum(split_questions(rows, seed=0, fraction=0.1)) == 1


def test_a_lone_question_is_trained_on_and_so_is_all_at_share_zero() -> None:
    assert split_questions(["only"], seed=0, fraction=0.999) == [False]
    assert split_questions(["only", "only"], seed=0, fraction=0.999) == [False, False]
    assert split_questions(["one", "two", "three"], seed=0, fraction=0.0) == [False] * 3
    assert split_questions([], seed=0, fraction=0.5) == []


def test_equal_questions_fall_on_one_side_in_any_order() -> None:
    questions = [f"question {i % 7}" for i in range(21)]
    split = split_questions(questions, seed=3, fraction=0.4)
    assert {q: out for q, out in zip(questions, split, strict=True)} == dict(
        zip(reversed(questions), reversed(split_questions(questions, seed=3, fraction=0.4)), strict=True)
    )
    assert all(split[i] == split[i + 7] == split[i + 14] for i in range(7))


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_where_the_hash_leaves_both_sides_something_it_alone_decides(fraction: float) -> None:
    questions = [f"question {i}" for i in range(1000)]
    by_hash = [held_out(question, seed=1, fraction=fraction) for question in questions]
    assert split_questions(questions, seed=1, fraction=fraction) == by_hash
    assert abs(sum(by_hash) / 1000 - fraction) < 0.05
