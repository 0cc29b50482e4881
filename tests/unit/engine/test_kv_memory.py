"""How much KV memory a run holds beyond its tokens, step by step, by the real scheduler; and what a block's size changes."""

import math
import random

import pytest
from engine_runs import run

from llamarl.engine.engine import NativeEngine
from llamarl.engine.scheduler import Scheduler
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.models.loading import load_tokenizer
from llamarl.settings.engine import EngineConfig


def _long_tail(num_prompts: int, group: int = 1) -> list[Sequence]:
    """Prompts of 24 to 40 tokens, responses log-normal between 8 and 512."""
    draw = random.Random(2)
    sequences = []
    for i in range(num_prompts):
        prompt = [3] * draw.randint(24, 40)
        for j in range(group):
            length = min(512, max(8, round(math.exp(draw.gauss(math.log(64), 1.0)))))
            params = SamplingParams(max_new_tokens=length)
            sequences.append(
                Sequence(prompt_index=i, sample_index=j, prompt_tokens=list(prompt), params=params, seed=0)
            )
    return sequences


def _ratios(sequences: list[Sequence], *, block_size: int, **limits: int) -> list[tuple[int, int]]:
    """(slots of the blocks in use, tokens held) after each step; a prompt that sequences share counts once."""
    settings = {"num_blocks": 64 * 600 // block_size, "max_batch_tokens": 2048, "max_sequences": 256, **limits}
    scheduler = Scheduler(block_size=block_size, **settings)
    for sequence in sequences:
        scheduler.add(sequence)
    found: list[tuple[int, int]] = []
    while scheduler.running or scheduler.waiting:
        plan = scheduler.schedule()
        shared = {id(p): p.num_computed for p in scheduler._prompts.values()}
        shared |= {id(m.prompt): m.prompt.num_computed for m in scheduler.running if m.prompt is not None}
        own = sum(max(0, m.num_computed - len(m.sequence.prompt_tokens)) for m in scheduler.running)
        found.append((scheduler.blocks.num_used * block_size, sum(shared.values()) + own))
        for member, _ in plan.samples:
            member.sequence.tokens.append(3)
            if len(member.sequence.tokens) == member.sequence.params.max_new_tokens:
                member.sequence.finish_reason = "length"
                scheduler.remove(member)
    return found


def test_in_the_worst_step_memory_is_within_5_percent_of_the_tokens_held() -> None:
    """At the default block size. It wastes at most one slot of a sequence, so this needs sequences of 20 tokens or more:
    here the shortest prompt has 24."""
    found = _ratios(_long_tail(64), block_size=EngineConfig().block_size_on("cpu"))
    assert len(found) > 500
    assert max(used / held for used, held in found) <= 1.05
    assert sum(used for used, _ in found) <= 1.01 * sum(held for _, held in found)


def test_also_when_memory_is_short_and_sequences_are_preempted() -> None:
    found = _ratios(_long_tail(64), block_size=2, num_blocks=1200, max_batch_tokens=256)
    assert max(used for used, _ in found) <= 2400
    assert max(used / held for used, held in found if held) <= 1.05


def test_in_groups_the_shared_prompts_partial_block_is_copied_so_it_weighs_while_responses_are_short() -> None:
    """Of 8 responses to one prompt each copies at most one token of it, and leaves at most one slot free."""
    found = _ratios(_long_tail(16, group=8), block_size=2, max_sequences=128)
    assert sum(used for used, _ in found) <= 1.02 * sum(held for _, held in found)
    assert max(used - held for used, held in found) <= 2 * 128 + 16
    assert max(used / held for used, held in found if held >= 4000) <= 1.05


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16])
def test_a_sequence_wastes_less_than_a_block(block_size: int) -> None:
    for used, held in _ratios(_long_tail(24), block_size=block_size, max_sequences=24):
        assert held <= used <= held + 24 * (block_size - 1)


def _sampled(block_size: int) -> list[Sequence]:
    tokenizer = load_tokenizer("bundled:tiny")
    config = EngineConfig(block_size=block_size, kv_cache_bytes=1 << 24, max_sequences=32)
    engine = NativeEngine("bundled:tiny", config)
    prompts = [tokenizer(text).input_ids for text in ("a3 b9 c4 =", "a1 b2 =", "a9 b9 c9 d9 =", "a5 b5 c1 =")]
    params = SamplingParams(max_new_tokens=40)
    sequences = [
        Sequence(prompt_index=i, sample_index=j, prompt_tokens=prompt, params=params, seed=9 * i + j)
        for i, prompt in enumerate(prompts)
        for j in range(2)
    ]
    return run(engine, sequences)


def test_block_size_changes_tokens_not_at_all_and_logprobs_by_rounding() -> None:
    """torch's fused attention sums in an order that depends on the padded length, which is a multiple of the block."""
    two, eight, sixteen = (_sampled(size) for size in (2, 8, 16))
    for other in (eight, sixteen):
        assert [s.tokens for s in other] == [s.tokens for s in two]
        for a, b in zip(other, two, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
