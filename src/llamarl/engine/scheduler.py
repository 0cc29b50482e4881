"""What the engine computes in each step: which tokens of which sequence, into which blocks. No tensors.

    add ─▶ waiting ──admit──▶ prompt (one per group) ──fork──▶ members ──decode──▶ finish
               ▲                                                  │
               └───────────────── preempt (youngest) ◀────────────┘

A group is the sequences with one prompt (same ``prompt_index`` and tokens). Its prompt is computed
once, into blocks that all members hold; at its end every member forks: it samples its first token
from the prompt's last position, or, if it was carried over with tokens already, computes those on
top. A member that is about to write into a block that others hold too gets a copy of it first (copy
on write), so only the last, partly filled block is ever copied.

A step first gives one token to each decoding sequence, oldest first, then what is left of the token
budget to prompts and carried tokens in chunks, then admits from the waiting line, in order. When a
block is needed and none is free, the youngest running sequence gives up its blocks and returns to
the head of the line. The oldest is never preempted for others, and ``add`` refuses what could not
run alone, so every sequence ends.

Invariants (property-tested): blocks in use never exceed the limit; a step never exceeds the budget;
no two sequences write one slot; the plan depends on the order and content of what was added alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from llamarl.engine.block_manager import BlockManager
from llamarl.engine.expert_record import Experts
from llamarl.engine.sequence import Sequence as TokenSequence

__all__ = ["Chunk", "Member", "Prompt", "Scheduler", "StepPlan"]

PromptKey = tuple[int, tuple[int, ...]]
"""Prompt index and tokens: sequences that agree in both share the prompt's cache."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt in the cache, on behalf of the members that have it."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    running: list[Member] = field(default_factory=list)
    """Members in the running batch that have this prompt, forked or not."""
    end_state: object = None
    """What the model runner keeps of the last position, so that late members can still sample from it."""
    experts: list[Experts] = field(default_factory=list)
    """Of its tokens from the first on, where they are noted; of all at once if its first blocks are a sequence's."""

    @property
    def complete(self) -> bool:
        return self.num_computed == len(self.tokens)


@dataclass(slots=True, eq=False)
class Member:
    """A sequence inside the engine."""

    order: int
    """Admission number: its place in every queue, for good."""
    sequence: TokenSequence
    key: PromptKey
    """What makes two sequences share a prompt."""
    prompt: Prompt | None = None
    """None while waiting."""
    forked: bool = False
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose K and V lie in ``blocks``."""

    @property
    def num_pending(self) -> int:
        """Tokens known but not yet in the cache."""
        sequence = self.sequence
        return len(sequence.prompt_tokens) + len(sequence.tokens) - self.num_computed


@dataclass(slots=True)
class Chunk:
    """Tokens of one sequence or prompt that enter the cache in this step."""

    tokens: list[int]
    start: int
    """Position of the first one."""
    blocks: list[int]
    """The owner's whole block table, as of this step."""
    decode: bool
    """One token on top of a sequence that samples in every step."""
    owner: Member | Prompt | None = None
    """Whose tokens they are."""


