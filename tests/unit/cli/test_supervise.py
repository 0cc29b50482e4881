"""When a supervised run is resumed, and when not."""

from __future__ import annotations

import pytest

from llamarl.cli.supervise import Attempts


def test_a_controller_that_was_killed_is_resumed_as_often_as_recovery_allows() -> None:
    attempts = Attempts(max_restarts=2, window_s=60.0)
    assert [attempts.why_not(-9, 5, now_s) for now_s in (0.0, 30.0)] == ["", ""]
    assert attempts.why_not(-9, 5, 59.0) == "it was resumed recovery.max_restarts = 2 times within 60 s"
    assert attempts.why_not(-9, 5, 61.0) == ""  # the first is out of the window


@pytest.mark.parametrize("code", [0, 2, 4, 130])
def test_what_was_done_refused_diverged_or_stopped_by_its_user_is_left_so(code: int) -> None:
    assert Attempts(max_restarts=8, window_s=60.0).why_not(code, 5, 0.0) == "it has ended for good"


@pytest.mark.parametrize("code", [1, 3])
def test_a_failure_is_tried_again_only_if_the_run_came_further_since_the_last_one(code: int) -> None:
    attempts = Attempts(max_restarts=8, window_s=60.0)
    assert attempts.why_not(code, 5, 0.0) == ""
    assert attempts.why_not(code, 7, 1.0) == ""
    assert attempts.why_not(code, 7, 2.0) == "it failed again without a further tick: it would fail a third time"
