"""What a run warns of: rows of real runs, broken on purpose and sound, and rows at the limits.

``runs_to_judge.json`` holds the keys that matter of ``metrics.jsonl`` of runs of recipes/tiny.toml: as it is (``healthy``), and
with 8 prompts a step and a reward that is always 0.1 (``constant``), ``max_new_tokens = 8`` (``cut``), a rate a hundred times as
high (``rate``), or a reward function that always raises (``fails``).
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_run import Report

from llamarl.controller.recorder import Recorder
from llamarl.observability.findings import WINDOW, Causes, NewFindings, few_causes, find_in_rows, find_wrong, remedy
from llamarl.observability.metrics import WarningLog, read_warnings
from llamarl.settings.observability import ObservabilityConfig

RUNS: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("runs_to_judge.json").read_text())


def said(rows: list[dict[str, Any]], *, group_baseline: bool = True) -> dict[str, tuple[int, str]]:
    """Kind -> the tick in which it was said, and the words."""
    findings = NewFindings(group_baseline=group_baseline)
    found: dict[str, tuple[int, str]] = {}
    for row in rows:
        new = findings.look(row, ["exception: ValueError: no number"] if row["reward/failed"] else [])
        assert not new.keys() & found.keys(), "said twice"
        found |= {kind: (row["step"], text) for kind, text in new.items()}
    return found


@pytest.mark.parametrize(
    ("run", "kinds", "key"),
    [
        ("constant", {"no_signal"}, "task.reward"),
        ("cut", {"mostly_cut"}, "generator.sampling.max_new_tokens"),
        ("rate", {"mismatch"}, "optimizer.lr"),
        ("fails", {"all_rewards_failed", "rewards_failing", "nothing_trained"}, "task.reward"),
    ],
)
def test_each_broken_run_is_warned_of_with_the_key_to_change(run: str, kinds: set[str], key: str) -> None:
    found = said(RUNS[run])
    assert kinds <= set(found)
    assert all(key in found[kind][1] for kind in kinds - {"nothing_trained"})
    assert max(tick for tick, _ in found.values()) <= 15


def test_a_sound_run_gives_no_warning() -> None:
    assert len(RUNS["healthy"]) == 100 and said(RUNS["healthy"]) == {}


SOUND = {
    "reward/mean": 0.5,
    "reward/failed": 0,
    "samples/delivered": 10,
    "groups/generated": 10,
    "groups/no_signal": 3,
    "response/truncated_fraction": 0.1,
    "mismatch/kl": 0.01,
    "ratio/clipped_fraction": 0.0,
    "entropy": 1.0,
    "tokens/trained": 100,
    "step/skipped": 0,
    "time/generator_s": 10.0,
    "time/environment_wait_s": 0.0,
    "time/environment_held_s": 0.0,
}
AT_THE_LIMIT = [
    ({"groups/no_signal": 9}, {"groups/no_signal": 8}, "no_signal"),
    ({"response/truncated_fraction": 0.5}, {"response/truncated_fraction": 0.49}, "mostly_cut"),
    ({"mismatch/kl": 0.5}, {"mismatch/kl": 0.49}, "mismatch"),
    ({"ratio/clipped_fraction": 0.3}, {"ratio/clipped_fraction": 0.29}, "mismatch"),
    ({"entropy": 0.05}, {"entropy": 0.051}, "entropy_collapsed"),
    ({"ratio/effective_samples": 0.199}, {"ratio/effective_samples": 0.2}, "few_samples"),
    ({"reward/failed": 5}, {"reward/failed": 4}, "rewards_failing"),
    ({"tokens/trained": 0}, {"tokens/trained": 1}, "nothing_trained"),
    ({"step/skipped": 1, "mismatch/kl": None}, {"step/skipped": 0}, "nothing_trained"),
    ({"time/environment_wait_s": 1.01}, {"time/environment_wait_s": 1.0}, "replies_late"),
]

AT_ONCE = {"mostly_cut": 1, "mismatch": 1, "no_signal": 2}
"""Kind -> ticks of 10 responses and 10 groups that are enough to tell; the others need the whole window."""


@pytest.mark.parametrize(("beyond", "within", "kind"), AT_THE_LIMIT)
def test_a_warning_begins_at_its_limit_in_the_first_tick_that_can_tell(
    beyond: dict[str, Any], within: dict[str, Any], kind: str
) -> None:
    enough = AT_ONCE.get(kind, WINDOW)

    def kinds(changes: dict[str, Any], num_rows: int = WINDOW) -> list[str]:
        recent = [{**SOUND, **changes}] * num_rows
        return list(find_in_rows([SOUND] * WINDOW, recent, group_baseline=True))

    assert kinds(beyond) == [kind]
    assert kinds(within) == []
    assert kinds(beyond, enough) == [kind]
    assert enough == 1 or kinds(beyond, enough - 1) == []


@pytest.mark.parametrize(
    "few", [{"samples/delivered": 7, "response/truncated_fraction": 1.0}, {"tokens/computed": 116}]
)
def test_a_tick_of_few_responses_or_few_computed_tokens_tells_nothing(few: dict[str, float]) -> None:
    rows = [{**SOUND, "mismatch/kl": 5.0, **few}]
    assert find_in_rows(rows, rows, group_baseline=True) == {}


def test_episodes_that_never_end_blame_a_limit_of_theirs() -> None:
    of_episodes = {"episodes/delivered": 10, "episodes/truncated_fraction": 0.8, "episodes/turns_mean": 6.0}
    rows = [{**SOUND, "response/truncated_fraction": 0.8, **of_episodes}]
    (text,) = find_in_rows(rows, rows, group_baseline=True).values()
    assert "80% of the episodes" in text and "task.max_turns" in text and "enable_thinking" not in text


def test_few_effective_samples_are_told_before_the_rewards_fall() -> None:
    """As recorded of the bundled model at a rate of 3e-3 and staleness 4; the same at 2e-4 learns and stays above 0.23."""
    share = [1.0, 0.835, 0.59, 0.171, 0.132, 0.031, 0.019, 0.071, 0.112, 0.125]
    reward = [0.305, 0.305, 0.422, 0.336, 0.25, 0.32, 0.383, 0.391, 0.086, 0.008]
    rows = [{**SOUND, "ratio/effective_samples": s, "reward/mean": r} for s, r in zip(share, reward, strict=True)]
    told = [
        k
        for k in range(10)
        if "few_samples" in find_in_rows(rows[:5], rows[max(0, k - 4) : k + 1], group_baseline=True)
    ]
    assert told[0] == 6 and min(reward[: told[0] + 1]) > 0.2 > max(reward[8:])


def test_a_rate_far_too_high_is_told_before_what_it_causes() -> None:
    """The policy breaks at the second update; later its responses never end and no reward differs."""
    found = said(RUNS["rate"])
    assert min(found.values())[1] == found["mismatch"][1] and found["mismatch"][0] <= 3
    sound, broken = {**SOUND, "step": 0}, {**SOUND, "mismatch/kl": 7.0, "response/truncated_fraction": 0.9}
    both = find_in_rows([sound], [broken] * WINDOW, group_baseline=True)
    assert list(both) == ["mismatch", "mostly_cut"]
    assert "optimizer.lr" in both["mostly_cut"] and "Raise generator" not in both["mostly_cut"]
    from_the_start = find_in_rows([broken], [broken], group_baseline=True)
    assert "Raise generator.sampling.max_new_tokens" in from_the_start["mostly_cut"]


def test_a_tick_of_nothing_but_failures_is_told_at_once_with_its_first_cause() -> None:
    row = {**SOUND, "reward/failed": 10, "step": 0}
    found = find_in_rows([row], [row], group_baseline=True, causes=["crash: signal 11", "timeout: 20 s"])
    assert list(found) == ["all_rewards_failed"] and "crash: signal 11" in found["all_rewards_failed"]


def test_failures_of_a_broken_policy_do_not_blame_the_reward() -> None:
    row = {**SOUND, "reward/failed": 10, "step": 0}
    found = find_in_rows([row], [row] * WINDOW, group_baseline=True, causes=["generation: logits are not finite"])
    texts = [found["all_rewards_failed"], found["rewards_failing"]]
    assert all("optimizer.lr" in text and "task.reward" not in text for text in texts)


def test_equal_rewards_are_no_trouble_where_the_advantage_does_not_compare_a_group() -> None:
    assert "no_signal" not in said(RUNS["constant"], group_baseline=False)


def test_a_kind_that_was_said_before_a_resume_is_not_said_again() -> None:
    rows = RUNS["constant"]
    assert "no_signal" in said(rows[:8])
    resumed = NewFindings(group_baseline=True, rows=rows[:8], said={"no_signal"})
    assert "no_signal" not in [kind for row in rows[8:] for kind in resumed.look(row)]


def test_equal_rewards_everywhere_bring_to_mind_that_answers_are_text() -> None:
    row = {
        "groups/no_signal": 10,
        "groups/generated": 10,
        "samples/delivered": 80,
        "reward/failed": 0,
        "reward/mean": 0.0,
    }
    for spread, expected in ((0.0, True), (0.3, False)):
        rows = [row | {"reward/std": spread}] * WINDOW
        text = find_in_rows(rows, rows, group_baseline=True)["no_signal"]
        assert ("an answer reaches it as text" in text) == expected


def test_equal_rewards_bring_to_mind_neither_text_nor_the_reward_where_others_were_earned() -> None:
    row = {"groups/no_signal": 16, "groups/generated": 16, "samples/delivered": 128, "reward/failed": 0}
    row |= {"reward/mean": 0.0, "reward/std": 0.0}
    began = {**row, "reward/mean": 0.3, "reward/std": 0.4}  # a policy that broke later
    assert "as text" not in find_in_rows([began], [row], group_baseline=True)["no_signal"]
    hot = [row | {"eval/reward_mean": 0.375}]
    one = SimpleNamespace(tick=0, reward=[0.0] * 128, failure=[""] * 128, flags=[0] * 128)
    (constant,) = find_wrong(hot, [], [one], group_baseline=True)
    for text in (find_in_rows(hot, hot, group_baseline=True)["no_signal"], constant.text):
        assert "as text" not in text and "earned 0.375, those of the first tick 0.000" in text


def test_a_tick_that_stands_for_several_is_named() -> None:
    rows = [SOUND | {"step": step, "tokens/computed": 0.0} for step in range(WINDOW)]
    rows[2] |= {"tokens/computed": 900.0, "mismatch/kl": 1.0}
    assert "over tick 2 mismatch" in find_in_rows(rows, rows, group_baseline=True)["mismatch"]


def test_late_replies_bring_the_delay_that_would_hide_them() -> None:
    """A tool of 0.2 s beside engine steps of 3 ms: 66.7 steps."""
    late = {"time/environment_wait_s": 4.0, "time/late_reply_s": 0.2, "time/engine_step_s": 0.003}
    rows = [SOUND | late | {"time/environment_held_s": 4.0}] * WINDOW
    found = find_in_rows(rows, rows, group_baseline=True)
    assert list(found) == ["replies_late"] and "40% of" in found["replies_late"]
    assert "generator.reply_delay = 67" in found["replies_late"]


def test_where_nobody_else_was_left_to_write_no_delay_is_advised() -> None:
    late = {"time/environment_wait_s": 4.0, "time/late_reply_s": 0.2, "time/engine_step_s": 0.003}
    rows = [SOUND | late | {"time/environment_held_s": 1.9}] * WINDOW
    text = find_in_rows(rows, rows, group_baseline=True)["replies_late"]
    assert "reply_delay" not in text and "task.pool.num_workers" in text


def test_a_report_names_at_most_five_causes_and_counts_the_others() -> None:
    causes = {f"exception: Error{n}: x": n for n in range(1, 10)}
    found = few_causes(causes)
    assert list(found.items())[:2] == [("exception: Error9: x", 9), ("exception: Error8: x", 8)]
    assert len(found) == 6 and found["others: of further causes"] == 1 + 2 + 3 + 4
    assert few_causes({"timeout: 20 s": 3}) == {"timeout: 20 s": 3}


def test_causes_add_up_over_ticks_and_only_a_new_kind_is_news() -> None:
    causes = Causes()
    assert causes.add({"timeout: 20 s": 2}) == ["timeout: 20 s"]
    assert causes.add({"exception: ValueError: a": 3, "timeout: 21 s": 5}) == ["exception: ValueError: a"]
    assert causes.lines() == ["7 x timeout: 20 s", "3 x exception: ValueError: a"]
    of_environments = {"environment: timeout: 3 s": 1, "environment: KeyError: 'a'": 1}
    assert causes.add(of_environments) == list(of_environments)
    assert {remedy(cause) for cause in of_environments} == {"Mend the environment (task.environment, task.pool)"}


# The log of warnings.


QUIET = ObservabilityConfig(console="none", tensorboard=False, trace=False)


def report(tick: int, failed: int) -> Report:
    metrics = {"samples/delivered": 4.0, "reward/failed": float(failed), "tokens/trained": 9.0 * (failed < 4)}
    failures = {"exception: ValueError: no number": failed} if failed else {}
    return Report("trainer", tick, metrics, 0.0, 1.0, failures=failures)


def test_a_kind_of_trouble_is_said_once_also_over_a_resume(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, QUIET, ["trainer"], 6)
    for tick, failed in enumerate([0, 4, 4, 4]):
        recorder.on_report(report(tick, failed))
    assert recorder.summary().failures == ("12 x exception: ValueError: no number",)
    recorder.close()
    (warning,) = read_warnings(tmp_path)
    assert (warning["step"], warning["kind"]) == (1, "all_rewards_failed")
    assert "every reward of " in warning["text"] and "ValueError: no number" in warning["text"]

    resumed = Recorder(tmp_path, QUIET, ["trainer"], 6, resume_after_tick=2)
    resumed.on_report(report(3, 4))
    resumed.close()
    assert read_warnings(tmp_path) == [warning]  # said before the resume
    again = Recorder(tmp_path, QUIET, ["trainer"], 6, resume_after_tick=0)
    assert read_warnings(tmp_path) == []  # of a tick that is done again
    again.on_report(report(1, 4))
    again.close()
    assert read_warnings(tmp_path) == [warning]


def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    log = WarningLog(tmp_path)
    log.write(3, "no_signal", "an example")
    with log.path.open("ab") as file:
        file.write(b'{"step": 4, "ki')
    assert read_warnings(tmp_path) == [{"step": 3, "kind": "no_signal", "text": "an example"}]
    assert WarningLog(tmp_path, resume_after_tick=3).said == {"no_signal"}
    assert log.path.read_bytes().endswith(b"}\n")
