"""What ``llamarl sft`` makes of its flags, before anything starts."""

from pathlib import Path

import pytest

from llamarl.cli import train
from llamarl.cli.main import main
from llamarl.config import RunConfig

pytestmark = pytest.mark.usefixtures("own_signals")


@pytest.mark.parametrize(
    ("words", "num_ticks", "warmup", "every"),
    [
        (["--batch", "2"], 50, 2, 10),
        (["--epochs", "2", "--batch", "2"], 100, 5, 20),
        (["--batch", "2", "--run.num_ticks", "20"], 20, 1, 4),
        (["--batch", "2", "--run.epochs", "2"], 100, 5, 20),
        (["--schedule.prompts_per_step", "2"], 50, 2, 10),
        (["--batch", "2", "--run.num_ticks", "20", "--optimizer.warmup_ticks", "7"], 20, 7, 4),
    ],
)
def test_warm_up_and_evaluations_are_shares_of_the_run_as_long_as_it_is(
    words: list[str], num_ticks: int, warmup: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "a{i} =", "completion": "{i}"}}\n' for i in range(100)))
    found: list[RunConfig] = []
    monkeypatch.setattr(train, "launch", lambda config, **flags: found.append(config))
    assert main(["sft", "bundled:tiny", str(file), "--task.eval_fraction", "0", *words]) == 0
    (config,) = found
    assert (config.run.num_ticks, config.optimizer.warmup_ticks, config.evaluation.every) == (num_ticks, warmup, every)
