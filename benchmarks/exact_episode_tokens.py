"""The tokens of episodes, as recorded, under the trainer's own forward: 1,000 of every environment that comes with llamarl, and of those in ``examples/games``.

    python benchmarks/exact_episode_tokens.py --json exact_episode_tokens.json

Episodes are played by the engine and judged by their environment; then the trainer takes one step on all of them, packed, with
shared prompts, and every log-prob that this step computes is compared with the one that the engine recorded. Two models:

    bundled:tiny   one token a character, no chat template; games in their compact style
    chatml         a small random model with a byte-level BPE and a ChatML template, which samples tokens that its tokenizer would
                   never write, and calls tools: some of its tokens are whole calls

Beside it, without a single log-prob: what the engine sampled in each turn is what the trainer is given, the tokens between two
turns are those of the template, and how many turns other tokens would stand for, had they been decoded and encoded again.
"""

from __future__ import annotations

import argparse
import dataclasses
import string
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import claim, write_report
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llamarl.data.prompts import PromptStream
from llamarl.data.turn_template import TurnTemplate
from llamarl.determinism import derive_seed
from llamarl.engine.engine import NativeEngine
from llamarl.engine.episodes import EpisodeEngine
from llamarl.engine.factory import to_response
from llamarl.engine.sequence import SamplingParams
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.environments.episode import Message, Step
from llamarl.environments.episode_pool import Answer, EpisodeItems, EpisodeOpener, EpisodePool
from llamarl.environments.episodes import Ask, begin_episode, episode_score, messages_of
from llamarl.models.loading import context_length, load_tokenizer
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.data import DataConfig
from llamarl.settings.engine import EngineConfig
from llamarl.settings.environments import RewardPoolConfig, TaskConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer
from llamarl.types import Group, Prompt

__all__ = ["ALPHABET_SORT", "CALCULATOR", "ENVIRONMENTS", "Found", "look_at", "make_chatml"]

TINY, CHATML = "bundled:tiny", "chatml"
_GAMES = Path(__file__).resolve().parents[1] / "examples/games"
ALPHABET_SORT, CALCULATOR = f"{_GAMES}/word_games.py:AlphabetSort", f"{_GAMES}/calculator.py:Calculator"
_COMPACT: Mapping[str, Any] = {"style": "compact"}
ENVIRONMENTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    f"{_GAMES}/frozen_lake.py:FrozenLake": {TINY: _COMPACT, CHATML: {}},
    f"{_GAMES}/guess_number.py:GuessNumber": {TINY: _COMPACT, CHATML: {}},
    "mastermind": {TINY: _COMPACT, CHATML: {}},
    f"{_GAMES}/word_games.py:Wordle": {TINY: _COMPACT, CHATML: {}},
    ALPHABET_SORT: {TINY: {"first": 2, "more": 1}, CHATML: {}},
    CALCULATOR: {TINY: _COMPACT, CHATML: {}},
    "second_try": {TINY: {"dataset": "chain_sum"}, CHATML: {"dataset": "chain_sum"}},
    "reasoning_gym:spell_backward": {TINY: {}, CHATML: {"attempts": 3}},
    "reasoning_gym:basic_arithmetic": {TINY: {}, CHATML: {}},
}
"""Environment -> model -> its options."""
_GROUP = 4
_MAX_TURN_TOKENS = 12
_BAR = 1e-4

_MARK = "qzTheReplyzq"
_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one environment under one model."""

    episodes: int
    turns: int
    tokens: int
    """Of the policy, all compared."""
    largest: float
    """|trainer's log-prob - recorded log-prob| over all of them, nats."""
    mean: float
    changed: int
    """Turns whose tokens at the end are not those that were sampled."""
    wrong_between: int
    """Pairs of turns between which something else stands than the template puts there."""
    would_change: int
    """Turns that would have other tokens, had their words been encoded again."""

    @property
    def exact(self) -> bool:
        return self.largest <= _BAR and not self.changed and not self.wrong_between


class _Heard(EpisodePool):
    """Notes what the environments say."""

    def __init__(self, task: TaskConfig) -> None:
        self.said: dict[Any, Answer] = {}
        super().__init__(task)

    def wait(self, ask: Ask) -> Answer:
        answer = self.said[ask.key, len(ask.replies)] = super().wait(ask)
        return answer


