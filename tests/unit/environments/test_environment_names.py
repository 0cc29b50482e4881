"""From ``task.environment`` and its options to an environment, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from llamarl.data.items import TaskItem
from llamarl.environments.adapters.trl import TrlEnvironment
from llamarl.environments.jobs import close_quietly
from llamarl.environments.registry import BUILT_IN, KINDS, check_environment, make_environment
from llamarl.errors import DataError
from llamarl.settings.environments import TaskConfig

OWN = '''
from llamarl.environments.episode import Observation, Step

class Echo:
    """This package's shape."""
    def __init__(self, times: int = 1):
        if times < 1:
            raise ValueError("times must be >= 1")
        self.times = times
    def reset(self, item, seed):
        return Observation(text="say something")
    def step(self, reply):
        return Step(text=reply * self.times, done=True, reward=1.0)
    def close(self):
        pass

class Tools:
    """TRL's shape."""
    def __init__(self, unit: str = "kg"):
        self.unit = unit
    def reset(self, **row):
        return None
    def weigh(self, what: str) -> str:
        """Weigh something.

        Args:
            what: What.
        """
        return "3 " + self.unit

class Nothing:
    """Neither."""

def factory(times=2):
    return Echo(times)
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "my_game.py"
    file.write_text(OWN)
    return str(file)


def test_every_bundled_environment_is_made_by_its_name() -> None:
    for name in BUILT_IN:
        made = make_environment(name, {})
        assert type(made).__doc__
        made.close()


def test_a_class_of_your_own_is_made_with_its_options(own: str) -> None:
    made = make_environment(f"{own}:Echo", {"times": 2})
    made.reset(TaskItem(question=""), 0)
    assert made.step("ab").text == "abab"
    assert make_environment(f"{own}:factory", {}).step("ab").text == "abab"


def test_a_class_of_trls_kind_is_wrapped_and_its_wrapper_has_options(own: str) -> None:
    made = make_environment(f"trl:{own}:Tools", {"unit": "g", "max_moves": 3})
    assert isinstance(made, TrlEnvironment) and made.max_moves == 3
    made.reset(TaskItem(question="How heavy?"), 0)
    assert made.step('{"name": "weigh", "arguments": {"what": "it"}}').messages[0]["content"] == "3 g"


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("master_mind", {}, "task.environment 'master_mind' is unknown; did you mean 'mastermind'?"),
        ("what_is_this", {}, "task.environment 'what_is_this' is unknown; It is one of mastermind"),
        ("trl:my_shop", {}, "must name a class or function: trl:my_shop.py:Class"),
        ("trl:no/such/file.py:Gym", {}, "no file"),
        ("agent:", {}, "must name a class or function: agent:my_agent.py:function"),
        ("second_try", {"dataset": "chain_summ"}, "no dataset 'chain_summ'; nearest: chain_sum"),
        ("mastermind", {"peg": 3}, "task.environment_options.peg: mastermind has no such option; did you mean 'pegs'?"),
        ("mastermind", {"pegs": "3"}, "task.environment_options.pegs: expected an integer, got '3'"),
        ("mastermind", {"pegs": True}, "expected an integer, got True"),
        ("mastermind", {"style": "short"}, "expected 'words' or 'compact', got 'short'"),
        ("mastermind", {"max_moves": 0}, "task.environment_options.max_moves must be > 0, got 0"),
        ("mastermind", {"pegs": 9}, "must be <= 8, got 9"),
        ("second_try", {"min_terms": 2}, "dataset is empty"),
        ("second_try", {"dataset": "chain_sum", "no_such": 2}, "refuses {'no_such': 2}"),
        ("no/such/file.py:Game", {}, "no file"),
        ("no_such_package:Game", {}, "cannot import no_such_package"),
    ],
)  # fmt: skip
def test_what_is_refused_names_key_value_and_fix(name: str, options: dict[str, Any], told: str) -> None:
    for refuse in (make_environment, check_environment):
        with pytest.raises(DataError) as caught:
            refuse(name, options)
        assert told in str(caught.value)
        assert str(caught.value).startswith("task.environment")


def test_a_class_of_your_own_that_fails_is_told_with_its_words(own: str) -> None:
    with pytest.raises(DataError, match="times must be >= 1"):
        make_environment(f"{own}:Echo", {"times": 0})
    with pytest.raises(DataError, match="unexpected keyword argument 'tims'"):
        make_environment(f"{own}:Echo", {"tims": 0})
    with pytest.raises(DataError, match=r"Nothing has no reset\(\*\*row\)"):
        make_environment(f"trl:{own}:Nothing", {})
    with pytest.raises(DataError, match="has no 'Missing'"):
        make_environment(f"{own}:Missing", {})


def test_checking_does_not_run_the_users_file(tmp_path: Path) -> None:
    file = tmp_path / "loud.py"
    file.write_text("raise SystemExit('imported')\nclass Game: ...\n")
    check_environment(f"{file}:Game", {})


def test_an_environment_of_ones_own_needs_no_close(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "game.py"
    file.write_text("class Game:\n    def reset(self, item, seed): ...\n    def step(self, reply): ...\n")
    close_quietly(make_environment(f"{file}:Game", {}))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["Nothing", "Tools"])
def test_a_class_of_another_shape_is_refused_with_the_kinds_that_there_are(own: str, name: str) -> None:
    with pytest.raises(DataError) as caught:
        make_environment(f"{own}:{name}", {})
    told = str(caught.value)
    assert "needs reset(item, seed) and step(reply), and may have close()" in told
    assert "agent:my_agent.py:function, trl:my_shop.py:Class" in told


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("my_game.py:Game", "my_game.py:Game"),
        ("package.games:Game", "package.games:Game"),
        ("", ""),
        ("mastermind", ""),
        *((written, written.partition(":")[2]) for written, _ in KINDS.values()),
    ],
)  # fmt: skip
def test_the_configuration_knows_which_environments_are_code_of_the_users_own(name: str, path: str) -> None:
    assert TaskConfig(name="episodes" if name else "steps", environment=name).own_environment == path
