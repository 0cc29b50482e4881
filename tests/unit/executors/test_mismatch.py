"""The mismatch doctor: its numbers by hand, its verdicts, and the command on a real model."""

import argparse
import json
import math

import numpy as np
import pytest

from llamarl.cli import doctor
from llamarl.errors import ConfigError
from llamarl.executors.mismatch import Mismatch, judge, measure


def found(*ratios: float, rho: float = 4.0) -> Mismatch:
    """One response; the generator gave every token probability 1/10."""
    behavior = np.full(len(ratios), math.log(0.1), np.float32)
    policy = (behavior + np.log(ratios)).astype(np.float32)
    return measure([policy], [behavior], [list(range(len(ratios)))], [[f"t{i}" for i in range(len(ratios))]], rho=rho)


def test_numbers_are_those_worked_by_hand() -> None:
    m = found(1.0, 2.0, 0.5, 5.0, rho=4.0)
    terms = [0.0, 1 - math.log(2), -0.5 + math.log(2), 4 - math.log(5)]
    assert m.num_tokens == 4
    assert m.kl == pytest.approx(sum(terms) / 4, rel=1e-5)
    assert m.kl_error == pytest.approx(np.std(terms) / 2, rel=1e-5)
    assert m.mean_gap == pytest.approx((2 * math.log(2) + math.log(5)) / 4, rel=1e-5)
    assert m.clipped == 0.25  # 5 is above 4
    assert m.effective == pytest.approx((1 + 2 + 0.5 + 4) ** 2 / (4 * (1 + 4 + 0.25 + 16)), rel=1e-5)
    assert (m.least_ratio, m.largest_ratio) == (pytest.approx(0.5), pytest.approx(5.0))


def test_the_largest_gap_is_named_by_response_position_and_text() -> None:
    behavior = [np.log([0.5, 0.5]).astype(np.float32), np.log([0.5, 0.5, 0.5]).astype(np.float32)]
    policy = [np.log([0.5, 0.6]).astype(np.float32), np.log([0.5, 0.1, 0.5]).astype(np.float32)]
    m = measure(policy, behavior, [[7, 8], [9, 10, 11]], [["a", "b"], ["c", "d", "e"]], rho=4.0)
    where = m.largest
    assert (where.response, where.position, where.token, where.text) == (1, 1, 10, "d")
    assert where.policy_logprob == pytest.approx(math.log(0.1)) and where.behavior_logprob == pytest.approx(
        math.log(0.5)
    )


def test_the_estimate_of_kl_is_that_of_the_distributions() -> None:
    mu, pi = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    drawn = np.random.default_rng(0).choice(3, 200_000, p=mu)
    logs = [np.log(p)[drawn].astype(np.float32) for p in (pi, mu)]
    m = measure([logs[0]], [logs[1]], [drawn.tolist()], [["."] * len(drawn)], rho=math.inf)
    exact = float((mu * np.log(mu / pi)).sum())
    assert abs(m.kl - exact) < 4 * m.kl_error and m.kl_error < 0.01 * exact


def test_nothing_and_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing was sampled"):
        measure([], [], [], [], rho=4.0)
    with pytest.raises(ValueError, match="1 of 2 tokens have a log-prob that is not finite"):
        measure([np.array([0.0, np.nan], np.float32)], [np.zeros(2, np.float32)], [[1, 2]], [["a", "b"]], rho=4.0)


SERVED = {"dtype": "float32", "quantization": "none", "trainer_dtype": "float32"}


@pytest.mark.parametrize(
    ("ratios", "safe", "says"),
    [
        ([1.0, 1.00001] * 50, True, "the same policy to rounding"),
        (
            [1.0, 1.1, 0.9, 1.0] * 50,
            True,
            "AIPO's weights make up for this difference, 0.00% of the tokens are clipped",
        ),
        ([1.0, 1.0, 1.0, 6.0] * 50, False, "25.0% of the tokens lie above rho 4"),
        ([0.4, 1.8] * 50, False, "another policy than the one that trains"),
    ],
)
def test_verdicts(ratios: list[float], safe: bool, says: str) -> None:
    verdict = judge(found(*ratios), rho=4.0, **SERVED)
    assert verdict.safe is safe and says in verdict.sentence


def test_a_rho_that_clips_nothing_can_be_safe_where_a_small_one_is_not() -> None:
    ratios = [1.0] * 95 + [1.3] * 5
    assert judge(found(*ratios, rho=4.0), rho=4.0, **SERVED).safe
    assert not judge(found(*ratios, rho=1.2), rho=1.2, **SERVED).safe


def test_advice_goes_from_the_cheapest_step_to_float32() -> None:
    apart = found(*[0.4, 1.8] * 50)
    steps = judge(apart, rho=4.0, dtype="bfloat16", quantization="int8", trainer_dtype="bfloat16").advice
    assert [step.split(": ")[1] for step in steps] == [
        "--generator.quantization none",
        "--generator.engine.dtype float32", "--trainer.dtype float32",
    ]  # fmt: skip
    (only,) = judge(apart, rho=4.0, **SERVED).advice
    assert "this is no rounding" in only


def ask(line: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    args = parser.parse_args(line.split())
    return int(args.run(args))


def test_float32_is_the_same_policy_and_int8_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("bundled:tiny --tokens 128 --device cpu --json") == 0
    same = json.loads(capsys.readouterr().out)
    assert same["safe"] and same["kl"] < 1e-8 and same["num_tokens"] > 60
    ask("bundled:tiny --tokens 128 --device cpu --precision int8")
    text = capsys.readouterr().out
    assert "generator    native, int8 over float32, on cpu" in text
    kl = float(text.partition("KL ")[2].split()[0])
    assert kl > 1e-6  # rounding to 8 bits is seen


def test_flags_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tokens must be > 0, got 0"):
        ask("bundled:tiny --tokens 0")
