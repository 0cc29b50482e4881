"""Decode steps by bucket, without a GPU: which bucket, what the padding holds, and that it changes nothing."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paged_reference
import pytest
import torch
from engine_runs import make_sequences, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_config, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING

from llamarl.engine import model_runner
from llamarl.engine.cuda_graphs import (
    Bucket,
    Buckets,
    DecodeInputs,
    PaddedDecoder,
    StagedInputs,
    sizes_between,
    why_graphs_unsupported,
)
from llamarl.engine.engine import NativeEngine
from llamarl.engine.scheduler import Chunk
from llamarl.engine.sequence import Sequence
from llamarl.errors import ConfigError
from llamarl.settings.engine import EngineConfig


def _decode(token: int, start: int, blocks: list[int]) -> Chunk:
    return Chunk([token], start, blocks, decode=True)


@pytest.mark.parametrize(
    ("smallest", "largest", "expected"),
    [
        (1, 1, (1,)),
        (1, 16, (1, 2, 3, 4, 6, 8, 12, 16)),
        (4, 13, (4, 6, 8, 12, 13)),
        (5, 5, (5,)),
        (32, 100, (32, 48, 64, 96, 100)),
    ],
)
def test_sizes_grow_by_a_half_and_a_third_in_turn(smallest: int, largest: int, expected: tuple[int, ...]) -> None:
    assert sizes_between(smallest, largest) == expected


def test_a_step_takes_the_smallest_bucket_that_holds_it() -> None:
    buckets = Buckets(max_rows=16, max_tokens=256, block_size=4)
    assert buckets.rows == (1, 2, 3, 4, 6, 8, 12, 16)
    assert buckets.widths == (16, 24, 32, 48, 64)  # blocks of 64 .. 256 tokens
    assert buckets.choose([1]) == Bucket(1, 16)
    assert buckets.choose([17, 3, 3, 3, 3]) == Bucket(6, 24)
    assert buckets.choose([64] * 16) == Bucket(16, 64)
    assert buckets.choose([1] * 17) is None  # more sequences than the largest bucket has rows
    assert buckets.choose([65]) is None


def test_one_long_context_among_many_short_ones_is_not_padded() -> None:
    buckets = Buckets(max_rows=512, max_tokens=4096, block_size=16)
    assert buckets.choose([256] + [4] * 255) is None  # 256 x 256 blocks for 1,276 held
    assert buckets.choose([256] + [64] * 255) == Bucket(256, 256)  # four times 16,576 is more than 65,536
    assert buckets.choose([128, 1]) == Bucket(2, 128)  # far from full, but small


@given(data=st.data(), block_size=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_padding_never_points_at_another_sequence(data: st.DataObject, block_size: int) -> None:
    starts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=9))
    free = iter(range(1000))
    # a table may be longer than what the step needs, as after a chunk that was computed ahead
    tables = [[next(free) for _ in range(start // block_size + 1 + i % 2)] for i, start in enumerate(starts)]
    chunks = [_decode(i + 1, start, table) for i, (start, table) in enumerate(zip(starts, tables, strict=True))]
    bucket = Buckets(max_rows=16, max_tokens=64, block_size=block_size).choose([s // block_size + 1 for s in starts])
    assert bucket is not None and bucket.rows >= len(chunks)
    staged = StagedInputs(most_rows=16, block_size=block_size, scratch=1000, device=torch.device("cpu"))
    inputs = DecodeInputs(staged.write(chunks, np.array(starts), bucket), bucket)
    rows = inputs.tables.view(bucket.rows, bucket.width).tolist()
    for i, (start, table) in enumerate(zip(starts, tables, strict=True)):
        needed = start // block_size + 1
        assert rows[i][:needed] == table[:needed]
        assert set(rows[i]) <= set(table[:needed])
        assert inputs.slots[i] == table[start // block_size] * block_size + start % block_size
        assert inputs.lengths[i] == start + 1
    assert all(set(row) == {1000} for row in rows[len(chunks) :])
    assert inputs.slots[len(chunks) :].tolist() == [1000 * block_size] * (bucket.rows - len(chunks))
    assert set(inputs.lengths[len(chunks) :].tolist()) <= {1}


# -- the engine, padded but not recorded ---------------------------------------------------------------------------


def _engine(folder: Path, cuda_graphs: str, **changes: Any) -> NativeEngine:
    values = {"block_size": 4, "max_sequences": 16, "max_batch_tokens": 64, "kv_cache_bytes": 1 << 20, **changes}
    return NativeEngine(folder, EngineConfig(cuda_graphs=cuda_graphs, **values), eos_token_ids=())  # type: ignore[arg-type]


def _count_padded(engine: NativeEngine) -> list[Bucket]:
    """Buckets of the padded steps from now on."""
    decoder = engine._runner.padded_decoder
    seen: list[Bucket] = []
    compute = decoder._compute

    def counted(inputs: DecodeInputs) -> torch.Tensor:
        seen.append(inputs.bucket)
        return compute(inputs)

    decoder._compute = counted
    return seen


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "qwen3_moe"])
def test_padded_steps_give_the_tokens_of_exact_ones(family: str, tmp_path: Path) -> None:
    tiny_model(family, "eager").save_pretrained(tmp_path)
    exact = run(_engine(tmp_path, "off"), make_sequences(temperature=1.0))
    engine = _engine(tmp_path, "padded")
    padded = _count_padded(engine)
    result = run(engine, make_sequences(temperature=1.0))
    assert len(padded) > 30 and len(set(padded)) >= 2  # most steps went this way, in several shapes
    assert [s.tokens for s in result] == [s.tokens for s in exact]
    for one, other in zip(result, exact, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=2e-5, rtol=0)


def test_blocks_read_in_place_give_the_tokens_of_copied_ones_in_few_widths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a family whose layers have windows and soft caps by turns."""

    def generated(engine: NativeEngine) -> list[Sequence]:
        sequences = make_sequences(temperature=1.0)
        for i, sequence in enumerate(sequences):
            sequence.params = replace(sequence.params, max_new_tokens=3 + i)
        return run(engine, sequences)

    tiny_model("gemma2", "eager").save_pretrained(tmp_path)
    copied = generated(_engine(tmp_path, "off"))
    monkeypatch.setitem(sys.modules, "llamarl.models.paged_kernel", paged_reference)
    monkeypatch.setattr(model_runner, "reads_in_place", lambda *_: True)
    monkeypatch.setattr(model_runner, "compile_layers", lambda model: None)
    engine = _engine(tmp_path, "padded")
    padded = _count_padded(engine)
    for result in (generated(_engine(tmp_path, "off")), generated(engine)):
        assert [s.tokens for s in result] == [s.tokens for s in copied]
        for one, other in zip(result, copied, strict=True):
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=2e-5, rtol=0)
    assert len({bucket.rows for bucket in padded}) > 2 and len({bucket.width for bucket in padded}) <= 2


