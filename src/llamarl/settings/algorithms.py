"""Which objective the trainer maximises, and its constants. No torch here: the command line reads this file alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from llamarl.errors import Mistake
from llamarl.strict import STRICT, holding, is_import_path, named, refuse

__all__ = [
    "ADVANTAGE_NAMES",
    "CRITIC_ADVANTAGES",
    "LOSSES",
    "PRESETS",
    "AlgorithmConfig",
    "Preset",
    "TermWeights",
    "spelled_out",
]

LOSSES = {
    "aipo": "llamarl.algorithms.aipo:aipo",
    "reinforce": "llamarl.algorithms.aipo:reinforce",
    "sequence_is": "llamarl.algorithms.aipo:sequence_is",
    "ppo": "llamarl.algorithms.ppo:ppo",
    "decoupled_ppo": "llamarl.algorithms.ppo:decoupled_ppo",
    "truncated_is": "llamarl.algorithms.ppo:truncated_is",
    "cispo": "llamarl.algorithms.ppo:cispo",
    "gspo": "llamarl.algorithms.ppo:gspo",
    "dppo": "llamarl.algorithms.ppo:dppo",
}
"""``algorithm.name`` -> import path of the loss. A new one is one file, one test and one line here."""
CRITIC_ADVANTAGES = ("gae", "turn_gae")
"""Those that a critic's values make, an advantage a token; each puts a critic into the job."""
ADVANTAGE_NAMES = (
    "group_mean",
    "leave_one_out",
    "group_std",
    "batch_std",
    "group_mean_batch_std",
    "max_rl",
    "gdpo",
    "reward",
    "distillation",
    *CRITIC_ADVANTAGES,
)


class TermWeights(NamedTuple):
    """What the three terms of a token's loss are multiplied by, before the step's mean."""

    rl: float = 0.0
    """The loss that ``algorithm.name`` names, with the token's advantage."""
    ce: float = 0.0
    """Cross-entropy: the token's own surprise, -log pi."""
    kl: float = 0.0
    """Estimated KL of the policy to the reference model at that token."""


class Preset(NamedTuple):
    """What a well-known name stands for, in keys of ``AlgorithmConfig``."""

    means: Mapping[str, Any]
    """What makes it this algorithm; a recipe that says otherwise is refused."""
    constants: Mapping[str, Any]
    """The source's numbers; those that a recipe sets win."""


