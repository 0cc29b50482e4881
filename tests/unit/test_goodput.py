"""The formula of goodput against hand-worked values, Young's and Daly's results, and a job that is died in at random."""

from __future__ import annotations

import math
import random
import runpy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from goodput import HERD_DEATHS_PER_DEVICE_HOUR, Mortal, goodput, replaced, stopped

ROOT = Path(__file__).resolve().parents[2]
MEAN_S = 3600 * 54 * 24 / 419
"""Between two deaths on 16,384 devices: 11,135 s, 3.1 hours."""


def test_the_published_rate_is_one_death_in_three_hours() -> None:
    (whole,) = stopped(16_384, back_s=0.0, deaths_per_device_hour=HERD_DEATHS_PER_DEVICE_HOUR)
    assert 1 / whole.deaths_per_s == pytest.approx(MEAN_S) == pytest.approx(11_135, abs=1)


def test_nothing_dies_and_only_saving_costs() -> None:
    assert goodput((), every_s=95.0, save_s=5.0) == pytest.approx(0.95)
    assert goodput([Mortal(deaths_per_s=0.0, back_s=600.0, repeats=1.0)], every_s=95.0, save_s=5.0) == pytest.approx(
        0.95
    )


def test_a_job_that_stops_at_every_death_has_dalys_expected_time() -> None:
    """Daly 2006: M exp(R / M) (exp((tau + delta) / M) - 1) a segment of tau."""
    tau, delta, back_s = 1200.0, 30.0, 600.0
    by_hand = tau / (MEAN_S * math.exp(back_s / MEAN_S) * (math.exp((tau + delta) / MEAN_S) - 1))
    mortals = stopped(16_384, back_s=back_s, deaths_per_device_hour=HERD_DEATHS_PER_DEVICE_HOUR)
    assert goodput(mortals, every_s=tau, save_s=delta) == pytest.approx(by_hand)


def test_the_best_interval_is_youngs_to_first_order_and_dalys_to_second() -> None:
    delta = 30.0
    mortals = stopped(16_384, back_s=600.0, deaths_per_device_hour=HERD_DEATHS_PER_DEVICE_HOUR)
    best = max(range(100, 3000), key=lambda tau: goodput(mortals, every_s=tau, save_s=delta))
    young = math.sqrt(2 * delta * MEAN_S)  # 817 s
    ratio = delta / (2 * MEAN_S)
    daly = young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - delta  # 798 s
    assert best == pytest.approx(young, rel=0.04) and best == pytest.approx(daly, abs=1.5)


def test_a_rare_death_costs_its_pause_and_half_an_interval_of_who_goes_back() -> None:
    """To first order in the rates: 1 - (L_g (back + tick) + L_t (back + repeats tau / 2))."""
    trainer = Mortal(deaths_per_s=1e-7, back_s=600.0, repeats=0.5)
    generator = Mortal(deaths_per_s=3e-7, back_s=180.0, redo_s=60.0)
    lost = 3e-7 * (180 + 60) + 1e-7 * (600 + 0.5 * 2000 / 2)
    assert 1 - goodput([trainer, generator], every_s=2000.0) == pytest.approx(lost, rel=1e-3)


def died_in(mortals: tuple[Mortal, ...], *, every_s: float, save_s: float, intervals: int, seed: int) -> float:
    """Goodput of a job that is carried out second by second, as events: no formula of the mean anywhere."""
    rng = random.Random(seed)
    (own,) = (one for one in mortals if one.repeats)
    pausing = [one for one in mortals if not one.repeats]

    def uninterrupted(seconds: float, rate: float) -> float:
        """Until a stretch has gone well, begun anew at each death."""
        spent = 0.0
        while (death := rng.expovariate(rate)) < seconds:
            spent += death
        return spent + seconds

    time_s = 0.0
    for _ in range(intervals):
        done = 0.0
        while done < every_s + save_s:
            deaths = [(rng.expovariate(own.deaths_per_s), own)]
            deaths += [(rng.expovariate(one.deaths_per_s), one) for one in pausing]
            after, who = min(deaths, key=lambda death: death[0])
            step = min(after, every_s + save_s - done)
            done, time_s = done + step, time_s + step
            if step < after:
                break
            if who is own:
                time_s += uninterrupted(own.back_s + own.repeats * done, own.deaths_per_s)
                continue
            pause_s = uninterrupted(who.back_s + who.redo_s, who.deaths_per_s)
            left = pause_s
            while (death := rng.expovariate(own.deaths_per_s)) < left:  # the trainer dies while all wait
                left -= death
                time_s += uninterrupted(own.back_s + own.repeats * done, own.deaths_per_s)
            time_s += pause_s
    return intervals * every_s / time_s


@pytest.mark.parametrize(("every_s", "repeats"), [(600.0, 1.0), (3600.0, 1.0), (3600.0, 0.6)])
def test_the_formula_is_the_mean_of_jobs_that_are_died_in_at_random(every_s: float, repeats: float) -> None:
    mortals = replaced(
        16_384,
        trainer_share=0.4,
        trainer_back_s=900.0,
        other_back_s=300.0,
        tick_s=100.0,
        deaths_per_device_hour=2 * HERD_DEATHS_PER_DEVICE_HOUR,
        trainer_repeats=repeats,
    )
    found = died_in(mortals, every_s=every_s, save_s=20.0, intervals=round(6e7 / every_s), seed=1)
    assert found == pytest.approx(goodput(mortals, every_s=every_s, save_s=20.0), abs=0.004)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="every_s must be > 0"):
        goodput((), every_s=0.0)
    with pytest.raises(ValueError, match="finite and >= 0"):
        Mortal(deaths_per_s=-1.0, back_s=0.0)
    one = Mortal(deaths_per_s=1.0, back_s=0.0, repeats=1.0)
    with pytest.raises(ValueError, match="2 of them go back"):
        goodput([one, one], every_s=1.0)


def test_the_page_shows_the_picture_and_the_numbers_that_the_script_makes() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "survival_picture.py"))
    assert (ROOT / "docs" / "images" / "survival.svg").read_text() == made["picture"]()
    assert made["table"]() in (ROOT / "docs" / "results" / "survival.md").read_text()
