"""How the metrics of an executor's ranks become the executor's."""

import math

import pytest

from llamarl.observability.keys import KEYS, over_ranks, own_metrics, reduce_over_ranks


def test_two_replicas_add_their_counts_and_weigh_their_means_by_responses() -> None:
    one = {
        "samples/delivered": 6.0,
        "tokens/generated": 4230.0,
        "response/length_mean": 10.0,
        "response/length_max": 30.0,
        "response/length_min": 4.0,
        "response/truncated_fraction": 0.5,
        "rollout/carried": 3.0,
        "rollout/age_max": 1.0,
        "time/repack_s": 0.25,
    }
    other = {
        "samples/delivered": 2.0,
        "tokens/generated": 3866.0,
        "response/length_mean": 30.0,
        "response/length_max": 20.0,
        "response/length_min": 7.0,
        "response/truncated_fraction": 0.0,
        "rollout/carried": 4.0,
        "rollout/age_max": 2.0,
        "time/repack_s": 0.5,
    }
    assert reduce_over_ranks("generator", [one, other]) == {
        "samples/delivered": 8.0,
        "tokens/generated": 8096.0,
        "response/length_mean": 15.0,  # (6 * 10 + 2 * 30) / 8
        "response/length_max": 30.0,
        "response/length_min": 4.0,
        "response/truncated_fraction": 0.375,
        "rollout/carried": 7.0,
        "rollout/age_max": 2.0,
        "time/repack_s": 0.5,
    }


def test_what_one_rank_alone_reports_is_its_value_to_the_bit() -> None:
    peer = own_metrics({"response/length_mean": 1.0, "time/repack_s": 2.0, "memory/generator_parked_bytes": 8.0})
    assert peer == {"time/repack_s": 2.0, "memory/generator_parked_bytes": 8.0}
    leader = {"response/length_mean": 0.1 + 0.2, "samples/delivered": 3.0, "entropy": math.nan}
    found = reduce_over_ranks("generator", [leader, peer])
    assert found["response/length_mean"] == 0.1 + 0.2 and math.isnan(found["entropy"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("user/score", 2.0),
        ("user/score_max", 3.0),
        ("user/min", 1.0),
        ("time/user_s", 3.0),
        ("tokens/user", 4.0),
        ("user/num_calls", 4.0),
        ("maximum", 2.0),
    ],
)
def test_a_key_that_the_table_does_not_know_goes_by_its_name(key: str, value: float) -> None:
    assert reduce_over_ranks("mine", [{key: 1.0}, {key: 3.0}]) == {key: value}


def test_a_value_that_stands_for_all_ranks_may_not_differ() -> None:
    assert reduce_over_ranks("trainer", [{"lr": 0.1}, {"lr": 0.1}]) == {"lr": 0.1}
    assert math.isnan(reduce_over_ranks("trainer", [{"grad_norm": math.nan}] * 2)["grad_norm"])
    with pytest.raises(ValueError, match=r"'trainer': rank 0 reports lr = 0.1, rank 2 reports 0.2"):
        reduce_over_ranks("trainer", [{"lr": 0.1}, {}, {"lr": 0.2}])


def test_a_rank_without_weight_counts_nothing_and_one_without_a_weights_key_is_refused() -> None:
    mean, weight = "response/length_mean", "samples/delivered"
    found = reduce_over_ranks("generator", [{mean: math.nan, weight: 0.0}, {mean: 2.0, weight: 5.0}])
    assert found == {mean: 2.0, weight: 5.0}
    with pytest.raises(ValueError, match="rank 1 reports response/length_mean without its weight, samples/delivered"):
        reduce_over_ranks("generator", [{mean: 1.0, weight: 1.0}, {mean: 2.0}])


def test_every_weight_is_a_key_that_adds_up() -> None:
    weights = {key.weight for key in KEYS if key.weight}
    assert weights and {over_ranks(weight) for weight in weights} == {("sum", "")}
    assert all(key.ranks == "mean" for key in KEYS if key.weight)
