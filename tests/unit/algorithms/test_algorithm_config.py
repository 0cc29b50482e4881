from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from llamarl.algorithms.advantages import compute_advantages
from llamarl.algorithms.config import AlgorithmConfig
from llamarl.algorithms.kl import ESTIMATORS as KL_ESTIMATORS
from llamarl.algorithms.registry import LOSSES


def test_rho_takes_a_number_or_none_also_as_text() -> None:
    assert AlgorithmConfig(rho="none").rho == "none"
    assert AlgorithmConfig(rho=5).rho == 5.0
    assert AlgorithmConfig(rho="2.5").rho == 2.5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"rho": 0.0}, "rho"), ({"rho": -1}, "rho"), ({"kl_coef": -0.1}, "kl_coef"), ({"normalization_constant": 0}, "normalization_constant"),
     ({"clip_low": 1.5}, "clip_low"), ({"clip_high": -1}, "clip_high"), ({"ratio_mask_low": 6}, "ratio_mask_low"),
     ({"overlong_buffer": 9, "overlong_limit": 5}, "overlong_limit"), ({"name": "nope"}, "name"), ({"unknown": 1}, "unknown")],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        AlgorithmConfig(**changed)


def test_every_name_that_a_recipe_may_write_has_a_function() -> None:
    annotations = AlgorithmConfig.__pydantic_fields__  # type: ignore[attr-defined]
    assert set(annotations["name"].annotation.__args__) == set(LOSSES)
    assert set(annotations["kl_estimator"].annotation.__args__) == set(KL_ESTIMATORS)
    for advantage in annotations["advantage"].annotation.__args__:
        (got,) = compute_advantages([np.array([2.0, 0.0])], AlgorithmConfig(advantage=advantage))
        assert got[0] > 0
