"""One tensor-parallel rank of an engine under test: generate, be interrupted, take new weights, go on; all is left in a folder.

``main`` runs in processes forked from a server that has imported this module, so that torch is imported once.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import join_group
from tiny_models import SPARSE, tiny_model
from transformers import PreTrainedModel

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.config import RunConfig, validate
from llamarl.engine.engine import NativeEngine
from llamarl.engine.expert_record import of_group
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.executors.generator_ranks import generator_layout, generator_weights, replicas_of
from llamarl.executors.version_loader import VersionLoader
from llamarl.models.parallel import ParallelLayout
from llamarl.settings.engine import EngineConfig
from llamarl.weight_sync.layout import MeshLayout, Shard
from llamarl.weight_sync.model_layouts import adapter_parameters, model_parameters

NUM_KV_TOKENS = 74
"""Room that all sequences together do not have: some are preempted."""
ALONE = 1
FURTHER = {2: "qwen3_moe"}
"""Which family of so many ranks also gets adapters alone."""

WIDE = {"num_attention_heads": 8}
"""Of the models in folders that end so: eight query heads over two key-value heads."""
TARGETS = ("q_proj", "v_proj", "o_proj")


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    family, _, wide = name.partition("-")
    return tiny_model(family, "eager", seed=seed, **(WIDE if wide else {}))


def sequences() -> list[Sequence]:
    """Three groups of three; one is greedy, one at another temperature than 1."""
    kinds = ({"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 1.0})
    return [
        Sequence(
            prompt_index=i,
            sample_index=j,
            prompt_tokens=[3 + (7 * i + 5 * k) % 90 for k in range(5 + 4 * i)],
            params=SamplingParams(max_new_tokens=9, **kind),  # type: ignore[arg-type]
            seed=100 * i + j,
        )
        for i, kind in enumerate(kinds)
        for j in range(3)
    ]


def recipe(folder: Path, tp: int) -> RunConfig:
    lora = {"rank": 3, "alpha": 12.0, "targets": list(TARGETS), "hand_over": "adapter"}
    return validate({"model": {"path": str(folder)}, "generator": {"tp": tp, "device": "cpu"}, "lora": lora})


def whole_weights(config: RunConfig) -> RunConfig:
    """The same recipe, without adapters."""
    return replace(config, lora=replace(config.lora, rank=0))


def all_steps(engine: NativeEngine) -> Iterator[int]:
    """The sequences that ended in each step."""
    while engine.has_work:
        yield len(engine.step())


def sampled(batch: list[Sequence]) -> dict[str, Any]:
    return {name: [list(getattr(s, name)) for s in batch] for name in ("tokens", "logprobs", "policy_versions")}


def experts(batch: list[Sequence]) -> dict[str, Any]:
    """Of prompts and own tokens."""
    own = [of_group([s.experts]) for s in batch]
    own += [None if s.experts is None else s.experts.rows(len(s.tokens)) for s in batch]
    return {"experts": [None if rows is None else rows.tolist() for rows in own]}


def longer(sequence: Sequence) -> Sequence:
    """What a later tick goes on with: the tokens so far, and four more."""
    return replace(
        sequence, params=replace(sequence.params, max_new_tokens=len(sequence.tokens) + 4), finish_reason=None
    )


def load_later(engine: NativeEngine, folder: Path, family: str, tp: int, layout: ParallelLayout | None) -> None:
    """Other weights, from one trainer rank."""
    num_ranks, rank = (1, 0) if layout is None else (layout.num_ranks, layout.rank)
    spec = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator")
    sender = WeightsSender(spec, rank=0, num_source_ranks=1, num_sink_ranks=num_ranks)
    receiver = WeightsReceiver(spec, rank=rank, num_source_ranks=1, num_sink_ranks=num_ranks)
    parts = generator_weights(whole_weights(recipe(folder / family, tp)))
    later = dict(make_model(family, seed=9).named_parameters())
    handle = sender.send(0, WeightsPayload(version=1, tensors=later, sink_layout=parts))
    received = receiver.receive((handle,), 60.0)
    received.load_into(engine.parameters_for_sync(), parts)
    receiver.close()
    sender.close()


def generate(folder: Path, family: str, tp: int, layout: ParallelLayout | None) -> dict[str, Any]:
    token_bytes = NativeEngine(folder / family, EngineConfig(block_size=4)).token_bytes if layout is None else 0
    if layout is not None:
        alone = json.loads((folder / f"{family}-1-0.json").read_text())
        token_bytes = alone["token_bytes"] // min(tp, 2)
    config = EngineConfig(
        block_size=4, kv_cache_bytes=NUM_KV_TOKENS * token_bytes, max_sequences=8, max_batch_tokens=24
    )
    engine = NativeEngine(folder / family, config, eos_token_ids=(), layout=layout, note_experts=family in SPARSE)

    told: dict[str, Any] = {}
    for attempt in ("first", "again"):
        batch = sequences()
        engine.add(batch)
        for _ in range(7):
            engine.step()
        engine.add(engine.suspend())  # nothing survives
        told[f"{attempt} ended"] = list(all_steps(engine))
        told[attempt] = sampled(batch) | experts(batch)
    stats = engine.stats()

    load_later(engine, folder, family, tp, layout)
    engine.weights_updated(1)

    carried = list(map(longer, batch))
    engine.add(carried)
    told["carried ended"] = list(all_steps(engine))
    told["carried"] = sampled(carried) | experts(carried)

    renamed = list(map(longer, carried))  # under the same weights by another name, while they are written
    engine.add(renamed)
    for _ in range(6):
        engine.step()
    engine.weights_updated(2)
    told["renamed ended"] = list(all_steps(engine))
    told["renamed"] = sampled(renamed) | experts(renamed)
    return told | {
        "preemptions": stats["preemptions"],
        "token_bytes": engine.token_bytes,
        "held": {name: tensor.numel() for name, tensor in sorted(engine.parameters_for_sync().items())},
    }


def generate_over_adapters(folder: Path, family: str, tp: int, layout: ParallelLayout | None) -> dict[str, Any]:
    """Four tokens of the base model, and what adapters make of it, from two trainer ranks that cut them in their own way."""
    num_ranks, rank = (1, 0) if layout is None else (layout.num_ranks, layout.rank)
    config = recipe(folder / family, tp)
    engine = NativeEngine(
        folder / family,
        EngineConfig(block_size=4, max_batch_tokens=24, max_sequences=16),
        eos_token_ids=(),
        layout=layout,
    )
    parts = generator_weights(config)
    loader = VersionLoader(engine, config.lora, parts, rank=rank, model_path=config.model.path)
    parameters = model_parameters(folder / family, dtype="float32")
    adapters = adapter_parameters(parameters, rank=config.lora.rank, targets=config.lora.targets)
    rng = torch.Generator().manual_seed(4)
    whole = {name: 0.6 * torch.randn(spec.shape, generator=rng) for name, spec in adapters.items()}
    source = MeshLayout(
        adapters, {"fsdp": 2}, {name: [Shard("fsdp", 1 if ".lora_A." in name else 0)] for name in adapters}
    )

    spec = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator")
    senders = [WeightsSender(spec, rank=i, num_source_ranks=2, num_sink_ranks=num_ranks) for i in range(2)]
    receiver = WeightsReceiver(spec, rank=rank, num_source_ranks=2, num_sink_ranks=num_ranks)
    batch = [replace(s, params=SamplingParams(max_new_tokens=4)) for s in sequences()]
    engine.add(batch)
    list(all_steps(engine))
    batch = list(map(longer, batch))
    without = copy.deepcopy(batch)
    engine.add(without)
    list(all_steps(engine))
    handles = []
    for i, sender in enumerate(senders):
        held = {p.parameter: whole[p.parameter][tuple(slice(*at) for at in p.box)] for p in source.pieces_of(i)}
        held = {name: tensor.contiguous() for name, tensor in held.items()}
        handles.append(sender.send(0, WeightsPayload(version=1, tensors=held, layout=source, sink_layout=parts)))
    received = receiver.receive(tuple(handles), 60.0)
    assert received is not None
    loader.load(received)
    engine.add(batch)
    list(all_steps(engine))
    receiver.close()
    for sender in senders:
        sender.close()
    return {"adapted": sampled(batch), "without adapters": sampled(without)}


def main(tp: int, rank: int, folder: Path, families: list[str]) -> None:
    torch.set_num_threads(1)
    layout = None
    if tp != ALONE:
        join_group(rank, tp, f"{folder}/rendezvous{tp}")
        config = recipe(folder / families[0], tp)
        (replica,) = replicas_of(config, tp)
        layout = generator_layout(config, "cpu", replica)
    for family in families:
        told = generate(folder, family, tp, layout)
        if FURTHER.get(tp) == family or (tp == ALONE and family in FURTHER.values()):
            told |= generate_over_adapters(folder, family, tp, layout)
        (folder / f"{family}-{tp}-{rank}.json").write_text(json.dumps(told))
    if layout is not None:
        dist.destroy_process_group()
