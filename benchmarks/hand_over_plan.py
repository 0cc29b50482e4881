"""What a rank works out before its first hand-over, as jobs grow: seconds, memory, copies and bytes.

    python benchmarks/hand_over_plan.py --json hand_over_plan.json      # half a minute on one core

Parameters are those of Llama-3.1-405B on meta tensors: nothing is allocated. The jobs are those of ``JOBS``.

A sink's part is what runs before its first pull: the catalogs of the sources that it pulls from, its own copies, and where each
block goes. A source's is its catalog, cut at the sinks' bounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).parent))
import harness

import llamarl
from llamarl.models.sizes import layers_of_stages
from llamarl.transports.shared_memory import SharedMemorySink
from llamarl.weight_sync.catalog import Catalog, build_catalog
from llamarl.weight_sync.layout import MeshLayout, box_elements
from llamarl.weight_sync.model_layouts import ModelParameters, fsdp_tp_placements, model_parameters, tp_placements
from llamarl.weight_sync.plan import copies_to_sink
from llamarl.weight_sync.sink import Puller

MODEL = "Llama-3.1-405B"
JOBS = {  # ranks a side: trainer (pp, fsdp, tp), generator (replicas, tp)
    8: ((1, 1, 8), (1, 8)),
    64: ((2, 4, 8), (8, 8)),
    512: ((14, 4, 8), (32, 16)),  # 448 trainer ranks: 14 stages of 9 layers
}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
T = TypeVar("T")


def holding_stages(parameters: ModelParameters, num_stages: int) -> dict[str, tuple[int, ...]]:
    """Name the stages that hold each parameter, cut as ``models.stages`` cuts the decoder: what is
    named before the layers is the first stage's, what is named after them the last one's. With tied
    ends the embedding, too, is the last one's as well.

    Args:
        parameters: Of the whole model, in its order.

    Returns:
        Empty with a single stage: it holds all.

    Raises:
        ValueError: There are fewer layers than stages.
    """
    if num_stages == 1:
        return {}
    names = list(parameters)
    layer = {name: int(found[1]) for name in names if (found := _LAYER.search(name))}
    own = layers_of_stages(max(layer.values(), default=-1) + 1, num_stages)
    stage_of = {number: stage for stage, layers in enumerate(own) for number in layers}
    places = [place for place, name in enumerate(names) if name in layer]
    last = num_stages - 1
    tied = not any(len(parameters[name].shape) > 1 for name in names[places[-1] + 1 :])
    held: dict[str, tuple[int, ...]] = {}
    for place, name in enumerate(names):
        if name in layer:
            held[name] = (stage_of[layer[name]],)
        elif place < places[0]:
            held[name] = (0, last) if tied else (0,)
        elif place > places[-1]:
            held[name] = (last,)
    return held


def layouts(parameters: ModelParameters, trainer: tuple[int, ...], generator: tuple[int, ...]) -> list[MeshLayout]:
    pp, fsdp, tp = trainer
    replicas, wide = generator
    return [
        MeshLayout(
            parameters,
            {"pp": pp, "fsdp": fsdp, "tp": tp},
            fsdp_tp_placements(parameters),
            holding_stages(parameters, pp),
        ),
        MeshLayout(parameters, {"replica": replicas, "tp": wide}, tp_placements(parameters)),
    ]


def measured(work: Callable[[], T]) -> tuple[T, float, int]:
    """What ``work`` gives, its seconds, and the bytes that this keeps alive; the second run is the one that is timed."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = work()
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    begun = time.perf_counter()
    again = work()
    seconds = time.perf_counter() - begun
    del kept
    return again, seconds, held


def of_sink(source: MeshLayout, sink: MeshLayout, rank: int) -> dict[str, float]:
    """What runs at a generator rank before it pulls, with the slots' bytes left out."""
    copies, plan_s, plan_bytes = measured(lambda: copies_to_sink(source, sink, rank))
    sources = sorted({copy.source_rank for copy in copies})
    some = sources[:: max(1, len(sources) // 4)][:4]  # the others' catalogs are as large
    said = {r: build_catalog(source, r, sink=sink).to_bytes() for r in some}
    begun = time.perf_counter()
    catalogs = [Catalog.from_bytes(data) for data in said.values()]
    read_s = (time.perf_counter() - begun) * len(sources) / len(some)
    shapes = {
        p.parameter: torch.empty([b - a for a, b in p.box], dtype=torch.bfloat16, device="meta")
        for p in sink.pieces_of(rank)
    }
    puller = Puller(rank=rank, num_sink_ranks=sink.num_ranks, transport=SharedMemorySink())
    of_some = [copy for copy in copies if copy.source_rank in said]
    begun = time.perf_counter()
    puller.compile(catalogs, of_some, shapes)
    compile_s = (time.perf_counter() - begun) * len(copies) / len(of_some)
    puller.close()
    return {
        "plan_s": plan_s,
        "plan_bytes": plan_bytes,
        "copies": len(copies),
        "sources": len(sources),
        "received_bytes": sum(2 * box_elements(copy.box) for copy in copies),  # bfloat16
        "catalog_bytes": sum(map(len, said.values())) * len(sources) / len(some),
        "read_catalogs_s": read_s,
        "blocks_s": compile_s,
    }


def of_source(source: MeshLayout, sink: MeshLayout, rank: int) -> dict[str, float]:
    """The catalog of a trainer rank."""
    begun = time.perf_counter()
    catalog = build_catalog(source, rank, sink=sink)
    return {
        "catalog_s": time.perf_counter() - begun,
        "blocks": len(catalog.blocks),
        "version_bytes": catalog.nbytes,
    }


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in found) for key in found[0]}


def case(config: dict[str, Any], trainer: Any, generator: Any) -> dict[str, Any]:
    """Medians over ranks of the middle and the last."""
    parameters = model_parameters(config)
    begun = time.perf_counter()
    source, sink = layouts(parameters, trainer, generator)
    layout_s = time.perf_counter() - begun

    def some(num_ranks: int) -> list[int]:
        return sorted({num_ranks // 3, num_ranks // 2, num_ranks - 1})

    return {
        "trainer": trainer,
        "generator": generator,
        "layout_s": layout_s,
        "sink": medians([of_sink(source, sink, rank) for rank in some(sink.num_ranks)]),
        "source": medians([of_source(source, sink, rank) for rank in some(source.num_ranks)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[*JOBS], help="of one side")
    parser.add_argument("--json")
    args = parser.parse_args()
    config = json.loads((Path(llamarl.__file__).parent / "forecast" / "models.json").read_text())[MODEL]
    results: dict[str, Any] = {}
    print(
        f"{'ranks':>12}{'sink: s':>9}{'kB':>8}{'copies':>8}{'sources':>8}{'blocks: s':>10}{'GB in':>8}"
        f"{'source: s':>10}{'blocks':>8}{'GB':>8}"
    )
    for n in args.ranks:
        found = results[str(n)] = case(config, *JOBS[n])
        a, b = found["sink"], found["source"]
        print(
            f"{n:>6}+{n:<5}{a['plan_s']:>9.3f}{a['plan_bytes'] / 1e3:>8.0f}{a['copies']:>8.0f}{a['sources']:>8.0f}"
            f"{a['read_catalogs_s'] + a['blocks_s']:>10.2f}{a['received_bytes'] / 1e9:>8.2f}"
            f"{b['catalog_s']:>10.3f}{b['blocks']:>8.0f}{b['version_bytes'] / 1e9:>8.2f}",
            flush=True,
        )
    harness.write_report(args.json, results, [])


if __name__ == "__main__":
    main()
