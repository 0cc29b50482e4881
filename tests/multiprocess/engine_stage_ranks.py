"""One rank of an engine in pipeline stages under test: generate, be interrupted, take new weights, go on; all is left in a folder.

``main`` runs in processes forked from a server that has imported this module, so that torch is imported once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_ranks import make_model, sequences

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.config import RunConfig, validate
from llamarl.engine.config import EngineConfig
from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import Sequence
from llamarl.executors.generator_ranks import generator_layout, generator_weights, replicas_of
from llamarl.models.parallel import ParallelLayout

NUM_KV_TOKENS = 90
"""Room that all sequences together do not have: some are preempted."""
ALONE = (1, 1)


def recipe(folder: Path, mesh: tuple[int, int]) -> RunConfig:
    pp, tp = mesh
    return validate({"model": {"path": str(folder)}, "generator": {"pp": pp, "tp": tp, "device": "cpu"}})


def all_steps(engine: NativeEngine) -> Iterator[int]:
    """The sequences that ended in each step."""
    while engine.has_work:
        yield len(engine.step())


def sampled(batch: list[Sequence]) -> dict[str, Any]:
    return {
        name: [list(getattr(s, name)) for s in batch]
        for name in ("tokens", "logprobs", "raw_logprobs", "policy_versions")
    }


def longer(sequence: Sequence) -> Sequence:
    """What a later tick goes on with: the tokens so far, and eight more."""
    return replace(
        sequence, params=replace(sequence.params, max_new_tokens=len(sequence.tokens) + 8), finish_reason=None
    )


def generate(
    folder: Path, family: str, mesh: tuple[int, int], layout: ParallelLayout | None, kernels: str
) -> dict[str, Any]:
    num_ranks, rank = (1, 0) if layout is None else (layout.num_ranks, layout.rank)
    token_bytes = NativeEngine(folder / family, EngineConfig(block_size=4)).token_bytes if layout is None else 0
    if layout is not None:
        alone = json.loads((folder / f"{family}-{kernels}-1x1-0.json").read_text())
        token_bytes = alone["token_bytes"] // 3 // mesh[1] * (3 if mesh[0] == 1 else 2 if mesh[0] == 2 else 1)
    config = EngineConfig(
        block_size=4,
        kv_cache_bytes=NUM_KV_TOKENS * token_bytes,
        max_sequences=8,
        max_batch_tokens=24,
        kernels=kernels,  # type: ignore[arg-type]
    )
    engine = NativeEngine(folder / family, config, eos_token_ids=(), layout=layout)

    told: dict[str, Any] = {}
    for attempt in ("first", "again"):
        batch = sequences()
        engine.add(batch)
        for _ in range(7):
            engine.step()
        engine.add(engine.suspend())  # nothing survives: what was being drawn is drawn again
        told[f"{attempt} ended"] = list(all_steps(engine))
        told[attempt] = sampled(batch)
    stats = engine.stats()

    spec = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator")
    sender = WeightsSender(spec, rank=0, num_source_ranks=1, num_sink_ranks=num_ranks)
    receiver = WeightsReceiver(spec, rank=rank, num_source_ranks=1, num_sink_ranks=num_ranks)
    parts = generator_weights(recipe(folder / family, mesh))
    later = dict(make_model(family, seed=9).named_parameters())
    handle = sender.send(0, WeightsPayload(version=1, tensors=later, sink_layout=parts))
    received = receiver.receive((handle,), 60.0)
    assert received is not None
    received.load_into(engine.parameters_for_sync(), parts)
    engine.weights_updated(1)
    receiver.close()
    sender.close()

    carried = list(map(longer, batch))
    engine.add(carried)
    told["carried ended"] = list(all_steps(engine))
    told["carried"] = sampled(carried)

    renamed = list(map(longer, carried))  # under the same weights by another name, while waves are under way
    engine.add(renamed)
    for _ in range(6):
        engine.step()
    engine.weights_updated(2)
    engine.cancel(2, 2)
    told["renamed ended"] = list(all_steps(engine))
    told["renamed"] = sampled(renamed)
    return told | {
        "preemptions": stats["preemptions"],
        "token_bytes": engine.token_bytes,
        "held": sorted(engine.parameters_for_sync()),
    }


def main(mesh: tuple[int, int], rank: int, folder: Path, cases: list[tuple[str, str]]) -> None:
    torch.set_num_threads(1)
    pp, tp = mesh
    layout = None
    if mesh != ALONE:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous{pp}x{tp}", rank=rank, world_size=pp * tp,
            timeout=timedelta(seconds=120),
        )  # fmt: skip
        config = recipe(folder / cases[0][0], mesh)
        (replica,) = replicas_of(config, pp * tp)
        layout = generator_layout(config, "cpu", replica)
    for family, kernels in cases:
        told = generate(folder, family, mesh, layout, kernels)
        (folder / f"{family}-{kernels}-{pp}x{tp}-{rank}.json").write_text(json.dumps(told))
    if layout is not None:
        dist.destroy_process_group()
