"""From scored groups to micro-batches: NumPy until the last line, which makes tensors.

    groups ──make_sequences──▶ TrainingSequence (advantage, weight, history) ──pack──▶ Microbatch (tensors, no padding)

Only positions that predict a trained token reach the output layer: with P prompt tokens, response token j (position
P + j) is predicted at position P + j - 1. What follows a response's last trained token is not computed at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llamarl.algorithms.advantages import compute_advantages
from llamarl.models.attention import PackedSequences
from llamarl.models.packing import for_several_at_once, pack, shared_units
from llamarl.models.parallel import ParallelLayout
from llamarl.models.transfer import to_device
from llamarl.settings.algorithms import AlgorithmConfig, TermWeights
from llamarl.trainer.context_parallel import ContextRanks, OwnTokens, RowOverRanks, cut_row
from llamarl.trainer.credit import response_reward, reward_parts, standardize, token_advantages
from llamarl.trainer.shared_prompts import SharedPrompts
from llamarl.types import DEMONSTRATIONS, Group, Response, Score

__all__ = [
    "Microbatch",
    "TrainingSequence",
    "make_microbatch",
    "make_sequences",
    "pack_sequences",
    "token_weight",
    "trainable",
    "training_sequence",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """One response that trains. L input tokens, of which T positions predict a trained token."""

    tokens: npt.NDArray[np.int64]
    """[L] prompt and response up to the position that predicts the last trained token."""
    positions: npt.NDArray[np.int64]
    """[T] indices into ``tokens`` whose next token is trained, ascending."""
    targets: npt.NDArray[np.int64]
    """[T] the trained tokens."""
    proximal_logprobs: npt.NDArray[np.float32] | None = None
    """[T] under the weights before the tick's first update; None where nobody asks."""
    behavior_logprobs: npt.NDArray[np.float32]
    """[T]"""
    policy_versions: npt.NDArray[np.int64]
    """[T]; empty where no version of the policy sampled them, but another model."""
    advantage: float
    reward: float = 0.0
    """Of the response, as its group's baseline sees it."""
    group: int
    """Index of its group among this rank's."""
    sample: int = 0
    """Its place in its group (``Response.sample_index``)."""
    num_prompt: int
    """Prompt tokens at the start of ``tokens``."""
    token_advantages: npt.NDArray[np.float64] | None = None
    """[T] where tokens differ; None where each has ``advantage``."""
    reference_logprobs: npt.NDArray[np.float32] | None = None
    """[T] where a reference executor has seen the response."""
    top_tokens: npt.NDArray[np.int64] | None = None
    """[T, k] where a teacher has named its likeliest tokens in each one's place."""
    top_logprobs: npt.NDArray[np.float32] | None = None
    """[T, k] what the teacher says of them."""
    terms: TermWeights = TermWeights(rl=1.0)
    """Of each of its tokens."""
    experts: npt.NDArray[np.unsignedinteger[Any]] | None = None
    """[L, sparse layers, k] that computed ``tokens`` in the generator; None where nobody noted them."""

    @classmethod
    def to_score(
        cls,
        prompt: Sequence[int],
        response: Sequence[int],
        *,
        group: int,
        experts: npt.NDArray[np.unsignedinteger[Any]] | None = None,
    ) -> TrainingSequence:
        """A response whose log-probs are wanted and nothing else: every token of it, no history, no advantage.

        Args:
            experts: Of prompt and response, [P + R, sparse layers, k], where they are known.
        """
        tokens = np.array([*prompt, *response], np.int64)
        return cls(
            tokens=tokens[:-1],
            positions=np.arange(len(prompt) - 1, len(tokens) - 1),
            targets=tokens[len(prompt) :],
            behavior_logprobs=np.zeros(len(response), np.float32),
            policy_versions=np.zeros(len(response), np.int64),
            advantage=0.0,
            group=group,
            num_prompt=len(prompt),
            experts=None if experts is None else experts[: len(tokens) - 1],
        )

    @property
    def has_signal(self) -> bool:
        """Whether any of its tokens has a term of the loss other than 0."""
        if self.terms.ce or self.terms.kl:
            return True
        return self.advantage != 0.0 if self.token_advantages is None else bool(self.token_advantages.any())


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Sequences laid end to end: N input tokens, T trained tokens, S sequences.

    Under context parallelism what goes into the model (``input_ids`` to ``targets``,
    ``top_tokens`` and ``experts``) is this rank's part, n for N and t for T; all else is of the whole row.
    """

    input_ids: Tensor
    """[1, N] int64."""
    position_ids: Tensor
    """[1, N] int64; each token's position in its own sequence."""
    packed: PackedSequences | SharedPrompts | RowOverRanks
    """Which of the N tokens may see which."""
    positions: Tensor
    """[T] indices into N."""
    targets: Tensor
    """[T] int64."""
    own: OwnTokens | None = None
    """Which part is this rank's; None: the whole row."""
    proximal_logprobs: Tensor | None = None
    """[T] float32; None where nobody asks."""
    behavior_logprobs: Tensor
    """[T] float32."""
    advantages: Tensor
    """[T] float32."""
    weights: Tensor
    """[T] float32: what each token's loss is multiplied by. Over the whole optimizer step they
    average as configured."""
    rl_weights: Tensor | None = None
    """[T] float32, as of ``TermWeights``, and so are the next two; None where no token has that term."""
    ce_weights: Tensor | None = None
    kl_weights: Tensor | None = None
    sequence_ids: Tensor
    """[T] int64, 0 .. S - 1."""
    num_sequences: int
    rewards: Tensor | None = None
    """[S] float32."""
    group_ids: Tensor | None = None
    """[S] int64: the group of each sequence, among this rank's."""
    reference_logprobs: Tensor | None = None
    """[T] float32; None where there is no reference."""
    top_tokens: Tensor | None = None
    """[T, k] int64: the teacher's likeliest; None where none has named them."""
    top_logprobs: Tensor | None = None
    """[T, k] float32."""
    experts: Tensor | None = None
    """[N, sparse layers, k] int16: what the routers are to choose, -1 in the rows of sequences of
    which it is not known. None where they choose themselves."""

    @property
    def num_tokens(self) -> int:
        """Input tokens of sequences that train: N, or 0 for a micro-batch that only keeps step with other ranks."""
        return self.packed.num_tokens if self.num_sequences else 0

    @property
    def num_trained(self) -> int:
        """T."""
        return len(self.weights)


