"""The adapter on a real vLLM in float32: its tokens are the native engine's, its log-probs the trainer's, its weights the last handed over.

Without a compiled graph, so that a model stands in seconds; ``test_training_on_vllm.py`` runs vLLM as users do.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sampling_with_vllm import (
    BOUND,
    BUNDLED,
    changed_model,
    drain,
    endings,
    give,
    largest_gap,
    logits_of,
    native_engine,
    prompts,
    sequences,
    trainers_model,
    vllm_engine,
)

from llamarl.engine.vllm import VllmEngine
from llamarl.models.loading import load_tokenizer

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")


@pytest.fixture(scope="module")
def shared_engine() -> VllmEngine:
    return vllm_engine(BUNDLED)


@pytest.fixture
def engine(shared_engine: VllmEngine) -> Iterator[VllmEngine]:
    """Holds the folder's weights, before and after."""
    yield shared_engine
    shared_engine.suspend()
    give(shared_engine, dict(trainers_model(BUNDLED).named_parameters()), version=0)


def test_greedy_tokens_and_ends_are_the_native_engines(engine: VllmEngine) -> None:
    of = prompts(24)
    ours = drain(native_engine(BUNDLED), sequences(of, tokens=48, temperature=0.0))
    theirs = drain(engine, sequences(of, tokens=48, temperature=0.0))
    assert endings(theirs) == endings(ours)
    assert {"stop", "length"} == {s.finish_reason for s in theirs}  # both kinds of end occur


