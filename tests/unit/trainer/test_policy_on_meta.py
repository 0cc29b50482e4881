"""The training step's forward and backward on a device that holds no values: a tensor left on the CPU would end it."""

from __future__ import annotations

import pytest
import torch
from training_fixtures import make_groups, tiny_config
from transformers import AutoModelForCausalLM

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.trainer.batch import make_microbatch, make_sequences
from llamarl.trainer.logprobs import LogitTransform
from llamarl.trainer.policy import Policy

META = torch.device("meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "shared"),
    [("llama", True), ("llama", False), ("qwen3", True), ("gemma2", False), ("gemma3_text", False)],
)
def test_every_tensor_of_a_microbatch_is_on_the_device(family: str, shared: bool, dtype: torch.dtype) -> None:
    attention = "llamarl_shared_prompts" if shared else "llamarl_packed"
    with META:
        model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation=attention, dtype=dtype)
    policy = Policy(model, LogitTransform(temperature=0.9), chunk_tokens=8, entropy_needs_grad=True)
    sequences = make_sequences(make_groups(), AlgorithmConfig(), lambda counts: counts)
    batch = make_microbatch(sequences, [1.0] * len(sequences), META, share_prompts=shared)
    logprobs, entropy = policy(batch)
    assert logprobs.device == entropy.device == META and logprobs.shape == batch.targets.shape
    (logprobs.sum() + entropy.sum()).backward()
    assert all(p.grad is not None and p.grad.device == META for p in policy.parameters())
