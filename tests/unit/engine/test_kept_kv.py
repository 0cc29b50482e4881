"""KV kept over a change of weights: what is sampled then, and that a saved cache goes on bit for bit."""

import copy
from pathlib import Path

import pytest
import torch

from llamarl.engine.config import EngineConfig
from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.models.loading import load_model
from llamarl.seeding import derive_seed

TOKEN_BYTES = 2 * 3 * 2 * 8 * 4  # K and V, layers, KV heads, head size, fp32


def engine_of(folder: Path, *, num_tokens: int = 4096, max_sequences: int = 16) -> NativeEngine:
    config = EngineConfig(
        block_size=4, max_batch_tokens=64, max_sequences=max_sequences, kv_cache_bytes=num_tokens * TOKEN_BYTES
    )
    return NativeEngine(folder, config, eos_token_ids=())


def sequences_of(count: int, group: int = 1, **params: object) -> list[Sequence]:
    settings = SamplingParams(**{"max_new_tokens": 24, "temperature": 1.0, **params})  # type: ignore[arg-type]
    rng = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 97, (5 + 3 * i,), generator=rng).tolist() for i in range(count)]
    return [
        Sequence(prompt_index=i, sample_index=j, prompt_tokens=list(p), params=settings, seed=derive_seed(3, i, j))
        for i, p in enumerate(prompts)
        for j in range(group)
    ]


def change_weights(engine: NativeEngine, version: int, *, keep_kv: bool) -> None:
    rng = torch.Generator().manual_seed(version)
    for tensor in engine.parameters_for_sync().values():
        tensor.add_(0.05 * torch.randn(tensor.shape, generator=rng))
    engine.weights_updated(version, keep_kv=keep_kv)


def finish(engine: NativeEngine) -> None:
    for _ in range(1000):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine did not finish")


@torch.no_grad()
def logprobs_over_stale_kv(folder: Path, sequence: Sequence, old: int) -> list[float]:
    """The library's own cache, filled by the old weights up to the change, extended by the new ones after it."""
    model = load_model(folder, dtype=torch.float32, attention="eager")
    tokens = [*sequence.prompt_tokens, *sequence.tokens]
    first = len(sequence.prompt_tokens)
    # when the weights change the cache holds all but the newest token
    out = model(torch.tensor([tokens[: first + old - 1]]), use_cache=True)
    scores = [out.logits[0, first - 1 + i].log_softmax(-1)[sequence.tokens[i]].item() for i in range(old)]
    rng = torch.Generator().manual_seed(1)
    for tensor in dict(model.named_parameters()).values():
        tensor.add_(0.05 * torch.randn(tensor.shape, generator=rng))
    for i in range(old, len(sequence.tokens)):
        out = model(torch.tensor([[tokens[first + i - 1]]]), past_key_values=out.past_key_values, use_cache=True)
        scores.append(out.logits[0, -1].log_softmax(-1)[sequence.tokens[i]].item())
    return scores


def test_after_a_change_tokens_are_sampled_by_new_weights_over_old_keys_and_values(folder: Path) -> None:
    engine = engine_of(folder)
    (sequence,) = sequences_of(1)
    engine.add([sequence])
    for _ in range(10):
        engine.step()
    assert len(sequence.tokens) == 10
    change_weights(engine, 1, keep_kv=True)
    finish(engine)
    assert sequence.policy_versions == [0] * 10 + [1] * 14
    assert sequence.kept_kv
    expected = logprobs_over_stale_kv(folder, sequence, old=10)
    torch.testing.assert_close(torch.tensor(sequence.logprobs), torch.tensor(expected), atol=2e-5, rtol=0)
    assert engine.stats()["tokens_computed"] == 5 + 23  # nothing was computed twice


def test_only_sequences_that_had_a_cache_are_marked(folder: Path) -> None:
    engine = engine_of(folder, max_sequences=2)
    sequences = sequences_of(4)
    engine.add(sequences)
    for _ in range(5):
        engine.step()
    change_weights(engine, 1, keep_kv=True)
    finish(engine)
    assert [s.kept_kv for s in sequences] == [True, True, False, False]


