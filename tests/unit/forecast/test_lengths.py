"""Length distributions: exact sums against hand-worked values and against sampling."""

import numpy as np
import pytest

from llamarl.errors import PlanError
from llamarl.forecast.lengths import Lengths, empirical, lognormal, parse_lengths


def test_moments_and_expected_maximum_of_a_fair_die() -> None:
    die = empirical([1, 2, 3, 4, 5, 6])
    assert die.mean == pytest.approx(3.5)
    assert die.second_moment == pytest.approx(91 / 6)
    assert die.expected_max(2) == pytest.approx(161 / 36)
    assert die.quantile([0.0, 1 / 6, 0.5, 0.51, 1.0]).tolist() == [1, 1, 3, 4, 6]
    assert die.representative(3).tolist() == [1, 3, 5]  # middles of the thirds: 1/6, 1/2, 5/6


@pytest.mark.parametrize("lengths", [lognormal(300, 0.8, 2000), empirical([5, 9, 9, 40])])
def test_sums_agree_with_sampling(lengths: Lengths) -> None:
    sample = lengths.sample(200_000, np.random.default_rng(1)).astype(float)
    assert sample.mean() == pytest.approx(lengths.mean, rel=0.01)
    assert (sample**2).mean() == pytest.approx(lengths.second_moment, rel=0.03)
    assert sample.reshape(-1, 50).max(axis=1).mean() == pytest.approx(lengths.expected_max(50), rel=0.02)
    assert sample.max() <= lengths.limit and sample.min() >= 1


def test_a_named_law_has_the_mean_asked_for_when_the_cut_is_far() -> None:
    assert lognormal(500, 0.5, 20_000).mean == pytest.approx(500, abs=1.0)  # whole tokens: rounded up


def test_command_line_forms() -> None:
    assert parse_lengths("512").limit == 512
    assert parse_lengths("4096:lognormal").limit == 4 * 4096
    assert parse_lengths("1000:lognormal:sigma=1.5,limit=3000").limit == 3000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("abc", "expected MEAN"),
        ("0", "at least 1"),
        ("-5:lognormal", "at least 1"),
        ("nan:lognormal", "at least 1"),
        ("100:weibull", "unknown kind"),
        ("100:lognormal:alpha=2", "takes"),
        ("100:lognormal:sigma=x", "key=number"),
        ("100:lognormal:sigma=0", "sigma"),
        ("100:pareto", "unknown kind"),
        ("100:lognormal:limit=99999999", "limit"),
        ("4096:lognormal:limit=inf", "limit must be a whole number of tokens.*got inf"),
        ("4096:lognormal:limit=nan", "limit must be a whole number of tokens.*got nan"),
        ("4096:lognormal:limit=2048.7", "limit must be a whole number of tokens.*got 2048.7"),
        ("4096:lognormal:limit=0", "limit must be a whole number"),
        ("1e308:lognormal", "limit"),
        ("1e308", "limit"),
    ],
)
def test_nonsense_lengths_are_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_lengths(text)