def test_padding_survives_preemption_sampling_and_new_weights(folder: Path) -> None:
    def sampled(cuda_graphs: str) -> list[Sequence]:
        # 52 blocks for sequences that would hold about 130; the scratch block comes out of the same bytes
        engine = _engine(folder, cuda_graphs, kv_cache_bytes=(52 + (cuda_graphs == "padded")) * 4 * 384)
        sequences = make_sequences(temperature=1.0)
        engine.add(sequences)
        for _ in range(12):
            engine.step()
        with torch.no_grad():
            for parameter in engine.parameters_for_sync().values():
                parameter.mul_(1.01)
        engine.weights_updated(1)
        while engine.has_work:
            engine.step()
        assert engine.stats()["preemptions"] > 0
        return sequences

    exact, padded = sampled("off"), sampled("padded")
    assert [s.tokens for s in padded] == [s.tokens for s in exact]
    assert [s.policy_versions for s in padded] == [s.policy_versions for s in exact]


def test_only_changes_are_written_and_the_inputs_are_those_of_a_new_start(folder: Path) -> None:
    """Through blocks that fill, sequences that end or are preempted, and wider tables."""
    engine = _engine(folder, "padded", kv_cache_bytes=(70 + 1) * 4 * 384)
    decoder = engine._runner.padded_decoder
    staged, shapes = decoder._staged, set()
    write = staged.write

    def compared(chunks: list[Chunk], starts: Any, bucket: Bucket) -> torch.Tensor:
        new = StagedInputs(most_rows=16, block_size=4, scratch=engine._runner.num_blocks, device=torch.device("cpu"))
        found = write(chunks, starts, bucket)
        assert torch.equal(found, new.write(chunks, starts, bucket))
        shapes.add((len(chunks), bucket))
        return found

    staged.write = compared  # type: ignore[method-assign, assignment]
    sequences = make_sequences(temperature=1.0)
    for i, sequence in enumerate(sequences):
        sequence.params = replace(sequence.params, max_new_tokens=20 + 3 * i)
    run(engine, sequences)
    assert len({rows for rows, _ in shapes}) > 4 and len({bucket.width for _, bucket in shapes}) > 1
    assert engine.stats()["preemptions"] > 0


