"""One tensor-parallel rank of an engine under test: generate, take new weights, go on; leave everything in a folder.

``main`` runs in processes forked from a server that has imported this module, so that torch is imported once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import join_group
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit" / "models"))
from tiny_models import tiny_model

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.engine.config import EngineConfig
from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.models.parallel import ParallelLayout, make_layout
from llamarl.weight_sync.layout import MeshLayout
from llamarl.weight_sync.model_layouts import model_parameters, tp_placements

WIDE = {"num_attention_heads": 8}
"""Of the models in folders that end so: eight query heads over two key-value heads."""
NUM_KV_TOKENS = 90
"""Room that all sequences together do not have: some are preempted."""


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    family, _, wide = name.partition("-")
    return tiny_model(family, "eager", seed=seed, **(WIDE if wide else {}))


def sequences() -> list[Sequence]:
    """Three groups of three; one is greedy, one is filtered, one has a deadline (far away)."""
    kinds = (
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 1.0, "deadline_s": 3600.0},
    )
    return [
        Sequence(
            prompt_index=i,
            sample_index=j,
            prompt_tokens=[3 + (7 * i + 5 * k) % 90 for k in range(5 + 4 * i)],
            params=SamplingParams(max_new_tokens=20, **kind),  # type: ignore[arg-type]
            seed=100 * i + j,
        )
        for i, kind in enumerate(kinds)
        for j in range(3)
    ]


def generate(folder: Path, family: str, layout: ParallelLayout | None) -> dict[str, object]:
    """Nine tokens under version 0, the rest under version 1, pulled over a weights channel."""
    token_bytes = NativeEngine(folder / family, EngineConfig(block_size=4)).token_bytes if layout is None else 0
    tp = 1 if layout is None else layout.tp
    if layout is not None:
        token_bytes = json.loads((folder / f"{family}-1-0.json").read_text())["token_bytes"] // min(tp, 2)
    config = EngineConfig(
        block_size=4, kv_cache_bytes=NUM_KV_TOKENS * token_bytes, max_sequences=8, max_batch_tokens=24
    )
    engine = NativeEngine(folder / family, config, eos_token_ids=(), layout=layout)
    batch = sequences()
    engine.add(batch)
    for _ in range(9):
        engine.step()

    spec = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator")
    sender = WeightsSender(spec, rank=0, num_source_ranks=1, num_sink_ranks=tp)
    receiver = WeightsReceiver(
        spec, rank=0 if layout is None else layout.tp_rank, num_source_ranks=1, num_sink_ranks=tp
    )
    parameters = model_parameters(folder / family, dtype="float32")
    parts = MeshLayout(parameters, {"dp": 1, "tp": tp}, tp_placements(parameters))
    later = dict(make_model(family, seed=9).named_parameters())
    handle = sender.send(0, WeightsPayload(version=1, tensors=later, sink_layout=parts))
    receiver.receive((handle,), 60.0).load_into(engine.parameters_for_sync(), parts)  # type: ignore[union-attr]
    engine.weights_updated(1)
    receiver.close()
    sender.close()

    while engine.has_work:
        engine.step()
    return {
        "tokens": [s.tokens for s in batch],
        "logprobs": [s.logprobs for s in batch],
        "raw_logprobs": [s.raw_logprobs for s in batch],
        "versions": [s.policy_versions for s in batch],
        "preemptions": engine.stats()["preemptions"],
        "token_bytes": engine.token_bytes,
        "held": sum(t.numel() for t in engine.parameters_for_sync().values()) * 4,
    }


def main(rank: int, world: int, folder: Path, families: list[str]) -> None:
    torch.set_num_threads(1)
    layout = None
    if world > 1:
        join_group(rank, world, f"{folder}/rendezvous{world}")
        layout = make_layout(fsdp=1, tp=world, device="cpu", keys=("generator.dp", "generator.tp"))
    for family in families:
        (folder / f"{family}-{world}-{rank}.json").write_text(json.dumps(generate(folder, family, layout)))
    if world > 1:
        dist.destroy_process_group()