def test_logprobs_are_those_of_the_trainers_forward(engine: VllmEngine) -> None:
    of = drain(engine, sequences(prompts(24), samples=4, tokens=48))
    assert largest_gap(trainers_model(BUNDLED), of) < BOUND


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.7}, {"temperature": 1.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"temperature": 1.3, "top_k": 6}],
    ids=str,
)  # fmt: skip
def test_logprobs_are_of_the_distribution_after_temperature_and_filters(
    engine: VllmEngine, params: dict[str, Any]
) -> None:
    model = trainers_model(BUNDLED)
    for s in drain(engine, sequences(prompts(12), samples=2, **params)):
        scaled = logits_of(model, s) / params.get("temperature", 1.0)
        probs = scaled.softmax(-1)
        kept = torch.ones_like(probs, dtype=torch.bool)
        if "top_k" in params:
            kept &= scaled >= scaled.topk(params["top_k"]).values[:, -1:]
        if "top_p" in params:
            ranked, order = probs.sort(descending=True)
            before = ranked.cumsum(-1) - ranked
            kept &= torch.zeros_like(kept).scatter(1, order, before < params["top_p"])
        if "min_p" in params:
            kept &= probs >= params["min_p"] * probs.max(-1, keepdim=True).values
        expected = scaled.masked_fill(~kept, -math.inf).log_softmax(-1).gather(1, torch.tensor(s.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(s.logprobs), expected, atol=2 * BOUND, rtol=0)


def test_tokens_are_drawn_as_often_as_their_logprob_says(engine: VllmEngine) -> None:
    (prompt,) = prompts(1, seed=5)
    draws = drain(engine, sequences([prompt], samples=4000, tokens=1, temperature=2.0))
    expected = (logits_of(trainers_model(BUNDLED), draws[0])[0] / 2.0).softmax(-1)
    counted = torch.bincount(torch.tensor([s.tokens[0] for s in draws]), minlength=len(expected)) / len(draws)
    assert 0.5 * (counted - expected).abs().sum().item() < 0.05  # 43 tokens, 4,000 draws: some 0.03 by chance
    assert expected.max() < 0.8


def test_seeds_decide_the_draws(engine: VllmEngine) -> None:
    of = prompts(8)
    one, again, other = (drain(engine, sequences(of, samples=4, seed=seed)) for seed in (1, 1, 2))
    assert endings(one) == endings(again)
    assert endings(one) != endings(other)
    alone = [drain(engine, [s])[0] for s in sequences(of, samples=4, seed=1)]
    assert endings(alone) == endings(one)  # in float32 on CPU; vLLM promises it nowhere


def test_stop_tokens_and_strings_end_a_response_where_the_native_engine_ends_it(engine: VllmEngine) -> None:
    native, of, tokenizer = native_engine(BUNDLED), prompts(12), load_tokenizer(BUNDLED)
    free = drain(native, sequences(of, tokens=40, temperature=0.0))
    commonest = max(range(3, 43), key=lambda token: sum(token in s.tokens for s in free))
    pair = str(tokenizer.decode(next(s.tokens for s in free if len(s.tokens) > 8)[4:6]))
    for stop in ({"stop_token_ids": (commonest,)}, {"stop_strings": (pair,)}):
        ours = drain(native, sequences(of, tokens=40, temperature=0.0, **stop))
        theirs = drain(engine, sequences(of, tokens=40, temperature=0.0, **stop))
        assert endings(theirs) == endings(ours)
        assert all(len(s.tokens) == len(s.logprobs) == len(s.policy_versions) for s in theirs)
        assert endings(theirs) != endings(free)  # it stopped something


def test_more_sequences_than_run_at_once_all_come_back(engine: VllmEngine) -> None:
    of = drain(engine, sequences(prompts(40), samples=16, tokens=12))
    assert len(of) == 640 > engine.config.max_sequences
    assert all(s.finish_reason in ("stop", "length") for s in of)
    assert largest_gap(trainers_model(BUNDLED), of[::16]) < BOUND


def test_suspended_sequences_go_on_where_they_were(engine: VllmEngine) -> None:
    of = prompts(10)
    whole = drain(engine, sequences(of, tokens=30, temperature=0.0))
    parts = sequences(of, tokens=30, temperature=0.0)
    engine.add(parts)
    for _ in range(9):
        engine.step()
    waiting = engine.suspend()
    assert [s.prompt_index for s in waiting] == sorted(s.prompt_index for s in waiting)
    assert waiting and not engine.has_work and 0 < len(waiting[0].tokens) < 30
    drain(engine, waiting)
    assert endings(parts) == endings(whole)


def test_handed_over_weights_are_computed_with_and_nothing_of_the_earlier_ones(engine: VllmEngine) -> None:
    of = prompts(12, length=120)  # whole blocks of the prefix cache
    drain(engine, sequences(of, samples=2))
    for version in (1, 2):
        model = changed_model(BUNDLED, seed=version)
        give(engine, dict(model.named_parameters()), version=version)
        after = drain(engine, sequences(of, samples=2))
        assert largest_gap(model, after) < BOUND
        assert {v for s in after for v in s.policy_versions} == {version} == {engine.policy_version}
        native = native_engine(BUNDLED)
        give(native, dict(model.named_parameters()), version=version)
        greedy = [drain(e, sequences(of, temperature=0.0)) for e in (engine, native)]
        assert endings(greedy[0]) == endings(greedy[1])


def test_running_sequences_go_on_under_new_weights_over_a_recomputed_cache(engine: VllmEngine) -> None:
    these = sequences(prompts(8, length=60), samples=2, tokens=30)
    engine.add(these)
    for _ in range(8):
        engine.step()
    model = changed_model(BUNDLED, seed=3)
    give(engine, dict(model.named_parameters()), version=7)
    while engine.has_work:
        engine.step()
    crossed = [s for s in these if len(set(s.policy_versions)) == 2]
    assert len(crossed) > 4
    old = trainers_model(BUNDLED)
    for s in crossed:
        before = s.policy_versions.count(0)
        assert s.policy_versions == [0] * before + [7] * (len(s.tokens) - before)
        for part, under in ((slice(0, before), old), (slice(before, None), model)):
            expected = logits_of(under, s).log_softmax(-1).gather(1, torch.tensor(s.tokens)[:, None])[part, 0]
            torch.testing.assert_close(torch.tensor(s.logprobs[part]), expected, atol=BOUND, rtol=0)
