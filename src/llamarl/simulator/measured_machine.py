"""This machine as hardware of the planner: the rates and overheads at which its rooflines give what a recipe's run measured.

    trainer's line   (a tick, a token)                    ─▶ FLOP/s and bytes/s, host time of a step
    generator's line (a tick, a decode step, a sequence)  ─▶ host time of a decode step and of each sequence in it

Where the runs' ticks were so alike that a line has all its time in the tick, that is the batch's time all the same.

A device is a GPU, or one CPU core; a generator's threads count as that many devices without loss, a trainer's with that of
``planner/cores.py``, and more of a role than there are cores as these, as ``scenario_from_recipe`` takes them. Every rate is a
measured one, so the matching efficiency is 1. The rooflines stay, so plans from it extrapolate to other models, batch sizes and
lengths the way those of named hardware do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace

from llamarl.config import RunConfig
from llamarl.errors import PlanError
from llamarl.planner.cores import core_rate, core_share
from llamarl.planner.hardware import Hardware, find_hardware, this_machine
from llamarl.planner.lengths import grouped
from llamarl.planner.model_spec import ModelSpec, find_model
from llamarl.planner.rooflines import decode_step_s
from llamarl.planner.training import TrainerDemand, TrainerLayout, trainer_tick
from llamarl.simulator.calibrate import LARGE_JITTER, RecipeCalibration, settled_threads
from llamarl.simulator.sources import replica_layout, trainer_layout

__all__ = ["machine_of_run"]

_NOTE = "fitted to short runs by llamarl plan RECIPE --calibrate"
_RATES = ("matmul_flops", "memory_bytes_per_s")
_FITTED = (
    "matmul", "memory", "attention", "decode_layer_overhead_s", "eager_layer_overhead_s", "decode_step_overhead_s", "decode_sequence_overhead_s",
    "train_layer_overhead_s", "train_step_overhead_s",
)  # fmt: skip


def machine_of_run(config: RunConfig, found: RecipeCalibration) -> Hardware:
    """The device of this machine, from the costs of ``config`` in turn: each role alone. Of unlike replicas the plainest kind is
    asked: not quantized, and of fewest ranks.

    Raises:
        PlanError: The model's shape cannot be read, or the machine has a GPU that is not known by name.
    """
    model, costs = find_model(config.model.path), found.in_turn
    base, threads = _device_here(config), {"generator": 1, "trainer": 1}
    if base.device.train_precision == "fp32":
        threads = settled_threads(config)
    lengths = grouped(found.groups)
    sequences = config.schedule.prompts_per_step * config.generator.group_size
    kind = _plainest_kind(config)
    own = config.generator.as_of_kind(kind)
    generator = replica_layout(own, base)
    trainer = trainer_layout(config, model, prompt_tokens=costs.prompt_tokens, response_tokens=lengths.mean)
    demand = TrainerDemand(
        lengths=lengths,
        prompt_tokens=costs.prompt_tokens,
        sequences=sequences,
        together=config.generator.group_size,
        group_size=config.generator.group_size,
    )
    cores = base.device.devices_per_node
    speed = core_rate(threads["trainer"]) * core_share(config.trainer.num_ranks * threads["trainer"], cores)
    tick_s, batch_s = costs.trainer.tick_s * speed, costs.trainer.token_s * sequences * demand.mean_tokens * speed
    if batch_s == 0.0:
        tick_s, batch_s = 0.0, tick_s
    machine = base.with_efficiency(matmul=1.0, memory=1.0, attention=1.0, **dict.fromkeys(_FITTED[3:], 0.0))
    machine = _as_fast(machine, lambda tried: _compute_s(tried, model, trainer, demand), batch_s, *_RATES)
    optimizer_s = trainer_tick(machine, model, trainer, demand).optimizer_s
    machine = machine.with_efficiency(train_step_overhead_s=max(0.0, tick_s - optimizer_s))
    line = costs.of_kinds[kind]
    speed = threads["generator"] * core_share(sum(config.generator.replica_ranks) * threads["generator"], cores)
    shares = config.generator.shares
    part = config.generator.replicas[kind].share if config.generator.replicas else 1.0
    share = math.ceil(sequences * part / sum(shares))
    steps = max(lengths.expected_max(share), share * lengths.mean / own.engine.max_sequences)
    context = costs.prompt_tokens + lengths.mean_in_flight
    batch = max(2, min(share, own.engine.max_sequences))

    def decode_s(tried: Hardware, active: int) -> float:
        return float(decode_step_s(tried, model, generator, active, context))

    step_s = line.step_s + line.tick_s / steps
    one_s, all_s = ((step_s + line.sequence_s * active) * speed for active in (1, batch))
    if 0.0 < one_s < decode_s(machine, 1):  # a step of one sequence reads all weights: memory is faster than that
        machine = _as_fast(machine, lambda tried: decode_s(tried, 1), one_s, "memory_bytes_per_s")
    rest_of_one, rest_of_all = one_s - decode_s(machine, 1), all_s - decode_s(machine, batch)
    each = max(0.0, (rest_of_all - rest_of_one) / (batch - 1))
    machine = machine.with_efficiency(
        decode_sequence_overhead_s=each, decode_step_overhead_s=max(0.0, rest_of_all - each * batch)
    )
    return _named(machine, max(costs.jitter.values()))


def _plainest_kind(config: RunConfig) -> int:
    generator = config.generator
    kinds = [generator.as_of_kind(kind) for kind in range(max(1, len(generator.replicas)))]
    return min(
        range(len(kinds)), key=lambda kind: (kinds[kind].quantization != "none", kinds[kind].tp * kinds[kind].pp)
    )


def _compute_s(hardware: Hardware, model: ModelSpec, layout: TrainerLayout, demand: TrainerDemand) -> float:
    """What of a trainer's tick grows with its batch."""
    time = trainer_tick(hardware, model, layout, demand)
    return time.total_s - time.optimizer_s - time.other_s


