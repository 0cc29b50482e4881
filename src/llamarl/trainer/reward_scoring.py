"""A frozen classifier's score of many texts: the arithmetic of the reward model executor.

    texts as tokens, in groups that begin alike ─▶ packed micro-batches, what a group has in common once ─▶ a float32 each

Decoders that are known (``model_support.py``) are packed without padding and may lie over an
(fsdp, tp) mesh. Any other model runs transformers' own forward on padded batches of texts of
similar length, on one rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from llamarl.errors import ModelError
from llamarl.models.parallel import make_layout
from llamarl.models.reward_model import is_packed, last_token, load_reward_model
from llamarl.settings.trainer import TrainerConfig
from llamarl.trainer.batch import TrainingSequence
from llamarl.trainer.building import build_reward_model
from llamarl.trainer.computes import Computes
from llamarl.trainer.shared_prompts import row_attention

__all__ = ["RewardScorer", "distinct", "padded_batches"]

_KEY = "reward_model.path"
_TOLERANCE = 2e-3
"""Between the two ways to compute a score, as a share of the largest in magnitude, or of 1; in
float32 rounding gives some 1e-6."""


class RewardScorer:
    """One rank's part of a classifier that never changes."""

    def __init__(
        self,
        path: str | Path,
        *,
        fsdp: int = 1,
        tp: int = 1,
        dtype: torch.dtype = torch.float32,
        max_tokens: int = 8192,
        device: str = "cpu",
    ) -> None:
        """
        Args:
            path: Hugging Face folder.
            dtype: Of its weights as computed with.
            max_tokens: Of one forward pass.

        Raises:
            ModelError: It has no single score, does not divide by ``tp``, or is not computed here as transformers does.
            ValueError: ``fsdp * tp`` ranks are not there.
        """
        self.max_tokens, self.device = max_tokens, torch.device(device)
        keys = ("reward_model.fsdp", "reward_model.tp")
        self.layout = make_layout(fsdp=fsdp, tp=tp, device=device, keys=keys)
        self._computes: Computes | None = None
        self._whole: PreTrainedModel | None = None
        if is_packed(path):
            attention, share_prompts = row_attention(TrainerConfig(), str(self.device), path)
            model = build_reward_model(
                path, self.layout, dtype=dtype, attention=attention, device=self.device, key=_KEY
            ).module
            self._computes = Computes(model, self.layout, device, max_tokens=max_tokens, share_prompts=share_prompts)
            self.config = model.model.config
            self._prove(path, dtype)
        elif self.layout.num_ranks > 1:
            raise ModelError.at(_KEY, f": {path} lies on one rank only: set reward_model.fsdp and tp to 1")
        else:
            self._whole = load_reward_model(path, dtype=dtype, device=device, attention=None, key=_KEY)
            self.config = self._whole.config

    @property
    def context_length(self) -> int | None:
        """Tokens that it can read at once; None where its configuration does not say."""
        length = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return None if length is None else int(length)

    @torch.no_grad()
    def score(self, texts: Sequence[Sequence[list[int]]], types: Sequence[Sequence[list[int]]] = ()) -> list[float]:
        """Scores of this rank's texts, in order. All ranks call it, whatever they have.

        Args:
            texts: Group by group: the tokens of each text, at least one. Groups only tell which texts may begin alike.
            types: Of the same shape: which of two joined texts each token is of; empty where the
                model makes no difference.
        """
        # a group's equal texts are computed once: so they have equal scores, to the bit, and no signal between them
        once = [distinct(group) for group in (_joined(texts, types))]
        firsts = [[group[i] for i in places] for group, (places, _) in zip(texts, once, strict=True)]
        if self._computes is not None:
            found = iter(self._score_packed(self._computes, firsts))
        else:
            of_firsts = [[group[i] for i in places] for group, (places, _) in zip(types, once, strict=False)]
            flat = [text for group in firsts for text in group], [one for group in of_firsts for one in group]
            found = iter(self._score_padded(*flat))
        scores: list[float] = []
        for places, which in once:
            of_group = [next(found) for _ in places]
            scores += [of_group[i] for i in which]
        return scores

    def _score_packed(self, computes: Computes, texts: Sequence[Sequence[list[int]]]) -> list[float]:
        sequences = _sequences(texts, computes.module.model)
        packed = computes.pack(sequences)
        scores = [0.0] * len(sequences)
        for one, values in zip(packed, computes.outputs(packed), strict=True):
            for i, score in zip(one.items, values.tolist(), strict=True):
                scores[i] = score
        return scores

    def _score_padded(self, texts: Sequence[list[int]], types: Sequence[list[int]]) -> list[float]:
        assert self._whole is not None
        padding = self._whole.config.get_text_config().pad_token_id
        scores = [0.0] * len(texts)
        for items in padded_batches([len(text) for text in texts], self.max_tokens if padding is not None else 1):
            given = {"input_ids": self._rows([texts[i] for i in items], padding or 0)}
            given["attention_mask"] = self._rows([[1] * len(texts[i]) for i in items], 0)
            if types:
                given["token_type_ids"] = self._rows([types[i] for i in items], 0)
            logits = self._whole(**given).logits
            for i, score in zip(items, logits[:, 0].float().tolist(), strict=True):
                scores[i] = score
        return scores

    def _rows(self, rows: Sequence[list[int]], padding: int) -> Tensor:
        longest = max(map(len, rows))
        return torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows], device=self.device)

    def _prove(self, path: str | Path, dtype: torch.dtype) -> None:
        """Packed scores of a few made-up texts against transformers' own forward, one text at a
        time; one rank, float32. With its plain attention: what transformers 5.17 takes by itself
        leaves out Gemma 2's soft caps.

        Raises:
            ModelError: They differ.
        """
        if self.layout.num_ranks > 1 or dtype != torch.float32:
            return
        tokens = min(self.config.get_text_config().vocab_size, 97)
        texts = [[[(5 + 7 * i + 3 * j * j) % tokens for j in range(4 + 3 * i)] for i in range(3)]]
        texts[0].append([*texts[0][0], *texts[0][1]])
        library = load_reward_model(path, dtype=dtype, device=self.device, attention="eager", key=_KEY)
        with torch.no_grad():
            true = [float(library(torch.tensor([text], device=self.device)).logits[0, 0]) for text in texts[0]]
        ours = self.score(texts)
        gap = max(abs(a - b) for a, b in zip(true, ours, strict=True)) / max(1.0, *map(abs, true))
        if not gap <= _TOLERANCE:
            raise ModelError.at(
                _KEY,
                f": {os.fspath(path)} is not computed here as transformers computes it: scores differ by {gap:.3g}",
            )


