"""Guessed tokens: what is sampled, and how likely it was, is what it is without guesses; only the steps are fewer."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_native_engine import _engine, _prompts, _run, _sequences, _state, folder  # noqa: F401
from tiny_models import tiny_model

from llamarl.config import validate
from llamarl.engine.drafts import Drafter
from llamarl.engine.engine import NativeEngine
from llamarl.engine.scheduler import Member
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.errors import ConfigError

GUESSING = {"speculative_tokens": 4}


@pytest.fixture(autouse=True)
def _room_for_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.engine.engine._MAX_GUESSING_ROWS", 12)


def assert_same(guessed: list[tuple[object, ...]], plain: list[tuple[object, ...]]) -> None:
    """The same tokens and ends; the same log-probs, to the rounding of products of more rows, here up to five times that of a logit."""
    for mine, theirs in zip(guessed, plain, strict=True):
        assert (mine[0], mine[3:]) == (theirs[0], theirs[3:])
        for one, other in zip(mine[1:3], theirs[1:3], strict=True):
            assert one == pytest.approx(other, abs=5e-5)


def sampled(engine: NativeEngine, sequences: list[Sequence]) -> tuple[list[tuple[object, ...]], int, int]:
    """(what the sequences hold, steps, guesses that were drawn)."""
    done = _run(engine, sequences)
    stats = engine.stats()
    return _state(done), int(stats["steps"]), int(stats["drafts_drawn"])


@pytest.mark.parametrize("temperature", [0.0, 0.2, 1.0])
def test_tokens_and_log_probs_are_those_without_guesses(folder: Path, temperature: float) -> None:  # noqa: F811
    def sequences() -> list[Sequence]:
        return _sequences(_prompts(2), group=3, temperature=temperature, max_new_tokens=40)

    plain, steps, _ = sampled(_engine(folder), sequences())
    guessed, fewer, drawn = sampled(_engine(folder, **GUESSING), sequences())
    assert_same(guessed, plain)
    assert fewer <= steps
    if temperature == 0.0:  # they go round in circles
        assert drawn > 10


def test_what_a_sibling_has_said_is_guessed_by_the_hand_full(folder: Path) -> None:  # noqa: F811
    """The same greedy response once more, beside the first: a few tokens unguessed, then five a step."""
    engine = _engine(folder, **GUESSING)
    first, again = _sequences(_prompts(1), group=2, max_new_tokens=50)
    engine.add([first])
    while len(first.tokens) < 45:
        engine.step()
    engine.add([again])
    engine.stats()
    steps = 0
    while len(again.tokens) < 40:
        engine.step()
        steps += 1
    assert again.tokens == first.tokens[: len(again.tokens)]
    assert steps <= 1 + 4 + -(-35 // 5)


@pytest.mark.parametrize("num_tokens", [140, 200])
def test_a_full_cache_preempts_for_sequences_and_never_for_guesses(folder: Path, num_tokens: int) -> None:  # noqa: F811
    def sequences() -> list[Sequence]:
        return _sequences(_prompts(3, lengths=range(10, 20)), group=2, max_new_tokens=40)

    plain, _, _ = sampled(_engine(folder, num_tokens=num_tokens), sequences())
    guessed, _, drawn = sampled(_engine(folder, num_tokens=num_tokens, **GUESSING), sequences())
    assert_same(guessed, plain)
    assert drawn


@pytest.mark.parametrize("room", [1, 2, 3, 7])
def test_a_response_ends_where_it_would_have_ended(folder: Path, room: int) -> None:  # noqa: F811
    """At its length, and at a token that stops it, though guesses went on behind."""
    (whole,) = _run(_engine(folder), _sequences(_prompts(1), max_new_tokens=30))
    stop = whole.tokens[20 + room]
    for settings in ({"max_new_tokens": 20 + room}, {"stop_token_ids": (stop,)}):
        plain, _, _ = sampled(_engine(folder), _sequences(_prompts(1), group=2, **settings))
        guessed, _, _ = sampled(_engine(folder, **GUESSING), _sequences(_prompts(1), group=2, **settings))
        assert_same(guessed, plain)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "qwen3_moe"])
def test_windows_soft_caps_and_learned_positions_are_kept(family: str, tmp_path: Path) -> None:
    tiny_model(family, "eager").save_pretrained(tmp_path)
    plain, _, _ = sampled(_engine(tmp_path), _sequences(_prompts(2), group=2, max_new_tokens=40))
    guessed, _, drawn = sampled(_engine(tmp_path, **GUESSING), _sequences(_prompts(2), group=2, max_new_tokens=40))
    assert_same(guessed, plain)
    assert drawn


def test_after_new_weights_and_a_suspension_it_goes_on_as_without(folder: Path) -> None:  # noqa: F811
    def run(**settings: int) -> list[tuple[object, ...]]:
        engine = _engine(folder, **settings)
        engine.add(_sequences(_prompts(2), group=2, max_new_tokens=30))
        for _ in range(9):
            engine.step()
        carried = engine.suspend()
        engine.weights_updated(5)
        for sequence in carried:  # the same number of tokens, however many steps they took
            del sequence.tokens[9:], sequence.logprobs[9:], sequence.raw_logprobs[9:]
            del sequence.policy_versions[9:], sequence.loss_mask[9:]
        return _state(_run(engine, carried))

    assert_same(run(**GUESSING), run())


# -- what is guessed, by hand -------------------------------------------------------------------------------------------


def member(order: int, tokens: list[int], *, prompt: list[int] = [1, 2, 3], most: int = 99) -> Member:  # noqa: B006
    sequence = Sequence(
        prompt_index=0, sample_index=order, prompt_tokens=prompt, params=SamplingParams(max_new_tokens=most), seed=0, tokens=tokens
    )  # fmt: skip
    return Member(order, sequence, (0, tuple(prompt)))


def test_what_followed_the_same_tokens_before_is_guessed() -> None:
    drafter = Drafter(max_tokens=4, max_rows=100)
    one = member(0, [7, 8, 9, 5, 7, 8])
    assert drafter.drafts([one]) == {0: [9, 5, 7, 8]}
    one.sequence.tokens += [4]
    assert drafter.drafts([one]) == {}, "8 4 was never seen"


def test_a_sibling_that_has_ended_is_learned_from_and_another_prompts_is_not() -> None:
    drafter = Drafter(max_tokens=3, max_rows=100)
    drafter.note(ended := member(0, [5, 6, 7, 8]))
    drafter.ended(ended)
    assert drafter.drafts([member(1, [5, 6])]) == {1: [7, 8]}
    assert drafter.drafts([member(2, [5, 6], prompt=[4, 4])]) == {}


def test_the_longest_match_is_taken_and_of_equals_the_latest() -> None:
    drafter = Drafter(max_tokens=1, max_rows=100)
    drafter.note(member(0, [9, 5, 6, 7, 1, 1, 8, 5, 6, 4]))
    assert drafter.drafts([member(1, [9, 5, 6])]) == {1: [7]}
    assert drafter.drafts([member(2, [3, 3, 5, 6])]) == {2: [4]}


def test_guesses_share_the_rows_that_are_left_and_a_response_has_no_more_than_it_may() -> None:
    drafter = Drafter(max_tokens=4, max_rows=6)
    texts = [member(order, [7, 8, 9, 5, 7, 8]) for order in range(3)]
    assert drafter.drafts(texts[:1]) == {0: [9, 5, 7, 8]}
    assert drafter.drafts(texts[:2]) == {0: [9, 5], 1: [9, 5]}
    assert {order: len(guess) for order, guess in drafter.drafts(texts).items()} == {0: 1, 1: 1, 2: 1}
    assert drafter.drafts([*texts, *texts, texts[0]]) == {}
    assert drafter.drafts([member(9, [7, 8, 9, 5, 7, 8], most=8)]) == {9: [9]}, "one more is drawn behind the guess"


def test_after_a_guess_that_was_not_drawn_the_next_is_shorter() -> None:
    drafter = Drafter(max_tokens=8, max_rows=100)
    one = member(0, [7, 8, 9, 5, 4, 6, 7, 8])
    assert len(drafter.drafts([one])[0]) == 4
    drafter.was_drawn(one, 0)
    assert len(drafter.drafts([one])[0]) == 2
    drafter.was_drawn(one, 2)
    assert len(drafter.drafts([one])[0]) == 6


def test_guesses_over_a_cache_that_is_kept_and_for_other_engines_are_refused() -> None:
    with pytest.raises(ConfigError, match="generator.engine.speculative_tokens is set, but kv_on_update is 'keep'"):
        validate({"generator": {"kv_on_update": "keep", "engine": {"speculative_tokens": 4}}})
    with pytest.raises(ConfigError, match="speculative_tokens is for the native engine, but name is 'vllm'"):
        validate({"generator": {"engine": {"speculative_tokens": 4, "name": "vllm"}}})
