"""Which objective the trainer maximises, and its constants. No torch here: the command line reads this file alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic.dataclasses import dataclass

from llamarl.strict import STRICT, at_least, refuse

__all__ = ["AlgorithmConfig"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AlgorithmConfig:
    """The loss, the advantage estimator and how per-token terms are averaged."""

    name: Literal["aipo", "aipo_surrogate", "reinforce", "ppo", "decoupled_ppo", "truncated_is", "cispo", "gspo"] = (
        "aipo"
    )
    """Loss; docs/algorithms/ has a page each. ``aipo`` weighs each token by min(pi / mu, rho), LlamaRL's objective.
    ``reinforce`` weighs every token by 1: no correction at all for staleness or for the generator's precision.
    ``ppo`` is the clip of PPO, GRPO and DAPO; ``gspo`` its response-level form; ``cispo`` clips the weight instead.
    ``decoupled_ppo`` and ``truncated_is`` tell the proximal policy from the behaviour policy."""

    rho: float | Literal["none"] = 4.0
    """Clip on the weight pi / mu of ``aipo``, ``aipo_surrogate`` and ``truncated_is``, > 0; the paper suggests 2 to 10.
    ``none`` never clips: unbiased, of unbounded variance."""

    clip_low: float = 0.2
    """Ratios below 1 - clip_low are clipped by ``ppo``, ``decoupled_ppo``, ``truncated_is``, ``cispo`` and ``gspo``; in
    [0, 1], 1 never clips. GSPO needs about 3e-4."""

    clip_high: float = 0.2
    """Ratios above 1 + clip_high are clipped by the same losses, >= 0. DAPO uses 0.28; GSPO needs about 4e-4."""

    ratio_mask: Literal["none", "token", "sequence"] = "none"
    """Leave tokens out of the loss where pi / mu lies outside [ratio_mask_low, ratio_mask_high]: ``token`` looks at
    each token (IcePop), ``sequence`` drops a whole response by its geometric mean ratio. Works with every loss."""

    ratio_mask_low: float = 0.5
    """Smallest ratio that still trains, >= 0. Used with ``ratio_mask``."""

    ratio_mask_high: float = 5.0
    """Largest ratio that still trains, > ``ratio_mask_low``. Used with ``ratio_mask``."""

    advantage: Literal[
        "group_mean", "leave_one_out", "group_std", "batch_std", "group_mean_batch_std", "reward", "gae"
    ] = "group_mean"
    """Advantage of a response. ``group_mean`` subtracts its group's mean reward, ``leave_one_out`` the mean of the other
    members, ``group_std`` subtracts the mean and divides by the group's standard deviation (GRPO). ``batch_std`` uses
    mean and deviation of the whole step (REINFORCE++), ``group_mean_batch_std`` the group's mean and the step's
    deviation. ``reward`` is the reward itself, without a baseline. ``gae`` is an advantage a token from a critic's values
    (section ``critic``); it needs no group."""

    gae_gamma: float = 1.0
    """Discount of rewards a token, in [0, 1], for ``gae``. Below 1, late rewards count less for early tokens."""

    gae_lambda: float = 0.95
    """In [0, 1], for ``gae``: 1 trusts the rewards alone (unbiased), 0 the critic's next value (least variance)."""

    gae_normalize: bool = True
    """Whether ``gae`` advantages get mean 0 and deviation 1 over the trained tokens of the step."""

    overlong_buffer: int = 0
    """Tokens before ``overlong_limit`` over which the reward falls linearly by ``overlong_penalty`` (DAPO); 0 is off."""

    overlong_limit: int = 0
    """Response length in tokens at which the penalty is full, usually generator's longest response."""

    overlong_penalty: float = 1.0
    """What a response of ``overlong_limit`` tokens loses of its reward, >= 0."""

    train_truncated: bool = True
    """Whether responses that hit the length limit train. False keeps them in the baseline but out of the loss."""

    normalization: Literal["token", "sequence", "constant"] = "token"
    """What per-token terms are divided by. ``token``: trained tokens of the whole optimizer step. ``sequence``: the
    response's own trained tokens, then the number of responses. ``constant``: ``normalization_constant`` times the number
    of responses (Dr. GRPO: no preference for short answers)."""

    normalization_constant: float = 1024.0
    """Tokens, > 0. Used when ``normalization`` is ``constant``; the longest response allowed is the usual choice."""

    kl_coef: float = 0.0
    """Weight of KL(policy || reference model), >= 0. Above 0 the job has a reference executor (section ``reference``)."""

    kl_place: Literal["loss", "reward", "token_reward"] = "loss"
    """Where that KL counts. ``loss``: a term of each token's loss. ``reward``: its sum over a response, from the recorded
    log-probs, is taken off the response's reward before any baseline. ``token_reward``: each token loses its own part
    when it is written, so that only tokens at or before it are held to account (needs no critic; with one it is PPO's
    form)."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimate of that KL. Only the gradient of ``k2`` is that of the KL itself, on policy; ``k3`` is the usual
    choice and never negative; ``k1`` has no gradient in expectation and is here for comparison."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus, per token in nats. 0 is none; negative values sharpen the policy."""

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a term for the KL to the reference model."""
        return self.kl_coef > 0 and self.kl_place == "loss"

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if self.rho != "none" and not float(self.rho) > 0:
            yield f"rho must be > 0 or 'none' (no clip), got {self.rho}; the paper uses 2 to 10"
        if not 0 <= self.clip_low <= 1:
            yield f"clip_low must be in [0, 1], got {self.clip_low}; 1 never clips from below"
        yield from at_least(self, 0, "clip_high", "kl_coef", "overlong_penalty", "overlong_buffer", "ratio_mask_low")
        if not self.ratio_mask_low < self.ratio_mask_high:
            yield f"ratio_mask_low ({self.ratio_mask_low}) must be below ratio_mask_high ({self.ratio_mask_high})"
        for name in ("gae_gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                yield f"{name} must be in [0, 1], got {getattr(self, name)}"
        if self.overlong_buffer and self.overlong_limit < self.overlong_buffer:
            yield (
                f"overlong_limit must be >= overlong_buffer ({self.overlong_buffer}) tokens, got {self.overlong_limit};"
                " use the longest response that the generator may write"
            )
        if not self.normalization_constant > 0:
            yield (
                f"normalization_constant must be > 0 tokens, got {self.normalization_constant};"
                " use the longest response allowed"
            )
