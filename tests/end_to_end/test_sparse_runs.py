"""The recipe with experts, whose trainer replays the generator's choices: it repeats and resumes bit for bit like any other."""

from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, CommandLine, rows
from same_run import assert_same_run

RECIPE = REPOSITORY / "recipes" / "moe.toml"
SHORT: dict[str, Any] = {
    "run.num_ticks": 4,
    "checkpoint.every": 2,
    "evaluation.every": 0,
    "optimizer.schedule": '"constant"',  # a falling one would depend on the length of the run
    "optimizer.warmup_ticks": 0,
}
INLINE = {"run.runtime": '"inline"'}


def test_a_resumed_run_with_replay_has_the_bits_of_an_unbroken_one(llamarl: CommandLine, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for run_dir, settings, flags in (
        (whole, SHORT, []),
        (broken, {**SHORT, "run.num_ticks": 2}, []),
        (broken, SHORT, ["--resume", str(broken)]),
    ):
        llamarl.train(run_dir, {**settings, **INLINE}, *flags, recipe=RECIPE)
    assert_same_run(broken, whole)
    table = rows(whole)
    assert table[1]["tokens/carried"] > 0  # responses went through the checkpoint with their experts
    assert max(row["rollout/segments_max"] for row in table) == 2
    for row in table:
        assert 1 <= row["experts/load_mean"] <= row["experts/load_max"] <= 8


@pytest.mark.long
@pytest.mark.parametrize("meshes", [{"trainer.tp": 2}, {"trainer.ep": 2, "trainer.pp": 2}], ids=["tp", "ep x pp"])
def test_experts_over_ranks_of_both_sides_train_as_on_one(
    llamarl: CommandLine, tmp_path: Path, meshes: dict[str, int]
) -> None:
    """The generator's two tensor-parallel ranks pull the experts that they hold from the trainer's four; the experts that they
    chose are replayed there."""
    short = {**SHORT, "run.num_ticks": 2}
    meshes = {"generator.tp": 2, "trainer.fsdp": 2, "run.cores": 8, **meshes}
    llamarl.train(tmp_path / "one", short, recipe=RECIPE)
    llamarl.train(tmp_path / "ranks", {**short, **meshes}, recipe=RECIPE, limit_s=400)
    for one, ranks in zip(rows(tmp_path / "one"), rows(tmp_path / "ranks"), strict=True):
        assert ranks["tokens/trained"] == one["tokens/trained"]
        assert ranks["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert ranks["loss/policy"] == pytest.approx(one["loss/policy"], abs=1e-6)
        assert ranks["experts/load_max"] == pytest.approx(one["experts/load_max"], rel=1e-3)


@pytest.mark.long
@pytest.mark.timeout(3600)  # longer than any other test's: as long as the run that it waits for may take
def test_it_learns_the_task(llamarl: CommandLine, tmp_path: Path) -> None:
    """Some minutes on two cores: from a quarter of the sums to most of them."""
    llamarl.run(
        ["train", str(RECIPE), "--run.dir", str(tmp_path / "run"), "--observability.console", "none"], limit_s=3600
    )
    found = [row["eval/accuracy"] for row in rows(tmp_path / "run") if "eval/accuracy" in row]
    assert found[-1] > 0.9