@pytest.mark.parametrize(
    ("num_tokens", "max_sequences", "steps"),
    [(4096, 16, 9), (4096, 5, 9), (4096, 5, 1), (160, 16, 14)],
    ids=["all running", "some waiting", "prompts half done", "preempted"],
)
def test_a_saved_cache_goes_on_bit_for_bit_in_a_new_engine(
    folder: Path, num_tokens: int, max_sequences: int, steps: int
) -> None:
    sizes = {"num_tokens": num_tokens, "max_sequences": max_sequences}
    engine, other = engine_of(folder, **sizes), engine_of(folder, **sizes)
    sequences = sequences_of(4, group=3)
    engine.add(sequences)
    for step in range(steps):
        if step == steps // 2 and steps > 1:
            change_weights(engine, 1, keep_kv=True)
        engine.step()
    state, tensors = engine.kv_state()
    carried = copy.deepcopy(sequences)
    for name, tensor in engine.parameters_for_sync().items():
        other.parameters_for_sync()[name].copy_(tensor)
    other.weights_updated(engine.policy_version)
    other.load_kv_state(state, tensors, {(s.prompt_index, s.sample_index): s for s in carried})
    for version, one in ((2, engine), (2, other)):
        change_weights(one, version, keep_kv=True)
        one.add(sequences_of(5, group=3)[12:])
        finish(one)
    assert carried == sequences
    assert all(s.finished for s in carried)
    counters = [{k: v for k, v in e.stats().items() if k.startswith("kv_bytes_used")} for e in (engine, other)]
    assert counters[0]["kv_bytes_used"] == counters[1]["kv_bytes_used"] == 0


def test_withdrawn_sequences_leave_their_blocks_and_can_come_back(folder: Path) -> None:
    engine = engine_of(folder)
    sequences = sequences_of(2, group=2)
    alone = copy.deepcopy(sequences[:2])
    engine.add(sequences)
    for _ in range(4):
        engine.step()
    engine.withdraw(1)
    assert not any(s.finished for s in sequences)
    finish(engine)
    assert engine.stats()["kv_bytes_used"] == 0
    engine.add(sequences[2:])
    finish(engine)
    assert all(s.finish_reason == "length" for s in sequences)
    other = engine_of(folder)
    other.add(alone)
    finish(other)
    assert [s.tokens for s in alone] == [s.tokens for s in sequences[:2]]


def test_a_member_that_comes_back_to_a_siblings_old_prompt_is_marked(folder: Path) -> None:
    """Preempted before the update, admitted after it: its prompt's full blocks are those of a running sibling."""
    engine = engine_of(folder, num_tokens=88)
    sequences = [s for s in sequences_of(6, 4) if s.prompt_index == 5]
    engine.add(sequences)
    for _ in range(23):
        engine.step()
    assert engine.stats()["waiting"] == 1
    change_weights(engine, 1, keep_kv=True)
    finish(engine)
    assert engine.stats()["prompt_tokens_shared"] == 16
    assert [s.kept_kv for s in sequences] == [True] * 4


def test_a_restored_cache_of_the_served_version_is_not_called_kept(folder: Path) -> None:
    engine, other = engine_of(folder), engine_of(folder)
    change_weights(engine, 7, keep_kv=True)
    sequences = sequences_of(2, 2)
    engine.add(sequences)
    for _ in range(5):
        engine.step()
    carried = copy.deepcopy(sequences)
    other.load_kv_state(*engine.kv_state(), {(s.prompt_index, s.sample_index): s for s in carried})
    for name, tensor in engine.parameters_for_sync().items():
        other.parameters_for_sync()[name].copy_(tensor)
    other.weights_updated(7, keep_kv=True)
    assert not any(s.kept_kv for s in carried)
    other.weights_updated(8, keep_kv=True)
    assert all(s.kept_kv for s in carried)
