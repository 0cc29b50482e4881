from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from llamarl.algorithms.advantages import compute_advantages
from llamarl.algorithms.kl import ESTIMATORS as KL_ESTIMATORS
from llamarl.config import load_config, save_config, validate
from llamarl.errors import ConfigError
from llamarl.settings.algorithms import ADVANTAGE_NAMES, AlgorithmConfig


def test_rho_takes_a_number_or_none() -> None:
    assert AlgorithmConfig(rho="none").rho == "none"
    assert AlgorithmConfig(rho=5).rho == 5.0
    with pytest.raises(ValueError, match="rho"):
        AlgorithmConfig(rho="2.5")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"rho": 0.0}, "rho"), ({"rho": -1}, "rho"), ({"kl_coef": -0.1}, "kl_coef"), ({"normalization_constant": 0}, "normalization_constant"),
     ({"clip_low": 1.5}, "clip_low"), ({"clip_high": -1}, "clip_high"), ({"ratio_mask_low": 6}, "ratio_mask_low"),
     ({"overlong_buffer": 9, "overlong_limit": 5}, "overlong_limit"), ({"name": "nope"}, "name"), ({"unknown": 1}, "unknown")],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        AlgorithmConfig(**changed)


@pytest.mark.parametrize(
    ("algorithm", "place", "why"),
    [({"advantage": "gdpo"}, "reward", "sees the named parts of a reward alone"),
     ({"name": "sft"}, "reward", "trains on no reward"), ({"name": "sft"}, "token_reward", "trains on no reward")],
)  # fmt: skip
def test_a_kl_in_rewards_that_nobody_looks_at_is_refused(algorithm: dict[str, Any], place: Any, why: str) -> None:
    with pytest.raises(ValidationError, match=f"kl_place is '{place}', but .*{why}"):
        AlgorithmConfig(**algorithm, kl_coef=0.1, kl_place=place)
    assert AlgorithmConfig(**algorithm, kl_place=place).kl_coef == 0.0
    assert AlgorithmConfig(**algorithm, kl_coef=0.1).term_weights.kl == 0.1


def test_every_name_that_a_recipe_may_write_has_a_function() -> None:
    annotations = AlgorithmConfig.__pydantic_fields__  # type: ignore[attr-defined]
    assert set(annotations["kl_estimator"].annotation.__args__) == {*KL_ESTIMATORS, "unbiased"}  # which also weighs
    for advantage in ADVANTAGE_NAMES:
        (got,) = compute_advantages([np.array([2.0, 0.0])], AlgorithmConfig(advantage=advantage))
        assert got[0] > 0


def test_a_preset_is_the_loss_and_the_keys_of_its_paper() -> None:
    grpo = AlgorithmConfig(
        name="ppo", advantage="group_std", normalization="sequence", clip_low=0.2, clip_high=0.2, kl_coef=0.04,
        kl_estimator="k3",
    )  # fmt: skip
    assert AlgorithmConfig(name="grpo") == grpo
    dapo = AlgorithmConfig(name="ppo", advantage="group_std", normalization="token", clip_low=0.2, clip_high=0.28)
    assert AlgorithmConfig(name="dapo") == dapo


def test_a_recipes_constants_win_over_a_presets_and_its_meaning_does_not() -> None:
    config = validate({"algorithm": {"name": "grpo", "kl_coef": 0.0, "clip_high": 0.3, "advantage": "group_std"}})
    assert (config.algorithm.name, config.algorithm.kl_coef, config.algorithm.clip_high) == ("ppo", 0.0, 0.3)
    assert not config.has_reference and validate({"algorithm": {"name": "grpo"}}).has_reference
    with pytest.raises(ConfigError) as caught:
        validate({"algorithm": {"name": "grpo", "advantage": "group_mean", "normalization": "token"}})
    assert "2 mistakes" in str(caught.value)
    assert "algorithm.advantage is 'group_mean', but name 'grpo' means 'group_std'" in str(caught.value)
    assert "algorithm.normalization is 'token', but" in str(caught.value)


def test_what_a_run_saves_of_a_preset_reads_back_equal(tmp_path: Path) -> None:
    config = validate({"algorithm": {"name": "dapo", "clip_low": 0.1}})
    save_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml").algorithm == config.algorithm
    assert 'name = "ppo"' in (tmp_path / "config.toml").read_text()


def test_a_preset_given_on_the_command_line_fights_with_keys_that_mean_otherwise(tmp_path: Path) -> None:
    save_config(validate({}), tmp_path / "config.toml")  # every key, at the defaults of AIPO
    with pytest.raises(
        ConfigError, match="name 'sft' means 'reward': leave advantage out$"
    ):  # it stands for no other name
        load_config(None, ["--algorithm.name", "sft", "--algorithm.advantage", "group_std"])
    with pytest.raises(ConfigError, match="algorithm.advantage is 'group_mean', but name 'dapo' means"):
        load_config(tmp_path / "config.toml", ["--algorithm.name", "dapo"])
