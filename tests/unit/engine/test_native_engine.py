import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_runs import run
from tiny_models import tiny_model

from llamarl.determinism import derive_seed
from llamarl.engine import model_runner
from llamarl.engine.engine import NativeEngine
from llamarl.engine.model_runner import cut_decodes
from llamarl.engine.scheduler import StepPlan
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.models.attention import PackedSequences
from llamarl.models.loading import load_model
from llamarl.settings.engine import EngineConfig

SMALL_BLOCKS = {"block_size": 4, "max_sequences": 16, "max_batch_tokens": 64}
TOKEN_BYTES = 2 * 3 * 2 * 8 * 4  # K and V, layers, KV heads, head size, fp32


def _prompts(n: int, *, lengths: range = range(3, 30)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    picks = torch.randint(lengths.start, lengths.stop, (n,), generator=generator).tolist()
    return [torch.randint(3, 97, (k,), generator=generator).tolist() for k in picks]


def _sequences(prompts: list[list[int]], group: int = 1, **params: object) -> list[Sequence]:
    settings = SamplingParams(**{"max_new_tokens": 64, "temperature": 0.0, **params})  # type: ignore[arg-type]
    return [
        Sequence(prompt_index=i, sample_index=j, prompt_tokens=list(p), params=settings, seed=derive_seed(3, i, j))
        for i, p in enumerate(prompts)
        for j in range(group)
    ]


def _engine(folder: Path, *, num_tokens: int = 4096, **changes: object) -> NativeEngine:
    config = EngineConfig(**{**SMALL_BLOCKS, "kv_cache_bytes": num_tokens * TOKEN_BYTES, **changes})  # type: ignore[arg-type]
    return NativeEngine(folder, config, eos_token_ids=())


@pytest.mark.parametrize(
    ("counts", "copied", "sizes"),
    [
        ([], 8, []),
        ([5], 4, [1]),  # one alone may be more than is copied together
        ([4, 4, 4], 8, [2, 1]),
        ([4, 4, 4], math.inf, [3]),
        ([5, 4, 4, 4], 100, [4]),  # 20 for 17 held: 1.18
        ([5, 4, 3, 3], 100, [3, 1]),  # three are 15 for 12 held, 1.25; four would be 20 for 15, 1.33
        ([9, 1, 1, 1], 100, [1, 3]),
    ],
)
def test_decodes_share_a_batch_while_little_is_padded_and_not_too_much_copied(
    counts: list[int], copied: float, sizes: list[int]
) -> None:
    cuts = cut_decodes(counts, padding=1.25, copied=copied)
    assert [cut.stop - cut.start for cut in cuts] == sizes
    assert [place for cut in cuts for place in range(cut.start, cut.stop)] == list(range(len(counts)))


def test_batches_cut_for_the_processors_cache_sample_the_same_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[slice]] = []
    monkeypatch.setattr(model_runner, "cut_decodes", lambda *a, **k: made.append(cut_decodes(*a, **k)) or made[-1])
    sequences = []
    for copied in (1 << 30, 80 * TOKEN_BYTES // 3):  # all; 80 tokens a layer, which none has alone
        monkeypatch.setattr(model_runner, "_MOST_COPIED", copied)
        sequences.append(_sequences([prompt[:3] for prompt in _prompts(6)]))
        run(_engine(folder), sequences[-1])
    assert max(map(len, made[: len(made) // 2])) == 1 and max(map(len, made[len(made) // 2 :])) > 1
    whole, cut = sequences
    assert [s.tokens for s in cut] == [s.tokens for s in whole]
    np.testing.assert_allclose([s.logprobs for s in cut], [s.logprobs for s in whole], atol=1e-5)


def _greedy(folder: Path, prompt: list[int], n: int) -> list[int]:
    model = load_model(folder, dtype=torch.float32, attention="eager")
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
    )
    return out[0, len(prompt) :].tolist()


def _state(sequences: list[Sequence]) -> list[tuple[object, ...]]:
    ordered = sorted(sequences, key=lambda s: (s.prompt_index, s.sample_index))
    return [(s.tokens, s.logprobs, s.policy_versions, s.loss_mask, s.finish_reason, s.error) for s in ordered]


def test_greedy_tokens_equal_generate_in_a_mixed_batch_with_preemption_and_chunked_prefill(folder: Path) -> None:
    prompts = _prompts(9)
    engine = _engine(folder, num_tokens=320, max_batch_tokens=16)  # nine sequences would hold about 700
    sequences = _sequences(prompts, group=2)
    run(engine, sequences)
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert stats["kv_bytes_used_max"] <= 320 * TOKEN_BYTES
    expected = [_greedy(folder, prompt, 64) for prompt in prompts]
    assert [s.tokens for s in sequences] == [e for e in expected for _ in range(2)]


def test_logprobs_equal_the_trainers_packed_forward(folder: Path) -> None:
    sequences = _sequences(_prompts(6), group=2, temperature=0.7, max_new_tokens=20)
    run(_engine(folder), sequences)
    model = load_model(folder, dtype=torch.float32, attention="llamarl_packed")
    ends = torch.tensor([0, *[s.num_tokens for s in sequences]]).cumsum(0)
    packed = PackedSequences.of(ends)
    row = torch.tensor([t for s in sequences for t in s.prompt_tokens + s.tokens])
    with torch.no_grad():
        logits = model(
            row[None], position_ids=packed.position_ids("cpu"), packed_sequences=packed, use_cache=False
        ).logits[0]
    for i, s in enumerate(sequences):
        first = int(ends[i]) + len(s.prompt_tokens)
        predicting = logits[first - 1 : first - 1 + len(s.tokens)]
        expected = torch.log_softmax(predicting / 0.7, -1).gather(1, torch.tensor(s.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(s.logprobs), expected, atol=1e-4, rtol=0)


def test_prompt_of_a_group_is_computed_and_stored_once(folder: Path) -> None:
    engine = _engine(folder)
    prompt = list(range(3, 25))  # 22 tokens: five full blocks and a half one
    engine.add(_sequences([prompt], group=8, temperature=1.0, max_new_tokens=2))
    engine.step()
    stats = engine.stats()
    assert stats["prompt_tokens_computed"] == 22
    assert stats["prompt_tokens_shared"] == 7 * 22
    assert stats["tokens_sampled"] == 8
    assert stats["kv_bytes_used"] == 6 * 4 * TOKEN_BYTES  # nobody has written behind it yet
    engine.step()
    assert engine.stats()["kv_bytes_used_max"] == (5 + 8) * 4 * TOKEN_BYTES  # the half block is everyone's own now


def test_a_block_is_copied_before_it_is_zeroed_for_another(folder: Path) -> None:
    runner = _engine(folder)._runner
    runner._cache[:, :, 1] = 3.0
    runner.execute(StepPlan(copies=[(1, 2)], fresh=[1]))
    assert (runner._cache[:, :, 2] == 3.0).all() and not runner._cache[:, :, 1].any()


def test_members_admitted_later_sample_from_the_same_prompt(folder: Path) -> None:
    prompt = list(range(3, 25))
    together = _sequences([prompt], group=6, temperature=1.0, max_new_tokens=9)
    run(_engine(folder), together)
    engine = _engine(folder, max_sequences=2)
    apart = _sequences([prompt], group=6, temperature=1.0, max_new_tokens=9)
    run(engine, apart)
    assert engine.stats()["prompt_tokens_computed"] == 22
    assert [s.tokens for s in apart] == [s.tokens for s in together]


def test_resumed_sequences_give_the_same_bits_in_the_old_engine_and_in_a_new_one(folder: Path) -> None:
    engine = _engine(folder)
    engine.add(_sequences(_prompts(5), group=3, temperature=1.0, max_new_tokens=30))
    done: list[Sequence] = []
    for _ in range(11):
        done += engine.step()
    carried = engine.suspend()
    assert not engine.has_work
    assert len(carried) == 15
    for_new = copy.deepcopy(carried)
    engine.weights_updated(1)
    run(engine, carried)
    fresh = _engine(folder)
    fresh.weights_updated(1)
    run(fresh, for_new)
    assert _state(carried) == _state(for_new)
    assert all(s.policy_versions == sorted(s.policy_versions) and s.policy_versions[-1] == 1 for s in carried)
    assert sum(s.policy_versions[0] == 0 for s in carried) >= 10


def test_prompts_of_equal_text_draw_differently_and_equal_seeds_repeat(folder: Path) -> None:
    """Alone, in one batch, and as members of one group: what is drawn follows each sequence's own seed."""
    prompts = _prompts(1, lengths=range(6, 7)) * 3
    settings = {"temperature": 1.0, "max_new_tokens": 12}
    batch = _sequences(prompts, group=2, **settings)
    run(_engine(folder), batch)
    assert len({tuple(s.tokens) for s in batch}) == 6
    repeated = _sequences(prompts[:1], group=3, **settings)
    repeated[1].seed = repeated[2].seed = batch[3].seed
    run(_engine(folder), repeated)
    assert [s.tokens for s in repeated] == [batch[0].tokens, batch[3].tokens, batch[3].tokens]


def test_new_weights_are_used_at_the_next_token_and_cached_keys_are_recomputed(folder: Path) -> None:
    engine = _engine(folder)
    prompts = _prompts(2)
    sequences = _sequences(prompts, max_new_tokens=20)
    engine.add(sequences)
    for _ in range(5):
        engine.step()
    assert [len(s.tokens) for s in sequences] == [5, 5]
    other = tiny_model("llama", "sdpa", seed=9)
    source = dict(other.named_parameters())
    live = engine.parameters_for_sync()
    assert set(live) == set(source)
    assert "lm_head.weight" not in live  # tied to the embedding
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(source[name])
    engine.weights_updated(4)
    while engine.has_work:
        engine.step()
    for s, prompt in zip(sequences, prompts, strict=True):
        assert s.policy_versions == [0] * 5 + [4] * 15
        start = torch.tensor([prompt + s.tokens[:5]])
        out = other.generate(start, max_new_tokens=15, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert s.tokens[5:] == out[0, start.shape[1] :].tolist()


def test_a_poisoned_request_fails_alone(folder: Path) -> None:
    prompts = _prompts(4)
    engine = _engine(folder)
    # poisons the embedding only: the tied head serves what it was packed from
    engine.parameters_for_sync()["model.embed_tokens.weight"][96] = float("nan")
    prompts = [[t for t in p if t != 96] for p in prompts]
    sequences = _sequences([prompts[0], [5, 96, 7, 8], *prompts[1:]], max_new_tokens=12)
    run(engine, sequences)
    assert sequences[1].finish_reason == "error"
    assert "not finite at token 0 under policy version 0" in (sequences[1].error or "")
    healthy = [s for s in sequences if s.prompt_index != 1]
    assert [s.finish_reason for s in healthy] == ["length"] * 4
    again = _sequences(prompts[:2], max_new_tokens=12)  # the freed blocks hold no NaN any more
    run(engine, again)
    assert [s.tokens for s in again] == [healthy[0].tokens, healthy[1].tokens]


def test_stop_tokens_end_a_response_and_are_part_of_it(folder: Path) -> None:
    prompt = _prompts(1)[0]
    free = _greedy(folder, prompt, 20)
    stop = free[6]
    (done,) = run(_engine(folder), _sequences([prompt], max_new_tokens=20, stop_token_ids=(stop,)))
    assert done.finish_reason == "stop"
    assert done.tokens == free[: free.index(stop) + 1]


class _Letters:
    """A tokenizer whose token n is the text ``<n>`` cut so that stop strings cross token borders."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(f"{t:02d}" for t in tokens)


def test_stop_strings_are_found_across_token_borders(folder: Path) -> None:
    prompt = _prompts(1)[0]
    free = _greedy(folder, prompt, 20)
    text = "".join(f"{t:02d}" for t in free)
    stop = text[9:12]  # second digit of token 4, both of token 5
    config = EngineConfig(kv_cache_bytes=1 << 20, **SMALL_BLOCKS)  # type: ignore[arg-type]
    engine = NativeEngine(folder, config, eos_token_ids=(), tokenizer=_Letters())  # type: ignore[arg-type]
    (done,) = run(engine, _sequences([prompt], max_new_tokens=20, stop_strings=("never", stop)))
    assert done.finish_reason == "stop"
    end = -(-(text.index(stop) + 3) // 2)
    assert done.tokens == free[:end]


class _Words:
    """A tokenizer of words with a space before each, which its decoder drops at the start of what it gets."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(f" w{t}" for t in tokens).removeprefix(" ")


def test_a_stop_string_with_a_space_in_front_is_found_at_the_start_of_a_response(folder: Path) -> None:
    prompt = _prompts(1)[0]
    free = _greedy(folder, prompt, 4)
    config = EngineConfig(kv_cache_bytes=1 << 20, **SMALL_BLOCKS)  # type: ignore[arg-type]
    for stop, length in (
        (f" w{free[0]}", 1),
        (f"w{prompt[-1]} w{free[0]}", 4),
    ):  # the prompt's own text is no part of it
        engine = NativeEngine(folder, config, eos_token_ids=(), tokenizer=_Words())  # type: ignore[arg-type]
        (done,) = run(engine, _sequences([prompt], max_new_tokens=4, stop_strings=(stop,)))
        assert (done.finish_reason, len(done.tokens)) == ("stop" if length == 1 else "length", length)


@pytest.mark.parametrize("kept", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_an_engine_over_ranks_refuses_filters(folder: Path, kept: dict[str, float]) -> None:
    engine = _engine(folder)
    engine._ranks.size = 2
    with pytest.raises(ValueError, match="for an engine of one rank"):
        engine.add(_sequences([[4, 5, 6]], temperature=1.0, **kept))
    assert not engine.has_work


def test_requests_that_cannot_fit_are_refused_and_nothing_is_admitted(folder: Path) -> None:
    engine = _engine(folder, num_tokens=64)
    fine = _sequences([[4, 5, 6]], max_new_tokens=4)
    for bad, words in (
        (_sequences([[3] * 250], max_new_tokens=7), "context of 256 tokens"),
        (_sequences([[3] * 40], max_new_tokens=40), "raise generator.engine.kv_cache_bytes"),
        (_sequences([[]], max_new_tokens=4), "empty"),
        (_sequences([[3]], max_new_tokens=4, stop_strings=("x",)), "tokenizer"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.add([*fine, *bad])
    assert not engine.has_work
