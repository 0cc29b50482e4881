"""Episodes around an engine whose tokens depend on everything that is in its batch: whatever joins at another step shows."""

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.data.turn_template import TurnTemplate
from llamarl.engine.episodes import EpisodeEngine
from llamarl.engine.joining import Join
from llamarl.engine.sequence import SamplingParams
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.environments.episode import Step
from llamarl.environments.episode_pool import Answer
from llamarl.environments.episodes import Ask, Episode, begin_episode, load_episode, save_episode
from llamarl.errors import DataError, EventLogError
from llamarl.executors.generator_shard import ActiveGroup, GeneratorShard
from llamarl.settings.data import DataConfig
from llamarl.tick_shares import Dealing
from llamarl.types import Failure, Opening, Prompt

END = 0


class Letters:
    """A tokenizer of one token a character."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(chr(token) for token in tokens if token != END)


class BatchEngine:
    """Each token is a hash of all that is computed with it, and of the order in which that was admitted."""

    def __init__(self, ends: int = 60) -> None:
        self.ends = ends  # of 256 tokens, about so many end a turn
        self.inside: list[TokenSequence] = []
        self.steps = 0
        self.policy_version = 0

    @property
    def has_work(self) -> bool:
        return bool(self.inside)

    def add(self, sequences: Sequence[TokenSequence]) -> None:
        assert all(len(s.tokens) < s.params.max_new_tokens and not s.finished for s in sequences)
        self.inside += sequences

    def step(self) -> list[TokenSequence]:
        self.steps += 1
        batch = hashlib.sha256(
            repr([(s.prompt_index, s.sample_index, s.tokens) for s in self.inside]).encode()
        ).digest()
        for sequence in self.inside:
            draw = hashlib.sha256(batch + bytes([sequence.prompt_index, sequence.sample_index])).digest()
            sequence.tokens.append(END if draw[0] < self.ends else 97 + draw[1] % 26)
            sequence.logprobs.append(-draw[2] / 64)
            sequence.policy_versions.append(self.policy_version)
            sequence.loss_mask.append(True)
            if sequence.tokens[-1] == END:
                sequence.finish_reason = "stop"
            elif len(sequence.tokens) >= sequence.params.max_new_tokens:
                sequence.finish_reason = "length"
        ended = [s for s in self.inside if s.finished]
        self.inside = [s for s in self.inside if not s.finished]
        return ended

    def suspend(self) -> list[TokenSequence]:
        taken, self.inside = self.inside, []
        return taken


class LatePool:
    """Answers arrive after a random number of looks; what they say is a function of the question alone."""

    def __init__(self, seed: int | None = None, most: int = 30, episode_turns: int = 4) -> None:
        self.random = random.Random(seed) if seed is not None else None
        self.most, self.turns = most, episode_turns
        self.left: dict[tuple[Any, int], int] = {}
        self.asked: list[Ask] = []
        self.released: list[Any] = []

    def begin(self, limit_s: float) -> None: ...

    def ask(self, ask: Ask) -> None:
        name = ask.key, len(ask.replies)
        if name not in self.left:
            self.asked.append(ask)
            self.left[name] = 0 if self.random is None else self.random.randint(0, self.most)

    def poll(self) -> None:
        self.left = {name: max(0, left - 1) for name, left in self.left.items()}

    def answered(self, ask: Ask) -> bool:
        return self.left[ask.key, len(ask.replies)] == 0

    def wait(self, ask: Ask) -> Answer:
        del self.left[ask.key, len(ask.replies)]
        return self.answer(ask)

    def answer(self, ask: Ask) -> Answer:
        told = hashlib.sha256(repr((ask.play.seed, ask.replies)).encode()).hexdigest()
        return Step(text=told[: 1 + len(ask.replies)], reward=int(told[0], 16) / 4, done=len(ask.replies) >= self.turns)

    def agree(self, arrived: Sequence[bool]) -> Sequence[bool]:
        return arrived

    def wait_any(self, asks: Sequence[Ask]) -> None:
        while not any(map(self.answered, asks)):
            self.poll()

    def release(self, key: Any) -> None:
        self.released.append(key)


def opening(**changes: Any) -> Opening:
    return Opening(**{"seed": 5, "max_turns": 6, "max_turn_tokens": 0, **changes})


def sequences(count: int = 4, *, max_tokens: int = 60, **changes: Any) -> list[TokenSequence]:
    made = []
    for number in range(count):
        prompt = Prompt(index=number // 2, tokens=np.array([65, 66], np.int32), text="AB", opening=opening(**changes))
        made.append(
            TokenSequence(
                prompt_index=number // 2,
                sample_index=number % 2,
                prompt_tokens=[65, 66],
                params=SamplingParams(max_new_tokens=max_tokens),
                seed=number,
                episode=begin_episode(prompt, max_tokens),
            )
        )
    return made


def player(
    pool: LatePool, engine: BatchEngine | None = None, *, reply_delay: int = 3, on_arrival: bool = False
) -> EpisodeEngine:
    tokenizer: Any = Letters()
    template = TurnTemplate(tokenizer, DataConfig(turn_template="<{text}>"))
    inner: Any = engine or BatchEngine()
    environments: Any = pool
    return EpisodeEngine(inner, environments, template, tokenizer, reply_delay=reply_delay, on_arrival=on_arrival)


def play(engine: EpisodeEngine, given: list[TokenSequence]) -> list[TokenSequence]:
    engine.add(given)
    ended = []
    while engine.has_work:
        ended += engine.step()
    return ended


def told(given: Sequence[TokenSequence]) -> list[Any]:
    return [
        (s.tokens, repr(s.logprobs), s.policy_versions, s.finish_reason, s.episode and s.episode.turns) for s in given
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 40), st.integers(0, 12))
def test_no_latency_changes_a_token(seed: int, most: int, reply_delay: int) -> None:
    instant, late = sequences(), sequences()
    order = play(player(LatePool(), reply_delay=reply_delay), instant)
    assert [
        (s.prompt_index, s.sample_index) for s in play(player(LatePool(seed, most), reply_delay=reply_delay), late)
    ] == [(s.prompt_index, s.sample_index) for s in order]
    assert told(late) == told(instant)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_an_episode_that_lay_in_a_checkpoint_goes_on_to_the_same_tokens(seed: int, cut: int) -> None:
    """Suspended between two steps, written out, read back and given to a new engine with a new pool."""

    def run(*, resumed: bool) -> list[TokenSequence]:
        held = sequences()
        engine = player(LatePool(seed))
        engine.add(held)
        for _ in range(cut):
            if engine.has_work:
                engine.step()
        engine.suspend()
        if resumed:
            engine = player(LatePool(seed + 1))
            fresh = sequences()
            for old, new in zip(held, fresh, strict=True):
                assert isinstance(old.episode, Episode) and isinstance(new.episode, Episode)
                load_episode(new.episode, save_episode(old.episode), len(old.tokens))
                for name in ("tokens", "logprobs", "policy_versions", "loss_mask", "finish_reason"):
                    setattr(new, name, getattr(old, name))
            held = fresh
        play(engine, [s for s in held if not s.finished])
        return held

    assert told(run(resumed=True)) == told(run(resumed=False))


@pytest.mark.parametrize(
    ("now", "cause"),
    [({"digest": "other"}, "now gives another observation"), ({"failure": "nobody is there"}, "nobody is there")],
)
def test_an_episode_that_begins_otherwise_after_a_resume_is_failed(now: dict[str, str], cause: str) -> None:
    """Else what was written would go on behind another prompt, or behind none."""

    def shard_of(given: list[TokenSequence]) -> GeneratorShard:
        prompt = Prompt(index=0, tokens=np.array([65, 66], np.int32), text="AB")
        return GeneratorShard(
            0,
            Dealing((1.0,), 1),
            first_prompt=0,
            oversubscription=2.0,
            max_segments=2,
            new_group=lambda index, tick, item: ActiveGroup(replace(prompt, index=index), tick, given),
        )

    old, new = sequences(2, digest="first"), sequences(2, **now)
    old[0].finish_reason = "stop"
    shard = shard_of(old)
    shard.admit(0)
    state = shard.state() | {"cursor": 2, "active": shard.state()["active"][:1]}
    shard_of(new).take_state(state, 0)
    play(player(LatePool()), new[1:])
    assert [s.finish_reason for s in new] == ["error", "error"]
    assert all(s.error and cause in s.error for s in new)


def test_messages_that_the_template_refuses_fail_their_sample_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume would meet them again: the run could never go on."""
    pool, given = LatePool(), sequences()
    engine = player(pool)

    def between(last: int, messages: Any) -> list[int]:
        if messages[0]["content"] in [pool.answer(ask).text for ask in pool.asked if ask.play.seed == 6]:
            raise DataError("no system message here")
        return [60]

    monkeypatch.setattr(engine._template, "between", between)
    given[0].episode = replace(given[0].episode, opening=opening(seed=6))
    play(engine, given)
    assert [s.error for s in given] == ["no system message here", None, None, None]
    assert pool.released == [(0, 0)]


