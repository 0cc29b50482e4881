"""The period of a job; ``test_simulation`` holds it against the job played on a virtual clock."""

import pytest

from llamarl.forecast.step_time import step_period


def test_the_paper_cases_sum_and_max() -> None:
    times = dict(generator_s=5.0, reward_s=1.0, trainer_s=3.0, sync_s=0.5)
    assert step_period(**times, max_staleness=0) == (pytest.approx(9.5), "round")
    assert step_period(**times, max_staleness=1) == (pytest.approx(5.0), "generator")
