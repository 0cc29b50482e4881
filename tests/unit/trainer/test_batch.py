import dataclasses
from typing import Any

import pytest
import torch
from made_responses import made_group
from training_fixtures import make_response, token_scores

from llamarl.algorithms.base import TokenBatch, TokenLosses
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.trainer.batch import make_microbatch, make_sequences, token_weight
from llamarl.trainer.objective import microbatch_loss
from llamarl.trainer.shared_prompts import SharedPrompts
from llamarl.types import Failure, Group, Score


def _group(*responses: Any, prompt: tuple[int, ...] = (10, 11, 12)) -> Group:
    return made_group(responses, tokens=prompt)


def test_positions_point_at_the_token_before_each_trained_one() -> None:
    response = make_response(
        0, 0, [20, 21, 22, 23], Score(value=1.0), mask=[True, False, True, False], versions=[4, 0, 5, 0]
    )
    (sequence,) = make_sequences([_group(response)], AlgorithmConfig())
    assert sequence.tokens.tolist() == [10, 11, 12, 20, 21]  # nothing after the last trained token is computed
    assert sequence.positions.tolist() == [2, 4]
    assert sequence.targets.tolist() == [20, 22]
    assert sequence.policy_versions.tolist() == [4, 5]


def test_a_response_without_tokens_counts_in_the_baseline_only() -> None:
    group = _group(make_response(0, 0, [], Score(value=1.0)), make_response(0, 1, [22], Score(value=0.0)))
    (sequence,) = make_sequences([group], AlgorithmConfig())
    assert sequence.advantage == -0.5


def test_an_unjudged_response_is_refused() -> None:
    with pytest.raises(ValueError, match="without a verdict"):
        make_sequences([_group(make_response(0, 3, [20], None))], AlgorithmConfig())


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="0/3 has the reward nan"):
        make_sequences([_group(make_response(0, 3, [20], Score(value=float("nan"))))], AlgorithmConfig())


@pytest.mark.parametrize("wrong", [float("nan"), 0.5])  # the last: a probability
def test_a_trained_token_without_a_behaviour_log_prob_is_refused(wrong: float) -> None:
    response = make_response(0, 0, [20, 21], Score(value=1.0), logprobs=[-1.0, wrong])
    with pytest.raises(ValueError, match="0/0.*not finite"):
        make_sequences([_group(response)], AlgorithmConfig())


def test_weights_of_each_normalization_by_hand() -> None:
    # two responses of 3 and 5 trained tokens
    def both(config: AlgorithmConfig) -> list[float]:
        return [token_weight(config, num_own_tokens=n, num_tokens=8, num_sequences=2) for n in (3, 5)]

    assert both(AlgorithmConfig(normalization="token")) == [1 / 8, 1 / 8]
    assert both(AlgorithmConfig(normalization="sequence")) == [1 / 6, 1 / 10]
    assert both(AlgorithmConfig(normalization="constant", normalization_constant=100)) == [1 / 200, 1 / 200]


def test_a_microbatch_lays_sequences_end_to_end() -> None:
    group = _group(
        make_response(0, 0, [20, 21], Score(value=1.0), logprobs=[-1.0, -2.0]),
        make_response(0, 1, [30], Score(value=0.0), logprobs=[-3.0]),
    )
    batch = make_microbatch(make_sequences([group], AlgorithmConfig()), [0.25, 0.5], torch.device("cpu"))
    assert batch.input_ids.tolist() == [[10, 11, 12, 20, 10, 11, 12]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.packed.lengths == [4, 3]
    assert batch.positions.tolist() == [2, 3, 6]
    assert batch.targets.tolist() == [20, 21, 30]
    assert batch.behavior_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert batch.advantages.tolist() == [0.5, 0.5, -0.5]
    assert batch.weights.tolist() == [0.25, 0.25, 0.5]
    assert batch.sequence_ids.tolist() == [0, 0, 1]


def test_a_loss_sees_reward_and_group_of_each_response() -> None:
    first = _group(make_response(0, 0, [20, 21], Score(value=2.0)), make_response(0, 1, [30], Score(value=0.5)))
    failed = _group(
        make_response(1, 0, [40], Failure(kind="x", detail="")), make_response(1, 1, [50], Score(value=3.0))
    )
    sequences = make_sequences([first, failed], AlgorithmConfig(overlong_buffer=1, overlong_limit=2))
    microbatch = make_microbatch(sequences, [1.0] * 3, torch.device("cpu"))
    seen: list[TokenBatch] = []

    def loss(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
        seen.append(batch)
        return TokenLosses(losses=batch.policy_logprobs, clipped=torch.zeros(4, dtype=torch.bool))

    microbatch_loss(loss, token_scores(torch.zeros(4)), microbatch, AlgorithmConfig(), has_reference=False)
    (batch,) = seen
    assert batch.rewards is not None and batch.group_ids is not None
    assert batch.rewards.tolist() == [1.0, 0.5, 3.0]  # the first is as long as may be, and fined 1
    assert batch.rewards[batch.sequence_ids].tolist() == [1.0, 1.0, 0.5, 3.0]
    assert batch.group_ids.tolist() == [0, 0, 1]


def test_an_empty_microbatch_still_runs_and_trains_nothing() -> None:
    batch = make_microbatch([], [], torch.device("cpu"))
    assert batch.input_ids.shape == (1, 1) and batch.targets.shape == (0,) and batch.num_sequences == 0


def test_the_overlong_penalty_is_taken_from_the_reward_before_the_baseline() -> None:
    group = _group(make_response(0, 0, [20] * 4, Score(value=1.0)), make_response(0, 1, [22], Score(value=1.0)))
    config = AlgorithmConfig(overlong_buffer=2, overlong_limit=4)
    assert [s.advantage for s in make_sequences([group], config)] == [-0.5, 0.5]  # rewards 0 and 1


def test_truncated_responses_may_stay_out_of_the_loss_but_in_the_baseline() -> None:
    cut = dataclasses.replace(make_response(0, 0, [20] * 4, Score(value=0.0)), finish_reason="length")
    group = _group(cut, make_response(0, 1, [22], Score(value=1.0)))
    (sequence,) = make_sequences([group], AlgorithmConfig(train_truncated=False))
    assert sequence.targets.tolist() == [22] and sequence.advantage == 0.5
    assert len(make_sequences([group], AlgorithmConfig())) == 2


def test_a_shared_prompt_is_laid_down_once_and_predicts_every_first_token() -> None:
    first = _group(
        make_response(0, 0, [20, 21, 22], Score(value=1.0)),
        make_response(0, 1, [30], Score(value=0.0)),
        make_response(0, 2, [40, 41], Score(value=0.0), mask=[False, True]),
    )
    second = _group(make_response(1, 0, [50, 51], Score(value=0.0)), prompt=(7, 8))
    sequences = make_sequences([first, second], AlgorithmConfig())
    batch = make_microbatch(sequences, [1.0] * 4, torch.device("cpu"), share_prompts=True)
    assert batch.input_ids.tolist() == [[10, 11, 12, 20, 21, 40, 7, 8, 50]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2]]
    assert isinstance(batch.packed, SharedPrompts) and batch.packed.units == ((3, (2, 0, 1)), (2, (1,)))
    assert batch.positions.tolist() == [2, 3, 4, 2, 5, 7, 8]
    assert batch.targets.tolist() == [20, 21, 22, 30, 41, 50, 51]