PRESETS: Mapping[str, Preset] = {
    "grpo": Preset(
        means={"name": "ppo", "advantage": "group_std", "normalization": "sequence"},
        constants={"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.04, "kl_place": "loss", "kl_estimator": "k3"},
    ),
    "dapo": Preset(
        means={"name": "ppo", "advantage": "group_std", "normalization": "token"},
        constants={"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0},
    ),
    "sft": Preset(means={"name": "sft", "advantage": "reward"}, constants={}),
}
"""``algorithm.name`` -> the keys that it stands for. A run's own config.toml shows those, not the name."""


def spelled_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """``[algorithm]`` as a user set it, with the keys that a preset's name stands for where ``values`` leaves them out.

    Put on top of other settings, the name alone would stand beside their advantage, clip and KL.
    """
    preset = PRESETS.get(str(values.get("name")))
    return {**preset.constants, **preset.means, **values} if preset else dict(values)


_Rho = Annotated[
    float | Literal["none"],
    holding(
        lambda rho: rho == "none" or rho > 0, "must be > 0, 2 to 10 as the paper suggests, or 'none', which never clips"
    ),
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AlgorithmConfig:
    """The loss, the advantage estimator and how per-token terms are averaged."""

    name: Annotated[str, named((*LOSSES, *PRESETS), "my_name.py:function")] = "aipo"
    """Loss: aipo, reinforce, ppo, decoupled_ppo, truncated_is, cispo, gspo,
    sequence_is, dppo, sft, grpo, dapo, or your own as package.module:function or path/to/file.py:function
    (docs/algorithms/README.md). docs/algorithms/ has a page each. ``aipo`` weighs each token by
    min(pi / mu, rho), LlamaRL's objective. ``reinforce`` weighs every token by 1: no correction at
    all for staleness or for the generator's precision. ``ppo`` is the clip of PPO, GRPO and DAPO;
    ``gspo`` its response-level form; ``cispo`` clips the weight instead; ``dppo`` leaves tokens out
    by how far their probability moved. ``sequence_is`` has one weight a response,
    min(pi(y) / mu(y), rho). ``decoupled_ppo`` and
    ``truncated_is`` tell the proximal policy from the behaviour policy. ``grpo`` and ``dapo`` are
    not losses but presets, ``ppo`` with the advantage, normalization and constants of their papers
    (docs/algorithms/ppo.md). ``sft`` is cross-entropy on completions that the data holds: a job
    without generator and reward (docs/sft.md)."""

    rho: _Rho = 4.0
    """Clip on the weight pi / mu of ``aipo``, ``truncated_is``, ``sequence_is`` and ``dppo``, > 0; the
    paper suggests 2 to 10. ``none`` never clips: unbiased, of unbounded variance. It is then capped
    only at e^20 (some 5e8), so that a float holds it; capped tokens count in
    ``ratio/clipped_fraction``, which is otherwise 0."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Ratios below 1 - clip_low are clipped by ``ppo``, ``decoupled_ppo``, ``truncated_is``, ``cispo`` and ``gspo``;
    1 never clips. GSPO needs about 3e-4. Of ``dppo`` the fall of a probability beyond which a
    token with negative advantage does not train."""

    clip_high: NonNegativeFloat = 0.2
    """Ratios above 1 + clip_high are clipped by the same losses. DAPO uses 0.28; GSPO needs about 4e-4. Of ``dppo`` the rise
    of a probability beyond which a token with positive advantage does not train."""

    ratio_mask: Literal["none", "token", "sequence", "off_policy"] = "none"
    """Leave tokens out of the loss where pi / mu lies outside [ratio_mask_low, ratio_mask_high]: ``token`` looks at
    each token (IcePop), ``sequence`` drops a whole response by its geometric mean ratio, ``off_policy``
    only one with a negative advantage whose geometric mean ratio is below ratio_mask_low. Works with
    every loss."""

    ratio_mask_low: NonNegativeFloat = 0.5
    """Smallest ratio that still trains. Used with ``ratio_mask``."""

    ratio_mask_high: float = 5.0
    """Largest ratio that still trains, > ``ratio_mask_low``. Used with ``ratio_mask``."""

    top_entropy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each response's tokens that train, those at which the policy's entropy is highest;
    0.2 is the usual one (arXiv:2506.01939). The divisor stays that of all tokens."""

    advantage: Annotated[str, named(ADVANTAGE_NAMES, "my_advantage.py:function")] = "group_mean"
    """Advantage of a response: group_mean, leave_one_out, group_std, batch_std,
    group_mean_batch_std, max_rl, gdpo, reward, distillation, gae, turn_gae, or your own function of one group's
    rewards, as package.module:function or path/to/file.py:function. ``group_mean`` subtracts its
    group's mean reward, ``leave_one_out`` the mean of the other members, ``group_std`` subtracts
    the mean and divides by the group's standard deviation (GRPO). ``batch_std`` uses mean and
    deviation of the whole tick (REINFORCE++), ``group_mean_batch_std`` the group's mean and the
    tick's deviation. ``max_rl`` subtracts the group's mean and divides by
    it. ``gdpo`` adds up ``group_std`` of each named part of the reward, over the tick's deviation.
    ``reward`` is the reward itself, without a baseline. ``distillation`` looks at no reward: a token's
    advantage is what the teacher, ``reference.path``, thinks of it, log p_teacher - log pi
    (docs/algorithms/distillation.md). ``gae`` is an advantage a
    token from a critic's values (section ``critic``); it needs no group. ``turn_gae`` goes over the
    turns of an episode in place of its tokens, whose advantage is their turn's (docs/algorithms/turns.md)."""

    teacher_top_k: NonNegativeInt = 0
    """With ``advantage = "distillation"``: the teacher names its so many likeliest tokens at each position, and
    the loss is the KL of its distribution over them, and the rest, to the policy's, in place of ``name``
    on the sampled token. 0 looks at the sampled token alone."""

    gae_gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of rewards a token for ``gae``, a turn for ``turn_gae``. Below 1, late rewards count less for what is early."""

    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Of both: 1 trusts the rewards alone (unbiased), 0 the critic's next value (least variance)."""

    gae_normalize: bool = True
    """Whether a critic's advantages get mean 0 and deviation 1 over the trained tokens of the tick."""

    overlong_buffer: NonNegativeInt = 0
    """Tokens before ``overlong_limit`` over which the reward falls linearly by ``overlong_penalty``
    (DAPO); 0 is off."""

    overlong_limit: int = 0
    """Response length in tokens at which the penalty is full, usually generator's longest response."""

    overlong_penalty: NonNegativeFloat = 1.0
    """What a response of ``overlong_limit`` tokens loses of its reward."""

    cosine_length: NonNegativeInt = 0
    """Response length in tokens up to which a right answer's reward (at least 1) falls by 0.5, and a
    wrong one's, which begins a whole lower, rises by 0.5, along half a cosine: short right answers
    and long tries are worth most. 0 is off."""

    repetition_penalty: NonNegativeFloat = 0.0
    """What a response loses of its reward that is nothing but repetitions: this times the share of
    its runs of ``repetition_ngram`` tokens that were there before. 0 is off."""

    repetition_ngram: PositiveInt = 4
    """Tokens of such a run. Used with ``repetition_penalty``."""

    train_truncated: bool = True
    """Whether responses that hit the length limit train. False keeps them in the baseline but out of the loss."""

    normalization: Literal["token", "sequence", "constant"] = "token"
    """What per-token terms are divided by. ``token``: trained tokens of the whole optimizer step.
    ``sequence``: the response's own trained tokens, then the number of responses. ``constant``:
    ``normalization_constant`` times the number of responses (Dr. GRPO: no preference for short
    answers)."""

    normalization_constant: PositiveFloat = 1024.0
    """Tokens. Used when ``normalization`` is ``constant``; the longest response allowed is the usual choice."""

    kl_coef: NonNegativeFloat = 0.0
    """Weight of KL(policy || reference model). Above 0 the job has a reference executor (section ``reference``)."""

    kl_place: Literal["loss", "reward", "token_reward"] = "loss"
    """Where that KL counts. ``loss``: a term of each token's loss. ``reward``: its sum over a
    response, from the recorded log-probs, is taken off the response's reward before any baseline.
    ``token_reward``: each token loses its own part when it is written, so that only tokens at or
    before it are held to account (needs no critic; with one it is PPO's form)."""

    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """Per-token estimate of that KL. ``unbiased`` is ``k3`` weighted by pi / mu, whose gradient is
    that of the KL, in the loss, however old the sample. On policy that of ``k2`` is too; ``k3`` is the usual choice there and
    never negative; ``k1`` has no gradient in expectation. With ``kl_place`` reward or token_reward it is the other way
    round: choose ``k1``, which pulls as the KL does; ``k3`` hardly does while the policy is near the reference."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Of a loss of your own, which reads them as ``config.options``."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus, per token in nats. 0 is none; negative values sharpen the policy."""

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a critic's values, token by token."""
        return self.advantage in CRITIC_ADVANTAGES

    @property
    def distills(self) -> bool:
        """Whether the reference model is a teacher, whose log-probs make the advantages."""
        return self.advantage == "distillation"

    @property
    def imitates(self) -> bool:
        """Whether completions come from the data, so that nothing is sampled and nothing judged."""
        return self.name == "sft"

    @property
    def term_weights(self) -> TermWeights:
        """Of each trained token: the one place where an algorithm says which of the three terms it gets."""
        kl = self.kl_coef if self.kl_place == "loss" else 0.0
        if self.teacher_top_k:
            return TermWeights(kl=1.0)
        return TermWeights(ce=1.0, kl=kl) if self.imitates else TermWeights(rl=1.0, kl=kl)

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, given: Any) -> Any:
        """Replace a preset's name by the keys that it stands for."""
        values = dict(given.kwargs or {}) if isinstance(given, ArgsKwargs) else given
        name = values.get("name") if isinstance(values, dict) else None
        if not isinstance(name, str) or name not in PRESETS:
            return given
        preset, asked = PRESETS[name], {key: value for key, value in values.items() if key != "name"}
        base = preset.means["name"]
        instead = f", or set name to {base!r} and say what you want instead" if base != name else ""
        refuse(
            Mistake(key, f"is {asked[key]!r}, but name {name!r} means {value!r}: leave {key} out{instead}", ("name",))
            for key, value in preset.means.items()
            if key in asked and asked[key] != value
        )
        return {**preset.constants, **asked, **preset.means}

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[Mistake]:
        if self.options and not is_import_path(self.name):
            yield Mistake(
                "options",
                f"are of a loss of your own, but name is {self.name!r}: leave them out, or name your function",
                ("name",),
            )
        if self.kl_estimator == "unbiased" and self.kl_place != "loss":
            yield Mistake(
                "kl_estimator",
                f"is 'unbiased', which weighs by the policy that is trained, but kl_place is {self.kl_place!r}: choose 'k1', "
                "or set kl_place to 'loss'",
                ("kl_place",),
            )
        unheard = ("reward", "token_reward") if self.imitates else ("reward",) if self.advantage == "gdpo" else ()
        if self.kl_coef and self.kl_place in unheard:
            why = "'sft' trains on no reward" if self.imitates else "'gdpo' sees the named parts of a reward alone"
            yield Mistake(
                "kl_place", f"is {self.kl_place!r}, but {why}: set it to 'loss', or kl_coef to 0", ("name", "advantage")
            )
        if not self.ratio_mask_low < self.ratio_mask_high:
            yield Mistake(
                "ratio_mask_low",
                f"({self.ratio_mask_low}) must be below ratio_mask_high ({self.ratio_mask_high})",
                ("ratio_mask_high",),
            )
        if self.distills and self.kl_coef:
            yield Mistake(
                "kl_coef",
                f"is {self.kl_coef:g}, but with advantage 'distillation' the reference model is the teacher, towards which the "
                "advantage draws already: set it to 0",
                ("advantage",),
            )
        if self.teacher_top_k and not self.distills:
            yield Mistake(
                "teacher_top_k",
                f"is {self.teacher_top_k}, but advantage {self.advantage!r} has no teacher: leave it out, or set advantage to "
                "'distillation'",
                ("advantage",),
            )
        unused = {"name": "aipo", "ratio_mask": "none", "top_entropy": 1.0}
        for key, default in unused.items() if self.teacher_top_k else ():
            if (given := getattr(self, key)) != default:
                yield Mistake(
                    key,
                    f"is {given!r}, of the loss on sampled tokens, in whose place teacher_top_k puts a KL: leave it out",
                    ("teacher_top_k",),
                )
        if self.overlong_buffer and self.overlong_limit < self.overlong_buffer:
            yield Mistake(
                "overlong_limit",
                f"must be >= overlong_buffer ({self.overlong_buffer}) tokens, got {self.overlong_limit}; use the longest "
                "response that the generator may write",
                ("overlong_buffer",),
            )
