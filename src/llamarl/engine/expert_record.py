"""Which experts the engine's routers chose for the tokens of a sequence, kept beside its tokens.

    engine step ─▶ choices of each row, [T, layers, k] ─▶ of prompts: once a prompt, for all who share it
                                                       └▶ of a sequence's own tokens: those that are truly its tokens

A token has the choices of the first pass that computed it, for good: under them the token behind it
was sampled, and its log-prob recorded. Weights that change meanwhile, a preemption or an episode's
next turn compute its cache anew, perhaps through other experts; that changes nothing here.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ExpertRecord", "Experts", "joined", "narrowed", "of_group"]

Experts = npt.NDArray[np.unsignedinteger[Any]]
"""[tokens, sparse layers, k] numbers of experts: uint8, or uint16 where there are more than 256."""


def narrowed(chosen: npt.NDArray[np.int64], num_experts: int) -> Experts:
    """The same numbers in as few bytes as hold each of them."""
    return chosen.astype(np.uint8 if num_experts <= 1 << 8 else np.uint16)


def joined(parts: Sequence[Experts]) -> Experts:
    """Consecutive tokens; at least one part."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(slots=True)
class ExpertRecord:
    """Of one sequence."""

    prompt: Experts | None = None
    """Of its prompt's tokens; None until the prompt has been computed for it."""
    parts: list[Experts] = field(default_factory=list)
    """Of its own tokens, in order, as far as they have been computed."""
    num_tokens: int = field(init=False)
    """Own tokens that have their choices: counted as they come, for each decode step asks, and adds a part."""

    def __post_init__(self) -> None:
        self.num_tokens = sum(map(len, self.parts))

    def note(self, start: int, rows: Experts) -> None:
        """A pass has computed own tokens from the ``start``-th on; those that were computed before
        keep what they have."""
        known = self.num_tokens - start
        assert known >= 0, "a token is computed on top of those before it"
        if known < len(rows):
            self.parts.append(rows[known:])
            self.num_tokens += len(rows) - known

    def rows(self, num_tokens: int) -> Experts | None:
        """[num_tokens, layers, k]; 0 where a token was never put in, as the last one. None where
        nothing was noted at all."""
        if self.prompt is None:
            return None
        found = joined([self.prompt[:0], *self.parts])[:num_tokens]
        missing = np.zeros((num_tokens - len(found), *found.shape[1:]), found.dtype)
        return np.concatenate([found, missing])

    def to_plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        own = joined(self.parts) if self.parts else None
        return {"prompt": _plain(self.prompt), "own": _plain(own)}

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any]) -> ExpertRecord:
        """What ``to_plain`` gave. Raises ValueError for what it does not give."""
        own, prompt = _array(saved["own"]), _array(saved["prompt"])
        if own is not None and (prompt is None or own.shape[1:] != prompt.shape[1:]):
            raise ValueError("experts are noted of other layers than those of the prompt")
        return cls(prompt, [] if own is None else [own])


def of_group(records: Iterable[ExpertRecord | None]) -> Experts | None:
    """Of the prompt that the sequences of a group have in common: what the first one has that has any.

    Members that began under other weights may have had it computed anew; the trainer computes it once, and takes these.
    """
    return next((r.prompt for r in records if r is not None and r.prompt is not None), None)


def _plain(rows: Experts | None) -> dict[str, Any] | None:
    if rows is None:
        return None
    values = base64.b64encode(np.ascontiguousarray(rows).tobytes()).decode("ascii")
    return {"dtype": rows.dtype.name, "shape": list(rows.shape), "values": values}


def _array(saved: Mapping[str, Any] | None) -> Experts | None:
    if saved is None:
        return None
    shape, kind = saved["shape"], saved["dtype"]
    if kind not in ("uint8", "uint16") or len(shape) != 3 or min(shape) < 0:
        raise ValueError(f"experts are noted as {kind!r:.40} of the shape {shape!r:.40}")
    return np.frombuffer(base64.b64decode(saved["values"]), dtype=kind).reshape(shape)
