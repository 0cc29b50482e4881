"""Which objective the trainer maximises, and its constants. No torch here: the command line reads this file alone."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from llamarl.strict import STRICT

__all__ = ["AlgorithmConfig"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AlgorithmConfig:
    """The loss, the advantage estimator and how per-token terms are averaged."""

    name: Literal["aipo", "reinforce"] = "aipo"
    """Loss. ``aipo`` weighs each token by min(pi / mu, rho); ``reinforce`` weighs every token by 1, that is, it does
    not correct for staleness or for the generator's precision at all."""

    rho: float | Literal["none"] = 4.0
    """AIPO's clip on pi / mu, > 0; the paper suggests 2 to 10. ``none`` never clips: unbiased, of unbounded variance."""

    advantage: Literal["group_mean", "leave_one_out", "group_std"] = "group_mean"
    """Advantage of a response from its group's rewards: ``group_mean`` subtracts the mean, ``leave_one_out`` the mean of
    the other members, ``group_std`` subtracts the mean and divides by the standard deviation (GRPO)."""

    normalization: Literal["token", "sequence", "constant"] = "token"
    """What per-token terms are divided by. ``token``: trained tokens of the whole optimizer step. ``sequence``: the
    response's own trained tokens, then the number of responses. ``constant``: ``normalization_constant`` times the number
    of responses (Dr. GRPO: no preference for short answers)."""

    normalization_constant: float = 1024.0
    """Tokens, > 0. Used when ``normalization`` is ``constant``; the longest response allowed is the usual choice."""

    kl_coef: float = 0.0
    """Weight of KL(policy || initial model) in the loss, >= 0, estimated per token without bias and never negative (k3).
    Above 0 the trainer keeps a frozen copy of the initial weights."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus, per token in nats. 0 is none; negative values sharpen the policy."""

    def __post_init__(self) -> None:
        if self.rho != "none" and not float(self.rho) > 0:
            raise ValueError(f"rho must be > 0 or 'none' (no clip), got {self.rho}; the paper uses 2 to 10")
        if not self.normalization_constant > 0:
            raise ValueError(
                f"normalization_constant must be > 0 tokens, got {self.normalization_constant};"
                " use the longest response allowed"
            )
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef must be >= 0, got {self.kl_coef}; 0 switches the KL term off")
