"""Rollouts of an earlier run, or of another program in its own order: their groups, and in which order they come."""

import json
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import validate
from llamarl.data.prompts import shuffled
from llamarl.errors import DataError
from llamarl.executors import demonstrations, recorded
from llamarl.executors.recorded import RecordedStream
from llamarl.models.folders import resolve_model_path
from llamarl.models.loading import load_tokenizer


def characters(text: str, **options: Any) -> dict[str, list[int]]:
    return {"input_ids": list(text.encode())}


def sample(index: int, prompt: str, reward: Any, **changes: Any) -> dict[str, Any]:
    common = dict(sample_index=0, task="", response="x", answer=None, reward_parts={}, failure=None, metadata={})
    common |= dict(finish_reason="stop", tokens=[1], behavior_logprobs=[-1.0], policy_versions=[0], loss_mask=[1])
    own = dict(prompt_index=index, prompt=prompt, prompt_tokens=list(prompt.encode()), reward=reward)
    return common | own | changes


def stream(folder: Path, samples: list[tuple[int, str, Any]], *, shuffle: bool = False) -> RecordedStream:
    rows = [sample(index, prompt, reward) for index, prompt, reward in samples]
    (folder / "tick_000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RecordedStream(
        str(folder), characters, seed=3, imitate=False, least_reward=1, eval_fraction=0, shuffle=shuffle
    )


def test_samples_of_a_prompt_are_its_group_wherever_they_stand_and_those_of_another_are_not(tmp_path: Path) -> None:
    found = stream(tmp_path, [(0, "a", 0), (1, "b", 1), (0, "a", 1.0), (1, "b", "0.5"), (0, "c", 1)])
    groups = [found.demonstration(index) for index in range(found.num_items("train"))]
    assert [(g.prompt.text, [r.outcome.value for r in g.responses]) for g in groups] == [  # type: ignore[union-attr]
        ("a", [0.0, 1.0]),
        ("b", [1.0, 0.5]),
        ("c", [1.0]),
    ]


def test_a_reward_that_is_no_number_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 2 is not a sample"):
        stream(tmp_path, [(0, "a", 0), (0, "a", "good")])


def test_an_epochs_order_is_worked_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(num_items: int, seed: int, epoch: int) -> Any:
        asked.append(epoch)
        return shuffled(num_items, seed, epoch)

    monkeypatch.setattr(recorded, "shuffled", counted)
    found = stream(tmp_path, [(index, str(index), 1) for index in range(5)], shuffle=True)
    shown = [int(found.demonstration(index).prompt.text) for index in range(10)]
    assert shown == [*shuffled(5, 3, 0), *shuffled(5, 3, 1)] and asked == [0, 1]


def test_a_tokenizer_that_ends_every_text_reads_the_prompts_that_it_has_written(tmp_path: Path) -> None:
    class Ending:
        eos_token, eos_token_id = "<end>", 7

        def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [1, *text.encode(), 7] if add_special_tokens else list(text.encode())}

    (tmp_path / "tick_000000.jsonl").write_text(json.dumps(sample(0, "ab", 1.0, prompt_tokens=[1, 97, 98])) + "\n")
    found = RecordedStream(str(tmp_path), Ending(), seed=3, imitate=False, least_reward=1, eval_fraction=0)
    assert found.demonstration(0).prompt.tokens.tolist() == [1, 97, 98]


def test_counting_the_samples_fetches_no_weights_of_a_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = resolve_model_path("bundled:tiny")
    prompt_tokens = load_tokenizer(tiny)("a1 b2 =\n")["input_ids"]
    rows = [sample(0, "a1 b2 =\n", 1.0, prompt_tokens=prompt_tokens, tokens=[token]) for token in (3, 4)]
    (tmp_path / "tick_000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked: list[tuple[str, Any]] = []

    def fetched(path: str, **how: Any) -> Path:
        asked.append((path, how["weights"]))
        return tiny

    monkeypatch.setattr(demonstrations, "resolve_model_path", fetched)
    imitates = {"algorithm": {"name": "sft"}, "model": {"path": "org/name"}}
    task = {"name": "demonstrations", "rollouts": str(tmp_path), "eval_fraction": 0.0}
    assert demonstrations.num_training_rows(validate({**imitates, "task": task})) == 2
    assert asked == [("org/name", False)]
