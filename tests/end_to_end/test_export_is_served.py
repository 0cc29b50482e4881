"""A run's last evaluation, and ``llamarl eval`` of what it exported: the same tokens, whatever the engine computes in.

The model is the bundled one, stored in bfloat16 as published models are, so that a cast back to it would show.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RECIPE, arguments, rows
from safetensors.torch import load_file, save_file

from llamarl.cli.main import main
from llamarl.executors import evaluator
from llamarl.models.folders import resolve_model_path
from llamarl.types import Group

SETTINGS: dict[str, Any] = {
    "run.runtime": '"inline"',
    "run.num_ticks": 2,
    "evaluation.every": 2,
    "generator.threads": 1,
    "trainer.threads": 1,
    "observability.console": '"none"',
    "observability.tensorboard": "false",
    "observability.trace": "false",
    "optimizer.schedule": '"constant"',
    "optimizer.warmup_ticks": 0,
}
LORA = {"lora.rank": 4, "optimizer.lr": 5e-3}
ADAPTER_ALONE = {**LORA, "lora.export_merged": "false"}
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"generator.engine.dtype": '"bfloat16"'},
    "int8": {"generator.quantization": '"int8"'},
    "lora": LORA,
    "lora, adapter handed over to bfloat16": {
        **LORA, "lora.hand_over": '"adapter"', "generator.engine.dtype": '"bfloat16"', "trainer.dtype": '"bfloat16"',
    },
    "lora, adapter exported": ADAPTER_ALONE,
    "lora, adapter exported, bfloat16": {**ADAPTER_ALONE, "generator.engine.dtype": '"bfloat16"'},
}  # fmt: skip
IN_SHORT = frozenset({"int8", "lora, adapter handed over to bfloat16"})
FLOAT32_BASE = frozenset({"lora, adapter handed over to bfloat16", "lora, adapter exported, bfloat16"})
"""Here rounding the base before or after the adapter is added makes a difference."""


@pytest.fixture(scope="module")
def bfloat16_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "tiny"
    shutil.copytree(resolve_model_path("bundled:tiny"), folder)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


Sampled = list[tuple[list[int], list[float]]]


def tokens(groups: list[Group]) -> Sampled:
    """With their log-probs, which show a rounded weight where no token changes."""
    responses = [response for group in groups for response in group.responses]
    return [(response.tokens.tolist(), response.behavior_logprobs.tolist()) for response in responses]


@pytest.mark.parametrize(
    "case", [case if case in IN_SHORT else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_evaluating_a_run_repeats_its_own_last_evaluation_to_the_token(
    case: str, bfloat16_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled: list[Sampled] = []
    original = evaluator.sample_groups

    def remember(*args: Any, **kwargs: Any) -> list[Group]:
        groups = original(*args, **kwargs)
        sampled.append(tokens(groups))
        return groups

    monkeypatch.setattr(evaluator, "sample_groups", remember)
    run = tmp_path / "run"
    base = "bundled:tiny" if case in FLOAT32_BASE else str(bfloat16_tiny)
    threads = torch.get_num_threads()
    settings = {"model.path": json.dumps(base), "optimizer.lr": 1e-4, **SETTINGS, **CASES[case]}
    assert main(["train", str(RECIPE), *arguments(run, settings)]) == 0
    of_the_run = rows(run)[-1]
    assert of_the_run["eval/policy_version"] == 2 and len(sampled) == 2
    capsys.readouterr()
    exported = run / ("adapter" if "exported" in case else "model")
    try:
        for named in (run, exported):
            assert main(["eval", str(named), "--json"]) == 0
            scores = json.loads(capsys.readouterr().out)
            assert sampled[-1] == sampled[1] != sampled[0], named
            assert scores["accuracy"] == of_the_run["eval/accuracy"]
            assert scores["length_mean"] == of_the_run["eval/length_mean"]
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
