"""What is reported of a model on held-out prompts, each worked by hand."""

import itertools
import math

import pytest
from made_responses import made_group, made_response

from llamarl.algorithms.advantages import shaping
from llamarl.data.curriculum import outcomes_of
from llamarl.executors.evaluator import evaluate
from llamarl.executors.measures import answered, best_of, majority, mean_of, measures, pass_at_k
from llamarl.executors.reward import reward_metrics
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.types import Failure, Group, Response, Score


def _response(sample: int, text: str, reward: float | None) -> Response:
    outcome = Failure(kind="exception", detail="x") if reward is None else Score(value=reward)
    return made_response(sample, text=text, outcome=outcome)


def _group(*responses: tuple[str, float | None], answer: str = "4") -> Group:
    made = (_response(i, *one) for i, one in enumerate(responses))
    return made_group(made, text="?", question="?", answer=answer, task="t")


@pytest.mark.parametrize(("n", "right"), [(5, 0), (5, 2), (6, 1), (4, 4)])
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_one(n: int, right: int) -> None:
    for k in range(1, n + 1):
        draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_the_majority_is_the_most_frequent_answer_not_the_most_frequent_text() -> None:
    said = [
        ("I say \\boxed{5}", 0.0),
        ("so \\boxed{4}", 1.0),
        ("thus \\boxed{4}", 1.0),
        ("it is \\boxed{5}", 0.0),
        ("\\boxed{4}", 1.0),
    ]
    assert majority(_group(*said).responses, numeric=True)
    assert not majority(_group(*said[:4]).responses, numeric=True)  # two each: the one given first, 5
    assert not majority(_group(("", 0.0), (" ", 0.0)).responses, numeric=True)
    own_form = [("9+3=12\n#12", 1.0), ("9+3=11\n#11", 0.0), ("so\n#12", 1.0)]
    assert majority(_group(*own_form, answer="12").responses, numeric=True)  # by the last line
    unjudged = [("\\boxed{5}", None), ("\\boxed{5}", None), ("\\boxed{4}", 1.0)]
    assert majority(_group(*unjudged).responses, numeric=True)  # who has no verdict does not vote


@pytest.mark.parametrize(
    ("right", "wrong", "numeric"),
    [
        (["1000", "1,000", "\\$1000", "1000.00"], "900", True),
        (["18", "18 dollars", "x = 18", "18\\text{ apples}"], "9", True),
        (["\\frac{1}{2}", "\\dfrac{1}{2}", "\\frac{1}{2}\\,", "\\tfrac{1}{2}"], "\\frac{1}{3}", False),
    ],
)
def test_one_answer_in_other_spellings_is_one_vote_more(right: list[str], wrong: str, numeric: bool) -> None:
    said = [(f"\\boxed{{{one}}}", 1.0) for one in right]
    assert majority(_group(*[(f"\\boxed{{{wrong}}}", 0.0)] * 3, *said).responses, numeric=numeric)
    other = [(f"\\boxed{{{one}}}", 0.0) for one in (wrong, wrong, "-18", "-18", "-18")]
    assert not majority(_group(*said[:2], *other).responses, numeric=numeric)


def test_long_numbers_that_differ_at_their_end_are_several_answers() -> None:
    said = [(str(10**30 + place), float(place == 9)) for place in (1, 2, 9, 9)]
    assert majority(_group(*said).responses, numeric=True)


def test_the_best_is_the_one_that_is_rated_highest() -> None:
    responses = _group(("a", 0.0), ("b", 1.0), ("c", 0.0)).responses
    assert best_of(responses, [0.1, 0.9, 0.2]) and not best_of(responses, [0.9, 0.1, 0.2])
    assert best_of(responses, [math.nan, 0.5, 0.5]) and not best_of(responses, [math.nan] * 3)
    unjudged = _group(("a", None), ("b", 1.0), ("c", 0.0)).responses
    assert best_of(unjudged, [0.9, 0.5, 0.2]) and not best_of(unjudged, [0.9, 0.2, 0.5])  # a failed one is no wrong one


def test_a_prompt_without_a_verdict_counts_in_no_share_of_a_run_s_own_evaluation() -> None:
    groups = [_group(("a", 1.0), ("b", None)), _group(("a", 0.0), ("b", 0.0)), _group(("a", None), ("b", None))]
    scores = evaluate(groups)
    assert (scores["pass_at_k"], scores["accuracy"], scores["failed"]) == (0.5, pytest.approx(1 / 3), 3.0)
    assert math.isnan(evaluate(groups[2:])["pass_at_k"])


def test_a_reward_is_right_that_rounding_has_kept_below_one() -> None:
    """As that of every full answer is where three rewards weigh 0.6, 0.3 and 0.1."""
    total = 0.6 + 0.3 + 0.1
    groups = [_group(("\\boxed{4}", total), ("\\boxed{5}", 0.99))]
    scores = evaluate(groups, ["t"])
    assert total < 1
    assert (scores["accuracy"], scores["pass_at_k"], scores["tasks/t/accuracy"]) == (0.5, 1.0, 0.5)
    assert reward_metrics(groups, ["t"])["reward/tasks/t/accuracy"] == 0.5
    assert measures(groups)["pass@1"].value == 0.5 and outcomes_of(groups) == [("t", -1, 0, 1, 1)]
    assert shaping(total, [], AlgorithmConfig(cosine_length=9)) == 0.0  # a wrong one's is -1


def test_the_interval_is_wilsons() -> None:
    """8 of 10, as in any table: 0.490 to 0.943. All of 10 leave room for a failure."""
    eight = mean_of([1.0] * 8 + [0.0] * 2)
    assert (eight.value, round(eight.low, 3), round(eight.high, 3)) == (0.8, 0.490, 0.943)
    assert (mean_of([1.0] * 10).high, round(mean_of([1.0] * 10).low, 3)) == (pytest.approx(1.0), 0.722)
    assert math.isnan(mean_of([]).value)


def test_measures_of_three_prompts() -> None:
    groups = [
        _group(("\\boxed{4}", 1.0), ("\\boxed{4}", 1.0), ("\\boxed{4}", 1.0), ("\\boxed{3}", 0.0)),
        _group(("\\boxed{9}", 0.0), ("\\boxed{9}", 0.0), ("\\boxed{4}", 1.0), ("none", 0.0)),
        _group(("a", None), ("b", None), ("c", None), ("d", None)),
    ]
    found = measures(groups, [[0.0, 0.0, 0.0, 9.0], [0.0, 0.0, 9.0, 0.0], [0.0] * 4])
    assert {key: one.value for key, one in found.items()} == pytest.approx(
        {"pass@1": 0.5, "pass@2": (1.0 + 0.5) / 2, "pass@4": 1.0, "majority@4": 0.5, "best_of@4": 0.5}
    )
    assert measures([_group(("\\boxed{4}", 1.0))]).keys() == {"pass@1"}
    assert math.isnan(measures([])["pass@1"].value)


def test_an_answer_in_a_wrong_form_is_apart_from_a_wrong_answer() -> None:
    group = _group(("I do not know", 0.0), ("\\boxed{9}", 0.0), ("\\boxed{4}", 1.0), ("it is 7", 0.0))
    assert answered([group]) == 0.75
    assert math.isnan(
        answered([_group(("#4", 1.0), ("#3", 1.0), ("\\boxed{4}", 0.0))])
    )  # one in the form of other tasks
    assert math.isnan(answered([_group(("#4", 1.0))])) and math.isnan(answered([]))
