"""Where every sampled token of a run went: the ``tokens/*`` keys close exactly, tick by tick and so over the run. Pure.

    imitated ──▶ trainer                                                rows of data beside what is sampled
    generated ─▶ [carried] ─▶ judged ─┬─▶ failed                        no reward
                in the generator      ├─▶ dropped                       dynamic sampling: no signal, or too old
                                      ├─▶ [spare] ─▶ of a later tick    dynamic sampling: waits in the reward executor
                                      └─▶ trainer ─┬─▶ unused           in no optimizer step
                                                   └─▶ trained          several passes count a token several times: repeated

``carried`` and ``spare`` are stocks at the end of a tick, the others flows of it. What lies between
the executors is no part
of a row: row k holds tick k of each, and the data edges between them have no delay. So for every row::

    generated + imitated + carried before + spare before = trained - repeated + unused + failed + dropped + carried + spare

Each term is counted by who sees the tokens, from the tokens themselves, none as the remainder of the others. Tokens of
evaluations are no part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llamarl.errors import LlamaRLError
from llamarl.types import Group, Score

__all__ = ["TokensLost", "check_ledger", "failed_tokens", "imbalance", "scored_tokens"]

_STOCKS = ("tokens/carried", "tokens/spare")
_OUT = ("tokens/trained", "tokens/unused", "tokens/failed", "tokens/dropped")
_NEEDED = frozenset({"tokens/generated", "tokens/carried", "tokens/failed", "tokens/unused", "tokens/trained"})
"""A job whose executors do not all count has no ledger."""


def scored_tokens(groups: Iterable[Group]) -> int:
    """Sampled tokens of the responses that have a reward."""
    return sum(r.num_sampled for g in groups for r in g.responses if isinstance(r.outcome, Score))


def failed_tokens(groups: Iterable[Group]) -> int:
    """Sampled tokens of the responses that have none."""
    return sum(r.num_sampled for g in groups for r in g.responses if not isinstance(r.outcome, Score))


def imbalance(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> int | None:
    """Tokens that came in and went nowhere (negative: went out and never came in); None where the row has no ledger.

    Args:
        before: The row of the tick before; None for a run's first.
    """
    if not row.keys() >= _NEEDED or (before is not None and "tokens/carried" not in before):
        return None
    came = (
        _of(row, "tokens/generated") + _of(row, "tokens/imitated") + sum(_of(before or {}, stock) for stock in _STOCKS)
    )
    went = sum(_of(row, key) for key in (*_OUT, *_STOCKS)) - _of(row, "tokens/repeated")
    return came - went


class TokensLost(LlamaRLError, AssertionError):
    """Tokens of a tick are nowhere, or counted twice."""


def check_ledger(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
    """Refuse a row that does not close: a token was lost or counted twice, which is an error of llamarl's.

    Raises:
        TokensLost: With every term.
    """
    missing = imbalance(row, before)
    if missing:
        terms = {
            key: _of(row, key) for key in ("tokens/generated", "tokens/imitated", *_OUT, "tokens/repeated", *_STOCKS)
        }
        terms |= {f"{stock} before": _of(before or {}, stock) for stock in _STOCKS}
        listed = ", ".join(f"{key} {value}" for key, value in terms.items())
        raise TokensLost(
            f"the tokens of tick {row.get('step')} do not add up: {missing:+d} of those that came in are nowhere ({listed}). "
            f"An executor of your own that drops groups reports their tokens as tokens/dropped; else this is an error in llamarl: please report it with this line"
        )


def _of(row: Mapping[str, Any], key: str) -> int:
    return int(row.get(key) or 0)
