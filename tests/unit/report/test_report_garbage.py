"""Signs of garbage in a text, and good answers that show none."""

from __future__ import annotations

import pytest

from llamarl.observability.findings import FLAGS
from llamarl.report.texts import flags_of, is_repetitive, other_script

PROSE = (
    "To find the number of apples we first count those in the basket, which are twelve, then add the five that Mary brings "
    "along in the afternoon. That makes seventeen. Since her brother eats two of them on the way home, fifteen remain, and "
    "divided among three children each of them gets exactly five apples, with none left over for the horse in the stable."
)


@pytest.mark.parametrize("text", ["the same again, " * 20, "!" * 200, PROSE + " I am sorry." * 30, "ab\n" * 100])
def test_a_text_that_runs_in_circles_is_repetitive(text: str) -> None:
    assert is_repetitive(text)


@pytest.mark.parametrize(
    "text", [PROSE, "", "4", "1000000000000", "1, 1, 2, 3, 5, 8, 13, 21", "x = 3\n" * 5, "-" * 60 + "\n" + PROSE]
)
def test_good_answers_are_not(text: str) -> None:
    assert not is_repetitive(text)


def test_another_script_than_the_prompts_is_told_from_formulas_and_from_the_prompts_own() -> None:
    assert other_script("Ответ на этот вопрос пять", "How many apples are there?")
    assert not other_script("Ответ на этот вопрос пять", "Сколько яблок?")
    assert not other_script("The angle α is π/3, so cos α = ½ and ∑ is ∞", "What is the angle?")
    assert not other_script("Naïve résumé of the façade", "Spell these words")
    assert not other_script("Пять", "How many?")  # too few letters to say


def test_flags_are_bits_in_the_order_of_their_names() -> None:
    assert FLAGS == ("repetition", "cut", "script", "empty")
    assert flags_of("five", "How many?", "stop") == 0
    assert flags_of("five", "How many?", "length") == 0b0010
    assert flags_of(" \n", "How many?", "stop") == 0b1000
    assert flags_of("again and " * 40, "How many?", "length") == 0b0011
