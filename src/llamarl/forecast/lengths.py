"""How long responses are: one survival curve P(length > t), from which all that the planner asks follows exactly.

A distribution is cut at a limit (the longest response allowed) and kept as an array over whole tokens, so mean, second
moment, expected maximum of a batch and quantiles are finite sums, not approximations of the named law.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamarl.errors import PlanError

__all__ = ["Lengths", "constant", "empirical", "lognormal", "parse_lengths"]

_MAX_LIMIT = 1_048_576


@dataclass(frozen=True, eq=False)
class Lengths:
    """Distribution of a whole number of tokens, 1 .. ``limit``."""

    label: str
    survival: npt.NDArray[np.float64]
    """[limit] P(length > t) for t = 0 .. limit - 1; non-increasing, starts at 1."""

    @property
    def limit(self) -> int:
        """The longest length with a probability above 0."""
        return len(self.survival)

    @property
    def mean(self) -> float:
        """E[length] = sum of P(length > t)."""
        return float(self.survival.sum())

    @property
    def second_moment(self) -> float:
        """E[length^2] = sum of (2 t + 1) P(length > t)."""
        return float(((2.0 * np.arange(self.limit) + 1.0) * self.survival).sum())

    def expected_max(self, count: int) -> float:
        """Mean length of the longest of ``count`` independent responses."""
        if count < 1:
            raise PlanError(f"the longest of {count} responses: give at least 1")
        with np.errstate(divide="ignore"):
            log_cdf = np.log1p(-np.minimum(self.survival, 1.0))
        return float((-np.expm1(count * log_cdf)).sum())

    def quantile(self, probability: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Smallest length l with P(length <= l) >= probability, for each probability in [0, 1]."""
        cdf = 1.0 - np.append(self.survival[1:], 0.0)  # cdf[i] = P(length <= i + 1)
        index = np.searchsorted(cdf, np.asarray(probability, dtype=np.float64) - 1e-12, side="left")
        return np.minimum(index, self.limit - 1).astype(np.int64) + 1

    def representative(self, count: int) -> npt.NDArray[np.int64]:
        """``count`` lengths that stand for the distribution: the middle of each of ``count`` equal
        shares, ascending."""
        return self.quantile((np.arange(count) + 0.5) / count)

    def sample(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """``count`` independent lengths."""
        return self.quantile(rng.random(count))


def _from_survival(label: str, values: npt.NDArray[np.float64]) -> Lengths:
    values = np.minimum.accumulate(np.clip(values, 0.0, 1.0))
    values[0] = 1.0
    positive = np.nonzero(values > 0.0)[0]
    return Lengths(label, np.ascontiguousarray(values[: positive[-1] + 1]))


def _check(label: str, mean: float, limit: float) -> int:
    """The limit as a whole number of tokens, once it and the mean make sense."""
    if not 1 <= mean < math.inf:
        raise PlanError(f"{label}: the mean must be at least 1 token, and finite, got {mean}")
    if not 1 <= limit <= _MAX_LIMIT or limit != int(limit):
        raise PlanError(f"{label}: the limit must be a whole number of tokens, 1 to {_MAX_LIMIT}, got {limit}")
    return int(limit)


def _times(mean: float, factor: int) -> float:
    """A default limit; not whole only where the mean is not finite."""
    return float(round(factor * mean)) if math.isfinite(factor * mean) else math.inf


def constant(tokens: int) -> Lengths:
    """Every response has ``tokens`` tokens."""
    _check("constant length", tokens, tokens)
    return Lengths(f"constant {tokens}", np.ones(tokens))


def lognormal(mean: float, sigma: float = 0.6, limit: float | None = None) -> Lengths:
    """Log-normal with this mean before the cut at ``limit`` (default 4 times the mean).

    Args:
        sigma: Standard deviation of log length; 0.6 has its 99th percentile at 3.4 times the mean.
    """
    limit = _check("log-normal length", mean, _times(mean, 4) if limit is None else limit)
    if not 0 < sigma <= 5:
        raise PlanError(f"log-normal length: sigma must be above 0 and at most 5, got {sigma}")
    mu = math.log(mean) - sigma * sigma / 2.0
    t = np.arange(limit, dtype=np.float64)
    with np.errstate(divide="ignore"):
        z = (np.log(t) - mu) / (sigma * math.sqrt(2.0))
    values = np.array([0.5 * math.erfc(x) if math.isfinite(x) else 1.0 for x in z])
    return _from_survival(f"log-normal, mean {mean:g}, sigma {sigma:g}, limit {limit}", values)


def empirical(lengths: Iterable[int], label: str = "measured") -> Lengths:
    """The distribution of given lengths."""
    given = list(lengths)
    if not given:
        raise PlanError(f"{label}: no lengths to read")
    if min(given) < 1 or max(given) > _MAX_LIMIT:  # before they become machine words
        raise PlanError(
            f"{label}: lengths must be 1 to {_MAX_LIMIT} tokens, got {min(given)} to {str(max(given))[:20]}"
        )
    values = np.asarray(given, dtype=np.int64)
    counts = np.bincount(values)
    survival = 1.0 - np.cumsum(counts)[:-1] / values.size
    return _from_survival(f"{label}, {values.size} responses, mean {values.mean():.1f}", survival)


def parse_lengths(text: str) -> Lengths:
    """Lengths from the command line: ``MEAN`` or ``MEAN:lognormal[:sigma=X,limit=N]``."""
    parts = text.split(":", 2)
    try:
        mean = float(parts[0])
    except ValueError:
        raise PlanError(
            f"response tokens {text!r}: expected MEAN[:KIND[:key=value,...]], for example 4096:lognormal"
        ) from None
    if not math.isfinite(mean) or mean < 1:
        raise PlanError(f"response tokens {text!r}: the mean must be at least 1 token, got {parts[0]}")
    kind = parts[1] if len(parts) > 1 else "constant"
    options: dict[str, float] = {}
    for item in parts[2].split(",") if len(parts) > 2 else ():
        key, _, value = item.partition("=")
        try:
            options[key.strip()] = float(value)
        except ValueError:
            raise PlanError(f"response tokens {text!r}: {item!r} is not key=number") from None
    if kind not in ("constant", "lognormal"):
        raise PlanError(f"response tokens {text!r}: unknown kind {kind!r}; known are constant and lognormal")
    allowed = {"sigma", "limit"} if kind == "lognormal" else set()
    if unknown := set(options) - allowed:
        raise PlanError(f"response tokens {text!r}: {kind} takes {sorted(allowed)}, got {sorted(unknown)}")
    if kind == "lognormal":
        return lognormal(mean, options.get("sigma", 0.6), options.get("limit"))
    if mean != int(mean):
        raise PlanError(f"response tokens {text!r}: a constant length is a whole number")
    return constant(int(mean))
