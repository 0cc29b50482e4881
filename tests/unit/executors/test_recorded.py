"""Groups of an earlier run: in which order they come."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.data.prompts import shuffled
from llamarl.executors import recorded
from llamarl.observability.rollouts import write_rollouts
from llamarl.types import Group, Prompt, Response, Score


def _group(index: int) -> Group:
    response = Response(
        prompt_index=index,
        sample_index=0,
        tokens=np.array([7], np.int32),
        behavior_logprobs=np.array([-1.0], np.float32),
        policy_versions=np.zeros(1, np.int32),
        loss_mask=np.ones(1, np.bool_),
        text="x",
        finish_reason="stop",
        outcome=Score(value=1.0),
    )
    return Group(prompt=Prompt(index=index, tokens=np.array([index], np.int32), text=str(index)), responses=(response,))


def test_an_epochs_order_is_worked_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(text)]}

    asked = []

    def counted(num_items: int, seed: int, epoch: int) -> Any:
        asked.append(epoch)
        return shuffled(num_items, seed, epoch)

    monkeypatch.setattr(recorded, "shuffled", counted)
    write_rollouts(tmp_path, 0, [_group(index) for index in range(5)])
    tokenizer: Any = tokens
    stream = recorded.RecordedStream(
        str(tmp_path), tokenizer, seed=3, imitate=False, least_reward=0.0, eval_fraction=0.0
    )
    shown = [int(stream.demonstration(index).prompt.text) for index in range(10)]
    assert shown == [*shuffled(5, 3, 0), *shuffled(5, 3, 1)] and asked == [0, 1]