@dataclass(slots=True)
class StepPlan:
    """One engine step."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    """Block copies (source, target) to make before anything is written or zeroed: a source may be fresh by then."""
    fresh: list[int] = field(default_factory=list)
    """Blocks taken from the free list; they may still hold what their last owner left."""
    chunks: list[Chunk] = field(default_factory=list)
    """Decodes first."""
    samples: list[tuple[Member, int | Prompt]] = field(default_factory=list)
    """Members that sample in this step, and from where: the last token of chunk i, or the end of a
    prompt computed earlier."""
    completed: list[tuple[Prompt, int]] = field(default_factory=list)
    """Prompts whose end is the last token of chunk i."""

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


class Scheduler:
    """The queues and the block tables."""

    def __init__(self, *, num_blocks: int, block_size: int, max_batch_tokens: int, max_sequences: int) -> None:
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._next_order = 0
        self.prompt_tokens_computed = 0
        self.prompt_tokens_shared = 0
        self.num_preemptions = 0
        self._reset()

    def _reset(self) -> None:
        self.blocks = BlockManager(self._num_blocks, self._block_size)
        self.waiting: deque[Member] = deque()
        self.running: list[Member] = []
        self._prompts: dict[PromptKey, Prompt] = {}
        self._unforked: dict[PromptKey, int] = {}

    def max_blocks_of(self, sequence: TokenSequence) -> int:
        """Blocks a sequence needs to run alone: its longest form, and the prompt's partial block
        beside its own copy."""
        longest = len(sequence.prompt_tokens) + max(sequence.params.max_new_tokens, len(sequence.tokens))
        return self.blocks.blocks_for(longest) + (1 if len(sequence.prompt_tokens) % self._block_size else 0)

    def check(self, sequence: TokenSequence) -> None:
        """Raise ValueError if the sequence could not run even alone."""
        if not sequence.prompt_tokens:
            raise ValueError(f"prompt {sequence.prompt_index} is empty: a prompt needs at least one token")
        if self.max_blocks_of(sequence) > self._num_blocks:
            raise ValueError(
                f"prompt {sequence.prompt_index}: {len(sequence.prompt_tokens)} prompt tokens and max_new_tokens="
                f"{sequence.params.max_new_tokens} need {self.max_blocks_of(sequence)} KV blocks of {self._block_size} tokens, "
                f"the cache has {self._num_blocks}: raise generator.engine.kv_cache_bytes or lower max_new_tokens"
            )

    def add(self, sequence: TokenSequence) -> Member:
        """Put a sequence at the end of the line.

        Raises:
            ValueError: It could not run even alone.
        """
        self.check(sequence)
        key = (sequence.prompt_index, tuple(sequence.prompt_tokens))
        if self.waiting and self.waiting[-1].key == key:
            key = self.waiting[-1].key  # one for the group: found without a look at its tokens
        member = Member(self._next_order, sequence, key)
        self._next_order += 1
        self._unforked[key] = self._unforked.get(key, 0) + 1
        self.waiting.append(member)
        return member

    def remove(self, member: Member) -> None:
        """Take a member out (finished or cancelled)."""
        if not member.forked:
            self._count_forked(member.key)
        if member.prompt is None:
            self.waiting.remove(member)
        else:
            self.running.remove(member)
            self._leave(member)

    def take_all(self) -> list[TokenSequence]:
        """Empty the engine; the sequences come back in admission order."""
        members = sorted([*self.running, *self.waiting], key=lambda m: m.order)
        self._reset()
        return [member.sequence for member in members]

    def restart_all(self) -> None:
        """Forget the whole cache; every running sequence is computed again, in admission order."""
        members = sorted([*self.running, *self.waiting], key=lambda m: m.order)
        self._reset()
        for member in members:
            member.prompt, member.forked, member.blocks, member.num_computed = None, False, [], 0
            self._unforked[member.key] = self._unforked.get(member.key, 0) + 1
            self.waiting.append(member)

    def schedule(self) -> StepPlan:
        """Decide the next step, and account for it as done."""
        plan, preemptions = StepPlan(), self.num_preemptions
        budget = self.max_batch_tokens
        self._decode(plan, budget)
        budget -= len(plan.chunks)
        scheduled = {member.order for member, _ in plan.samples}
        for member in list(self.running):
            if budget <= 0:
                return plan
            if member.prompt is not None and member.order not in scheduled:
                budget -= self._advance(member, budget, plan, scheduled)
        if self.waiting and self.num_preemptions == preemptions:
            self._admit_waiting(budget, plan, scheduled)
        return plan

    def _decode(self, plan: StepPlan, most: int) -> None:
        """One token for each decoding sequence, oldest first, for at most so many."""
        for member in list(self.running):
            # a loop over a copy: an older member may preempt this one before its turn
            if len(plan.chunks) == most:
                return
            if not _decodes(member):
                continue
            start, tokens = member.num_computed, member.sequence.tokens
            # what it writes into is its own and has room, unless it is its first token since it forked or a block's first
            if len(tokens) == 1 or start % self._block_size == 0:
                if not self._make_room(member, 1, plan, scheduled=set()):
                    continue
            member.num_computed += 1
            plan.samples.append((member, len(plan.chunks)))
            plan.chunks.append(Chunk(tokens[-1:], start, member.blocks, True, member))

    # -- admission ------------------------------------------------------------------------------------------------

    def _admit_waiting(self, budget: int, plan: StepPlan, scheduled: set[int]) -> None:
        available = self.blocks.num_free - self._blocks_promised()
        while budget > 0 and self.waiting and len(self.running) < self.max_sequences:
            member = self.waiting[0]
            need = self._blocks_to_start(member)
            # half a block for each running sequence is kept free: admitting to the brim would preempt at once
            if need + len(self.running) // 2 > available:
                available += self._drop_idle_prompts(keep=member.key)
                need = self._blocks_to_start(member)
            if self.running and need + len(self.running) // 2 > available:
                return
            available -= need
            self.waiting.popleft()
            self._admit(member)
            budget -= self._advance(member, budget, plan, scheduled)

    def _admit(self, member: Member) -> None:
        prompt = self._prompts.get(member.key)
        if prompt is None:
            prompt = self._prompts[member.key] = Prompt(member.sequence.prompt_tokens)
            sibling = next((m for m in self.running if m.forked and m.key == member.key), None)
            if sibling is not None:  # the group's prompt is gone, but its full blocks live on in those that forked
                full = (len(prompt.tokens) - 1) // self._block_size
                prompt.blocks = sibling.blocks[:full]
                self.blocks.share(prompt.blocks)
                prompt.num_computed = full * self._block_size
                if sibling.sequence.experts is not None and sibling.sequence.experts.prompt is not None:
                    prompt.experts = [sibling.sequence.experts.prompt]
                self.prompt_tokens_shared += prompt.num_computed
        else:
            self.prompt_tokens_shared += len(prompt.tokens)
        member.prompt = prompt
        prompt.running.append(member)
        self.running.append(member)

    def _blocks_to_start(self, member: Member) -> int:
        """New blocks until the member has decoded one token."""
        P = len(member.sequence.prompt_tokens)
        own = self.blocks.blocks_for(member.sequence.num_tokens + 1) - P // self._block_size
        prompt = self._prompts.get(member.key)
        return own + (self.blocks.blocks_for(P) if prompt is None else 0)

    def _blocks_promised(self) -> int:
        """New blocks that running members still need until each has decoded one token."""
        promised = 0
        for prompt in self._prompts.values():
            promised += self.blocks.blocks_for(len(prompt.tokens)) - len(prompt.blocks)
        for member in self.running:
            need = self.blocks.blocks_for(member.sequence.num_tokens + 1)
            if member.forked:
                promised += max(0, need - len(member.blocks)) + self._must_copy(member)
            else:
                promised += need - len(member.sequence.prompt_tokens) // self._block_size
        return promised

    # -- progress of one member -----------------------------------------------------------------------------------

    def _advance(self, member: Member, budget: int, plan: StepPlan, scheduled: set[int]) -> int:
        """Prompt chunk, fork, or chunk of carried tokens for one member; returns the tokens it took."""
        prompt = member.prompt
        assert prompt is not None
        used = 0
        if not member.forked:
            if not prompt.complete:
                if any(chunk.blocks is prompt.blocks for chunk in plan.chunks):
                    return 0  # another member of the group has advanced it in this step
                used = min(budget, len(prompt.tokens) - prompt.num_computed)
                if not self._make_room_for_prompt(member, used, plan, scheduled):
                    return 0
                start = prompt.num_computed
                plan.chunks.append(Chunk(prompt.tokens[start : start + used], start, prompt.blocks, False, prompt))
                prompt.num_computed += used
                self.prompt_tokens_computed += used
                if prompt.complete:
                    plan.completed.append((prompt, len(plan.chunks) - 1))
                else:
                    return used
            self._fork(member, plan, scheduled)
            if any(done is prompt for done, _ in plan.completed):
                return used  # a copy of the partial block would miss what this very step writes into it
        n = min(budget, member.num_pending)
        if n == 0 or not self._make_room(member, n, plan, scheduled):
            return 0
        return self._compute(member, n, plan)

    def _fork(self, member: Member, plan: StepPlan, scheduled: set[int]) -> None:
        prompt = member.prompt
        assert prompt is not None and prompt.complete
        member.blocks = list(prompt.blocks)
        self.blocks.share(member.blocks)
        member.num_computed = len(prompt.tokens)
        member.forked = True
        scheduled.add(member.order)
        if member.num_pending == 0:
            chunk = next((i for done, i in plan.completed if done is prompt), None)
            plan.samples.append((member, prompt if chunk is None else chunk))
        self._count_forked(member.key)

    def _compute(self, member: Member, n: int, plan: StepPlan) -> int:
        sequence, start = member.sequence, member.num_computed
        first = start - len(sequence.prompt_tokens)
        tokens = sequence.tokens[first : first + n]
        member.num_computed += n
        plan.chunks.append(Chunk(tokens, start, member.blocks, False, member))
        if member.num_pending == 0:
            plan.samples.append((member, len(plan.chunks) - 1))
        return n

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _must_copy(self, member: Member) -> bool:
        """Whether the block that the member writes next has other holders: once it has written, none."""
        if member.num_computed > len(member.sequence.prompt_tokens):
            return False
        block, offset = divmod(member.num_computed, self._block_size)
        return offset != 0 and self.blocks.holders(member.blocks[block]) > 1

    def _make_room(self, member: Member, n: int, plan: StepPlan, scheduled: set[int]) -> bool:
        """Blocks for the next ``n`` tokens of a member, all its own from the first one written. False: it must wait."""
        start, size = member.num_computed, self._block_size
        while True:
            shared = self._must_copy(member)
            need = self.blocks.blocks_for(start + n) - len(member.blocks) + shared
            if need <= self.blocks.num_free:
                break
            if not self._preempt_younger(member, scheduled):
                return False
        if shared:
            source = member.blocks[start // size]
            target = self.blocks.allocate()  # the copy overwrites all of it
            self.blocks.release([source])
            member.blocks[start // size] = target
            plan.copies.append((source, target))
            need -= 1
        self._extend(member.blocks, need, plan)
        return True

    def _make_room_for_prompt(self, member: Member, n: int, plan: StepPlan, scheduled: set[int]) -> bool:
        prompt = member.prompt
        assert prompt is not None
        need = self.blocks.blocks_for(prompt.num_computed + n) - len(prompt.blocks)
        while need > self.blocks.num_free:
            if not self._preempt_younger(member, scheduled):
                return False
        self._extend(prompt.blocks, need, plan)
        return True

    def _extend(self, table: list[int], count: int, plan: StepPlan) -> None:
        for _ in range(count):
            block = self.blocks.allocate()
            table.append(block)
            plan.fresh.append(block)

    def _drop_idle_prompts(self, keep: PromptKey | None = None) -> int:
        """Free prompts that are held for waiting members only; returns how many blocks that frees."""
        before = self.blocks.num_free
        for key, prompt in list(self._prompts.items()):
            if not prompt.running and key != keep:
                self.blocks.release(prompt.blocks)
                del self._prompts[key]
        return self.blocks.num_free - before

    def _preempt_younger(self, member: Member, scheduled: set[int]) -> bool:
        """Free blocks: idle prompts first, then the youngest running member if it is younger and
        not in this step's plan."""
        if self._drop_idle_prompts():
            return True
        victim = self.running[-1]
        if victim is member or victim.order in scheduled:
            return False
        self.running.pop()
        if victim.forked:
            self._unforked[victim.key] = self._unforked.get(victim.key, 0) + 1
        self._leave(victim)
        self.waiting.appendleft(victim)
        self.num_preemptions += 1
        return True

    def _leave(self, member: Member) -> None:
        """Release what a member holds, and its prompt if nobody needs it any more."""
        prompt = member.prompt
        assert prompt is not None
        self.blocks.release(member.blocks)
        prompt.running.remove(member)
        if not prompt.running and member.key not in self._unforked and self._prompts.get(member.key) is prompt:
            self.blocks.release(prompt.blocks)
            del self._prompts[member.key]
        member.prompt, member.forked, member.blocks, member.num_computed = None, False, [], 0

    def _count_forked(self, key: PromptKey) -> None:
        """One member less that will need the prompt's own blocks; the last one inherits them."""
        self._unforked[key] -= 1
        if self._unforked[key] == 0:
            del self._unforked[key]
            prompt = self._prompts.get(key)
            if prompt is not None and (prompt.complete or not prompt.running):
                self.blocks.release(prompt.blocks)
                prompt.blocks = []
                del self._prompts[key]


def _decodes(member: Member) -> bool:
    return member.forked and member.num_pending == 1