def test_scratch_block_counts_toward_the_limit_and_is_nobodys(folder: Path) -> None:
    engine = _engine(folder, "padded", kv_cache_bytes=100 * 4 * 384)
    runner = engine._runner
    assert runner.num_blocks == 99 and runner._cache.shape[2] == 100
    run(engine, make_sequences())
    assert engine.stats()["kv_bytes_used_max"] <= 99 * 4 * 384
    with pytest.raises(ConfigError, match="less than 2 blocks of 4 tokens"):
        _engine(folder, "padded", kv_cache_bytes=4 * 384)


def test_a_sequence_of_nans_harms_nobody_in_its_padded_batch(folder: Path) -> None:
    exact = run(_engine(folder, "off"), make_sequences())
    engine = _engine(folder, "padded")
    sequences = make_sequences()
    victim = sequences[3]
    engine.add(sequences)
    for _ in range(3):
        engine.step()
    member = next(m for m in engine._members.values() if m.sequence is victim)
    engine._runner._cache[:, :, member.blocks[-1]] = float("nan")
    while engine.has_work:
        engine.step()
    assert victim.finish_reason == "error"
    assert [s.tokens for s in sequences if s is not victim] == [
        e.tokens for s, e in zip(sequences, exact, strict=True) if s is not victim
    ]


def test_the_same_run_takes_the_same_bits_again(folder: Path) -> None:
    one, two = (run(_engine(folder, "padded"), make_sequences(temperature=1.0)) for _ in range(2))
    assert [(s.tokens, s.logprobs) for s in one] == [(s.tokens, s.logprobs) for s in two]


# -- recording, with a stand-in for the device ---------------------------------------------------------------------


class _Recording(TorchDispatchMode):
    """Notes every operation, to be done again into the same tensors."""

    def __init__(self, work: list[Any]) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))

        def again() -> None:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.data_ptr() != made.data_ptr():
                made.copy_(result)

        self.work.append(again)
        return made


