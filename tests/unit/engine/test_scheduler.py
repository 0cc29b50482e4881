"""The scheduler against a cache that stores, instead of keys and values, the tokens themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.engine.block_manager import BlockManager
from llamarl.engine.block_tables import BlockTables
from llamarl.engine.scheduler import Prompt, Scheduler, StepPlan
from llamarl.engine.sequence import SamplingParams, Sequence

BLOCK = 4


def _sequence(prompt: list[int], index: int, sample: int, length: int, carried: int = 0) -> Sequence:
    params = SamplingParams(max_new_tokens=length)
    sequence = Sequence(prompt_index=index, sample_index=sample, prompt_tokens=prompt, params=params, seed=0)
    sequence.tokens = [_token(sequence, t) for t in range(carried)]
    return sequence


def _token(sequence: Sequence, position: int) -> int:
    return 1000 + 97 * sequence.prompt_index + 31 * sequence.sample_index + 7 * position


class _Cache:
    """Executes plans, and checks that every position a token attends to holds the right token."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.blocks: dict[int, list[int | None]] = {}
        self.finished: list[tuple[int, int]] = []
        self.tables = BlockTables()

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.scheduler.max_batch_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_sequences
        assert 0 <= self.scheduler.blocks.num_used <= self.scheduler.blocks.num_blocks
        for source, target in plan.copies:
            self.blocks[target] = list(self.blocks[source])
        for block in plan.fresh:
            self.blocks[block] = [None] * BLOCK
        decodes = [chunk for chunk in plan.chunks if chunk.decode]
        counts = [chunk.start // BLOCK + 1 for chunk in decodes]
        tables = self.tables.write([chunk.blocks for chunk in decodes], np.array(counts, np.int64)).tolist()
        for chunk, count, row in zip(decodes, counts, tables, strict=True):
            assert row[:count] == chunk.blocks[:count], "a row kept from an earlier step is stale"
            assert set(row[count:]) <= {chunk.blocks[count - 1]}
        written: set[tuple[int, int]] = set()
        for chunk in plan.chunks:
            for i, token in enumerate(chunk.tokens):
                slot = divmod(chunk.start + i, BLOCK)
                place = (chunk.blocks[slot[0]], slot[1])
                assert place not in written, "two tokens of one step in one slot"
                written.add(place)
                self.blocks[place[0]][place[1]] = token
        for member, source in plan.samples:
            sequence = member.sequence
            known = sequence.prompt_tokens + sequence.tokens
            held = [self.blocks[member.blocks[p // BLOCK]][p % BLOCK] for p in range(len(known))]
            assert held == known
            if isinstance(source, Prompt):
                assert source.complete and not sequence.tokens
            else:
                chunk = plan.chunks[source]
                assert chunk.start + len(chunk.tokens) == len(known)
        orders = [member.order for member, _ in plan.samples]
        assert len(set(orders)) == len(orders)
        assert plan.chunks or plan.samples, "no progress"
        for member, _ in plan.samples:
            sequence = member.sequence
            sequence.tokens.append(_token(sequence, len(sequence.tokens)))
            if len(sequence.tokens) == sequence.params.max_new_tokens:
                self.scheduler.remove(member)
                self.finished.append((sequence.prompt_index, sequence.sample_index))
        return plan


groups = st.lists(
    st.tuples(
        st.integers(1, 14),  # prompt length
        st.integers(1, 5),  # group size
        st.lists(st.tuples(st.integers(1, 12), st.integers(0, 11)), min_size=5, max_size=5),  # length, carried
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(
    groups=groups,
    num_blocks=st.integers(8, 30),
    max_batch_tokens=st.integers(4, 40),
    max_sequences=st.integers(1, 4),
    cancel_at=st.integers(0, 40),
    restart_at=st.integers(0, 40),
)
def test_every_sequence_ends_over_the_right_tokens_within_memory_and_budget(
    groups: list[tuple[int, int, list[tuple[int, int]]]],
    num_blocks: int,
    max_batch_tokens: int,
    max_sequences: int,
    cancel_at: int,
    restart_at: int,
) -> None:
    scheduler = Scheduler(
        num_blocks=num_blocks, block_size=BLOCK, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences
    )
    cache = _Cache(scheduler)
    members = []
    for index, (prompt_length, size, lengths) in enumerate(groups):
        prompt = [10 * index + p for p in range(prompt_length)]
        for sample in range(size):
            length, carried = lengths[sample]
            members.append(scheduler.add(_sequence(prompt, index, sample, length, min(carried, length - 1))))
    cancelled = None
    for step in range(3000):
        if not scheduler.running and not scheduler.waiting:
            break
        if step == restart_at:
            scheduler.restart_all()
        if step == cancel_at:
            cancelled = (scheduler.running or list(scheduler.waiting))[-1]
            scheduler.remove(cancelled)
            continue
        cache.step()
    expected = {(m.sequence.prompt_index, m.sequence.sample_index) for m in members if m is not cancelled}
    assert set(cache.finished) == expected and len(cache.finished) == len(expected)
    assert scheduler.blocks.num_used == 0


def test_a_groups_members_hold_its_prompts_tokens_once() -> None:
    scheduler = Scheduler(num_blocks=40, block_size=BLOCK, max_batch_tokens=8, max_sequences=8)
    first, second, other = (scheduler.add(_sequence([1, 2, 3], index, 0, 2)) for index in (0, 0, 1))
    assert second.key is first.key and other.key != first.key


def test_decodes_go_first_and_prompts_fill_what_is_left_of_the_budget() -> None:
    scheduler = Scheduler(num_blocks=40, block_size=BLOCK, max_batch_tokens=8, max_sequences=8)
    cache = _Cache(scheduler)
    scheduler.add(_sequence([1, 2, 3], 0, 0, 9))
    scheduler.add(_sequence([4, 5, 6], 1, 0, 9))
    cache.step()
    scheduler.add(_sequence(list(range(20)), 2, 0, 9))
    plan = cache.step()
    assert [(chunk.decode, len(chunk.tokens)) for chunk in plan.chunks] == [(True, 1), (True, 1), (False, 6)]
    assert len(plan.samples) == 2


def test_the_youngest_is_preempted_and_the_oldest_never() -> None:
    scheduler = Scheduler(num_blocks=6, block_size=BLOCK, max_batch_tokens=50, max_sequences=8)
    cache = _Cache(scheduler)
    members = [scheduler.add(_sequence([10 * i, 10 * i + 1, 10 * i + 2], i, 0, 17)) for i in range(3)]
    while scheduler.num_preemptions == 0:
        cache.step()
    assert list(scheduler.waiting) == members[1:]  # the third was never admitted: there was no room for it
    assert members[1].blocks == [] and members[0].blocks
    while scheduler.running or scheduler.waiting:
        cache.step()
    assert cache.finished[0] == (0, 0)
    assert members[0].sequence.num_tokens == 20


def test_a_copied_block_may_go_to_another_in_the_same_step() -> None:
    scheduler = Scheduler(num_blocks=39, block_size=BLOCK, max_batch_tokens=11, max_sequences=10)
    cache = _Cache(scheduler)
    for i, length in enumerate((1, 3, 3, 2, 4)):
        scheduler.add(_sequence([i] * length, 100 + i, 0, 60))
    for _ in range(5):
        cache.step()
    # a group with one of another among its members, as replies of environments join
    for index, sample, carried, more in ((0, 0, 48, 4), (0, 1, 2, 19), (1, 0, 4, 18), (0, 2, 2, 6)):
        scheduler.add(_sequence([[5], [6, 7, 8]][index], index, sample, carried + more, carried))
    plans = [cache.step() for _ in range(12)]
    assert any({source for source, _ in plan.copies} & {*plan.fresh} for plan in plans)


def test_blocks_are_counted_by_holder_and_the_lowest_free_one_is_taken() -> None:
    blocks = BlockManager(3, BLOCK)
    assert [blocks.allocate(), blocks.allocate()] == [0, 1]
    blocks.share([0])
    blocks.release([0, 1])
    assert (blocks.num_used, blocks.holders(0), blocks.allocate()) == (1, 1, 1)
    blocks.release([0])
    assert blocks.num_free == 2
    with pytest.raises(AssertionError, match="released twice"):
        blocks.release([0])
    assert (blocks.blocks_for(8), blocks.blocks_for(9), blocks.blocks_for(0)) == (2, 3, 0)
