"""What a slow tool costs: 64 episodes of 4 turns whose tool takes 200 ms, beside the same with an instant one.

    python benchmarks/environment_latency.py --json environment_latency.json

Both play the same episodes, with the same ``reply_delay``, so that every token is equal (checked); they take turns, round by
round. ``--slots`` sequences are written at once, the others wait for their turn or their reply. Two bounds stand beside the
result: the engine alone (the instant tool) and the tools alone, ``episodes * turns * delay / workers``. As a second baseline
the instant tool is played with a ``reply_delay`` of 0.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from harness import claim, paired_ratio, spread, write_report

from llamarl.data.prompts import PromptStream
from llamarl.data.turn_template import TurnTemplate
from llamarl.engine.engine import NativeEngine
from llamarl.engine.episodes import EpisodeEngine
from llamarl.engine.sequence import SamplingParams
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.environments.episode_pool import EpisodeItems, EpisodeOpener, EpisodePool
from llamarl.environments.episodes import begin_episode
from llamarl.models.loading import load_tokenizer
from llamarl.settings.data import DataConfig
from llamarl.settings.engine import EngineConfig
from llamarl.settings.environments import RewardPoolConfig, TaskConfig
from llamarl.types import Prompt

TOOL = Path(__file__).parent / "slow_tool.py"


class Player:
    """One kind of tool with its pool of workers, kept over the rounds."""

    def __init__(self, args: argparse.Namespace, engine: NativeEngine, tokenizer: Any, delay_s: float) -> None:
        task = TaskConfig(
            name="episodes",
            environment=f"{TOOL}:SlowTool",
            environment_options={"turns": args.turns, "delay_s": delay_s},
            max_turns=args.turns,
            max_turn_tokens=args.turn_tokens,
            pool=RewardPoolConfig(num_workers=args.workers),
        )
        self.pool = EpisodePool(task)
        self._engine, self._tokenizer = engine, tokenizer
        self._max_tokens = args.turns * (args.turn_tokens + 12)
        opener = EpisodeOpener(self.pool, task)
        stream = PromptStream(EpisodeItems(), tokenizer, DataConfig(), 0, opener=opener)
        self.prompts = [stream.get(index) for index in range(args.episodes)]

    def play(self, reply_delay: int) -> tuple[float, float, list[list[int]]]:
        """Seconds in all, of these seconds that the engine stood still, and the tokens."""
        template = TurnTemplate(self._tokenizer, DataConfig())
        player = EpisodeEngine(self._engine, self.pool, template, self._tokenizer, reply_delay=reply_delay)
        sequences = [self._sequence(prompt) for prompt in self.prompts]
        start = time.perf_counter()
        player.add(sequences)
        while player.has_work:
            player.step()
        seconds = time.perf_counter() - start
        assert all(s.finish_reason == "stop" for s in sequences), {s.error or s.finish_reason for s in sequences}
        return seconds, player.take_times().waited_s, [s.tokens for s in sequences]

    def _sequence(self, prompt: Prompt) -> TokenSequence:
        return TokenSequence(
            prompt_index=prompt.index,
            sample_index=0,
            prompt_tokens=prompt.tokens.tolist(),
            params=SamplingParams(max_new_tokens=self._max_tokens),
            seed=prompt.index,
            episode=begin_episode(prompt, self._max_tokens),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:tiny")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=48, help="every turn is cut there: no token ends one")
    parser.add_argument("--delay-s", type=float, default=0.2)
    parser.add_argument(
        "--reply-delay", type=int, default=96, help="engine steps, as generator.reply_delay: about the tool's time"
    )
    parser.add_argument("--slots", type=int, default=16, help="sequences that are written at once")
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="OUT.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(args.model)
    engine = NativeEngine(args.model, EngineConfig(max_sequences=args.slots), eos_token_ids=())
    slow, instant = Player(args, engine, tokenizer, args.delay_s), Player(args, engine, tokenizer, 0.0)
    times: dict[str, list[float]] = {"slow": [], "instant": [], "instant, no delay": [], "stood still": []}
    with slow.pool, instant.pool:
        instant.play(args.reply_delay)  # warm-up
        for number in range(args.rounds):
            seconds, waited, tokens = slow.play(args.reply_delay)
            times["slow"].append(seconds)
            times["stood still"].append(waited)
            seconds, _, same = instant.play(args.reply_delay)
            times["instant"].append(seconds)
            assert tokens == same, "a late reply changed a token"
            times["instant, no delay"].append(instant.play(0)[0])
            print(f"round {number}: " + ", ".join(f"{name} {values[-1]:.2f} s" for name, values in times.items()))
    ratio = paired_ratio(times["slow"], times["instant"])
    without = paired_ratio(times["slow"], times["instant, no delay"])
    tools_s = args.episodes * args.turns * args.delay_s / args.workers
    engine_s = spread(times["instant"])["median"]
    bound = max(engine_s, tools_s) / engine_s
    results = {
        "seconds": {name: spread(values) for name, values in times.items()},
        "ratio": ratio,
        "ratio_to_no_delay": without,
        "bound": {"tools_alone_s": tools_s, "engine_alone_s": engine_s, "ratio": bound},
        "tokens_equal": True,
    }
    print(
        f"slow / instant: {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}), bound {bound:.3f}; "
        f"to an instant tool without a delay {without['median']:.3f}; tools alone {tools_s:.1f} s"
    )
    assert math.isfinite(ratio["median"])
    words = (
        f"{args.episodes} episodes of {args.turns} turns with a tool of {args.delay_s * 1e3:.0f} ms, by an instant one"
    )
    write_report(args.json, results, [claim(words, ratio["median"], 1.25, at_least=False)])


if __name__ == "__main__":
    main()