class _Tape:
    """What ``torch.cuda`` is to the decoder: a graph here runs again what ran while it was recorded."""

    def __init__(self) -> None:
        self.recording: list[Any] = []
        self.capturing = False
        self.captures = self.replays = self.streams = 0
        self.pools: list[list[int]] = []
        """Of each pool, the tokens that the buckets recorded into it gather, in order."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tape = self

        class Graph:
            work: list[Any]

            def replay(self) -> None:
                tape.replays += 1
                for work in self.work:
                    work()

        @contextlib.contextmanager
        def graph(recorded: Any, **settings: Any) -> Iterator[None]:
            assert settings["capture_error_mode"] == "thread_local" and settings["pool"] is tape.pools[-1]
            tape.recording = []
            tape.captures += 1
            tape.capturing = True
            with _Recording(tape.recording):
                yield
            tape.capturing = False
            recorded.work = tape.recording

        stream = SimpleNamespace(wait_stream=lambda other: None)

        def make_stream(device: object) -> Any:
            tape.streams += 1
            return stream

        def make_pool() -> list[int]:
            tape.pools.append([])
            return tape.pools[-1]

        fakes = {
            "current_stream": lambda device: stream,
            "Stream": make_stream,
            "stream": lambda s: contextlib.nullcontext(),
            "graph_pool_handle": make_pool,
            "CUDAGraph": Graph,
            "graph": graph,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


def _recorder(tape: _Tape | None = None) -> PaddedDecoder:
    """Logits of a row: its token, its length, and the sum of its block table."""

    def compute(inputs: DecodeInputs) -> torch.Tensor:
        if tape is not None and tape.capturing:
            tape.pools[-1].append(inputs.bucket.rows * inputs.bucket.width)
        tables = inputs.tables.view(inputs.bucket.rows, -1).sum(1)
        return torch.stack([inputs.tokens, inputs.lengths, tables], dim=1)

    buckets = Buckets(max_rows=4, max_tokens=16, block_size=4)
    return PaddedDecoder(compute, buckets, device=torch.device("cpu"), block_size=4, scratch=50, record=True)


def test_a_bucket_is_recorded_once_and_replayed_with_new_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = _Tape()
    tape.install(monkeypatch)
    decoder = _recorder()
    for token in (5, 6, 7):
        logits = decoder.run([_decode(token, token, [1, 2])])
        assert logits is not None and logits.tolist() == [[token, token + 1, 1 + 2 + 2 + 2]]
    assert (tape.captures, tape.replays, len(decoder._graphs)) == (1, 3, 1)
    logits = decoder.run([_decode(9, 0, [3]), _decode(4, 1, [8])])
    assert logits is not None and logits[:, 0].tolist() == [9, 4]
    assert (tape.captures, len(decoder._graphs), tape.streams) == (2, 1, 1)
    decoder.run([_decode(5, 5, [1, 2])])
    assert (tape.captures, len(decoder._graphs), tape.streams) == (3, 2, 1)


def test_no_pool_is_given_a_larger_bucket_than_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a pool never merge: what it holds is then what its largest bucket takes, not the sum of all."""
    tape = _Tape()
    tape.install(monkeypatch)
    decoder = _recorder(tape)
    for rows in (1, 2, 1, 4, 3, 2, 1):
        decoder.run([_decode(token, 0, [token]) for token in range(rows)])
    assert tape.pools == [[4], [8, 4], [16, 12, 8, 4]]
    assert len(decoder._graphs) == 4


def test_all_graphs_write_their_logits_into_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    _Tape().install(monkeypatch)
    decoder = _recorder()
    three = decoder.run([_decode(token, 0, [token]) for token in (3, 4, 5)])
    one = decoder.run([_decode(5, 5, [1, 2])])
    assert one.data_ptr() == three.data_ptr() and three.untyped_storage().nbytes() == 4 * 3 * three.element_size()


def test_graphs_are_forgotten_only_if_weights_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = _Tape()
    tape.install(monkeypatch)
    decoder = _recorder()
    decoder.served_from((1, 2))
    decoder.run([_decode(5, 5, [1, 2])])
    decoder.served_from((1, 2))
    assert len(decoder._graphs) == 1
    decoder.served_from((1, 3))
    assert not decoder._graphs and decoder._pool is None  # a pool whose graphs are gone cannot be recorded into


def test_a_new_version_leaves_every_address_where_it_was(folder: Path) -> None:
    """On the CPU too: what a graph would read is written in place."""
    runner = _engine(folder, "padded")._runner
    before = runner._addresses()
    with torch.no_grad():
        for parameter in runner.parameters_for_sync().values():
            parameter.add_(0.01)
    runner.weights_updated()
    assert runner._addresses() == before


def test_recording_is_refused_where_it_cannot_work(folder: Path) -> None:
    config = tiny_config("llama")
    assert why_graphs_unsupported(config) is None
    assert "not those of a dense decoder" in str(why_graphs_unsupported(tiny_config("mixtral")))
    assert "known of the families" in str(why_graphs_unsupported(CONFIG_MAPPING["arcee"]()))
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "dynamic" in str(why_graphs_unsupported(config))
    assert why_graphs_unsupported(tiny_config("gemma3_text")) is None  # a rope for each kind of layer
    with pytest.raises(ConfigError, match="engine.cuda_graphs is 'on'.*CUDA device"):
        _engine(folder, "on")
    assert _engine(folder, "auto")._runner.padded_decoder is None
