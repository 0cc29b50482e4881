"""Weight hand-over against the memory copy that bounds it and the gather-and-broadcast that it replaces.

    python benchmarks/weight_sync.py --json weight_sync.json          # all sections, a few minutes on two free cores
    python benchmarks/weight_sync.py --sections one_to_one --models 135m --repeats 5

Sections: ``one_to_one`` (one trainer process, one generator process), ``reshard`` (fsdp 2 x tp 2 to tp 2, and to two
replicas); between hosts see ``weight_sync_tcp.py``. With ``--run RUN_DIR``
also ``end_to_end``: what the hand-over cost in a run that was made before, by its trace. Every process computes on one
thread. Alternatives run in turn in the same processes (A B A B); the report holds medians and all values.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import claim, spread, write_report

from llamarl.transports.shared_memory import SharedMemorySink, SharedMemorySource
from llamarl.weight_sync.layout import MeshLayout, ParameterSpec, Piece, Shard
from llamarl.weight_sync.model_layouts import ModelParameters, fsdp_tp_placements, tp_placements
from llamarl.weight_sync.sink import Puller
from llamarl.weight_sync.source import Publisher, WeightsPayload

WAIT_S = 300.0
SHAPES = {  # hidden, intermediate, layers, heads, KV heads, head size, vocabulary; Llama architecture, tied embeddings
    "tiny": (128, 344, 4, 4, 2, 32, 2048),
    "135m": (576, 1536, 30, 9, 3, 64, 49152),  # SmolLM2-135M
    "1b": (2048, 5632, 20, 32, 4, 64, 32000),  # 1.0e9 parameters, the proportions of TinyLlama-1.1B
}


def llama_parameters(name: str, dtype: str = "float32") -> ModelParameters:
    """Shapes of a Llama model and the dimensions its tensor-parallel plan cuts."""
    hidden, intermediate, layers, heads, kv_heads, head, vocabulary = SHAPES[name]
    specs = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    cuts = {"model.embed_tokens.weight": Shard("tp", 0)}
    for layer in range(layers):
        for part, shape, dim in (
            ("self_attn.q_proj", (heads * head, hidden), 0),
            ("self_attn.k_proj", (kv_heads * head, hidden), 0),
            ("self_attn.v_proj", (kv_heads * head, hidden), 0),
            ("self_attn.o_proj", (hidden, heads * head), 1),
            ("mlp.gate_proj", (intermediate, hidden), 0),
            ("mlp.up_proj", (intermediate, hidden), 0),
            ("mlp.down_proj", (hidden, intermediate), 1),
            ("input_layernorm", (hidden,), None),
            ("post_attention_layernorm", (hidden,), None),
        ):
            full_name = f"model.layers.{layer}.{part}.weight"
            specs[full_name] = shape
            if dim is not None:
                cuts[full_name] = Shard("tp", dim)
    return ModelParameters({n: ParameterSpec(s, dtype) for n, s in specs.items()}, cuts)


class Processes:
    """Spawned processes that answer one message at a time; no wait is without a deadline."""

    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._members: list[tuple[Any, Connection]] = []

    def start(self, target: Callable[..., None], *args: Any) -> int:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        self._members.append((process, ours))
        return len(self._members) - 1

    def pipe(self) -> tuple[Connection, Connection]:
        return self._context.Pipe()

    def tell(self, message: Any) -> None:
        for _, pipe in self._members:
            pipe.send(message)

    def answers(self) -> list[Any]:
        result = []
        for index, (process, pipe) in enumerate(self._members):
            if not pipe.poll(WAIT_S):
                raise TimeoutError(f"process {index} (pid {process.pid}) gave no answer in {WAIT_S:g} s")
            result.append(pipe.recv())
        return result

    def ask(self, message: Any) -> list[Any]:
        self.tell(message)
        return self.answers()

    def close(self) -> None:
        for process, pipe in self._members:
            if process.is_alive():
                pipe.send(None)
            process.join(30)
            if process.is_alive():
                process.kill()


def reset_peak() -> int:
    """Start a new measurement of this process's peak memory; bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """Most bytes resident since ``reset_peak``, mapped shared pages included."""
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def local_tensors(layout: MeshLayout, rank: int, fill: bool) -> dict[str, torch.Tensor]:
    """This rank's local tensors; values depend on the global position, so that every rank agrees on them."""
    return {p.parameter: local_tensor(p, fill) for p in layout.pieces_of(rank)}


