"""The tokens of an episode are those that were sampled, to the trainer's forward and through the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llamarl.data.config import DataConfig
from llamarl.data.prompts import PromptStream
from llamarl.data.turn_template import TurnTemplate
from llamarl.engine.config import EngineConfig
from llamarl.engine.engine import NativeEngine
from llamarl.engine.episodes import EpisodeEngine
from llamarl.engine.sequence import SamplingParams
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.environments.config import RewardPoolConfig, TaskConfig
from llamarl.environments.episode_pool import EpisodePool
from llamarl.environments.episodes import begin_episode
from llamarl.environments.openings import EpisodeItems, EpisodeOpener
from llamarl.models.loading import load_model, load_tokenizer

ENVIRONMENTS = Path(__file__).parents[2] / "small_environments.py"
GAMES: dict[str, dict[str, Any]] = {
    f"{ENVIRONMENTS}:Ledgers": {"turns": 4, "fewest": 2},
    "frozen_lake": {"style": "compact"},
    "guess_number": {"style": "compact"},
}
MAX_TOKENS = 120


@pytest.fixture(scope="module", params=GAMES, ids=lambda name: name.rpartition(":")[2])
def played(request: pytest.FixtureRequest) -> Iterator[list[TokenSequence]]:
    task = TaskConfig(
        name="episodes",
        environment=request.param,
        environment_options=GAMES[request.param],
        max_turn_tokens=12,
        pool=RewardPoolConfig(num_workers=1),
    )
    tokenizer = load_tokenizer("bundled:tiny")
    engine = NativeEngine("bundled:tiny", EngineConfig(), tokenizer=tokenizer)
    with EpisodePool(task) as pool:
        opener = EpisodeOpener(pool, task)
        stream = PromptStream(EpisodeItems(), tokenizer, DataConfig(), 0, opener=opener)
        player = EpisodeEngine(engine, pool, TurnTemplate(tokenizer, DataConfig()), tokenizer, reply_delay=4)
        sequences = []
        for index in range(16):
            prompt = stream.get(index)
            sequences.append(
                TokenSequence(
                    prompt_index=index,
                    sample_index=0,
                    prompt_tokens=prompt.tokens.tolist(),
                    params=SamplingParams(max_new_tokens=MAX_TOKENS),
                    seed=index,
                    episode=begin_episode(prompt, MAX_TOKENS),
                )
            )
        player.add(sequences)
        while player.has_work:
            player.step()
    assert all(s.finish_reason in ("stop", "length") for s in sequences), {s.error for s in sequences}
    yield sequences


def test_the_models_own_forward_gives_the_recorded_log_probs(played: list[TokenSequence]) -> None:
    """One pass of the plain model over prompt and episode, no cache, no batch."""
    model = load_model("bundled:tiny", dtype=torch.float32)
    worst = 0.0
    for sequence in played:
        tokens = torch.tensor([[*sequence.prompt_tokens, *sequence.tokens]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=tokens).logits[0].float(), dim=-1)
        first = len(sequence.prompt_tokens)
        positions = np.flatnonzero(sequence.loss_mask)
        expected = [float(logprobs[first + t - 1, sequence.tokens[t]]) for t in positions]
        recorded = np.array(sequence.logprobs)[positions]
        worst = max(worst, float(np.abs(recorded - expected).max()))
    assert worst < 1e-4


def test_what_the_environment_heard_is_what_was_sampled(played: list[TokenSequence]) -> None:
    """The bundled tokenizer has one token a character, so a reply's words give its tokens back."""
    tokenizer = load_tokenizer("bundled:tiny")
    turns = 0
    for sequence in played:
        assert sequence.episode is not None
        for turn in sequence.episode.turns:
            written = [t for t in sequence.tokens[turn.start : turn.end] if t not in tokenizer.all_special_ids]
            assert tokenizer(turn.reply, add_special_tokens=False)["input_ids"] == written
            turns += 1
    assert turns > len(played)