class _Sampled(NativeEngine):
    """Notes the tokens of each sequence when the engine has ended a turn of it."""

    def __init__(self, model: str, tokenizer: Any) -> None:
        self.ends: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        super().__init__(model, EngineConfig(), tokenizer=tokenizer)

    def step(self) -> list[TokenSequence]:
        ended = super().step()
        for sequence in ended:
            self.ends.setdefault((sequence.prompt_index, sequence.sample_index), []).append(tuple(sequence.tokens))
        return ended


def make_chatml(folder: Path) -> str:
    """A random model of 4 layers whose vocabulary holds pieces of words, ChatML's marks and whole tool calls."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = [
        " ".join(string.ascii_lowercase),
        *(f"{n} is {n * n}, more or less" for n in range(200)),
        "left right up down",
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(text, trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=1024)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    call = '<tool_call>{{"name": "calculate", "arguments": {{"expression": "{}"}}}}</tool_call>'
    calls = [call.format(f"{a}*{a + 7}") for a in range(12)]
    tokenizer.add_tokens([AddedToken(words, special=False, normalized=False) for words in calls])
    tokenizer.chat_template = _TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.15,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def look_at(model: str, environment: str, options: Mapping[str, Any], *, episodes: int, workers: int = 2) -> Found:
    """Play so many episodes, train on them for a step, and compare."""
    tokenizer = load_tokenizer(model)
    task = TaskConfig(
        name="episodes",
        environment=environment,
        environment_options=dict(options),
        max_turn_tokens=_MAX_TURN_TOKENS,
        pool=RewardPoolConfig(num_workers=workers),
    )
    engine = _Sampled(model, tokenizer)
    with _Heard(task) as pool:
        opener = EpisodeOpener(pool, task)
        stream = PromptStream(EpisodeItems(), tokenizer, DataConfig(), 0, opener=opener)
        template = TurnTemplate(tokenizer, DataConfig())
        player = EpisodeEngine(engine, pool, template, tokenizer, reply_delay=4)
        prompts = [stream.get(index) for index in range(-(-episodes // _GROUP))]
        room = (context_length(model) or 1024) - max(len(prompt.tokens) for prompt in prompts)
        sequences = [_sequence(prompt, sample, min(room, 400)) for prompt in prompts for sample in range(_GROUP)]
        player.add(sequences)
        while player.has_work:
            player.step()
    broken = {s.error for s in sequences if s.finish_reason not in ("stop", "length")}
    assert not broken, broken
    of_prompt = [sequences[i : i + _GROUP] for i in range(0, len(sequences), _GROUP)]
    groups = [_judged(prompt, samples, tokenizer) for prompt, samples in zip(prompts, of_prompt, strict=True)]
    gaps = trained_gaps(model, groups)
    turns = [(s, number) for s in sequences if s.episode is not None for number in range(len(s.episode.turns))]
    return Found(
        episodes=len(sequences),
        turns=len(turns),
        tokens=len(gaps),
        largest=float(gaps.max()),
        mean=float(gaps.mean()),
        changed=sum(not _as_sampled(s, number, engine.ends) for s, number in turns),
        wrong_between=sum(not _as_the_template(s, number, pool.said, tokenizer) for s, number in turns),
        would_change=sum(_encoded_again(s, number, tokenizer) != _written(s, number) for s, number in turns),
    )


def _sequence(prompt: Prompt, sample: int, max_tokens: int) -> TokenSequence:
    return TokenSequence(
        prompt_index=prompt.index,
        sample_index=sample,
        prompt_tokens=prompt.tokens.tolist(),
        params=SamplingParams(max_new_tokens=max_tokens),
        seed=derive_seed(0, prompt.index, sample),
        episode=begin_episode(prompt, max_tokens),
    )


def _judged(prompt: Prompt, samples: Sequence[TokenSequence], tokenizer: Any) -> Group:
    responses = []
    for sequence in samples:
        assert sequence.episode is not None
        score = episode_score(sequence.episode.turns)
        responses.append(dataclasses.replace(to_response(sequence, tokenizer), outcome=score))
    return Group(prompt=prompt, responses=tuple(responses))


def trained_gaps(model: str, groups: Sequence[Group]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """|log pi - log mu| of every token that the policy wrote, as the trainer's step computes log pi, nats, [T]."""
    trainer = Trainer(
        model,
        TrainerConfig(skip_zero_advantage=False),
        OptimizerConfig(),
        AlgorithmConfig(train_truncated=True),
        temperature=1.0,
        num_ticks=1,
    )
    found: list[np.ndarray[Any, Any]] = []

    def compare(sequences: Any, logprobs: torch.Tensor, _clipped: torch.Tensor) -> None:
        recorded = np.concatenate([s.behavior_logprobs for s in sequences]).astype(np.float64)
        found.append(np.abs(logprobs.double().numpy() - recorded))

    trainer.on_tokens = compare
    trainer.train(groups, 0)
    gaps = np.concatenate(found)
    assert len(gaps) == sum(int(r.loss_mask.sum()) for g in groups for r in g.responses), "some token was not trained"
    return gaps