def local_tensor(piece: Piece, fill: bool) -> torch.Tensor:
    tensor = torch.zeros([b - a for a, b in piece.box])
    if fill:
        tensor += torch.arange(piece.box[0][0], piece.box[0][1]).view(-1, *[1] * (len(piece.box) - 1)) % 1009
        if len(piece.box) > 1:
            tensor += torch.arange(piece.box[1][0], piece.box[1][1]) % 1013 * 0.001
    return tensor


def check_values(layout: MeshLayout, rank: int, live: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(live[piece.parameter], local_tensor(piece, fill=True)) for piece in layout.pieces_of(rank))


# ---- one trainer rank to one generator rank


def one_source(pipe: Connection, to_sink: Connection, model: str) -> None:
    torch.set_num_threads(1)
    layout = MeshLayout(llama_parameters(model), {"rank": 1})
    tensors = local_tensors(layout, 0, fill=True)
    pool = torch.zeros(sum(t.numel() for t in tensors.values()))  # as large as what is copied: its pages count too
    publisher = Publisher(rank=0, num_source_ranks=1, num_slots=1, transport=SharedMemorySource())
    version = 0
    pipe.send("ready")
    while (what := pipe.recv()) is not None:
        if what == "memcpy":
            started, cpu, at = time.monotonic(), time.process_time(), 0
            for tensor in tensors.values():
                pool[at : at + tensor.numel()].view(tensor.shape).copy_(tensor)
                at += tensor.numel()
            pipe.send({"s": time.monotonic() - started, "cpu_s": time.process_time() - cpu})
        else:
            version += 1
            before, started, cpu = reset_peak(), time.monotonic(), time.process_time()
            handle = publisher.publish(
                WeightsPayload(
                    version=version,
                    tensors=tensors,
                    layout=layout,
                    released=threading.Event() if what in ("streamed", "mapped") else None,
                )
            )
            to_sink.send((started, handle))
            publisher.wait()
            spent = {"s": time.monotonic() - started, "cpu_s": time.process_time() - cpu}
            pipe.send(spent | {"grew": peak() - before})
    publisher.close()


def one_sink(pipe: Connection, from_source: Connection, model: str) -> None:
    torch.set_num_threads(1)
    layout = MeshLayout(llama_parameters(model), {"rank": 1})
    live = local_tensors(layout, 0, fill=False)
    served = live
    puller = Puller(rank=0, num_sink_ranks=1, transport=SharedMemorySink())
    pipe.send("ready")
    while (what := pipe.recv()) is not None:
        if what == "memcpy":
            pipe.send(None)
        elif what == "check":
            pipe.send(check_values(layout, 0, served))
        else:
            assert from_source.poll(WAIT_S)
            started, handle = from_source.recv()
            before, cpu = reset_peak(), time.process_time()
            if what == "mapped":
                mapped = puller.open([handle], WAIT_S).map_tensors()
                assert mapped is not None
                served = mapped
            else:
                puller.open([handle], WAIT_S).load_into(live, layout, WAIT_S)
                served = live
            spent = {"s": time.monotonic() - started, "cpu_s": time.process_time() - cpu}
            pipe.send(spent | {"grew": peak() - before})
    puller.close()


