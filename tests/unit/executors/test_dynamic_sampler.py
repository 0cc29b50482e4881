"""The state that dynamic sampling keeps between ticks, and the numbers that a recipe gives it."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from made_responses import made_group, made_response

from llamarl.channels.plain_values import to_bytes
from llamarl.channels.samples import ANY
from llamarl.config import load_config, validate
from llamarl.errors import CheckpointError, ConfigError
from llamarl.executors.dynamic_sampling import DynamicSampler
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.types import Failure, Group, Score


def _group(index: int, rewards: tuple[float | None, ...]) -> Group:
    rng = np.random.default_rng(abs(index))
    prompt, responses = rng.integers(0, 9, 3), []
    for sample, reward in enumerate(rewards):
        outcome = (
            Failure(kind="timeout", detail="too slow")
            if reward is None
            else Score(value=reward, parts={"format": reward / 3})
        )
        logprobs = -rng.random(4).astype(np.float32)
        logprobs[1] = np.nan
        responses.append(
            made_response(
                sample,
                index=index,
                tokens=rng.integers(0, 9, 4),
                logprobs=logprobs,
                versions=[4, -1, 4, 5],
                mask=[True, False, True, True],
                text="😀 done" if sample else "",
                outcome=outcome,
            )
        )
    known = {"answer": None if index % 2 else "8", "metadata": {"difficulty": 0.1, "parts": [1, 2]}}
    return made_group(responses, index=index, tokens=prompt, text="3 + é", task="t", **known)


def _equal(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        return all(_equal(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return one == other


def _sampler() -> DynamicSampler:
    return DynamicSampler(AlgorithmConfig(), num_wanted=2, max_staleness=2)


def test_counts_of_a_tick_and_of_the_next_that_it_refills() -> None:
    sampler = _sampler()
    chosen, counts = sampler.select([_group(i, (0.0, 1.0, None)) for i in range(3)] + [_group(3, (1.0, 1.0))], 5)
    assert [g.prompt.index for g in chosen] == [0, 1]
    assert counts == {
        "groups/generated": 4, "groups/no_signal": 1, "groups/trained": 2, "groups/refilled": 0, "groups/spare": 1,
        "groups/expired": 0, "groups/short": 0, "tokens/dropped": 6, "tokens/spare": 6,  # 2 scored responses of 3 tokens
    }  # fmt: skip
    chosen, counts = sampler.select([_group(4, (1.0, 1.0))], 6)
    assert [g.prompt.index for g in chosen] == [2]
    assert (counts["groups/refilled"], counts["groups/short"], counts["groups/spare"]) == (1, 1, 0)


def test_a_restored_sampler_holds_the_same_bits(tmp_path: Path) -> None:
    sampler, restored = _sampler(), _sampler()
    sampler.select([_group(i, (0.1, 1 / 3, None)) for i in range(5)], 5)
    sampler.save(tmp_path)
    restored.load(tmp_path, 5, ANY)
    ours, theirs = sampler.select([], 6), restored.select([], 6)
    assert len(ours[0]) == 2 and ours[1] == theirs[1]
    assert _equal(tuple(ours[0]), tuple(theirs[0]))


@pytest.mark.parametrize("kept", [None, b"[]", to_bytes([1, 2]), to_bytes((1, 2)), to_bytes((_group(-1, (1.0,)),))])
def test_spare_groups_that_are_none_are_refused_in_a_sentence(tmp_path: Path, kept: bytes | None) -> None:
    if kept is not None:
        (tmp_path / "spare_groups").write_bytes(kept)
    with pytest.raises(CheckpointError, match="holds no spare groups of this version"):
        _sampler().load(tmp_path, 5, ANY)


def test_groups_generated_a_tick_are_a_whole_number_a_replica() -> None:
    def groups(prompts: int, oversample: float, dp: int) -> int:
        return load_config(
            None,
            ["--schedule.prompts_per_step", f"{prompts}", "--generator.dp", f"{dp}", "--dynamic_sampling.enabled", "true",
             "--dynamic_sampling.oversample", f"{oversample}"],
        ).groups_per_tick  # fmt: skip

    assert groups(16, 1.5, 1) == 24
    assert groups(10, 1.1, 1) == 11  # 10 * 1.1 is a little more than 11 in float64
    assert groups(4, 1.1, 1) == 5
    assert groups(4, 1.1, 2) == 6
    assert groups(4, 1.0, 4) == 4
    assert load_config(None, ["--dynamic_sampling.oversample", "3"]).groups_per_tick == 16  # not enabled


def test_the_bound_on_staleness_counts_ticks_of_waiting_only_where_they_are_allowed() -> None:
    base = ["--schedule.max_staleness", "2", "--generator.max_segments", "3", "--dynamic_sampling.carry_ticks", "2"]
    assert load_config(None, base).token_staleness_bound == 4
    assert load_config(None, [*base, "--dynamic_sampling.enabled", "true"]).token_staleness_bound == 6


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"dynamic_sampling": {"oversample": 0.5}}, "dynamic_sampling.oversample must be >= 1"),
        ({"dynamic_sampling": {"carry_ticks": -1}}, "dynamic_sampling.carry_ticks must be >= 0"),
        (
            {"dynamic_sampling": {"enabled": True}, "algorithm": {"advantage": "batch_std"}},
            "such groups have a gradient",
        ),
        ({"dynamic_sampling": {"enabled": True}, "algorithm": {"advantage": "gdpo"}}, "choose one of group_mean, "),
        ({"trainer": {"minibatches": 0}}, "trainer.minibatches must be >= 1"),
        ({"trainer": {"epochs": 0}}, "trainer.epochs must be >= 1"),
        ({"trainer": {"minibatches": 17}}, "cut into more parts than it has groups"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(raw: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(raw)
