"""What a run warns of: rows of real runs, broken on purpose and sound, and rows at the limits.

``runs_to_judge.json`` holds the keys that matter of ``metrics.jsonl`` of runs of recipes/tiny.toml: as it is (``healthy``), and
with 8 prompts a step and a reward that is always 0.1 (``constant``), ``max_new_tokens = 8`` (``cut``), a rate a hundred times as
high (``rate``), or a reward function that always raises (``fails``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llamarl.observability.health import WINDOW, Health, find_trouble, hiding_delay

RUNS: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("runs_to_judge.json").read_text())


def said(rows: list[dict[str, Any]], *, group_baseline: bool = True) -> dict[str, tuple[int, str]]:
    """Kind -> the tick in which it was said, and the words."""
    health = Health(group_baseline=group_baseline)
    found: dict[str, tuple[int, str]] = {}
    for row in rows:
        for trouble in health.look(row, ["exception: ValueError: no number"] if row["reward/failed"] else []):
            assert trouble.kind not in found, "said twice"
            found[trouble.kind] = (row["step"], trouble.text)
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
    ({"reward/failed": 5}, {"reward/failed": 4}, "rewards_failing"),
    ({"tokens/trained": 0}, {"tokens/trained": 1}, "nothing_trained"),
    ({"step/skipped": 1, "mismatch/kl": None}, {"step/skipped": 0}, "nothing_trained"),
    ({"time/environment_wait_s": 1.01}, {"time/environment_wait_s": 1.0}, "replies_late"),
]


@pytest.mark.parametrize(("beyond", "within", "kind"), AT_THE_LIMIT)
def test_a_warning_begins_at_its_limit_and_needs_every_tick_of_the_window(
    beyond: dict[str, Any], within: dict[str, Any], kind: str
) -> None:
    def kinds(changes: dict[str, Any], num_rows: int = WINDOW) -> list[str]:
        recent = [{**SOUND, **changes}] * num_rows
        return [trouble.kind for trouble in find_trouble([SOUND] * WINDOW, recent, group_baseline=True)]

    assert kinds(beyond) == [kind]
    assert kinds(within) == []
    assert kinds(beyond, WINDOW - 1) == []


def test_a_tick_of_nothing_but_failures_is_told_at_once_with_its_first_cause() -> None:
    row = {**SOUND, "reward/failed": 10, "step": 0}
    (trouble,) = find_trouble([row], [row], group_baseline=True, causes=["crash: signal 11", "timeout: 20 s"])
    assert trouble.kind == "all_rewards_failed" and "crash: signal 11" in trouble.text


def test_failures_of_a_broken_policy_do_not_blame_the_reward() -> None:
    row = {**SOUND, "reward/failed": 10, "step": 0}
    troubles = find_trouble([row], [row] * WINDOW, group_baseline=True, causes=["generation: logits are not finite"])
    texts = [trouble.text for trouble in troubles if trouble.kind in ("all_rewards_failed", "rewards_failing")]
    assert len(texts) == 2
    assert all("optimizer.lr" in text and "task.reward" not in text for text in texts)


def test_equal_rewards_are_no_trouble_where_the_advantage_does_not_compare_a_group() -> None:
    assert "no_signal" not in said(RUNS["constant"], group_baseline=False)


def test_a_kind_that_was_said_before_a_resume_is_not_said_again() -> None:
    rows = RUNS["constant"]
    assert "no_signal" in said(rows[:8])
    resumed = Health(group_baseline=True, rows=rows[:8], said={"no_signal"})
    assert not [trouble for row in rows[8:] for trouble in resumed.look(row) if trouble.kind == "no_signal"]


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
        (text,) = [one.text for one in find_trouble(rows, rows, group_baseline=True) if one.kind == "no_signal"]
        assert ("an answer reaches it as text" in text) == expected


def test_late_replies_bring_the_delay_that_would_hide_them() -> None:
    """A tool of 0.2 s beside engine steps of 3 ms: 66.7 steps."""
    late = {"time/environment_wait_s": 4.0, "time/late_reply_s": 0.2, "time/engine_step_s": 0.003}
    rows = [SOUND | late | {"time/environment_held_s": 4.0}] * WINDOW
    (trouble,) = find_trouble(rows, rows, group_baseline=True)
    assert trouble.kind == "replies_late" and "40% of" in trouble.text
    assert "generator.reply_delay = 67" in trouble.text
    assert hiding_delay(0.2, 0.05) == 4 and hiding_delay(0.21, 0.05) == 5


def test_where_nobody_else_was_left_to_write_no_delay_is_advised() -> None:
    late = {"time/environment_wait_s": 4.0, "time/late_reply_s": 0.2, "time/engine_step_s": 0.003}
    rows = [SOUND | late | {"time/environment_held_s": 1.9}] * WINDOW
    (trouble,) = find_trouble(rows, rows, group_baseline=True)
    assert "reply_delay" not in trouble.text and "task.pool.num_workers" in trouble.text