def make_sequences(
    groups: Sequence[Group],
    config: AlgorithmConfig,
    sum_over_ranks: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]] = lambda values: values,
) -> list[TrainingSequence]:
    """The responses that train, in order. Failed responses and those without a trained token are left out.

    Rows to imitate (``DEMONSTRATIONS``) that come beside what was sampled are no part of any baseline: each has
    the term ``ce`` alone, with its outcome's value as its weight.

    Args:
        sum_over_ranks: For advantages that look at the whole step: adds up over the ranks that hold its other groups.

    Raises:
        ValueError: A response was never judged, a trained token has no finite behaviour log-prob,
            or the algorithm needs values or reference log-probs that nobody has put there.
    """
    judged = [(i, group) for i, group in enumerate(groups) if config.imitates or not _is_shown(group)]
    rewards = [np.array([response_reward(r, config) for r in group.responses], np.float64) for _, group in judged]
    sequences = []
    parts = [reward_parts(group.responses) for _, group in judged] if config.advantage == "gdpo" else None
    of_groups = compute_advantages(rewards, config, sum_over_ranks, parts)
    for (index, group), rewarded, advantages in zip(judged, rewards, of_groups, strict=True):
        for response, advantage, reward in zip(group.responses, advantages, rewarded, strict=True):
            if trainable(response, config):
                of_tokens = token_advantages(response, float(advantage), config)
                one = training_sequence(group, response, float(advantage), index, of_tokens)
                sequences.append(dataclasses.replace(one, reward=float(reward), terms=config.term_weights))
    if config.has_critic and config.gae_normalize:
        normal = standardize([s.token_advantages for s in sequences if s.token_advantages is not None], sum_over_ranks)
        sequences = [
            dataclasses.replace(s, token_advantages=a, advantage=float(a.mean()))
            for s, a in zip(sequences, normal, strict=True)
        ]
    for index, group in enumerate(groups):
        if len(judged) < len(groups) and _is_shown(group):
            sequences.extend(_to_imitate(group, index))
    return sequences


