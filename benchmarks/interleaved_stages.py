"""What several chunks of layers a rank (interleaved stages) would bring the trainer's pipeline, by the planner's own rooflines.

    python benchmarks/interleaved_stages.py --json OUT

For each model, number of devices and length: the fastest trainer with one pipeline stage, and with 2, 4 and 8, over all sizes of
``tp``, micro-batch and recomputation that fit, and the seconds of it that the pipeline stands still. Interleaving v chunks leaves
a v-th of these; that no time at all would be lost is the most that it could bring.
"""

from __future__ import annotations

import argparse
import math
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


def fastest(model_name: str, devices: int, longest: int, pp: int) -> tuple[TrainerTime, TrainerLayout, int] | None:
    """With its number of micro-batches; None: nothing fits."""
    hardware, model = find_hardware("h100-sxm"), find_model(model_name)
    lengths = lognormal(mean=longest / 4, sigma=0.6, limit=longest)
    demand = TrainerDemand(lengths=lengths, prompt_tokens=256, sequences=RESPONSES)
    found = []
    for tp in (1, 2, 4, 8):
        ranks = devices // (tp * pp)
        for micro_batch in (0.5, 1, 2, 4, 8, 16):
            for recompute in (False, True):
                layout = TrainerLayout(tp, pp, ranks, 1, micro_batch, recompute, True)
                memory = sum(trainer_memory(hardware, model, layout, demand).values())
                if micro_batch * ranks <= RESPONSES and memory <= hardware.usable_memory_bytes:
                    count = math.ceil(math.ceil(RESPONSES / ranks) / micro_batch)
                    found.append((trainer_tick(hardware, model, layout, demand), layout, count))
    return min(found, key=lambda one: one[0].total_s, default=None)


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
            found = fastest(*case, pp)
            if found is None:
                print(f"  pp {pp}: nothing fits")
                continue
            time, layout, count = found
            without = time.total_s - time.bubble_s
            alone = time.total_s if pp == 1 else alone
            results[f"{name} {devices} {longest} pp{pp}"] = {"s": time.total_s, "without_bubble_s": without}
            print(
                f"  pp {pp}: {time.total_s:6.1f} s, of which {time.bubble_s:4.1f} stand still; without {without:6.1f}; "
                f"tp {layout.tp}, fsdp {layout.fsdp}, {count} micro-batches of {layout.micro_batch:g}"
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
