"""Counts with their nouns, and where they are said."""

import pytest

from llamarl.config import validate
from llamarl.controller.run_parts import _staleness
from llamarl.observability import text
from llamarl.observability.job_description import JobDescription
from llamarl.plural import plural


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (1, "version", "1 version"),
        (0, "version", "0 versions"),
        (2048, "rank", "2,048 ranks"),
        (2, "batch", "2 batches"),
        (1, "batch", "1 batch"),
    ],
)
def test_a_count_takes_its_noun_in_the_right_number(count: int, noun: str, words: str) -> None:
    assert plural(count, noun) == words


def test_a_bound_of_one_version_and_a_run_of_one_tick_are_said_so() -> None:
    assert _staleness(validate({})).endswith("no token older than 1 version")
    assert "t · 1 tick" in text.head(JobDescription(title="t", lanes=()), 1)[1]
