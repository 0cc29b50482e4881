"""The simulator against the theory, and at scale: ``python benchmarks/simulator.py --json OUT``.

1. Where nothing varies, the simulated period is the maximum cycle mean: 200 random duration triples, staleness 0 to 8.
2. 16,384 devices (half generate, in replicas of 8), 131,072 responses a tick with a length each, 100 ticks: time and memory,
   with whole batches and with partial rollouts. Each in a process of its own, so that its peak memory is its own.
3. 100,000 devices: half generate, in 6,250 replicas of 8, 400,000 responses a tick, and one dies every half an hour.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from harness import claim, write_report

from llamarl.forecast.costs import GeneratorLayout
from llamarl.forecast.hardware import find_hardware
from llamarl.forecast.lengths import constant, lognormal
from llamarl.forecast.model import find_model
from llamarl.forecast.scenario import Failures, GeneratorCost, Scenario, TrainerCost
from llamarl.forecast.simulate import simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--triples", type=int, default=200)
    parser.add_argument("--ticks", type=int, default=100, help="of the large simulation")
    parser.add_argument("--scale", choices=("whole", "partial", "hundred"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.scale:
        found = (
            hundred_thousand(args.ticks) if args.scale == "hundred" else at_scale(args.scale == "partial", args.ticks)
        )
        print(json.dumps(found))
        return
    worst = theory_error(args.triples)
    print(f"theory against simulation: {worst['runs']} runs, largest error {worst['error']:.2e}", flush=True)
    large = {kind: in_own_process(kind, args.ticks) for kind in ("whole", "partial")}
    for kind, found in large.items():
        print(f"{kind}: {found['seconds']:.1f} s, {found['memory_gb']:.2f} GB", flush=True)
    hundred = in_own_process("hundred", args.ticks)
    print(f"100,000 devices: {hundred}", flush=True)
    claims = [
        claim("theory = simulation where nothing varies, largest relative error", worst["error"], 0.01, at_least=False),
        claim(
            f"16,384 devices, {args.ticks} ticks, seconds",
            max(f["seconds"] for f in large.values()),
            30.0,
            at_least=False,
        ),
        claim("16,384 devices, peak memory in GB", max(f["memory_gb"] for f in large.values()), 2.0, at_least=False),
        claim(f"100,000 devices that fail, {args.ticks} ticks, seconds", hundred["seconds"], 60.0, at_least=False),
    ]
    write_report(args.json, {"theory": worst, "scale": large, "hundred": hundred}, claims)


@dataclass(frozen=True)
class FixedCost:
    """A generator whose decode steps all take ``step_s`` seconds."""

    step_s: float

    def decode_step_s(self, active: Any, context: Any) -> Any:
        return self.step_s + 0.0 * active

    def prefill_s(self, tokens: Any, context: Any) -> Any:
        return 0.0 * tokens


def of_durations(
    *, generator_s: float, reward_s: float, trainer_s: float, sync_s: float = 0.0, **changes: Any
) -> Scenario:
    """Executors whose ticks always last the same: one sequence of one token."""
    scenario = Scenario(
        title="durations",
        prompts_per_step=1,
        group_size=1,
        lengths=constant(1),
        generator=FixedCost(generator_s),  # type: ignore[arg-type]  # it has all that is asked of one
        trainer=TrainerCost(tick_s=trainer_s),
        reward_s=reward_s,
        weights_latency_s=sync_s,
    )
    return replace(scenario, **changes)


def theory_error(triples: int) -> dict[str, Any]:
    rng = random.Random(0)
    worst: dict[str, Any] = {"error": 0.0, "runs": 0}
    for _ in range(triples):
        generator_s, reward_s, trainer_s = (10 ** rng.uniform(-1, 1) for _ in range(3))
        for staleness in range(9):
            result = simulate(
                of_durations(
                    generator_s=generator_s, reward_s=reward_s, trainer_s=trainer_s, max_staleness=staleness,
                    num_ticks=5 * (staleness + 1) + 4,
                )
            )  # fmt: skip
            error = abs(result.step_s / result.theory_s - 1.0)
            worst["runs"] += 1
            if error > worst["error"]:
                worst |= {"error": error, "durations": [generator_s, reward_s, trainer_s], "staleness": staleness}
    return worst


def at_scale(partial: bool, ticks: int) -> dict[str, Any]:
    model, hardware = find_model("Llama-3.1-70B"), find_hardware("h100-sxm")
    scenario = Scenario(
        title="16,384 devices",
        prompts_per_step=8192,
        group_size=16,
        lengths=lognormal(4096, 0.6),
        prompt_tokens=256,
        generator=GeneratorCost(hardware=hardware, model=model, layout=GeneratorLayout(8, "fp8")),
        trainer=TrainerCost(token_s=1e-7),
        replicas=1024,
        slots=256,
        max_segments=4 if partial else 1,
        oversubscription=2.0 if partial else 1.0,
        generator_devices=8192,
        trainer_devices=8192,
        num_ticks=ticks,
    )
    began = time.perf_counter()
    result = simulate(scenario)
    return {
        "seconds": time.perf_counter() - began,
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "responses_a_tick": scenario.prompts_per_step * scenario.group_size,
        "step_s": result.step_s,
        "theory_s": result.theory_s,
        "idle": dict(result.idle),
        "replica_idle": result.replica_idle,
        "staleness_mean": result.staleness_mean,
    }


def hundred_thousand(ticks: int) -> dict[str, Any]:
    model, hardware = find_model("Llama-3.1-70B"), find_hardware("h100-sxm")
    began = time.perf_counter()
    scenario = Scenario(
        title="100,000 devices",
        prompts_per_step=25_000,
        group_size=16,
        lengths=lognormal(4096, 0.6),
        prompt_tokens=256,
        generator=GeneratorCost(hardware=hardware, model=model, layout=GeneratorLayout(8, "fp8")),
        trainer=TrainerCost(token_s=1.6e-8),
        replicas=6_250,
        slots=256,
        generator_devices=50_000,
        trainer_devices=50_000,
        failures=Failures(device_mtbf_hours=50_000.0, restart_s=300.0, checkpoint_every=5),
        num_ticks=ticks,
    )
    result = simulate(scenario)
    return {
        "seconds": time.perf_counter() - began,
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "responses_a_tick": scenario.prompts_per_step * scenario.group_size,
        "step_s": result.step_s,
        "theory_s": result.theory_s,
        "failures": result.num_failures,
        "lost_share": result.lost_share,
    }


def in_own_process(kind: str, ticks: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--scale", kind, "--ticks", str(ticks)],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
