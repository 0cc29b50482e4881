"""What several chunks of layers a rank (interleaved stages) would bring the trainer's pipeline, by the planner's own rooflines.

    python benchmarks/interleaved_stages.py --json OUT

For each model, number of devices and length: the fastest trainer with one pipeline stage, and with 2, 4 and 8, over all sizes of
``tp`` and ``cp`` in a node, micro-batch and recomputation that fit, and the seconds of it that the pipeline stands still.
Interleaving v chunks leaves a v-th of these; that no time at all would be lost is the most that it could bring: the least of all
those layouts, each without its own.
"""

from __future__ import annotations

import argparse
import math
from itertools import product
from typing import Any

from harness import claim, write_report

from llamarl.planner.hardware import find_hardware
from llamarl.planner.lengths import lognormal
from llamarl.planner.model_spec import find_model
from llamarl.planner.training import TrainerDemand, TrainerLayout, TrainerTime, trainer_memory, trainer_tick

CASES = (("Llama-3.1-70B", 64, 4_096), ("Llama-3.1-405B", 512, 4_096), ("Llama-3.1-405B", 512, 32_768))
"""Model, trainer's devices, longest response; the mean is a quarter of it."""
RESPONSES = 2_048
STAGES = (1, 2, 4, 8)


def fitting(model_name: str, devices: int, longest: int, pp: int) -> list[tuple[TrainerTime, TrainerLayout, int]]:
    """Each layout of so many stages, with its number of micro-batches."""
    hardware, model = find_hardware("h100-sxm"), find_model(model_name)
    lengths = lognormal(mean=longest / 4, sigma=0.6, limit=longest)
    demand = TrainerDemand(lengths=lengths, prompt_tokens=256, sequences=RESPONSES)
    node = hardware.device.devices_per_node
    found = []
    for tp in (1, 2, 4, 8):
        for cp, micro_batch, recompute in product((1, 2, 4, 8), (1, 2, 4, 8, 16), (False, True)):
            ranks = devices // (tp * cp * pp)
            if tp * cp > node or micro_batch * ranks > RESPONSES:
                continue
            layout = TrainerLayout(tp, pp, ranks, 1, micro_batch, recompute, True, cp=cp)
            if sum(trainer_memory(hardware, model, layout, demand).values()) <= hardware.usable_memory_bytes:
                time = trainer_tick(hardware, model, layout, demand)
                found.append((time, layout, demand.microbatches(layout)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the report here")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    claims = []
    for case in CASES:
        name, devices, longest = case
        print(f"{name}, {devices} H100, responses up to {longest:,}")
        alone = math.inf
        for pp in STAGES:
            found = fitting(*case, pp)
            if not found:
                print(f"  pp {pp}: nothing fits")
                continue
            time, layout, count = min(found, key=lambda one: one[0].total_s)
            without = min(one.total_s - one.bubble_s for one, _, _ in found)
            alone = time.total_s if pp == 1 else alone
            results[f"{name} {devices} {longest} pp{pp}"] = {"s": time.total_s, "without_bubble_s": without}
            print(
                f"  pp {pp}: {time.total_s:6.1f} s, of which {time.bubble_s:4.1f} stand still: tp {layout.tp}, cp {layout.cp}, "
                f"fsdp {layout.fsdp}, {count} micro-batches of {layout.micro_batch}; best without any: {without:6.1f} s"
            )
            if pp > 1:
                claims.append(
                    claim(
                        f"{name}, {longest}: pp {pp} without any bubble over pp 1", without / alone, 0.99, at_least=True
                    )
                )
    write_report(args.json, results, claims)


if __name__ == "__main__":
    main()