def _as_fast(hardware: Hardware, seconds: Callable[[Hardware], float], wanted_s: float, *rates: str) -> Hardware:
    """The hardware with ``rates`` scaled by the one factor at which ``seconds`` of it are ``wanted_s``, by bisection."""

    def scaled(factor: float) -> Hardware:
        old = hardware.device
        flops = {name: flops * factor for name, flops in old.matmul_flops.items()}
        new = {"matmul_flops": flops, "memory_bytes_per_s": old.memory_bytes_per_s * factor}
        return replace(hardware, device=replace(old, **{name: new[name] for name in rates}))  # type: ignore[arg-type]

    low, high = 1e-4, 1e4
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(scaled(middle)) > wanted_s else (low, middle)
    return scaled(high)


def _device_here(config: RunConfig) -> Hardware:
    """What links, memory and the number of devices are taken from: this machine's cores, or its GPUs by name."""
    import torch

    if config.trainer.device == "cpu" or not torch.cuda.is_available():
        return this_machine()
    title = torch.cuda.get_device_name()
    known = next((name for name in ("a100", "h100", "h200", "b200", "mi300x") if name in title.lower()), None)
    if known is None:
        raise PlanError(f"--calibrate: {title} is not among the GPUs in planner/hardware.toml: its links are not known")
    base, count = find_hardware(known), torch.cuda.device_count()
    return replace(base, device=replace(base.device, title=f"{count} x {title}", devices_per_node=count))


def _named(machine: Hardware, jitter: float) -> Hardware:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = f"; ticks differed by {jitter:.0%}: was it idle?" if jitter > LARGE_JITTER else ""
    cpu = machine.device.train_precision == "fp32"
    what = f"this machine ({cores} CPU cores, one core a device" if cpu else f"this machine ({machine.device.title}"
    sources = {**machine.device.sources, **dict.fromkeys(_RATES, _NOTE)}
    device = replace(
        machine.device, name="this-machine", title=f"{what}, measured{busy})", sources=sources, assumed=False
    )
    efficiency = replace(machine.efficiency, sources={**machine.efficiency.sources, **dict.fromkeys(_FITTED, _NOTE)})
    return Hardware(device=device, efficiency=efficiency)
