"""The native engine: continuous batching on the ``transformers`` module, with our scheduler, KV cache and sampler.

    step():  Scheduler.schedule ─▶ ModelRunner.execute ─▶ sample ─▶ append, stop checks ─▶ ended sequences

Everything that decides a bit of the output is in the sequences and the order in which they were added; nothing survives
``suspend``, so an engine that resumes carried sequences equals a new one that was given the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from llamarl.engine.cut_sampler import sample_over_ranks
from llamarl.engine.expert_record import ExpertRecord, Experts, joined
from llamarl.engine.linears import FusedLinear
from llamarl.engine.model_runner import ModelRunner
from llamarl.engine.ranks import EngineRanks
from llamarl.engine.sampler import Draws, is_filtered, sample
from llamarl.engine.scheduler import Member, Prompt, Scheduler, StepPlan
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.engine.stop_strings import StopStrings
from llamarl.models.parallel import ParallelLayout
from llamarl.models.repeatable import suspended
from llamarl.settings.engine import EngineConfig
from llamarl.types import FinishReason

__all__ = ["NativeEngine"]


class NativeEngine:
    """Implements :class:`llamarl.engine.base.Engine`, and ``AdoptsWeights`` and ``Parkable`` beside it.

    Args:
        model_path: Hugging Face folder, or ``bundled:NAME``.
        tokenizer: Needed for stop strings only.
        quantization: ``none`` serves the weights in ``config.dtype``; ``int8`` (CPU) and ``fp8``
            (CUDA) serve linear layers quantized from them, anew at each version.
        eos_token_ids: Tokens that end every response; None takes those of the model's generation config.
        layout: This rank's place among the tensor-parallel ranks of the engine; None is a single
            rank. All ranks make the same calls with the same sequences, in the same order, and get
            the same tokens.
        note_experts: Write down in each sequence which experts of a sparse model computed its
            tokens (``Sequence.experts``).
        parked: Come up as ``park`` leaves the engine; the KV cache is then never held beside what else is being set up.
    """

    def __init__(
        self,
        model_path: str | Path,
        config: EngineConfig,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | str = "cpu",
        quantization: str = "none",
        eos_token_ids: Iterable[int] | None = None,
        layout: ParallelLayout | None = None,
        parked: bool = False,
        note_experts: bool = False,
    ) -> None:
        self.config = config
        self._stops = StopStrings(tokenizer)
        self._ranks = EngineRanks(layout)
        self._runner = ModelRunner(
            model_path,
            config,
            device=device,
            quantization=quantization,
            layout=layout,
            parked=parked,
            note_experts=note_experts,
        )
        self._scheduler = Scheduler(
            num_blocks=self._runner.num_blocks,
            block_size=self._runner.block_size,
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_sequences,
        )
        self._eos = frozenset(_eos_of(self._runner.model) if eos_token_ids is None else eos_token_ids)
        self._policy_version = 0
        self._members: dict[int, Member] = {}
        self._reset_counters()

    # -- the Engine protocol --------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def has_work(self) -> bool:
        return bool(self._members)

    def add(self, sequences: Sequence[TokenSequence]) -> None:
        """Admit sequences in order; all of them, or on an error none."""
        for sequence in sequences:
            self._check(sequence)
        for sequence in sequences:
            member = self._scheduler.add(sequence)
            self._members[member.order] = member

    def step(self) -> list[TokenSequence]:
        plan = self._scheduler.schedule()
        if not plan.chunks and not plan.samples:
            assert not self._members, "the scheduler made no progress"
            return []
        logits = self._runner.execute(plan)
        self._count_step(plan.num_tokens)
        if self._runner.notes_experts:
            _note_experts(plan, self._runner.chosen_experts(plan))
        rows = [member for member, _ in plan.samples]
        ended = self._append(rows, self._sample(rows, logits)) if rows else []
        return [member.sequence for member in sorted(ended, key=lambda m: m.order)]

    def suspend(self) -> list[TokenSequence]:
        self._members.clear()
        return self._scheduler.take_all()

    def parameters_for_sync(self) -> Mapping[str, torch.Tensor]:
        return self._runner.parameters_for_sync()

    def can_adopt(self, dtypes: Mapping[str, str]) -> bool:
        """Whether ``adopt`` takes whole parameters of these names and types."""
        return self._runner.can_adopt(dtypes)

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compute with these parameters in place of own copies; the engine only reads them."""
        self._runner.adopt(tensors)

    def weights_updated(self, version: int) -> None:
        """Serve ``version`` from the next step on. Running sequences keep their tokens; their KV is recomputed."""
        self._policy_version = version
        self._runner.weights_updated()
        self._scheduler.restart_all()

    def park(self) -> int:
        """Give the memory of weights and KV cache back; returns its bytes.

        Raises:
            ValueError: A sequence is still inside; it would lose its cache.
        """
        if self.has_work:
            raise ValueError(
                f"{len(self._members)} unfinished sequences are in the engine: suspend them before parking"
            )
        return self._runner.park()

    def unpark(self) -> None:
        """Take the memory again; ``weights_updated`` must follow before the next step."""
        self._runner.unpark()

    def stats(self) -> Mapping[str, float]:
        """Counters since the last call, and the state of the KV cache now."""
        scheduler, runner = self._scheduler, self._runner
        result = {
            "steps": self._steps,
            "tokens_computed": self._tokens_computed,
            "tokens_sampled": self._tokens_sampled,
            "prompt_tokens_computed": scheduler.prompt_tokens_computed,
            "prompt_tokens_shared": scheduler.prompt_tokens_shared,
            "preemptions": scheduler.num_preemptions,
            "kv_bytes_used": scheduler.blocks.num_used * runner.block_bytes,
            "kv_bytes_used_max": self._max_blocks_used * runner.block_bytes,
            "kv_bytes_limit": runner.cache_bytes,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
        }
        self._reset_counters()
        return result

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache that one token takes."""
        return self._runner.token_bytes

    @property
    def served_linears(self) -> Sequence[FusedLinear]:
        """The linear layers as they are computed with; a benchmark measures them alone."""
        return self._runner.linears

    # -- inside ---------------------------------------------------------------------------------------------------

    def _reset_counters(self) -> None:
        self._steps = self._tokens_computed = self._tokens_sampled = 0
        self._max_blocks_used = self._scheduler.blocks.num_used
        self._scheduler.prompt_tokens_computed = self._scheduler.prompt_tokens_shared = 0
        self._scheduler.num_preemptions = 0

    def _count_step(self, num_tokens: int) -> None:
        self._steps += 1
        self._tokens_computed += num_tokens
        self._max_blocks_used = max(self._max_blocks_used, self._scheduler.blocks.num_used)

    def _check(self, sequence: TokenSequence) -> None:
        where = f"sequence {sequence.prompt_index}/{sequence.sample_index}"
        params = sequence.params
        if params.max_new_tokens <= len(sequence.tokens):
            raise ValueError(
                f"{where} has {len(sequence.tokens)} tokens, max_new_tokens={params.max_new_tokens} leaves none"
            )
        longest = len(sequence.prompt_tokens) + params.max_new_tokens
        if longest > self._runner.context_length:
            raise ValueError(
                f"{where}: {len(sequence.prompt_tokens)} prompt tokens and max_new_tokens={params.max_new_tokens} exceed the "
                f"model's context of {self._runner.context_length} tokens: shorten the prompt or lower max_new_tokens"
            )
        vocabulary = self._runner.model_config.vocab_size
        for tokens in filter(None, (sequence.prompt_tokens, sequence.tokens)):
            if not 0 <= min(tokens) <= max(tokens) < vocabulary:  # at C's speed: there may be 100,000
                strange = next(token for token in tokens if not 0 <= token < vocabulary)
                raise ValueError(f"{where}: token {strange} is not in the model's vocabulary of {vocabulary}")
        self._stops.check(sequence, where)
        if self._ranks.size > 1 and is_filtered(params):
            raise ValueError(
                f"{where}: top_k, top_p and min_p are for an engine of one rank, as eval and generate have"
            )
        self._scheduler.check(sequence)

    def _sample(self, rows: list[Member], logits: torch.Tensor) -> Draws:
        sequences = [member.sequence for member in rows]
        positions = [len(sequence.tokens) for sequence in sequences]
        params, seeds = [s.params for s in sequences], [s.seed for s in sequences]
        with suspended(self._runner.device):
            if self._ranks.size == 1:
                return sample(logits, params, seeds, positions)
            vocabulary = self._runner.model_config.vocab_size
            return sample_over_ranks(logits, params, seeds, positions, ranks=self._ranks, vocabulary=vocabulary)

    def _append(self, rows: list[Member], draws: Draws) -> list[Member]:
        """Give the sequences what was drawn for them; returns those that have ended."""
        ended = []
        for member, token, logprob, ok in zip(rows, draws.tokens, draws.logprobs, draws.ok, strict=True):
            if not ok:
                self._fail(member)
                ended.append(member)
                continue
            sequence = member.sequence
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.policy_versions.append(self._policy_version)
            sequence.loss_mask.append(True)
            self._tokens_sampled += 1
            if (reason := self._finish_reason(sequence)) is not None:
                self._finish(member, reason)
                ended.append(member)
        return ended

    def _fail(self, member: Member) -> None:
        at = f"token {len(member.sequence.tokens)} under policy version {self._policy_version}"
        member.sequence.error = f"logits are not finite at {at}"
        self._finish(member, "error")

    def _finish_reason(self, sequence: TokenSequence) -> FinishReason | None:
        params, token = sequence.params, sequence.tokens[-1]
        if token in self._eos or token in params.stop_token_ids:
            return "stop"
        if self._stops.ended(sequence):
            return "stop"
        return "length" if len(sequence.tokens) >= params.max_new_tokens else None

    def _finish(self, member: Member, reason: FinishReason) -> None:
        member.sequence.finish_reason = reason
        del self._members[member.order]
        self._scheduler.remove(member)


def _note_experts(plan: StepPlan, chosen: Sequence[Experts]) -> None:
    """Prompts and sequences get the rows of their own tokens, and who goes on from a whole prompt gets the prompt's.

    Args:
        chosen: Of each chunk of the plan, [its tokens, layers, k].
    """
    for chunk, rows in zip(plan.chunks, chosen, strict=True):
        if isinstance(chunk.owner, Prompt) and sum(map(len, chunk.owner.experts)) <= chunk.start:
            chunk.owner.experts.append(rows)
    members = [chunk.owner for chunk in plan.chunks if isinstance(chunk.owner, Member)]
    for member in [*members, *(member for member, _ in plan.samples)]:
        sequence, prompt = member.sequence, member.prompt
        assert prompt is not None, "it is part of this step"
        if sequence.experts is None:
            sequence.experts = ExpertRecord()
        if sequence.experts.prompt is None:
            sequence.experts.prompt = _of_whole(prompt)
    for chunk, rows in zip(plan.chunks, chosen, strict=True):
        if isinstance(chunk.owner, Member):
            sequence = chunk.owner.sequence
            assert sequence.experts is not None
            start = chunk.start - len(sequence.prompt_tokens)
            if start <= sequence.experts.num_tokens:
                sequence.experts.note(start, rows)


def _of_whole(prompt: Prompt) -> Experts | None:
    if len(prompt.experts) > 1:
        prompt.experts = [joined(prompt.experts)]  # one array for all members
    return prompt.experts[0] if prompt.experts else None


def _eos_of(model: torch.nn.Module) -> list[int]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