def test_tokens_of_the_environment_are_marked_and_those_of_the_policy_stay() -> None:
    (sequence, *_) = played = sequences()
    play(player(LatePool()), played)
    episode = sequence.episode
    assert episode is not None and len(episode.turns) == 4 and sequence.finish_reason == "stop"
    for turn, following in zip(episode.turns, episode.turns[1:], strict=False):
        between = sequence.tokens[turn.end : following.start]
        assert "".join(map(chr, between)) == f"<{turn.observation}>"
        assert set(sequence.policy_versions[turn.end : following.start]) == {-1}
        assert not any(sequence.loss_mask[turn.end : following.start])
        assert all(map(math.isnan, sequence.logprobs[turn.end : following.start]))
    for turn in episode.turns:
        assert all(sequence.loss_mask[turn.start : turn.end])
        assert Letters().decode(sequence.tokens[turn.start : turn.end]) == turn.reply
    assert episode.turns[-1].end == len(sequence.tokens)


def test_a_reply_joins_the_stated_number_of_steps_after_its_turn() -> None:
    inner = BatchEngine(ends=0)
    (talker,) = sequences(1, max_turn_tokens=3)
    clock = sequences(4)[3]  # writes all the time, so that no step is jumped over
    clock.episode = None
    engine = player(LatePool(), inner, reply_delay=4)
    engine.add([talker, clock])
    wrote = []
    for step in range(20):
        before = sum(talker.loss_mask)
        engine.step()
        wrote += [step] * (sum(talker.loss_mask) - before)
    assert wrote[:9] == [0, 1, 2, 7, 8, 9, 14, 15, 16]  # a turn ends in step 2: its reply joins before step 2 + 1 + 4


