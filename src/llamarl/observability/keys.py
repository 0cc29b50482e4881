"""Every metric key: its unit, what it says, how ranks' values become one, and whether it depends on timing.

docs/metrics.md is made from this table, and ``ranks.py`` reduces by it.

A row of ``metrics.jsonl`` lists its keys in the order of this table; keys that it does not know (parts of a reward, metrics
of a user's own executor) follow in alphabetical order. Two runs of one seed have equal rows but for the timing keys.

``python -m llamarl.observability.keys docs/metrics.md`` writes the table anew between the page's two marks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = [
    "KEYS",
    "REPLICA_KEY",
    "MetricKey",
    "OverRanks",
    "is_integer_key",
    "is_timing_key",
    "key_order",
    "markdown_table",
    "over_ranks",
]

REPLICA_KEY = "time/replica_{}_s"
"""Of each unlike replica of the generator, by its number."""

OverRanks = Literal["sum", "mean", "max", "min", "same"]
"""How the values of an executor's ranks become one: ``same`` is one value that any of them may report, since it stands for
all of them; two that differ are refused. A ``mean`` is weighted by another key of the same rank, or counts each rank once.
What only one rank reports is taken as it is."""


@dataclass(frozen=True, kw_only=True)
class MetricKey:
    """One column of ``metrics.jsonl``."""

    name: str
    unit: str
    meaning: str
    over_ranks: OverRanks
    weight: str = ""
    """Key of the weight of a ``mean``."""
    integer: bool = False
    """Written without a decimal point."""

    @property
    def reduction(self) -> str:
        """In words."""
        return f"{self.over_ranks} by `{self.weight}`" if self.weight else self.over_ranks


def _key(
    name: str, unit: str, meaning: str, over_ranks: OverRanks, *, weight: str = "", integer: bool = False
) -> MetricKey:
    return MetricKey(name=name, unit=unit, meaning=meaning, over_ranks=over_ranks, weight=weight, integer=integer)


KEYS: tuple[MetricKey, ...] = (
    _key("step", "tick", "The trainer tick of this row, from 0.", "same", integer=True),
    _key(
        "policy_version",
        "updates",
        "Policy version after this tick: trainer ticks done, `step + 1`.",
        "same",
        integer=True,
    ),
    _key("reward/mean", "reward", "Mean reward of the batch over samples that have one.", "same"),
    _key("reward/std", "reward", "Standard deviation of those rewards over the whole batch (population).", "same"),
    _key(
        "reward/failed",
        "samples",
        "Samples without a reward: the reward function raised, ran out of time, died or gave NaN. They are kept, shown, and "
        "left out of the baseline; never scored 0.",
        "same",
        integer=True,
    ),
    _key(
        "reward/parts/NAME",
        "reward",
        "Mean of a part that the task's score names (`correct`, `answered`, ..), over the samples that have it.",
        "same",
    ),
    _key(
        "reward_model/num_scored",
        "responses",
        "Where there is a reward model: responses that it gave a number. Their mean is `reward/parts/NAME`.",
        "sum",
        integer=True,
    ),
    _key(
        "reward_model/num_tokens",
        "tokens",
        "The same: tokens of what it was given to read, in its own tokens.",
        "sum",
        integer=True,
    ),
    _key(
        "reward_model/num_failed",
        "responses",
        "The same: responses that it failed, such as too long ones and those with a score that is no number.",
        "sum",
        integer=True,
    ),
    *(
        _key(
            f"judge/{name}",
            unit,
            f"{'Where a language model judges' if i == 0 else 'The same'}: {meaning}",
            "sum",
            integer=True,
        )
        for i, (name, unit, meaning) in enumerate(
            (
                ("num_scored", "responses", "responses that it gave a score. Their mean is `reward/parts/NAME`."),
                ("num_failed", "responses", "responses without a verdict: it could not be reached, or said no score."),
                ("num_requests", "requests", "times that it was asked, further attempts included."),
                ("num_retries", "requests", "further attempts."),
                ("num_prompt_tokens", "tokens", "its tokens read, as it counts them: what is paid for."),
                ("num_completion_tokens", "tokens", "its tokens written."),
            )
        )
    ),
    _key(
        "prompts/too_long",
        "prompts",
        'With `data.too_long = "skip"`: items of this tick that were too long and replaced by others.',
        "sum",
        integer=True,
    ),
    _key("reward/tasks/LABEL/mean", "reward", "Of a mixture: mean reward of the samples of one task.", "same"),
    _key("reward/tasks/LABEL/accuracy", "share", "The same: share of them with a reward of at least 1.", "same"),
    _key(
        "reward/tasks/LABEL/groups",
        "groups",
        "The same: groups of the tick that are of that task.",
        "same",
        integer=True,
    ),
    _key(
        "staleness/mean",
        "updates",
        "Policy version that is being trained minus the version that sampled the token, mean over trained tokens.",
        "same",
    ),
    _key(
        "staleness/max",
        "updates",
        "The largest of these; at most `max_staleness + max_segments - 1` (`max_staleness` under the latest weights), plus "
        "`dynamic_sampling.carry_ticks` where that is on.",
        "same",
        integer=True,
    ),
    _key(
        "staleness/steps_mean",
        "optimizer steps",
        "With several steps a tick: `K (k - v) + j` for a token of version `v` in step `j` of tick `k`, `K` steps a tick; "
        "mean over trained tokens.",
        "same",
    ),
    _key(
        "staleness/steps_max",
        "optimizer steps",
        "The largest of these; at most `K` times the bound on `staleness/max`, plus `K - 1`.",
        "same",
        integer=True,
    ),
    _key("response/length_mean", "tokens", "Mean response length in the batch.", "mean", weight="samples/delivered"),
    _key("response/length_max", "tokens", "Longest response in the batch.", "max", integer=True),
    _key("response/length_min", "tokens", "Shortest response in the batch.", "min", integer=True),
    _key(
        "response/truncated_fraction",
        "share",
        "Responses cut by the length limit, of all in the batch.",
        "mean",
        weight="samples/delivered",
    ),
    _key(
        "samples/delivered",
        "responses",
        "Responses that the generator finished and delivered in its tick.",
        "sum",
        integer=True,
    ),
    _key("tokens/generated", "tokens", "Response tokens that the generator sampled in its tick.", "sum", integer=True),
    _key(
        "tokens/carried",
        "tokens",
        "Sampled tokens that lie in the generator after its tick: of unfinished groups, and of complete ones that wait.",
        "sum",
        integer=True,
    ),
    _key(
        "tokens/failed",
        "tokens",
        "Sampled tokens of the responses judged in this tick that have no reward.",
        "sum",
        integer=True,
    ),
    _key(
        "tokens/dropped",
        "tokens",
        "With dynamic sampling: tokens, failed ones apart, of groups dropped without a signal or for their age.",
        "sum",
        integer=True,
    ),
    _key(
        "tokens/spare",
        "tokens",
        "With dynamic sampling: tokens, failed ones apart, of the groups kept for a later tick.",
        "sum",
        integer=True,
    ),
    _key(
        "tokens/unused",
        "tokens",
        "Tokens of scored responses that reached the trainer and that no optimizer step of the tick took: not selected, or "
        "cut at the length limit under `algorithm.train_truncated = false`.",
        "same",
        integer=True,
    ),
    _key(
        "tokens/repeated",
        "tokens",
        "With several passes over a batch: what `tokens/trained` counts beyond each token's first time.",
        "same",
        integer=True,
    ),
    _key(
        "tokens/trained",
        "tokens",
        "Response tokens in the loss of this tick, over all its optimizer steps: a second pass counts again.",
        "same",
        integer=True,
    ),
    _key(
        "tokens/budget_share",
        "share",
        "`tokens/trained` by what the steps' token budgets hold, where there is one.",
        "same",
    ),
    _key(
        "samples/trained", "responses", "Responses with a trained token, counted as tokens are.", "same", integer=True
    ),
    _key(
        "samples/unused",
        "responses",
        "Responses that could train and that no optimizer step of the tick took; with a selection or several steps.",
        "same",
        integer=True,
    ),
    _key(
        "tokens/computed",
        "tokens",
        "Tokens that the trainer's forward computed, prompts included: a prompt that its group shares counts once, and "
        "responses without advantage may be left out (`trainer.skip_zero_advantage`).",
        "same",
        integer=True,
    ),
    _key(
        "tokens_per_s/generated", "tokens/s", "`tokens/generated` by `time/step_s`: the rate of the whole job.", "sum"
    ),
    *(
        key
        for role in ("generator", "reward_model", "judge", "reward", "reference", "critic", "trainer", "evaluator")
        for key in (
            _key(
                f"recovery/{role}_restarts",
                "restarts",
                f"Only after a process of the {role} died: how often it was brought up again in this run, so far.",
                "same",
                integer=True,
            ),
            _key(
                f"recovery/{role}_lost_s",
                "s",
                "Beside it: from the start of the work that was lost, or from the death if there was none, to the start of the next.",
                "max",
            ),
        )
    ),
    *(
        key
        for role in ("generator", "reward_model", "judge", "reward", "reference", "evaluator")
        for key in (
            _key(
                f"recovery/{role}_twins",
                "ticks",
                f"Only where a tick of the {role} took too long and was started a second time: how many were in this run, so far.",
                "same",
                integer=True,
            ),
            _key(
                f"recovery/{role}_twin_wins",
                "ticks",
                "Beside it: at how many of them the second attempt was ready first.",
                "same",
                integer=True,
            ),
        )
    ),
    _key("time/step_s", "s", "From the end of the trainer's tick before to the end of this one.", "same"),
    _key(
        "time/generator_s",
        "s",
        "Duration of the generator's tick, from first input pulled to last output published.",
        "same",
    ),
    _key(
        REPLICA_KEY.format("N"),
        "s",
        "With `[[generator.replicas]]`: what of it the replica N takes, numbered from 0 in the order of the tables, from the "
        "start of its work to its last group; the slowest is what the others' prompts wait for.",
        "max",
    ),
    _key(
        "time/reward_s",
        "s",
        "Duration of the reward executor's tick, with what it did ahead (`schedule.parts`).",
        "same",
    ),
    _key("time/trainer_s", "s", "Duration of the trainer's tick, with what it did ahead (`schedule.parts`).", "same"),
    _key(
        "time/trainer_save_s",
        "s",
        "In ticks that save: how long the trainer's tick waited for its checkpoint, that is for a copy in host memory and, "
        "if it was still being written, for the one before.",
        "max",
    ),
    _key("time/critic_save_s", "s", "The same of the critic's tick, where there is one.", "max"),
    _key("time/reward_model_s", "s", "Duration of the reward model's tick, where there is one.", "same"),
    _key("time/judge_s", "s", "Duration of the judge's tick, where there is one.", "same"),
    _key("time/reference_s", "s", "Duration of the reference executor's tick, where there is one.", "same"),
    _key(
        "time/critic_s", "s", "Duration of the critic's tick, where there is one: values, then its own updates.", "same"
    ),
    _key("time/evaluator_s", "s", "Duration of the evaluator's tick (near 0 where no evaluation is due).", "same"),
    _key(
        "time/weight_sync_s",
        "s",
        "Time that executors spent on weights in this tick: announcing a version, waiting for its copy, pulling, proving and "
        "loading it (their spans `weight_sync...`), summed.",
        "same",
    ),
    _key(
        "time/repack_s",
        "s",
        "Time in which the generator made what it computes with from a version that had arrived: packed or quantized matrices.",
        "max",
    ),
    _key(
        "time/environment_wait_s",
        "s",
        "Time in which the generator stood still for replies of environments that were later than `generator.reply_delay` "
        "engine steps.",
        "max",
    ),
    _key(
        "time/environment_held_s",
        "s",
        "Of that, the time in which other samples could have been written: a larger `generator.reply_delay` would hide it. In "
        "the rest nobody else was left to write.",
        "max",
    ),
    _key("time/late_reply_s", "s", "Longest time that a late reply took since it was asked for; 0: none was.", "max"),
    _key("time/engine_step_s", "s", "With an environment: mean time of an engine step.", "mean"),
    _key(
        "time/weight_copy_s",
        "s",
        "How long the trainer's copies of the version before this one took on a thread of their own, beside its next tick.",
        "max",
    ),
    _key(
        "time/park_s",
        "s",
        "In a co-located job: what generator and trainer spent on giving their memory back and taking it again, summed.",
        "max",
    ),
    _key(
        "memory/generator_parked_bytes",
        "bytes",
        "In a co-located job: what the generator gave back at the end of its tick, that is its KV cache as configured, the "
        "served form of its weights, and the weights unless they lie in the trainer's slot.",
        "sum",
        integer=True,
    ),
    _key(
        "memory/trainer_parked_bytes",
        "bytes",
        "In a co-located job: what the trainer moved from its GPUs to host memory at the end of its tick; 0 on a CPU.",
        "sum",
        integer=True,
    ),
    _key(
        "idle/generator",
        "share",
        "Bubble: of the time from the end of its tick before to the end of this one, the share in which the executor "
        "did nothing.",
        "same",
    ),
    _key("idle/reward", "share", "The same for the reward executor.", "same"),
    _key("idle/trainer", "share", "The same for the trainer.", "same"),
    _key("idle/reference", "share", "The same for the reference executor.", "same"),
    _key("idle/reward_model", "share", "The same for the reward model.", "same"),
    _key("idle/judge", "share", "The same for the judge.", "same"),
    _key("idle/critic", "share", "The same for the critic.", "same"),
    _key("idle/evaluator", "share", "The same for the evaluator.", "same"),
    _key(
        "ratio/mean",
        "ratio",
        "Policy probability by behaviour probability, mean over the trained tokens that were computed: those without "
        "advantage are left out unless `trainer.skip_zero_advantage` is false, and so are this and the like of a tick in which "
        "none was.",
        "same",
    ),
    _key("ratio/max", "ratio", "The largest of these ratios.", "same"),
    _key(
        "ratio/clipped_fraction",
        "share",
        "Trained tokens on which the loss's own bound acted (`rho`, `clip_low`, `clip_high`), or the cap on ratios at e^20.",
        "same",
    ),
    _key(
        "ratio/masked_fraction",
        "share",
        "Trained tokens left out by `algorithm.ratio_mask`; only where one is set.",
        "same",
    ),
    _key(
        "mismatch/kl",
        "nats",
        "KL(behaviour, policy) estimated on the trained tokens, mean of `r - 1 - log r` with `r` the ratio: staleness, "
        "precision and kernel differences together.",
        "same",
    ),
    _key(
        "experts/load_max",
        "ratio",
        "Of a sparse model: the load of the busiest expert of any layer. An expert's load is its share of the choices that its "
        "layer's router made, times the number of experts: 1 where all are chosen alike. Over the tokens that the trainer "
        "computed, prompts included; with several steps, their mean.",
        "same",
    ),
    _key("experts/load_mean", "ratio", "The load of each layer's busiest expert, mean over layers.", "same"),
    _key("experts/unused", "share", "Experts of all layers that no token of the step chose.", "same"),
    _key(
        "experts/dropped",
        "choices",
        "Choices of routers that no expert computed: 0, since experts have no capacity that could be full.",
        "same",
        integer=True,
    ),
    _key("loss/policy", "loss", "Policy loss over the whole optimizer step.", "same"),
    _key(
        "kl/reference",
        "nats",
        "KL(policy, reference model) by `kl_estimator`, mean over trained tokens; only where there is a reference.",
        "same",
    ),
    _key("critic/loss", "reward^2", "Value loss of the tick's first update, mean over trained tokens.", "same"),
    _key(
        "critic/explained_variance",
        "share",
        "1 less the variance of (return - value) by that of the return, over trained tokens, with the values that the "
        "trainer used: 1 is perfect, 0 no better than a constant, negative worse.",
        "same",
    ),
    _key("critic/value_mean", "reward", "Mean of those values.", "same"),
    _key("critic/return_mean", "reward", "Mean of the returns that the critic learns.", "same"),
    _key("critic/clipped_fraction", "share", "Tokens on which value clipping acted in the tick's last update.", "same"),
    _key("critic/grad_norm", "norm", "Gradient norm of the tick's first update, before clipping.", "same"),
    _key("critic/lr", "1/update", "The critic's learning rate in this tick.", "same"),
    _key(
        "critic/skipped",
        "updates",
        "Updates of this tick skipped because a gradient was not finite.",
        "same",
        integer=True,
    ),
    _key("entropy", "nats", "Entropy of the policy, mean over the trained tokens that were computed.", "same"),
    _key("grad_norm", "norm", "Gradient norm before clipping; with several steps, their mean.", "same"),
    _key("lr", "1/update", "Learning rate of this tick.", "same"),
    _key(
        "step/skipped",
        "optimizer steps",
        "Updates skipped because a gradient was not finite; 0 is usual.",
        "same",
        integer=True,
    ),
    _key(
        "step/empty",
        "optimizer steps",
        "Updates not made because no token could train; 0 is usual.",
        "same",
        integer=True,
    ),
    _key(
        "groups/no_signal",
        "groups",
        "Groups whose rewards are all equal (or of which fewer than two have one): they move nothing.",
        "same",
        integer=True,
    ),
    _key(
        "groups/generated",
        "groups",
        "Groups judged in this tick.",
        "same",
        integer=True,
    ),
    _key(
        "groups/trained",
        "groups",
        "With dynamic sampling, as the next ones: groups handed to the trainer.",
        "same",
        integer=True,
    ),
    _key("groups/refilled", "groups", "Of these, groups judged in an earlier tick.", "same", integer=True),
    _key("groups/spare", "groups", "Groups with a signal kept for a later tick.", "same", integer=True),
    _key(
        "groups/expired",
        "groups",
        "Groups with a signal dropped because waiting longer would pass the bound on staleness.",
        "same",
        integer=True,
    ),
    _key("groups/short", "groups", "Groups by which the batch stayed below `prompts_per_step`.", "same", integer=True),
    _key(
        "rollout/segments_max",
        "versions",
        "Most policy versions in one response; at most `max_segments`, or `max_staleness + 1` under the latest weights.",
        "max",
        integer=True,
    ),
    _key(
        "rollout/swaps",
        "swaps",
        'Under `schedule.weights = "latest"`: versions swapped in between the engine steps of the tick.',
        "sum",
        integer=True,
    ),
    _key(
        "rollout/carried",
        "responses",
        "Unfinished responses that the generator carries into its next tick.",
        "sum",
        integer=True,
    ),
    _key("episodes/delivered", "episodes", "With an environment: episodes in the batch.", "sum", integer=True),
    _key(
        "episodes/turns_mean",
        "turns",
        "Mean number of turns of the policy in one.",
        "mean",
        weight="episodes/delivered",
    ),
    _key("episodes/turns_max", "turns", "Most turns in one; at most `task.max_turns`.", "max", integer=True),
    _key(
        "episodes/truncated_fraction",
        "share",
        "Episodes ended by a limit: on turns, on tokens, or the environment's own.",
        "mean",
        weight="episodes/delivered",
    ),
    _key(
        "episodes/environment_tokens_mean",
        "tokens",
        "Mean number of tokens in one that the policy did not write: what the environment said, and the template around it.",
        "mean",
        weight="episodes/delivered",
    ),
    _key(
        "episodes/failed",
        "episodes",
        "Episodes without an outcome: the environment raised, ran out of time or died.",
        "sum",
        integer=True,
    ),
    _key(
        "rollout/age_max",
        "ticks",
        "Oldest group of the batch: generator ticks between its admission and its delivery.",
        "max",
        integer=True,
    ),
    _key(
        "eval/accuracy",
        "share",
        "Share of scored responses to held-out prompts whose reward is at least 1; only in rows in which an evaluation ended.",
        "same",
    ),
    _key(
        "eval/pass_at_k", "share", "Share of held-out prompts with a right one among their samples (k of them).", "same"
    ),
    _key(
        "eval/tasks/LABEL/KEY",
        "share",
        "Of a mixture: accuracy, pass_at_k or reward_mean of one task's prompts.",
        "same",
    ),
    _key("eval/reward_mean", "reward", "Mean reward of scored responses to held-out prompts.", "same"),
    _key(
        "eval/parts/NAME",
        "reward",
        "Mean of a part that the score of a held-out response names, over the responses that have it.",
        "same",
    ),
    _key("eval/failed", "responses", "Responses to held-out prompts without a verdict.", "same", integer=True),
    _key("eval/policy_version", "updates", "Policy version that was evaluated.", "same", integer=True),
    _key("eval/length_mean", "tokens", "Mean response length in the evaluation.", "same"),
)

_BEGIN, _END = "<!-- keys -->", "<!-- end of keys -->"
_POSITION = {key.name: position for position, key in enumerate(KEYS)}
_INTEGERS = frozenset(key.name for key in KEYS if key.integer)
_KNOWN = {key.name: key for key in KEYS}
_EXTREME = re.compile(r"(?:^|[/_])(max|min)$")
_COUNT = re.compile(r"(?:^|/)(?:tokens|samples|groups)/|(?:^|/)num_")


def is_timing_key(name: str) -> bool:
    """Whether a key depends on the clock, so that it differs from run to run: ``time/*``, ``idle/*`` and rates."""
    return name.startswith(("time/", "idle/", "recovery/")) or "_per_s" in name


def is_integer_key(name: str) -> bool:
    """Whether a key is written without a decimal point."""
    return name in _INTEGERS


def over_ranks(name: str) -> tuple[OverRanks, str]:
    """How ranks' values under a key become one, and the key of a mean's weight ("" counts each rank once).

    A key that the table does not know goes by its name: ``time/*`` takes the largest; names that end in ``max`` or ``min``
    the largest or smallest; counts (``tokens/*``, ``samples/*``, ``groups/*``, ``num_*``) add up; anything else is the mean
    over the ranks that report it.
    """
    known = _KNOWN.get(name)
    if known is not None:
        return known.over_ranks, known.weight
    if name.startswith("time/"):
        return "max", ""
    extreme = _EXTREME.search(name)
    if extreme is not None:
        return ("max" if extreme[1] == "max" else "min"), ""
    return ("sum" if _COUNT.search(name) else "mean"), ""


def key_order(names: Iterable[str]) -> list[str]:
    """Names in the order of the table, then unknown ones alphabetically."""
    return sorted(names, key=lambda name: (_POSITION.get(name, len(KEYS)), name))


def markdown_table() -> str:
    """The table of docs/metrics.md."""
    lines = ["| key | unit | meaning | over ranks | same in every run |", "|---|---|---|---|---|"]
    for key in KEYS:
        repeats = "no" if is_timing_key(key.name) else "yes"
        lines.append(f"| `{key.name}` | {key.unit} | {key.meaning} | {key.reduction} | {repeats} |")
    return "\n".join(lines) + "\n"


def _rewrite(page: Path) -> None:
    """Put the table between the marks of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise SystemExit(f"{page} has no lines {_BEGIN!r} and {_END!r} to write the table between")
    page.write_text(f"{before}{_BEGIN}\n{markdown_table()}{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    _rewrite(Path(sys.argv[1]))
