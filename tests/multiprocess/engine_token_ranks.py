"""One rank of an engine whose steps are cut by tokens, under test: generate in every way that there is, leave all in a folder.

``main`` runs in processes forked from a server that has imported this module, so that torch is imported once.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import join_group
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_ranks import make_model, sequences
from tiny_models import SPARSE

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.config import RunConfig, validate
from llamarl.engine.config import EngineConfig
from llamarl.engine.engine import NativeEngine
from llamarl.engine.expert_record import of_group
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.executors.generator_ranks import generator_layout, generator_weights, replicas_of
from llamarl.models.paged_context import HeadExchange
from llamarl.models.parallel import ParallelLayout

NUM_KV_TOKENS = 110
"""Room that all sequences together do not have: some are preempted."""
STEP_TOKENS = 24
KV_HEADS = {"deepseek_v3": 4}
"""Of families with other than two."""


Mesh = tuple[int, int]
"""Parts of the tokens, and tensor-parallel ranks of each."""
ALONE: Mesh = (1, 1)


def recipe(folder: Path, mesh: Mesh) -> RunConfig:
    cp, tp = mesh
    return validate({"model": {"path": str(folder)}, "generator": {"cp": cp, "tp": tp, "device": "cpu"}})


def report(folder: Path, family: str, mesh: Mesh, rank: int) -> Path:
    return folder / f"{family}-{mesh[0]}x{mesh[1]}-{rank}.json"


def _of(index: int, sample: int, tokens: list[int], params: SamplingParams, *, seed: int) -> Sequence:
    return Sequence(prompt_index=index, sample_index=sample, prompt_tokens=tokens, params=params, seed=seed)


def crowd() -> list[Sequence]:
    """Three groups that share their prompts, and a prompt of several steps."""
    long = [3 + (11 * k + k * k) % 90 for k in range(2 * STEP_TOKENS + 13)]
    return [*sequences(), _of(7, 0, long, SamplingParams(max_new_tokens=12, temperature=1.0), seed=77)]


def lone() -> list[Sequence]:
    """One short prompt: fewer tokens in a step than ranks."""
    return [_of(9, 0, [5, 8], SamplingParams(max_new_tokens=7, temperature=1.0), seed=78)]


def circles() -> list[Sequence]:
    """Greedy responses to one prompt, which go round in circles."""
    return [_of(3, j, [5, 6, 7], SamplingParams(max_new_tokens=30, temperature=0.0), seed=j) for j in range(2)]


def finish(engine: NativeEngine) -> None:
    while engine.has_work:
        engine.step()


def sampled(batch: list[Sequence]) -> dict[str, Any]:
    told = {
        name: [list(getattr(s, name)) for s in batch]
        for name in ("tokens", "logprobs", "raw_logprobs", "policy_versions")
    }
    experts = [of_group([s.experts]) for s in batch]
    experts += [None if s.experts is None else s.experts.rows(len(s.tokens)) for s in batch]
    return told | {"experts": [None if rows is None else rows.tolist() for rows in experts]}


def load(engine: NativeEngine, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in engine.parameters_for_sync().items():
            parameter.copy_(values[name])


def take_version(engine: NativeEngine, folder: Path, family: str, mesh: Mesh, rank: int) -> None:
    """Version 1 over a weights channel, as the generator takes it: every rank all of it, or its tensor-parallel part."""
    num_ranks = mesh[0] * mesh[1]
    spec = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator")
    sender = WeightsSender(spec, rank=0, num_source_ranks=1, num_sink_ranks=num_ranks)
    receiver = WeightsReceiver(spec, rank=rank, num_source_ranks=1, num_sink_ranks=num_ranks)
    layout = generator_weights(recipe(folder / family, mesh))
    later = dict(make_model(family, seed=9).named_parameters())
    handle = sender.send(0, WeightsPayload(version=1, tensors=later, sink_layout=layout))
    received = receiver.receive((handle,), 60.0)
    assert received is not None
    received.load_into(engine.parameters_for_sync(), layout)
    engine.weights_updated(1)
    receiver.close()
    sender.close()


def generate(folder: Path, family: str, mesh: Mesh, layout: ParallelLayout | None) -> dict[str, Any]:
    rank = 0 if layout is None else layout.rank
    path = folder / family
    if layout is None:
        token_bytes = NativeEngine(path, EngineConfig(block_size=4)).token_bytes
    else:
        alone = json.loads(report(folder, family, ALONE, 0).read_text())
        token_bytes = alone["token_bytes"] // min(mesh[0] * mesh[1], KV_HEADS.get(family, 2))

    def make(**changes: Any) -> NativeEngine:
        settings = {"kv_cache_bytes": NUM_KV_TOKENS * token_bytes, "max_sequences": 8} | changes
        config = EngineConfig(block_size=4, max_batch_tokens=STEP_TOKENS, **settings)
        return NativeEngine(path, config, eos_token_ids=(), layout=layout, note_experts=family in SPARSE)

    told: dict[str, Any] = {}
    engine = make()
    batch = crowd()
    engine.add(batch)
    for _ in range(7):
        engine.step()
    engine.add(engine.suspend())
    for _ in range(4):
        engine.step()
    take_version(engine, folder, family, mesh, rank)
    finish(engine)
    told["crowd"] = sampled(batch)
    stats = engine.stats()
    told |= {name: stats[name] for name in ("preemptions", "prompt_tokens_shared", "steps")}

    whole = {name: tensor.clone() for name, tensor in engine.parameters_for_sync().items()}
    for name in ("lone", "parked"):
        batch = lone()
        engine.add(batch)
        finish(engine)
        told[name] = sampled(batch)
        if name == "lone":
            engine.park()
            engine.unpark()
            load(engine, whole)
            engine.weights_updated(1)
    told["token_bytes"] = engine.token_bytes
    told["held"] = sum(t.numel() for t in whole.values()) * 4

    engine = make()
    batch = crowd()
    engine.add(batch)
    for _ in range(6):
        engine.step()
    load(engine, whole)
    engine.weights_updated(1, keep_kv=True)
    for _ in range(3):
        engine.step()
    state, tensors = copy.deepcopy(engine.kv_state())
    going_on = {(s.prompt_index, s.sample_index): copy.deepcopy(s) for s in batch if not s.finished}
    finish(engine)
    told["kept"] = sampled(batch)
    again = make()
    load(again, whole)
    again.load_kv_state(json.loads(json.dumps(state)), tensors, going_on)
    again.weights_updated(1, keep_kv=True)
    finish(again)
    told["restored"] = sampled([going_on.get((s.prompt_index, s.sample_index), s) for s in batch])
    return told


def exchanged(layout: ParallelLayout) -> list[str]:
    """Types of which a step's heads did not come back from the other ranks bit for bit, or are not where they belong."""
    wrong = []
    n, heads, kv_heads, tokens, size = layout.cp, 8, 2, 7, 3
    exchange = HeadExchange(layout.group("cp"), n, tokens)
    m = exchange.num_on_each
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        generator = torch.Generator().manual_seed(1)
        whole = torch.randn(n * m, heads + 2 * kv_heads, size, generator=generator).to(dtype)
        own = whole[layout.cp_rank * m : (layout.cp_rank + 1) * m]
        q, k, v = whole[:tokens].split((heads, kv_heads, kv_heads), dim=1)
        h, r = heads // n, layout.cp_rank
        kv = range(r * kv_heads // n, max(r * kv_heads // n + 1, (r + 1) * kv_heads // n))
        expected = torch.cat([q[:, r * h : (r + 1) * h], k[:, kv.start : kv.stop], v[:, kv.start : kv.stop]], dim=1)
        got = exchange.to_heads(*own.split((heads, kv_heads, kv_heads), dim=1))
        back = exchange.to_tokens(got[:, :h].clone())
        real = max(0, min(m, tokens - r * m))
        if not (got.equal(expected) and back.shape == (m, heads, size) and back[:real].equal(own[:real, :heads])):
            wrong.append(str(dtype))
    return wrong


def main(mesh: Mesh, rank: int, folder: Path, families: list[str]) -> None:
    torch.set_num_threads(1)
    cp, tp = mesh
    layout = None
    if mesh != ALONE:
        join_group(rank, cp * tp, f"{folder}/rendezvous{cp}x{tp}")
        config = recipe(folder / families[0], mesh)
        (replica,) = replicas_of(config, cp * tp)
        layout = generator_layout(config, "cpu", replica)
        assert layout is not None
        if tp == 1:
            (folder / f"exchange-{cp}-{rank}.json").write_text(json.dumps(exchanged(layout)))
    for family in families:
        told = generate(folder, family, mesh, layout)
        report(folder, family, mesh, rank).write_text(json.dumps(told))
    if layout is not None:
        dist.destroy_process_group()