def _is_shown(group: Group) -> bool:
    return any(response.sampled_by == DEMONSTRATIONS for response in group.responses)


def _to_imitate(group: Group, index: int) -> Iterator[TrainingSequence]:
    for response in group.responses:
        if isinstance(response.outcome, Score) and response.outcome.value and response.loss_mask.any():
            row = training_sequence(group, response, 0.0, index)
            yield dataclasses.replace(row, terms=TermWeights(ce=response.outcome.value))


def trainable(response: Response, config: AlgorithmConfig) -> bool:
    """Whether a judged response has tokens in the loss."""
    truncated = response.finish_reason == "length" and not config.train_truncated
    return isinstance(response.outcome, Score) and bool(response.loss_mask.any()) and not truncated


def token_weight(config: AlgorithmConfig, *, num_own_tokens: int, num_tokens: int, num_sequences: int) -> float:
    """Weight of each token of one response in the mean over the optimizer step.

    Args:
        num_own_tokens: Trained tokens of this response.
        num_tokens: Trained tokens of the whole step, over all ranks.
        num_sequences: Responses that train in the whole step, over all ranks.
    """
    if config.normalization == "token":
        return 1.0 / num_tokens
    if config.normalization == "sequence":
        return 1.0 / (num_sequences * num_own_tokens)
    return 1.0 / (num_sequences * config.normalization_constant)


def make_microbatch(
    sequences: Sequence[TrainingSequence],
    weights: Sequence[float],
    device: torch.device,
    *,
    share_prompts: bool = False,
    replay: bool = False,
    context: ContextRanks | None = None,
) -> Microbatch:
    """Lay sequences end to end. None gives one input token that trains nothing: a rank must step with the others.

    Args:
        weights: Of each sequence's tokens in the step's mean.
        share_prompts: Neighbours of one group have one prompt between them.
        replay: Routers are to choose the experts that the sequences know.
        context: The ranks over which the row is cut; this one's part is made.
    """
    if context is not None:  # cut where it lies, so that nothing waits for the device
        host = torch.device("cpu")
        return _part_of(
            make_microbatch(sequences, weights, host, share_prompts=share_prompts, replay=replay), context, device
        )
    experts = _known_experts(sequences) if replay else None
    packed, pieces, positions = _lay_row(sequences, share_prompts=share_prompts)
    rows = [sequences[i].tokens[of] for i, of in pieces]
    of_rows = [] if experts is None else [experts[i][of] for i, of in pieces]
    counts = [len(s.targets) for s in sequences]
    named = any(s.top_tokens is not None for s in sequences)

    def tensor(parts: list[npt.NDArray[Any]], dtype: torch.dtype) -> Tensor:
        joined = np.concatenate(parts) if parts else np.zeros(0)
        return to_device(torch.as_tensor(joined).to(dtype=dtype), device)

    def per_token(values: Sequence[float]) -> list[npt.NDArray[Any]]:
        return [np.full(count, value) for count, value in zip(counts, values, strict=bool(counts))]

    def of_term(values: Sequence[float]) -> Tensor | None:
        return tensor(per_token(values), torch.float32) if any(values) else None

    return Microbatch(
        input_ids=tensor([*rows] or [np.zeros(1, dtype=np.int64)], torch.int64)[None],
        position_ids=packed.position_ids(device),
        packed=packed,
        positions=tensor(positions, torch.int64),
        proximal_logprobs=_proximal_logprobs(sequences, device),
        targets=tensor([s.targets for s in sequences], torch.int64),
        behavior_logprobs=tensor([s.behavior_logprobs for s in sequences], torch.float32),
        advantages=tensor(
            [
                np.full(len(s.targets), s.advantage) if s.token_advantages is None else s.token_advantages
                for s in sequences
            ],
            torch.float32,
        ),
        weights=tensor(per_token(weights), torch.float32),
        rl_weights=of_term([s.terms.rl for s in sequences]),
        ce_weights=of_term([s.terms.ce for s in sequences] or [1.0]),  # without a sequence: a loss of no tokens
        kl_weights=of_term([s.terms.kl for s in sequences]),
        sequence_ids=tensor(per_token(range(len(sequences))), torch.int64),
        num_sequences=len(sequences),
        rewards=tensor([np.array([s.reward for s in sequences])], torch.float32),
        group_ids=tensor([np.array([s.group for s in sequences])], torch.int64),
        reference_logprobs=_noted([s.reference_logprobs for s in sequences], sequences, device),
        top_tokens=_noted([s.top_tokens for s in sequences], sequences, device) if named else None,
        top_logprobs=_noted([s.top_logprobs for s in sequences], sequences, device) if named else None,
        experts=tensor(of_rows, torch.int16) if of_rows else None,
    )