def _sequences(texts: Sequence[Sequence[list[int]]], model: PreTrainedModel) -> list[TrainingSequence]:
    """One position each: where the score is read. What the texts of a group have in common at their
    start is their prompt."""
    found = []
    for g, group in enumerate(texts):
        ends = [last_token(text, model.config) + 1 for text in group]
        cut = [text[:end] for text, end in zip(group, ends, strict=True)]
        common = min(len(os.path.commonprefix(cut)), min(map(len, cut)) - 1) if cut else 0
        for i, tokens in enumerate(cut):
            # texts that differ in their first token have nothing in common: each is a group of its own
            number, prompt = (g * 1_000_003, common) if common > 0 else (g * 1_000_003 + i + 1, 1)
            found.append(
                TrainingSequence(
                    tokens=np.array(tokens, np.int64),
                    positions=np.array([len(tokens) - 1]),
                    targets=np.zeros(1, np.int64),
                    behavior_logprobs=np.zeros(1, np.float32),
                    policy_versions=np.zeros(1, np.int64),
                    advantage=0.0,
                    group=number,
                    num_prompt=prompt,
                )
            )
    return found


def _joined(texts: Sequence[Sequence[list[int]]], types: Sequence[Sequence[list[int]]]) -> list[list[tuple[int, ...]]]:
    """Everything that a score depends on, text by text."""
    if not types:
        return [[tuple(text) for text in group] for group in texts]
    pairs = zip(texts, types, strict=True)
    return [[(*text, *kinds) for text, kinds in zip(group, of_group, strict=True)] for group, of_group in pairs]


def distinct(texts: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """Places of the first of each kind of text, and for every text which of those it equals."""
    firsts: dict[tuple[int, ...], int] = {}
    which = [firsts.setdefault(text, len(firsts)) for text in texts]
    return [which.index(i) for i in range(len(firsts))], which


def padded_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Texts of similar length together, at most ``max_tokens`` with their padding: the shortest
    first; a longer one is alone."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[i] <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
