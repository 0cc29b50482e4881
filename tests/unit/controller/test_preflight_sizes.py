from __future__ import annotations

import dataclasses

import pytest

from llamarl.config import RunConfig
from llamarl.controller.preflight import check_parallel_sizes
from llamarl.controller.training import plan_run
from llamarl.errors import ConfigError, ModelError
from llamarl.models.folders import resolve_model_path

FOLDER = resolve_model_path("bundled:tiny")


def mesh(fsdp: int, tp: int, runtime: str = "monarch") -> RunConfig:
    plain = RunConfig()
    return dataclasses.replace(
        plain,
        run=dataclasses.replace(plain.run, runtime=runtime),
        trainer=dataclasses.replace(plain.trainer, fsdp=fsdp, tp=tp, device="cpu"),
    )


def test_a_mesh_that_fits_is_accepted() -> None:
    check_parallel_sizes(mesh(2, 2), FOLDER, cores=1)


def test_a_dry_run_refuses_a_size_that_does_not_divide_the_model_and_names_those_that_do() -> None:
    with pytest.raises(ModelError, match=r"trainer.tp = 7 does not divide.*sizes that fit: 1, 2"):
        plan_run(mesh(1, 7))


def test_many_ranks_a_core_are_refused_with_the_sizes_that_fit() -> None:
    with pytest.raises(ConfigError, match=r"8 \* 2 = 16 ranks on 2 cores.*fit.*: 1 \* 2, 2 \* 2, 3 \* 2, 4 \* 2$"):
        check_parallel_sizes(mesh(8, 2), FOLDER, cores=2)


def test_one_process_cannot_hold_a_mesh() -> None:
    with pytest.raises(ConfigError, match="run.runtime 'inline'.*2 ranks.*set run.runtime to 'monarch'"):
        check_parallel_sizes(mesh(2, 1, "inline"), FOLDER, cores=8)