def _lay_row(
    sequences: Sequence[TrainingSequence], *, share_prompts: bool
) -> tuple[PackedSequences | SharedPrompts, list[tuple[int, slice]], list[npt.NDArray[np.int64]]]:
    """Which tokens of which sequence the row is made of, piece by piece, and where in it each
    sequence's ``positions`` lie."""
    if not share_prompts or not sequences:
        ends = np.cumsum([0, *([len(s.tokens) for s in sequences] or [1])]).tolist()
        pieces = [(i, slice(None)) for i in range(len(sequences))]
        return PackedSequences.of(ends), pieces, [end + s.positions for end, s in zip(ends, sequences, strict=False)]
    pieces, positions = [], []
    units: list[tuple[int, list[int]]] = []  # prompt tokens, tokens of each response
    start = prompt_start = 0
    for i, sequence in enumerate(sequences):
        prompt, length = sequence.num_prompt, len(sequence.tokens) - sequence.num_prompt
        if not i or sequences[i - 1].group != sequence.group:
            units.append((prompt, []))
            pieces.append((i, slice(None, prompt)))
            prompt_start, start = start, start + prompt
        in_prompt = sequence.positions < prompt
        positions.append(np.where(in_prompt, prompt_start + sequence.positions, start + sequence.positions - prompt))
        pieces.append((i, slice(prompt, None)))
        units[-1][1].append(length)
        start += length
    return SharedPrompts(tuple((prompt, tuple(lengths)) for prompt, lengths in units)), pieces, positions


def _part_of(whole: Microbatch, context: ContextRanks, device: torch.device) -> Microbatch:
    assert not isinstance(whole.packed, RowOverRanks)
    row = RowOverRanks(whole.packed, context)
    own, positions = cut_row(row, whole.positions)
    part = dataclasses.replace(
        whole,
        input_ids=row.own(whole.input_ids[0], fill=0)[None],
        position_ids=row.own(whole.position_ids[0], fill=0)[None],
        packed=row,
        positions=positions,
        targets=whole.targets[own.places],
        top_tokens=None if whole.top_tokens is None else whole.top_tokens[own.places],
        experts=None if whole.experts is None else row.own(whole.experts, fill=-1),
    )
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    tensors: dict[str, Any] = {
        name: to_device(value, device) for name, value in values.items() if isinstance(value, Tensor)
    }
    own = dataclasses.replace(own, places=to_device(own.places, device))
    return dataclasses.replace(part, **tensors, own=own)


def _known_experts(sequences: Sequence[TrainingSequence]) -> list[npt.NDArray[np.int16]] | None:
    """Of each sequence's tokens, -1 throughout where it knows none; None if no sequence does."""
    shape = next((s.experts.shape[1:] for s in sequences if s.experts is not None), None)
    if shape is None:
        return None
    unknown = (np.full((len(s.tokens), *shape), -1, np.int16) for s in sequences)
    return [
        none if s.experts is None else s.experts.astype(np.int16) for s, none in zip(sequences, unknown, strict=True)
    ]


def _noted(
    rows: Sequence[npt.NDArray[Any] | None], sequences: Sequence[TrainingSequence], device: torch.device
) -> Tensor | None:
    """What a reference has noted of every token; rows to imitate that it has not seen, and that have no term of it,
    have 0."""
    if any(row is None and (s.terms.rl or s.terms.kl) for row, s in zip(rows, sequences, strict=True)):
        return None
    like = next((row[:0] for row in rows if row is not None), np.zeros(0, np.float32))
    filled = [
        np.zeros((len(s.targets), *like.shape[1:]), like.dtype) if row is None else row
        for row, s in zip(rows, sequences, strict=True)
    ]
    return to_device(torch.from_numpy(np.concatenate([*filled, like])), device)