def one_to_one(model: str, repeats: int) -> dict[str, Any]:
    nbytes = sum(s.nbytes for s in llama_parameters(model).values())
    processes = Processes()
    a, b = processes.pipe()
    try:
        processes.start(one_source, a, model)
        processes.start(one_sink, b, model)
        processes.answers()
        firsts = [report for what in ("mapped", "blocking") for report in processes.ask(what)]
        times: dict[str, list[float]] = {"memcpy": [], "mapped": [], "streamed": [], "blocking": [], "publish": []}
        cpu: dict[str, list[float]] = {"memcpy": [], "publish": [], "pull": [], "prove_in_place": []}
        grew = [report["grew"] for report in firsts]
        correct = True
        for _ in range(repeats):
            for what in ("streamed", "mapped", "blocking"):
                copied = processes.ask("memcpy")[0]
                source, sink = processes.ask(what)
                times["memcpy"].append(copied["s"])
                cpu["memcpy"].append(copied["cpu_s"])
                times[what].append(sink["s"])
                grew += [source["grew"], sink["grew"]]
                if what == "blocking":  # each side alone, so that its processor time is its own
                    times["publish"].append(source["s"])
                    cpu["publish"].append(source["cpu_s"])
                    cpu["pull"].append(sink["cpu_s"])
                if what == "mapped":
                    cpu["prove_in_place"].append(sink["cpu_s"])
                correct = correct and check_one(processes)
    finally:
        processes.close()
    assert correct, "the generator does not hold the trainer's values"
    result: dict[str, Any] = {"bytes": nbytes, "first_s": firsts[1]["s"]} | {n: spread(t) for n, t in times.items()}
    copy = result["memcpy"]["median"]
    result["cpu_over_copy"] = {n: statistics.median(t) / statistics.median(cpu["memcpy"]) for n, t in cpu.items()}
    result["peak_growth_over_own_shards"] = max(grew) / nbytes
    result["ratio_mapped"] = result["mapped"]["median"] / copy
    result["ratio_mapped_best"] = min(times["mapped"]) / min(times["memcpy"])
    result["ratio_streamed"] = result["streamed"]["median"] / copy
    result["ratio_blocking"] = result["blocking"]["median"] / copy
    result["ratio_publish"] = result["publish"]["median"] / copy
    result["ratio_streamed_best"] = min(times["streamed"]) / min(times["memcpy"])
    result["copy_GB_per_s"] = nbytes / copy / 1e9
    return result


def check_one(processes: Processes) -> bool:
    """True if what the generator serves is what the trainer holds."""
    processes._members[0][1].send("memcpy")
    processes._members[1][1].send("check")
    return processes.answers()[1]


# ---- four trainer ranks to two generator ranks


def reshard_layouts(model: str, sink_kind: str) -> tuple[ModelParameters, MeshLayout, MeshLayout]:
    parameters = llama_parameters(model)
    source = MeshLayout(parameters, {"fsdp": 2, "tp": 2}, fsdp_tp_placements(parameters))
    if sink_kind == "tp":
        return parameters, source, MeshLayout(parameters, {"tp": 2}, tp_placements(parameters))
    return parameters, source, MeshLayout(parameters, {"replica": 2}, {})