@pytest.mark.parametrize("others", [True, False])
def test_a_wait_is_told_apart_by_whether_others_could_be_written_meanwhile(others: bool) -> None:
    (talker,) = sequences(1, max_turn_tokens=3)
    clock = sequences(4)[3]
    clock.episode = None
    engine = player(LatePool(0, 10**6), BatchEngine(ends=0), reply_delay=2)
    play(engine, [talker, clock] if others else [talker])
    times = engine.take_times()
    assert len(times.waits) == 4 and times.waited_s > 0 and times.steps >= 12
    assert times.longest_s >= max(end - start for start, end in times.waits)
    assert times.held_s == (pytest.approx(times.waited_s) if others else 0.0)
    assert not engine.take_times().waits


def test_steps_in_which_nobody_would_write_are_jumped_over() -> None:
    inner = BatchEngine(ends=0)
    (talker,) = sequences(1, max_turn_tokens=3)
    play(player(LatePool(), inner, reply_delay=1000), [talker])
    assert inner.steps == 12  # four turns of three tokens


@pytest.mark.parametrize(
    ("changes", "max_tokens", "turns"),
    [({"max_turns": 2}, 200, 2), ({"max_turn_tokens": 2}, 11, None)],
    ids=["turns", "tokens"],
)
def test_a_limit_ends_the_episode_and_lets_its_environment_go(
    changes: dict[str, int], max_tokens: int, turns: int | None
) -> None:
    pool = LatePool(episode_turns=50)
    given = sequences(4, max_tokens=max_tokens, **changes)
    play(player(pool), given)
    for sequence in given:
        assert sequence.finish_reason == "length" and len(sequence.tokens) <= max_tokens
        assert sequence.episode.turns[-1].end == len(sequence.tokens)  # nothing stands behind the last turn
        assert turns is None or len(sequence.episode.turns) == turns
    assert sorted(pool.released) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(("changes", "reason"), [({}, "length"), ({"max_turn_tokens": 4}, "stop")])
def test_an_episode_that_ran_out_of_tokens_is_cut_whatever_its_environment_makes_of_the_last_turn(
    changes: dict[str, int], reason: str
) -> None:
    (sequence,) = sequences(1, max_tokens=5, **changes)
    play(player(LatePool(episode_turns=1), BatchEngine(ends=0)), [sequence])
    assert sequence.episode is not None and sequence.finish_reason == reason
    assert [turn.finish_reason for turn in sequence.episode.turns] == ["length"]