def _proximal_logprobs(sequences: Sequence[TrainingSequence], device: torch.device) -> Tensor | None:
    """All of them, or None: a tick computes them for every response or for none."""
    known = [s.proximal_logprobs for s in sequences if s.proximal_logprobs is not None]
    if not known or len(known) < len(sequences):
        return None
    return to_device(torch.from_numpy(np.concatenate(known)), device)


def training_sequence(
    group: Group, response: Response, advantage: float, index: int, of_tokens: npt.NDArray[np.float64] | None = None
) -> TrainingSequence:
    """One trainable response of the ``index``-th group.

    Args:
        of_tokens: [T] advantages of its trained tokens; None where each has ``advantage``.

    Raises:
        ValueError: The prompt is empty, or a trained token has no finite behaviour log-prob, or one above 0.
    """
    trained = np.flatnonzero(response.loss_mask)
    num_prompt = len(group.prompt.tokens)
    where = f"response {response.prompt_index}/{response.sample_index}"
    if num_prompt == 0:
        raise ValueError(f"{where}: its prompt is empty, so nothing predicts its first token")
    behavior = response.behavior_logprobs[trained]
    if (
        not (behavior < 1e-2).all() or not np.isfinite(behavior).all()
    ):  # rounding makes a certain token's little more than 0
        raise ValueError(f"{where}: a trained token has a behaviour log-prob that is not finite, or above 0")
    tokens = np.concatenate([group.prompt.tokens, response.tokens]).astype(np.int64)
    positions = num_prompt + trained - 1
    return TrainingSequence(
        tokens=tokens[: positions[-1] + 1],
        positions=positions.astype(np.int64),
        targets=tokens[positions + 1],
        behavior_logprobs=behavior.astype(np.float32),
        policy_versions=response.policy_versions[[] if response.sampled_by else trained].astype(np.int64),
        advantage=advantage if of_tokens is None else float(of_tokens.mean()),
        group=index,
        sample=response.sample_index,
        num_prompt=num_prompt,
        token_advantages=of_tokens,
        reference_logprobs=None if response.reference_logprobs is None else response.reference_logprobs[trained],
        top_tokens=None if response.top_tokens is None else response.top_tokens[trained].astype(np.int64),
        top_logprobs=None if response.top_logprobs is None else response.top_logprobs[trained],
        experts=_experts(group, response, int(positions[-1]) + 1),
    )


def _experts(group: Group, response: Response, num_tokens: int) -> npt.NDArray[np.unsignedinteger[Any]] | None:
    if group.prompt_experts is None or response.routed_experts is None:
        return None
    return np.concatenate([group.prompt_experts, response.routed_experts])[:num_tokens]


def pack_sequences(
    sequences: Sequence[TrainingSequence],
    *,
    max_tokens: int,
    share_prompts: bool,
    layout: ParallelLayout,
    device: str | torch.device,
    at_once: int = 1,
) -> list[list[int]]:
    """Indices of the sequences of each micro-batch; as many micro-batches on every rank, the
    surplus empty. Pipeline stages, which hold the same sequences, find the same: at least as many
    micro-batches as there are stages, so that each has work at once.

    Args:
        at_once: Micro-batches that a lone rank computes at the same time: at least as many are
            made, if there are as many units, and in an order in which they end together.
    """
    units = [[i] for i in range(len(sequences))]
    if share_prompts:
        prompts = [s.num_prompt for s in sequences]
        responses = [len(s.tokens) - s.num_prompt for s in sequences]
        units = shared_units([s.group for s in sequences], prompts, responses, max_tokens)
    costs = [sum(len(sequences[i].tokens) for i in u) - (len(u) - 1) * sequences[u[0]].num_prompt for u in units]
    packing = pack(costs, max_tokens, min_microbatches=min(max(at_once, layout.pp), len(costs)))
    count = int(layout.max_over_data(torch.tensor(len(packing), device=device)).item())
    if len(packing) < count:
        packing = pack(costs, max_tokens, min_microbatches=count)
    microbatches = [[i for unit in items for i in units[unit]] for items in packing]
    if at_once == 1:
        return microbatches
    of_each = [sum(costs[unit] for unit in items) for items in packing]
    own = [len(s.tokens) - (s.num_prompt if share_prompts else 0) for s in sequences]
    return for_several_at_once(microbatches, of_each, own, at_once)
