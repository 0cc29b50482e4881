"""What a trainer's step gives a GPU, without one: a tick on torch's ``meta`` device, whose tensors have no values.

The kernels of a layer and the places at which the host waits are budgets: whoever adds to them says so here.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launches import Launches
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_fixtures import make_groups, write_model

from llamarl.models import attention
from llamarl.models.sharded_loading import make_skeleton
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import LoraConfig, OptimizerConfig, ReferenceConfig, TrainerConfig
from llamarl.trainer.scoring import FrozenScorer
from llamarl.trainer.step import Trainer


class _VarlenKernel(torch.autograd.Function):
    """One kernel each way, as flash attention of packed rows is."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.like = k
        return q.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return grad.clone(), torch.empty_like(ctx.like), torch.empty_like(ctx.like)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions that ask the device for a value: each answer is 1."""
    found: list[str] = []

    def patch(name: str, answer: Callable[[Tensor], Any]) -> None:
        real = getattr(Tensor, name)

        def ask(tensor: Tensor, *args: Any) -> Any:
            if not tensor.is_meta:
                return real(tensor, *args)
            found.append(traceback.extract_stack(limit=2)[0].name)
            return answer(tensor)

        monkeypatch.setattr(Tensor, name, ask)

    patch("tolist", lambda tensor: np.ones(tensor.shape, np.int64).tolist())
    patch("item", lambda tensor: 1)
    patch("cpu", lambda tensor: torch.from_numpy(np.ones(tensor.shape)))
    monkeypatch.setattr(attention, "_can_use_varlen", lambda q, cap: q.dtype == torch.bfloat16 and cap is None)
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn", lambda q, k, v, *rest, **settings: _VarlenKernel.apply(q, k, v)
    )
    return found


def _trainer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, lora: LoraConfig | None = None, **settings: Any
) -> Trainer:
    config = TrainerConfig(
        **{"dtype": "bfloat16", "share_prompts": False, "max_tokens_per_microbatch": 4096, **settings}
    )
    trainer = Trainer(folder, config, OptimizerConfig(), AlgorithmConfig(), temperature=0.9, device="meta", lora=lora)
    monkeypatch.setattr(trainer.weights, "step", lambda lr: None)  # fused AdamW refuses such tensors
    return trainer


def _launches(trainer: Trainer) -> Launches:
    with Launches() as launches:
        trainer.train(make_groups(), 0)
    return launches


@pytest.mark.parametrize(
    ("family", "settings", "budget"),
    [
        ("llama", {}, 131),
        ("qwen3", {}, 183),
        ("llama", {"activation_checkpointing": "full"}, 167),
        ("llama", {"share_prompts": True}, 290),
    ],
)
def test_a_layer_starts_no_more_kernels_than_it_did(
    family: str,
    settings: dict[str, Any],
    budget: int,
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward pass, the gradients' norm and their scaling."""
    counts = []
    for layers in (2, 4):
        folder = write_model(tmp_path / str(layers), family, num_hidden_layers=layers, tie_word_embeddings=False)
        counts.append(_launches(_trainer(folder, monkeypatch, **settings)))
    assert (counts[1].count - counts[0].count) / 2 <= budget
    assert counts[0].waiting == set()


@pytest.mark.parametrize("max_tokens", [4096, 24])
def test_the_host_waits_for_a_step_and_not_for_a_micro_batch(
    max_tokens: int, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(
        write_model(tmp_path, tie_word_embeddings=False), monkeypatch, max_tokens_per_microbatch=max_tokens
    )
    _launches(trainer)
    of_statistics = ["__init__", "__init__"]  # counts over all ranks, before; sums and maxima after
    assert asked == [*of_statistics, "pack_sequences", "apply_gradients", "metrics", "metrics"]


def test_adapters_alone_are_trained_without_a_tensor_left_on_the_cpu(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(write_model(tmp_path, tie_word_embeddings=False), monkeypatch, lora=LoraConfig(rank=4))
    assert _launches(trainer).waiting == set()


class _Bytes(TorchDispatchMode):
    """Bytes of every new tensor on the device, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        copies = func._schema.name in (
            "aten::_to_copy",
            "aten::clone",
        )  # transformers makes a model without storage first
        if isinstance(made, Tensor) and made.is_meta and made.is_floating_point() and copies:
            self.of[made.dtype] = self.of.get(made.dtype, 0) + made.numel() * made.element_size()
        return made


@pytest.mark.parametrize(
    ("what", "float32_a_parameter", "bfloat16_a_parameter"),
    [("trained", 4, 2), ("offloaded", 0, 2), ("frozen", 0, 2), ("adapters", 0, 2)],
)
def test_a_lone_rank_takes_no_more_of_the_device_than_it_keeps(
    what: str, float32_a_parameter: int, bfloat16_a_parameter: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 weights are read in host memory: on the device lie master weights, if any, and those that are computed with."""
    folder = write_model(tmp_path, tie_word_embeddings=False)
    with _Bytes() as taken:
        if what == "frozen":
            packing = TrainerConfig(share_prompts=False)
            reference = ReferenceConfig(dtype="bfloat16")
            FrozenScorer(folder, reference, AlgorithmConfig(), packing, temperature=0.9, device="meta")
        else:
            lora = LoraConfig(rank=1, hand_over="adapter") if what == "adapters" else None
            _trainer(folder, monkeypatch, lora=lora, offload_optimizer=what == "offloaded")
    num_parameters = sum(p.numel() for p in make_skeleton(folder, attention="eager").parameters())
    adapters = 2 * 4 * num_parameters // 10 if what == "adapters" else 0
    buffers = 4096
    assert taken.of[torch.bfloat16] == pytest.approx(bfloat16_a_parameter * num_parameters, abs=adapters + buffers)
    assert taken.of.get(torch.float32, 0) == pytest.approx(float32_a_parameter * num_parameters, abs=adapters + buffers)
