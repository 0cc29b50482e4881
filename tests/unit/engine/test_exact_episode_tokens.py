"""The tokens of an episode are those that were sampled, under the trainer's own step and through the tokenizer.

A slice of ``benchmarks/exact_episode_tokens.py``, which plays 1,000 of every environment.
"""

from pathlib import Path

import pytest
from exact_episode_tokens import ALPHABET_SORT, CALCULATOR, ENVIRONMENTS, look_at, make_chatml

from llamarl.environments.registry import BUILT_IN

LEDGERS = f"{Path(__file__).resolve().parents[2] / 'small_environments.py'}:Ledgers"


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_chatml(tmp_path_factory.mktemp("chatml"))


def test_every_environment_that_comes_with_llamarl_is_looked_at() -> None:
    assert BUILT_IN.keys() <= ENVIRONMENTS.keys()


@pytest.mark.parametrize("environment", ["mastermind", LEDGERS], ids=["mastermind", "ledgers"])
def test_the_trainers_step_gives_the_recorded_log_probs(environment: str) -> None:
    options = {"turns": 4, "fewest": 2} if environment == LEDGERS else ENVIRONMENTS[environment]["bundled:tiny"]
    found = look_at("bundled:tiny", environment, options, episodes=8, workers=1)
    assert found.exact, found
    assert found.turns > 8 and found.would_change == 0  # one token a character


@pytest.mark.parametrize("environment", [CALCULATOR, ALPHABET_SORT], ids=["calculator", "alphabet_sort"])
def test_tokens_that_the_tokenizer_would_never_write_stay_as_they_were_sampled(chatml: str, environment: str) -> None:
    """Pieces of words, broken characters and whole tool calls, between the marks of a chat template."""
    found = look_at(chatml, environment, ENVIRONMENTS[environment]["chatml"], episodes=12, workers=1)
    assert found.exact, found
    assert found.turns > 12 and found.would_change > found.turns / 2
