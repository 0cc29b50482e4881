"""The trainer's check of token versions, without a model."""

import dataclasses

import numpy as np
import pytest
from made_responses import made_group
from training_fixtures import make_response

from llamarl.errors import StaleTokenError
from llamarl.trainer.batch import training_sequence
from llamarl.trainer.staleness import check_token_versions
from llamarl.types import Failure, Group, Score


def group(*versions: list[int], mask: list[bool] | None = None, failed: bool = False) -> list[Group]:
    """Prompt 4 with one response a list of token versions."""
    outcome = Failure(kind="timeout", detail="") if failed else Score(value=1.0)
    responses = (make_response(4, s, [7] * len(v), outcome, versions=v, mask=mask) for s, v in enumerate(versions))
    return [made_group(responses, index=4)]


def test_a_token_at_the_bound_trains_and_one_version_older_is_named() -> None:
    check_token_versions(group([5, 6, 7]), trainer_version=7, max_staleness=2)
    with pytest.raises(
        StaleTokenError, match="response 4/1, token 0 was sampled by policy version 4, 3 versions before .*7"
    ):
        check_token_versions(group([5, 6, 7], [4, 5]), trainer_version=7, max_staleness=2)


def test_a_version_that_does_not_exist_yet_is_refused_also_without_a_bound() -> None:
    check_token_versions(group([0, 7]), trainer_version=7, max_staleness=None)
    with pytest.raises(
        StaleTokenError, match="token 1 carries policy version 8, which does not exist: .* holds version 7"
    ):
        check_token_versions(group([7, 8]), trainer_version=7, max_staleness=None)


def test_a_trained_token_without_a_version_is_refused_and_one_that_the_policy_did_not_write_is_not() -> None:
    mask = [False, True]  # the fixture gives version -1 where the policy did not write the token
    check_token_versions(group([7, 7], mask=mask), trainer_version=7, max_staleness=0)
    with pytest.raises(StaleTokenError, match=r"token 0 is to be trained but carries no policy version \(-1\)"):
        check_token_versions(group([-1]), trainer_version=0, max_staleness=0)


def test_a_failed_sample_breaks_the_promise_too() -> None:
    with pytest.raises(StaleTokenError, match="version 4"):
        check_token_versions(group([4], failed=True), trainer_version=7, max_staleness=2)


def test_tokens_of_another_model_have_no_age() -> None:
    (sampled,) = group([0, 0])
    of_teacher = dataclasses.replace(sampled.responses[0], sampled_by="teacher")
    check_token_versions([dataclasses.replace(sampled, responses=(of_teacher,))], trainer_version=7, max_staleness=2)
    assert len(training_sequence(sampled, of_teacher, 1.0, 0).policy_versions) == 0
    assert training_sequence(sampled, sampled.responses[0], 1.0, 0).policy_versions.tolist() == [0, 0]


def test_every_rank_raises_the_same_of_the_one_rank_that_saw_it() -> None:
    tables: list[np.ndarray] = []
    for rank, groups in enumerate(([], group([4]))):  # what each rank has to say
        check_token_versions(groups, trainer_version=7, max_staleness=2, rank=rank, num_ranks=2,
                             sum_over_ranks=lambda table: tables.append(table.copy()) or np.zeros_like(table))  # fmt: skip
    messages = []
    for rank, groups in enumerate(([], group([4]))):
        with pytest.raises(StaleTokenError) as raised:
            check_token_versions(groups, trainer_version=7, max_staleness=2, rank=rank, num_ranks=2,
                                 sum_over_ranks=lambda _: tables[0] + tables[1])  # fmt: skip
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert "response 4/0, token 0 (data-parallel rank 1) was sampled by policy version 4" in messages[0]
