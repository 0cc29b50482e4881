"""Episodes on two ranks: one has the environments, both play the same."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import join_group, run_ranks

from llamarl.data.prompts import PromptStream
from llamarl.data.turn_template import TurnTemplate
from llamarl.engine.engine import NativeEngine
from llamarl.engine.episode_ranks import make_environments
from llamarl.engine.episodes import EpisodeEngine
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.environments.episode_pool import EpisodeItems, EpisodeOpener
from llamarl.environments.episodes import begin_episode
from llamarl.models.loading import load_tokenizer
from llamarl.models.parallel import make_layout
from llamarl.settings.data import DataConfig
from llamarl.settings.engine import EngineConfig
from llamarl.settings.environments import TaskConfig

ENVIRONMENTS = Path(__file__).resolve().parents[1] / "small_environments.py"
FAILS_AT = 5
"""Prompt whose environment raises in its second turn."""


def main(rank: int, tp: int, folder: Path) -> None:
    torch.set_num_threads(1)
    layout = None
    if tp > 1:
        join_group(rank, tp, f"{folder}/rendezvous")
        layout = make_layout(fsdp=1, tp=tp, device="cpu", keys=("dp", "tp"))
    task = TaskConfig(
        name="episodes",
        environment=f"{ENVIRONMENTS}:Ledgers",
        environment_options={"turns": 4, "fewest": 2, "delay_s": 0.01, "fails_at": FAILS_AT},
        max_turn_tokens=12,
    )
    tokenizer = load_tokenizer("bundled:tiny")
    environments = make_environments(task, layout)
    stream = PromptStream(EpisodeItems(), tokenizer, DataConfig(), 0, opener=EpisodeOpener(environments, task))
    engine = NativeEngine("bundled:tiny", EngineConfig(), tokenizer=tokenizer, layout=layout)
    template = TurnTemplate(tokenizer, DataConfig())
    player = EpisodeEngine(engine, environments, template, tokenizer, reply_delay=3)
    told = play(player, stream)
    (folder / f"{tp}-{rank}.json").write_text(json.dumps(told))
    arriving = EpisodeEngine(engine, environments, template, tokenizer, reply_delay=0, on_arrival=True)
    arriving.begin_tick(None)
    told = play(arriving, stream)
    (folder / f"{tp}-{rank}-arriving.json").write_text(json.dumps([told, arriving.joins]))
    environments.close()
    if tp > 1:
        dist.destroy_process_group()


def play(player: EpisodeEngine, stream: PromptStream) -> list[dict[str, Any]]:
    """Six episodes to their end."""
    prompts = [stream.get(index) for index in range(6)]
    sequences = [
        Sequence(
            prompt_index=prompt.index,
            sample_index=0,
            prompt_tokens=prompt.tokens.tolist(),
            params=SamplingParams(max_new_tokens=100),
            seed=prompt.index,
            episode=begin_episode(prompt, 100),
        )
        for prompt in prompts
    ]
    player.add(sequences)
    while player.has_work:
        player.step()
    return [
        {
            "tokens": s.tokens,
            "reason": s.finish_reason,
            "error": (s.error or "").splitlines()[:1],
            "turns": [asdict(turn) for turn in s.episode.turns] if s.episode is not None else [],
        }
        for s in sequences
    ]


def test_two_ranks_hear_the_same_replies_and_play_what_one_plays_alone(tmp_path: Path) -> None:
    run_ranks(main, [(rank, tp, tmp_path) for tp, rank in ((1, 0), (2, 0), (2, 1))], limit_s=120)
    alone = json.loads((tmp_path / "1-0.json").read_text())
    assert sum(len(sequence["turns"]) for sequence in alone) > 2 * len(alone)
    assert [sequence["reason"] for sequence in alone].count("error") == 1  # a failure is heard by all too
    first, second = (json.loads((tmp_path / f"2-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second == alone
    # where replies join on arrival, what the first rank has seen decides for both
    first, second = (json.loads((tmp_path / f"2-{rank}-arriving.json").read_text()) for rank in (0, 1))
    assert first == second
    assert len(first[1]) == sum(len(sequence["turns"]) for sequence in first[0])