def _written(sequence: TokenSequence, number: int) -> list[int]:
    assert sequence.episode is not None
    turn = sequence.episode.turns[number]
    return sequence.tokens[turn.start : turn.end]


def _as_sampled(sequence: TokenSequence, number: int, ends: Mapping[tuple[int, int], Sequence[Sequence[int]]]) -> bool:
    """Whether everything up to the turn's end stands at the end as it stood when the engine ended the turn."""
    assert sequence.episode is not None
    then = ends[sequence.prompt_index, sequence.sample_index][number]
    end = sequence.episode.turns[number].end
    return len(then) == end and sequence.tokens[:end] == list(then) and all(sequence.loss_mask[end - 1 : end])


def _as_the_template(sequence: TokenSequence, number: int, said: Mapping[Any, Answer], tokenizer: Any) -> bool:
    """Whether, where a turn follows, what stands before it is what the template puts between them."""
    assert sequence.episode is not None
    turns = sequence.episode.turns
    if number + 1 == len(turns):
        return True
    step = said[(sequence.prompt_index, sequence.sample_index), number + 1]
    assert isinstance(step, Step)
    start, end = turns[number].end, turns[number + 1].start
    between, masks = sequence.tokens[start:end], sequence.loss_mask[start:end]
    expected = _template_tokens(messages_of(step), sequence.tokens[start - 1], tokenizer)
    return between == expected and not any(masks) and set(sequence.policy_versions[start:end]) == {-1}


def _template_tokens(messages: Sequence[Message], last: int, tokenizer: Any) -> list[int]:
    if not tokenizer.chat_template:
        (message,) = messages
        return list(tokenizer(f"\n{message['content']}\n", add_special_tokens=False)["input_ids"])
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}, *messages]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    tokens = list(tokenizer(text.partition(_MARK)[2], add_special_tokens=False)["input_ids"])
    return tokens[1:] if last == tokenizer.eos_token_id else tokens


def _encoded_again(sequence: TokenSequence, number: int, tokenizer: Any) -> list[int]:
    words = tokenizer.decode(_written(sequence, number), skip_special_tokens=False)
    return list(tokenizer(words, add_special_tokens=False)["input_ids"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000, help="of each environment")
    parser.add_argument("--only", nargs="*", default=list(ENVIRONMENTS), help="environments, by name")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="OUT.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: dict[str, Any] = {}
    claims = []
    with tempfile.TemporaryDirectory() as folder:
        paths = {TINY: TINY, CHATML: make_chatml(Path(folder))}
        for environment in args.only:
            for model, options in ENVIRONMENTS[environment].items():
                start = time.perf_counter()
                found = look_at(paths[model], environment, options, episodes=args.episodes)
                results[f"{environment} {model}"] = {**vars(found), "exact": found.exact, "options": dict(options)}
                claims.append(claim(f"{environment}, {model}: nats", found.largest, _BAR, at_least=False))
                print(
                    f"{environment:31} {model:13} {found.turns} turns, {found.tokens} tokens: largest gap "
                    f"{found.largest:.1e}, mean {found.mean:.1e}; changed {found.changed}, wrong between "
                    f"{found.wrong_between}, encoded again {found.would_change} would change "
                    f"({time.perf_counter() - start:.0f} s)",
                    flush=True,
                )
    write_report(args.json, results, claims)


if __name__ == "__main__":
    main()
