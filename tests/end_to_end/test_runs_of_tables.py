"""A run whose questions are a data set of the Hub, in processes that the Hub is not asked from."""

import tomllib
from pathlib import Path

import pytest

pytest.importorskip("datasets", reason="tables need the package datasets: pip install 'llamarl[datasets]'")
import pyarrow
import pyarrow.parquet
from hub_server import serving_here

from llamarl.cli.main import main


def test_a_data_set_of_the_hub_is_trained_on_and_its_commit_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"problem": f"a{n % 10} b{n // 10} =\n", "solution": str(n % 10 + n // 10)} for n in range(40)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "judge.py").write_text("def judge(response, answer):\n    return float(answer in response)\n")
    (tmp_path / "recipe.toml").write_text(
        """
        [run]
        dir = "run"
        runtime = "inline"
        num_ticks = 1
        [task]
        name = "function"
        data = "lab/sums"
        columns = { question = "problem", answer = "solution" }
        reward = "judge.py:judge"
        [schedule]
        prompts_per_step = 2
        [generator]
        group_size = 2
        threads = 1
        sampling = { max_new_tokens = 8 }
        [trainer]
        threads = 1
        [evaluation]
        every = 1
        num_prompts = 2
        """
    )
    with serving_here(monkeypatch, tmp_path) as hub:
        commit = hub.commit("datasets/lab/sums", {"train.parquet": (tmp_path / "train.parquet").read_bytes()})
        monkeypatch.delenv("HF_HUB_OFFLINE")  # a process that it starts could ask
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        assert main(["train", "recipe.toml"]) in (0, 4)  # the bundled model may not solve one of four
    recorded = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["task"]
    assert recorded["data"] == f"lab/sums@{commit}"
    assert sum("/resolve/" in line and line.startswith("GET") for line in hub.asked) <= 2  # file and redirect, once
