"""A tick's payload between hosts: how long it takes over a slow link, and what passes through the controller.

    python benchmarks/payload_link.py --json payload.json          # as root; 1 Gbit/s with a round trip of 1 ms

A tick of the size that docs/results/runs.md times for SmolLM2: 8 prompts of 128 tokens, 8 responses of 64 tokens each with their log-probs,
versions, masks, texts and scores, sent through a data channel of the job (``tcp``) from one namespace and received, proved and
decoded in another (``slow_link.py``). Both data channels of the standard job carry it: completions and scored groups.

The controller's bytes are those of orders and reports of the bundled model's job, by its trace: on one machine, and with its
generator on another host.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from distance import run_job
from harness import claim, spread, write_report
from namespaces import enter
from slow_link import far_hosts, measured_link, parse_link

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.data import DataReceiver, DataSender
from llamarl.transports.network import Network, join
from llamarl.transports.tcp import TcpSink, TcpSource
from llamarl.types import Group, Prompt, Response

KEY = bytes(range(32))
SPEC = ChannelSpec(name="completions", kind=ChannelKind.GATHER, source="generator", sink="reward", capacity=2)
VOCABULARY = 49_152


def payload(prompts: int, group_size: int, tokens: int, tick: int) -> list[Group]:
    """Groups of random tokens."""
    rng = np.random.default_rng(tick)
    groups = []
    for index in range(prompts):
        prompt = Prompt(
            index=index,
            tokens=rng.integers(0, VOCABULARY, 128).astype(np.int32),
            text="word " * 128,
            question="word " * 100,
            answer="42",
            task="gsm_symbolic",
        )
        responses = tuple(
            Response(
                prompt_index=index,
                sample_index=sample,
                tokens=rng.integers(0, VOCABULARY, tokens).astype(np.int32),
                behavior_logprobs=-rng.random(tokens, dtype=np.float32),
                policy_versions=np.full(tokens, tick, np.int32),
                loss_mask=np.ones(tokens, np.bool_),
                text="word" * tokens,
                finish_reason="stop",
            )
            for sample in range(group_size)
        )
        groups.append(Group(prompt=prompt, responses=responses))
    return groups


def _source(pipe: Connection, namespace: str, network: Network, size: tuple[int, int, int]) -> None:
    enter(namespace)
    join(network)
    sender = DataSender(SPEC, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=TcpSource())
    while (tick := pipe.recv()) is not None:
        pipe.send(sender.send(tick, payload(*size, tick)))
    sender.close()


def _sink(pipe: Connection, namespace: str, network: Network) -> None:
    enter(namespace)
    join(network)
    receiver = DataReceiver(SPEC, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=TcpSink())
    while (handle := pipe.recv()) is not None:
        started = time.monotonic()
        groups = receiver.receive((handle,), 60.0)
        pipe.send((time.monotonic() - started, sum(len(group.responses) for group in groups)))
    receiver.close()


def pull_times(link_words: str, size: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """Seconds of each read, and bytes over the link a read, headers of packets included."""
    context = multiprocessing.get_context("spawn")
    with far_hosts(2, parse_link(link_words)) as hosts:
        measured = measured_link(hosts)
        pipes = [context.Pipe() for _ in hosts]
        places = [Network(space=name, address=address, key=KEY) for name, address in hosts]
        ends = [
            context.Process(target=_source, args=(pipes[0][1], hosts[0][0], places[0], size), daemon=True),
            context.Process(target=_sink, args=(pipes[1][1], hosts[1][0], places[1]), daemon=True),
        ]
        for end in ends:
            end.start()
        times = []
        before = 0
        for tick in range(repeats + 2):
            pipes[0][0].send(tick)
            pipes[1][0].send(pipes[0][0].recv())
            seconds, count = pipes[1][0].recv()
            assert count == size[0] * size[1]
            if tick < 2:  # connections are made, one a slot
                before = _received(hosts[1][0])
                continue
            times.append(seconds)
        nbytes = (_received(hosts[1][0]) - before) / repeats
        for pipe in pipes:
            pipe[0].send(None)
        for end in ends:
            end.join(10.0)
    return {"link": measured, "seconds": spread(times), "bytes": nbytes}


def _received(namespace: str) -> int:
    found: list[int] = []
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_count, args=(namespace, theirs))
    process.start()
    found.append(ours.recv())
    process.join(10.0)
    return found[0]


def _count(namespace: str, told: Connection) -> None:
    enter(namespace)
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()  # of this process's own network
    told.send(next(int(line.split(":")[1].split()[0]) for line in lines if "far0" in line))


def controller_bytes(trace: Path) -> float:
    """Of a tick: orders and reports of all executors, median over ticks."""
    by_tick: defaultdict[int, float] = defaultdict(float)
    for event in json.loads(trace.read_text(encoding="utf-8")):
        found = event.get("args", {})
        if "controller/bytes" in found:
            by_tick[int(event["name"].split()[-1])] += found["controller/bytes"]
    return statistics.median(list(by_tick.values())[2:-1])


def through_the_controller(ticks: int) -> dict[str, float]:
    """Bytes a tick on one machine and over two hosts."""
    os.environ |= {"COSTED_GENERATOR_S": "0.3", "COSTED_TRAINER_S": "0.3"}
    flags = ["--run.num_ticks", str(ticks), "--observability.trace", "true"]
    with tempfile.TemporaryDirectory(prefix="llamarl-payload-") as made, far_hosts(2, parse_link("none")) as hosts:
        found = {}
        for name, where in (("one machine", []), ("two hosts", hosts)):
            folder = Path(made) / name.replace(" ", "-")
            run_job("tiny", where, folder, flags)
            found[name] = controller_bytes(folder / "trace.json")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write the results")
    parser.add_argument("--link", default="1gbit:1ms")
    parser.add_argument("--size", type=int, nargs=3, default=[8, 8, 64], metavar=("PROMPTS", "RESPONSES", "TOKENS"))
    parser.add_argument("--tick-s", type=float, default=8.3, help="of SmolLM2, as docs/results/runs.md has it")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--ticks", type=int, default=10, help="of the job whose controller is listened to; 0: none")
    args = parser.parse_args()
    results: dict[str, Any] = {"payload": pull_times(args.link, tuple(args.size), args.repeats)}
    twice = 2.0 * results["payload"]["seconds"]["median"]
    print(f"{args.link}: {results['payload']}", flush=True)
    claims = [claim(f"payload time of a tick of {args.tick_s} s, share", twice / args.tick_s, 0.02, at_least=False)]
    if args.ticks:
        results["controller_bytes"] = found = through_the_controller(args.ticks)
        print(found, flush=True)
        claims.append(
            claim("the controller's bytes over hosts, of those on one machine", found["two hosts"] / found["one machine"], 1.0,
                  at_least=False)
        )  # fmt: skip
    write_report(args.json, results, claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())