def reshard_rank(pipe: Connection, rank: int, model: str, sink_kind: str, store: str) -> None:
    """Ranks 0 to 3 train, ranks 4 and 5 generate; one gloo group joins them for the slow way and for the barrier."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=6)
    receivers = dist.new_group([0, 4, 5])
    parameters, source, sink = reshard_layouts(model, sink_kind)
    is_source = rank < 4
    tensors = local_tensors(source, rank, True) if is_source else local_tensors(sink, rank - 4, False)
    own = sum(t.numel() * 4 for t in tensors.values())
    publisher = Publisher(rank=rank, num_source_ranks=4, num_slots=2, transport=SharedMemorySource())
    puller = Puller(rank=rank - 4, num_sink_ranks=2, transport=SharedMemorySink())
    version = 0
    pipe.send("ready")
    while (what := pipe.recv()) is not None:
        if what == "check":
            pipe.send(is_source or check_values(sink, rank - 4, tensors))
            continue
        if not is_source:
            for tensor in tensors.values():
                tensor.fill_(-1.0)
        before = reset_peak()
        dist.barrier()
        started = time.monotonic()
        if what == "direct":
            version += 1
            if is_source:
                handle = publisher.publish(
                    WeightsPayload(
                        version=version,
                        tensors=tensors,
                        layout=source,
                        sink_layout=sink,
                        released=threading.Event(),
                    )
                )
                pipe.send(handle)
                publisher.wait()
            else:
                assert pipe.poll(WAIT_S)
                puller.open(pipe.recv(), WAIT_S).load_into(tensors, sink, WAIT_S)
        else:
            gather_then_broadcast(rank, parameters, source, sink, tensors, receivers)
        finished = time.monotonic()
        pipe.send({"started": started, "finished": finished, "grew": peak() - before, "own": own})
        dist.barrier()
    publisher.close()
    puller.close()
    dist.destroy_process_group()


def gather_then_broadcast(
    rank: int,
    parameters: ModelParameters,
    source: MeshLayout,
    sink: MeshLayout,
    tensors: dict[str, torch.Tensor],
    receivers: Any,
) -> None:
    """The slow way: trainer rank 0 gathers the whole state dict, broadcasts it, every generator cuts what it needs."""
    full: dict[str, torch.Tensor] = {}
    for name, spec in parameters.items():
        if rank == 0:
            whole = torch.empty(spec.shape)
            for other in range(4):
                for piece in source.pieces_of(other):
                    if piece.parameter == name:
                        part = tensors[name] if other == 0 else torch.empty([b - a for a, b in piece.box])
                        if other != 0:
                            dist.recv(part, src=other)
                        whole[tuple(slice(a, b) for a, b in piece.box)] = part
            full[name] = whole
        elif rank < 4 and name in tensors:
            dist.send(tensors[name], dst=0)
    for name, spec in parameters.items():
        if rank in (1, 2, 3):
            continue
        if rank != 0:
            full[name] = torch.empty(spec.shape)
        dist.broadcast(full[name], src=0, group=receivers)
    if rank >= 4:
        for piece in sink.pieces_of(rank - 4):
            tensors[piece.parameter].copy_(full[piece.parameter][tuple(slice(a, b) for a, b in piece.box)])


def reshard(model: str, sink_kind: str, repeats: int) -> dict[str, Any]:
    processes = Processes()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(6):
                processes.start(reshard_rank, rank, model, sink_kind, f"{folder}/store")
            processes.answers()
            times: dict[str, list[float]] = {"direct": [], "gather_broadcast": []}
            grew: dict[str, list[list[float]]] = {"direct": [], "gather_broadcast": []}
            first: list[dict[str, float]] = []
            for repeat in range(repeats + 2):  # two rounds of warm-up: both slots get their memory
                for what in ("direct", "gather_broadcast"):
                    reports = reshard_once(processes, what)
                    if repeat == 0 and what == "direct":
                        first = reports
                    if repeat >= 2:
                        times[what].append(max(r["finished"] for r in reports) - min(r["started"] for r in reports))
                        grew[what].append([r["grew"] / r["own"] for r in reports])
                    assert all(processes.ask("check")), f"{what}: a generator does not hold the trainer's values"
        finally:
            processes.close()
    result: dict[str, Any] = {name: spread(t) for name, t in times.items()}
    result["speedup"] = result["gather_broadcast"]["median"] / result["direct"]["median"]
    result["first_hand_over_peak_growth_over_own_shards"] = [r["grew"] / r["own"] for r in first]
    result["peak_growth_over_own_shards"] = {w: [max(c) for c in zip(*rows, strict=True)] for w, rows in grew.items()}
    return result


def reshard_once(processes: Processes, what: str) -> list[dict[str, float]]:
    processes.tell(what)
    if what == "direct":  # what the controller does: carry four small handles to both generators
        handles = []
        for _, pipe in processes._members[:4]:
            assert pipe.poll(WAIT_S)
            handles.append(pipe.recv())
        for _, pipe in processes._members[4:]:
            pipe.send(handles)
    return processes.answers()


# ---- from a run's trace


def end_to_end(run_dir: Path) -> dict[str, Any]:
    """Time that a run's executors spent on weights, as its trace shows it, over the time of its steps.

    Counted are the spans of all executors that pull, prove, load, repack or publish weights. What the trainer copies on a
    thread of its own beside its next step holds nobody up and is reported apart (``time/weight_copy_s`` of the metrics).
    """
    trace = json.loads((run_dir / "trace.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    lanes = {e["tid"]: e["args"]["name"] for e in events if e.get("ph") == "M" and e["name"] == "thread_name"}
    spans = [e for e in events if e.get("ph") == "X"]
    steps = [e for e in spans if lanes.get(e["tid"]) == "trainer" and e["name"].startswith("tick")]
    spent: dict[str, float] = {}
    for event in spans:
        if "weight" in event["name"]:
            key = f"{lanes.get(event['tid'], event['tid'])}: {event['name']}"
            spent[key] = spent.get(key, 0.0) + event["dur"] / 1e6
    wall = (max(e["ts"] + e["dur"] for e in steps) - min(e["ts"] for e in steps)) / 1e6
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "steps": len(steps),
        "step_s": wall / len(steps),
        "spent_s": spent,
        "share_of_step": sum(spent.values()) / wall,
        "background_copy_s_per_step": sum(row.get("time/weight_copy_s") or 0.0 for row in rows) / len(steps),
    }


def free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write the results")
    parser.add_argument("--sections", nargs="+", default=["one_to_one", "reshard"])
    parser.add_argument("--models", nargs="+", default=["135m", "1b"], choices=sorted(SHAPES), help="for one_to_one")
    parser.add_argument("--reshard-model", default="135m", choices=sorted(SHAPES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--run", type=Path, metavar="RUN_DIR", help="a finished run, for end_to_end")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    claims: list[dict[str, Any]] = []
    if "one_to_one" in arguments.sections:
        for model in arguments.models:
            need = 3.8 * sum(s.nbytes for s in llama_parameters(model).values())
            if free_bytes() < need:
                results[f"one_to_one_{model}"] = (
                    f"left out: needs {need / 1e9:.0f} GB, {free_bytes() / 1e9:.0f} GB are free"
                )
                continue
            result = results[f"one_to_one_{model}"] = one_to_one(model, arguments.repeats)
            for key, how in (("ratio_mapped", "served in place"), ("ratio_streamed", "into own tensors")):
                text = f"{model} fp32, one rank to one rank, {how}, over a memory copy"
                claims.append(claim(text, result[key], 1.3, at_least=False))
            for side, what in (("publish", "source"), ("pull", "sink")):
                cost = result["cpu_over_copy"][side] - 1.0
                claims.append(
                    claim(f"{model}: checksums at the {what}, processor time over a copy's", cost, 0.2, at_least=False)
                )
            text, growth = (
                f"{model}: peak memory growth of either process over the weights",
                result["peak_growth_over_own_shards"],
            )
            claims.append(claim(text, growth, 1.1, at_least=False))
            print(f"one_to_one {model}: {json.dumps(result)}")
    if "reshard" in arguments.sections:
        for kind, label in (("tp", "tp 2"), ("replica", "2 replicas")):
            result = results[f"reshard_to_{kind}"] = reshard(
                arguments.reshard_model, kind, max(3, arguments.repeats // 2)
            )
            claims.append(
                claim(f"fsdp 2 x tp 2 to {label}: speed over gather, broadcast, load", result["speedup"], 5.0)
            )
            growth = max(
                result["first_hand_over_peak_growth_over_own_shards"] + result["peak_growth_over_own_shards"]["direct"]
            )
            text = f"fsdp 2 x tp 2 to {label}: peak memory growth over a rank's own shards"
            claims.append(claim(text, growth, 1.1, at_least=False))
            print(f"reshard to {label}: {json.dumps(result)}")
    if arguments.run is not None:
        result = results["end_to_end"] = end_to_end(arguments.run)
        name = f"{arguments.run.name}: hand-over's share of a step, by the trace"
        claims.append(claim(name, result["share_of_step"], 0.02, at_least=False))
        print(f"end_to_end: {json.dumps(result)}")
    write_report(arguments.json, results, claims)


if __name__ == "__main__":
    main()
