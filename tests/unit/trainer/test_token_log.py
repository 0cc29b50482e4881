"""What a tick's forward passes said of each token is kept response by response, as the first pass saw it."""

import numpy as np
import torch
from made_responses import made_group

from llamarl.executors.trainer import TokenLog
from llamarl.trainer.batch import TrainingSequence


def _sequence(group: int, sample: int, num_tokens: int) -> TrainingSequence:
    ids = np.arange(num_tokens, dtype=np.int64)
    return TrainingSequence(
        tokens=ids,
        positions=ids,
        targets=ids,
        behavior_logprobs=np.zeros(num_tokens, np.float32),
        policy_versions=ids,
        advantage=0.5 * sample,
        group=group,
        sample=sample,
        num_prompt=1,
    )


def test_each_response_gets_its_stretch_of_the_packed_tokens_and_its_prompts_own_index() -> None:
    log = TokenLog([made_group((), index=40), made_group((), index=7)])
    log.add(
        [_sequence(1, 2, 1), _sequence(0, 0, 2)], torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([True, False, True])
    )
    log.add([], torch.zeros(0), torch.zeros(0, dtype=torch.bool))  # a rank that only keeps step
    log.add([_sequence(0, 3, 1)], torch.tensor([-4.0]), torch.tensor([False]))
    log.add([_sequence(1, 0, 5), _sequence(1, 4, 2)], torch.zeros(0), torch.zeros(0, dtype=torch.bool))  # not computed
    found = log.responses()
    places = [(40, 0, 0.0), (40, 3, 1.5), (7, 0, 0.0), (7, 2, 1.0), (7, 4, 2.0)]
    assert [(r.prompt_index, r.sample_index, r.advantage) for r in found] == places
    assert [r.policy_logprobs.tolist() for r in found] == [[-2.0, -3.0], [-4.0], [], [-1.0], []]
    assert [r.clipped.tolist() for r in found] == [[False, True], [False], [], [True], []]


def test_a_second_pass_over_a_response_does_not_replace_the_first() -> None:
    log = TokenLog([made_group((), index=40)])
    for value in (-1.0, -9.0):
        log.add([_sequence(0, 0, 1)], torch.tensor([value]), torch.tensor([False]))
    assert [r.policy_logprobs.tolist() for r in log.responses()] == [[-1.0]]
