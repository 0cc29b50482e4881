"""A loss and an advantage from a user's file, beside the built-in names."""

from pathlib import Path

import numpy as np
import pytest
import torch

from llamarl.algorithms.advantages import compute_advantages
from llamarl.algorithms.base import TokenBatch
from llamarl.algorithms.registry import find_loss
from llamarl.config import load_config
from llamarl.controller.preflight import find_missing
from llamarl.errors import ConfigError
from llamarl.settings.algorithms import AlgorithmConfig

FILE = """
import numpy as np
import torch
from llamarl.algorithms.base import TokenLosses

def double(batch, config):
    terms = -2 * batch.advantages * batch.policy_logprobs
    return TokenLosses(losses=terms, clipped=terms > 0)

def averaged(batch, config):
    return TokenLosses(losses=batch.policy_logprobs.mean(), clipped=batch.advantages > 0)

def number(batch, config):
    return 1.0

def detached(batch, config):
    return TokenLosses(losses=batch.policy_logprobs.detach(), clipped=None)

def misspelt(batch, config):
    return TokenLosses(losses=batch.policy_logprobs * config.options["wieght"], clipped=None)

def listed(batch, config):
    return TokenLosses(losses=[batch.policy_logprobs], clipped=None)

def lone(batch):
    return 0

def both(loss):
    return lambda batch, config: loss(batch)

@both
def decorated(batch):
    return 0

def best_only(rewards):
    return np.where(rewards == np.nanmax(rewards), 1.0, -1.0)

def leafy(rewards):
    import torch
    return torch.tensor(rewards, requires_grad=True)

class Sink:
    def __init__(self, run_dir): ...

def short(rewards):
    return rewards[1:]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path / "own.py"


def batch() -> TokenBatch:
    return TokenBatch(
        policy_logprobs=torch.tensor([-1.0, -2.0], requires_grad=True),
        behavior_logprobs=torch.tensor([-1.0, -2.0]),
        advantages=torch.tensor([3.0, 1.0]),
        sequence_ids=torch.tensor([0, 0]),
        num_sequences=1,
    )


def test_a_loss_of_a_users_file_is_called_with_the_batch_and_the_section(file: Path) -> None:
    config = AlgorithmConfig(name=f"{file}:double")
    tokens = batch()
    find_loss(config.name)(tokens, config).losses.sum().backward()
    assert tokens.policy_logprobs.grad.tolist() == [-6.0, -2.0]


def test_a_loss_of_ones_own_has_options_and_need_not_say_what_it_clipped(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from llamarl.algorithms.base import TokenLosses\n\n\n"
        "def weighted(batch, config):\n"
        "    terms = -config.options['weight'] * batch.policy_logprobs * batch.advantages\n"
        "    return TokenLosses(losses=terms)\n"
    )
    words = ["--algorithm.name", f"{tmp_path}/own.py:weighted", "--algorithm.options.weight", "0.5"]
    config = load_config(None, words).algorithm
    terms = find_loss(config.name)(batch(), config)
    assert terms.losses.tolist() == [1.5, 1.0]  # 0.5 * 1 * 3 and 0.5 * 2 * 1
    assert terms.clipped.tolist() == [False, False]


def test_options_without_a_loss_of_ones_own_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.options are of a loss of your own, but name is 'ppo'"):
        load_config(None, ["--algorithm.name", "ppo", "--algorithm.options.weight", "0.5"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("averaged", r"'losses': \(\)"),
        ("listed", "'losses': <class 'list'>"),
        ("number", "returned a float"),
        ("missing", "has no 'missing'"),
        ("detached", "without a gradient"),
        ("misspelt", r"raised KeyError: 'wieght' at .*own.py:\d+: return TokenLosses"),
    ],
)
def test_a_loss_that_answers_wrongly_is_refused_with_what_it_should_be(file: Path, name: str, said: str) -> None:
    config = AlgorithmConfig(name=f"{file}:{name}")
    with pytest.raises(ConfigError, match=said):
        find_loss(config.name)(batch(), config)


@pytest.mark.parametrize(
    ("line", "said"), [("import nosuch", "No module named 'nosuch'"), ("exit(3)", "ends its process")]
)
def test_a_loss_whose_file_cannot_be_imported_is_told_with_its_key(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "own.py").write_text(f"{line}\ndef loss(batch, config): ...\n")
    with pytest.raises(ConfigError, match=f"algorithm.name '.*own.py:loss'.*{said}"):
        find_loss(f"{tmp_path}/own.py:loss")(batch(), AlgorithmConfig(name=f"{tmp_path}/own.py:loss"))


def test_an_advantage_of_a_users_file_sees_a_group_and_failed_samples_keep_none(file: Path) -> None:
    config = AlgorithmConfig(advantage=f"{file}:best_only")
    found = compute_advantages([np.array([0.0, 2.0, np.nan]), np.array([1.0])], config)
    assert [group.tolist() for group in found] == [[-1.0, 1.0, 0.0], [1.0]]
    with pytest.raises(ConfigError, match=r"made array\(\[1.\]\) of the rewards \[0.0, 1.0\]"):
        compute_advantages([np.array([0.0, 1.0])], AlgorithmConfig(advantage=f"{file}:short"))
    with pytest.raises(ConfigError, match="expected an array of numbers"):
        compute_advantages([np.array([0.0, 1.0])], AlgorithmConfig(advantage=f"{file}:leafy"))


def test_a_name_that_is_neither_is_refused_with_the_nearest_and_how_to_bring_ones_own() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.name 'pppo' is unknown; did you mean 'ppo'\?.*file\.py:name"):
        load_config(None, ["--algorithm.name", "pppo"])


def test_a_recipe_that_names_what_its_file_does_not_hold_is_refused_before_anything_starts(file: Path) -> None:
    config = load_config(None, ["--algorithm.name", f"{file}:tripple", "--algorithm.advantage", f"{file}:best_only"])
    (line,) = find_missing(config)
    assert line.key == "algorithm.name" and "has no 'tripple'" in line.text
    config = load_config(None, ["--algorithm.name", f"{file}:lone", "--algorithm.advantage", f"{file}:double"])
    loss, advantage = find_missing(config)
    assert "is lone(batch), and is called as lone(batch, config)" in loss.text
    assert "is double(batch, config), and is called as double(rewards)" in advantage.text
    assert not list(find_missing(load_config(None, ["--algorithm.name", f"{file}:decorated"])))
    words = [
        "--observability.sinks",
        f'["{file}:Sink"]',
        "--executors.mine",
        f'{{ factory = "{file}:Sink", writes = [] }}',
    ]
    executor, sink = find_missing(load_config(None, words))
    assert "is Sink(self, run_dir), and is called as Sink(config, context)" in executor.text
    assert "is called as Sink(run_dir, config, resume_after_tick)" in sink.text
