"""A trainer's layers as compiled functions, whose operators run one by one here: what is compiled, and that nothing changes."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch._dynamo.utils import counters
from training_fixtures import make_groups, write_model

from llamarl.models.attention import PACKED_ATTENTION, packed_attention, register_attention
from llamarl.models.parallel import ParallelLayout
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer import building, compiled_layers
from llamarl.trainer.step import Trainer


@pytest.fixture(autouse=True)
def traced_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled_layers.torch, "compile", partial(torch.compile, backend="aot_eager", options=None))
    monkeypatch.setattr(building, "use_onednn_linears", lambda model: 0)  # as on a GPU
    torch.compiler.reset()
    counters.clear()
    yield
    register_attention(PACKED_ATTENTION, packed_attention)
    torch.compiler.reset()


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_steps_of_compiled_layers_are_those_of_plain_ones(
    checkpointing: Literal["none", "full"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all layers four functions, about attention and its products, for rows of any number of tokens."""
    folder, found = write_model(tmp_path, "qwen3"), []
    for compiles in (False, True):
        monkeypatch.setattr(building, "_compiles", lambda *_, compiles=compiles: compiles)
        config = TrainerConfig(
            max_tokens_per_microbatch=64, microbatches_at_once=1, activation_checkpointing=checkpointing
        )
        trainer = Trainer(
            folder, config, OptimizerConfig(lr=1e-2, eps=1e-1), AlgorithmConfig(), temperature=0.9
        )  # an eps far above the gradients: AdamW follows them, not their signs
        metrics = [trainer.train(make_groups(seed=tick), tick) for tick in range(2)]
        found.append((metrics, {name: w.clone() for name, w in trainer.parameters_for_sync().items()}))
    assert counters["stats"]["unique_graphs"] == 4
    (plain, weights), (compiled, reached) = found
    for one, other in zip(compiled, plain, strict=True):
        for key in ("loss/policy", "entropy", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(reached[name], weight, atol=1e-5, rtol=1e-4)


def test_a_lone_rank_on_a_gpu_compiles_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    one, gpu, cpu = ParallelLayout(fsdp=1, tp=1, mesh=None), torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(building, "check_compiler", lambda user: None)
    assert building._compiles(one, gpu, torch.bfloat16)
    assert not building._compiles(one, gpu, torch.float32) and not building._compiles(one, cpu, torch.bfloat16)
    assert not building._compiles(ParallelLayout(fsdp=2, tp=1, mesh=None), gpu, torch.bfloat16)
