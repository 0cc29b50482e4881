"""The theorem: asynchronous beats synchronous in the continuous model; ties and rounding as docs/forecast.md says."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import paper_table
import pytest
from step_time_theorem import RolesProblem, SampleTime, asynchronous_step_s, integer_split_step_s, synchronous_step_s

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
BATCHES = tuple(float(2**i) for i in range(11))


def _time(fixed: float, each: float, spread: float) -> SampleTime:
    """Seconds a sample: falls with the batch (``fixed``), and device-seconds grow with log2 m (``spread``)."""
    return lambda b, m: (fixed / b + each) / m * (1.0 + spread * math.log2(m))


def _random_problem(rng: random.Random, strict: bool) -> RolesProblem:
    fixed = (rng.uniform(0.05, 20.0), rng.uniform(0.05, 20.0)) if strict else (0.0, 0.0)
    spread = (rng.uniform(0.02, 0.5), rng.uniform(0.02, 0.5)) if strict else (0.0, 0.0)
    return RolesProblem(
        devices=rng.choice([64, 256, 1024, 16384]),
        batch=rng.choice([256, 2048, 8192]),
        memory=rng.uniform(40e9, 200e9),
        weights=rng.uniform(1e9, 900e9),
        train_states=rng.uniform(3.0, 9.0),
        generate_states=rng.choice([1.0, 0.5, 0.25]),
        activation=rng.uniform(0.1e9, 20e9),
        cache=rng.uniform(0.05e9, 5e9),
        train_time=_time(fixed[0], rng.uniform(0.1, 5.0), spread[0]),
        generate_time=_time(fixed[1], rng.uniform(0.1, 5.0), spread[1]),
        parallel_sizes=SIZES,
        batch_sizes=BATCHES,
    )


def test_asynchronous_is_never_slower_in_1500_random_instances() -> None:
    rng = random.Random(0)
    feasible = strict = 0
    for _ in range(1500):
        problem = _random_problem(rng, strict=True)
        sync, separate = synchronous_step_s(problem), asynchronous_step_s(problem)
        if math.isinf(sync):
            continue
        feasible += 1
        assert separate <= sync * (1 + 1e-12)
        strict += separate < sync * (1 - 1e-12)
    assert feasible >= 1000
    # On a grid of sizes the freed memory may be less than the next size up; it almost never is for both roles at once.
    assert strict >= 0.98 * feasible


def test_strictly_faster_whenever_the_freed_memory_admits_a_larger_batch_or_a_smaller_replica() -> None:
    rng = random.Random(1)
    checked = 0
    for _ in range(1500):
        p = _random_problem(rng, strict=True)
        if math.isinf(synchronous_step_s(p)):
            continue
        # A grid as fine as the slack: the replica batch may grow by any amount, as the proof assumes.
        fine = replace(p, batch_sizes=tuple(1.0 * 1.02**i for i in range(350)))
        if checked >= 100:
            break
        checked += 1
        assert asynchronous_step_s(fine) < synchronous_step_s(fine)
    assert checked == 100


def test_equal_when_neither_batch_nor_replica_size_matters() -> None:
    rng = random.Random(2)
    equal = 0
    for _ in range(300):
        problem = _random_problem(rng, strict=False)
        sync = synchronous_step_s(problem)
        if math.isfinite(sync):
            assert asynchronous_step_s(problem) == pytest.approx(sync, rel=1e-12)
            equal += 1
    assert equal > 150


def test_rounding_can_reverse_it() -> None:
    # 24 devices in replicas of 8: three replicas work on both phases in turn, but split only 2 + 1.
    def time(b: float, m: int) -> float:
        return 10.0 / m

    problem = RolesProblem(
        devices=24, batch=64, memory=1.0, weights=0.5, train_states=8.0, generate_states=1.0, activation=0.01,
        cache=0.01, train_time=time, generate_time=time, parallel_sizes=(8,), batch_sizes=(1.0,),
    )  # fmt: skip
    assert synchronous_step_s(problem) == pytest.approx(64 / 24 * 20)  # 53.3 s
    assert asynchronous_step_s(problem) == pytest.approx(64 / 24 * 20)
    assert integer_split_step_s(problem) == pytest.approx(80.0)  # one replica of 8: 64 samples of 10 / 8 s


# The paper's table.


def test_every_claim_holds_and_the_file_has_the_agreed_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    assert paper_table.main(["--quick", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert all(set(claim) >= {"claim", "value", "bar"} for claim in record["claims"])
    assert [claim["ok"] for claim in record["claims"]] == [True] * 4
    assert "nothing was measured" in capsys.readouterr().out


def test_the_baseline_row_hangs_on_memory_and_the_verdict_on_one_estimate_as_the_docs_say() -> None:
    base = paper_table.base_case()
    pairs = paper_table.rows_of(base)
    assert pairs[2][0].tp == 128
    assert pairs[2][0].slots < 2048 / pairs[2][0].copies  # several waves
    assert paper_table.within(paper_table.speed_ups(pairs))
    e = base.hardware.efficiency
    assert "eager_layer_overhead_s" in e.estimates
    changed = base.hardware.with_efficiency(eager_layer_overhead_s=1.2 * e.eager_layer_overhead_s)
    ratios = paper_table.speed_ups(paper_table.rows_of(paper_table.replace(base, hardware=changed)))
    assert not paper_table.within(ratios)