def test_an_environment_that_fails_fails_its_sample_and_the_others_go_on() -> None:
    class Failing(LatePool):
        def answer(self, ask: Ask) -> Answer:
            if ask.key == (0, 1) and len(ask.replies) == 2:
                return Failure(kind="environment", detail="KeyError: 'x'")
            return super().answer(ask)

    given = sequences()
    play(player(Failing()), given)
    assert [s.finish_reason for s in given] == ["stop", "error", "stop", "stop"]
    assert given[1].error == "KeyError: 'x'" and given[1].episode is not None and given[1].episode.failure


def test_an_episode_that_never_opened_ends_without_a_token() -> None:
    given = sequences(2, failure="it hung")
    ended = play(player(LatePool()), given)
    assert ended == given
    assert [(s.finish_reason, s.error, s.tokens) for s in given] == [("error", "it hung", [])] * 2


def test_sequences_without_an_episode_pass_through() -> None:
    plain, alone = sequences(2), sequences(2)
    for sequence in (*plain, *alone):
        sequence.episode = None
    play(player(LatePool()), plain)
    inner = BatchEngine()
    inner.add(alone)
    while inner.has_work:
        inner.step()
    assert told(plain) == told(alone)


# -- replies that join when they have arrived -------------------------------------------------------------------


def play_ticks(engine: EpisodeEngine, given: list[TokenSequence], logged: list[Sequence[Join]] | None) -> list[Any]:
    """Ticks of nine steps, with a suspension after each, as a generator's; what joined in each."""
    joined = []
    while unfinished := [s for s in given if not s.finished]:
        engine.begin_tick(None if logged is None else logged[len(joined)])
        engine.add(unfinished)
        for _ in range(9):
            if engine.has_work:
                engine.step()
        engine.suspend()
        joined.append(engine.joins)
    return joined


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 40))
def test_replies_that_join_on_arrival_join_at_the_same_steps_in_a_replay(seed: int, most: int) -> None:
    """Whatever the replay's own latencies are, across ticks too."""
    first, again = sequences(6), sequences(6)
    logged = play_ticks(player(LatePool(seed, most), on_arrival=True), first, None)
    assert play_ticks(player(LatePool(seed + 1, 50), on_arrival=True), again, logged) == logged
    assert told(again) == told(first)
    turns = [s.episode.turns for s in first if s.episode is not None]
    assert sorted((j.prompt_index, j.sample_index, j.turn) for tick in logged for j in tick) == [
        (s.prompt_index, s.sample_index, n) for s, of in zip(first, turns, strict=True) for n in range(len(of))
    ]


def test_a_reply_that_has_arrived_joins_at_once_and_nobody_waits_for_one_that_has_not() -> None:
    inner, pool = BatchEngine(ends=0), LatePool(0, 10**6)
    talker = sequences(1, max_turn_tokens=3)[0]
    clock = sequences(4, max_tokens=400)[3]
    clock.episode = None
    engine = player(pool, inner, on_arrival=True)
    engine.begin_tick(None)
    engine.add([talker, clock])
    for _ in range(50):
        engine.step()
    assert sum(talker.loss_mask) == 3 and len(clock.tokens) == 50 and not engine.take_times().waits
    pool.left = dict.fromkeys(pool.left, 0)
    engine.step()
    assert sum(talker.loss_mask) == 4 and engine.joins == (Join(50, 0, 0, 0),)


@pytest.mark.parametrize(
    ("logged", "why"),
    [
        ([Join(2, 0, 0, 0)], "for which nobody waits"),
        ([Join(3, 0, 0, 1)], "for which nobody waits"),
        ([], "nobody is left"),
    ],
    ids=["too early", "another turn", "never"],
)
def test_a_log_that_does_not_fit_ends_the_replay(logged: list[Join], why: str) -> None:
    """A turn of three tokens ends in step 2."""
    (talker,) = sequences(1, max_turn_tokens=3)
    engine = player(LatePool(), BatchEngine(ends=0), on_arrival=True)
    engine.begin_tick(logged)
    engine.add([talker])
    with pytest.raises(EventLogError, match=why):
        for _ in range(5):
            engine.step()
