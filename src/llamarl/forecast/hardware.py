"""Devices and how much of their peak real kernels reach.

``Device`` holds what a maker states, ``Efficiency`` what kernels make of it; both come from
``hardware.toml``, where every number has its source, and ``Efficiency.estimates`` names those that
nobody measured. A finished run of this machine puts four constants in their place
(``calibrate.py``).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from llamarl.errors import PlanError
from llamarl.runtime.placement import available_cores, available_memory

__all__ = [
    "BYTES_PER_WEIGHT",
    "SIDE_BY_SIDE",
    "Device",
    "Efficiency",
    "Hardware",
    "device_names",
    "find_hardware",
    "this_machine",
]

SIDE_BY_SIDE = 0.85
"""Of a core's rate, what it is guessed to reach beside another one of the same process; it falls out
of what rests on a run, whose threads stay as they are. SmolLM2-135M's trainer takes 50 s of two
cores for what takes 40 to 45 s of one (docs/results/speed.md, a step on two cores)."""

BYTES_PER_WEIGHT: Mapping[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}
"""Bytes of one weight at a precision; scales of quantized blocks are below 2% and left out."""

_ALIASES = {
    "a100": "a100-sxm",
    "a100-80gb": "a100-sxm",
    "a100-40gb": "a100-sxm-40gb",
    "h100": "h100-sxm",
    "h200": "h200-sxm",
    "b200": "b200-sxm",
    "b300": "b300-sxm",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
    "mi300": "mi300x",
    "cpu": "this-machine",
    "local": "this-machine",
}


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the maker states of one device: dense peaks, one direction of a link."""

    name: str
    title: str
    memory_bytes: float
    memory_bytes_per_s: float
    matmul_flops: Mapping[str, float]
    """FLOP/s by precision of the operands."""
    weight_precisions: tuple[str, ...]
    """Precisions a generator may hold its weights in; the first is also the trainer's."""
    devices_per_node: int
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    """Network rate of one device; a node has ``devices_per_node`` times that."""
    host_bytes_per_s: float
    assumed: bool = False
    """The rates are guesses: nobody stated or measured them."""
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def train_precision(self) -> str:
        return self.weight_precisions[0]

    @property
    def activation_bytes(self) -> float:
        """Bytes of one number of an activation, of the cache, and of a weight as the trainer computes with it."""
        return BYTES_PER_WEIGHT[self.train_precision]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of a peak (0..1], latencies and host overheads (seconds). One set serves every model and layout."""

    matmul: float
    memory: float
    attention: float
    link: float
    overlap: float
    usable_memory: float
    intra_node_latency_s: float
    inter_node_latency_s: float
    collective_launch_s: float
    fused_layer_overhead_s: float
    """Of a decoded layer on CPU cores, and of other systems in captured graphs."""
    eager_layer_overhead_s: float
    decode_step_overhead_s: float
    train_layer_overhead_s: float
    train_step_overhead_s: float
    tile_rows: int
    tile_columns: int
    compute_units: int
    kernel_gap_s: float = 0.0
    """Of each kernel that the engine starts in a captured graph."""
    hand_over_passes: float = 0.0
    """Times that a hand-over between GPUs of one host moves a version's bytes in memory, mostly for checksums."""
    generator_scale: float = 1.0
    """Measured seconds over forecast ones of what grows with the work of decoding; 1 until a run was fitted."""
    trainer_scale: float = 1.0
    """The same of training."""
    estimates: tuple[str, ...] = ()
    """Names of the constants that nobody measured."""
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device with its efficiencies: all that the cost model asks."""

    device: Device
    efficiency: Efficiency

    def __hash__(self) -> int:
        return hash((self.device.name, self.efficiency.matmul))  # equal ones agree; dicts have no hash

    @property
    def usable_memory_bytes(self) -> float:
        return self.device.memory_bytes * self.efficiency.usable_memory

    @property
    def memory_rate(self) -> float:
        """Bytes/s that streaming kernels reach."""
        return self.device.memory_bytes_per_s * self.efficiency.memory

    def matmul_rate(self, precision: str) -> float:
        """FLOP/s that large matrix products reach at ``precision``.

        A precision the device has no unit for is computed at the trainer's (weights are widened on the fly).
        """
        flops = self.device.matmul_flops
        return flops.get(precision, flops[self.device.train_precision]) * self.efficiency.matmul

    @property
    def attention_rate(self) -> float:
        """FLOP/s of causal attention kernels, at the trainer's precision."""
        return self.device.matmul_flops[self.device.train_precision] * self.efficiency.attention

    @property
    def is_cpu(self) -> bool:
        """Whether a device is a core of this machine's CPU."""
        return self.device.train_precision == "fp32"

    def with_efficiency(self, **changes: Any) -> Hardware:
        """A copy with some constants changed."""
        return replace(self, efficiency=replace(self.efficiency, **changes))

    def joined(self, cores: int) -> Hardware:
        """So many cores as one device: the threads of one process, which share cache and memory."""
        device, rate = self.device, cores * (SIDE_BY_SIDE if cores > 1 else 1.0)
        return replace(
            self,
            device=replace(
                device,
                name=f"{device.name} x {cores}",
                memory_bytes=device.memory_bytes * cores,
                memory_bytes_per_s=device.memory_bytes_per_s * rate,
                matmul_flops={name: flops * rate for name, flops in device.matmul_flops.items()},
            ),
        )


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    with open(Path(__file__).with_name("hardware.toml"), "rb") as file:
        return tomllib.load(file)


def device_names() -> list[str]:
    """Names that ``find_hardware`` knows."""
    return [*_table()["device"], "this-machine"]


def find_hardware(name: str) -> Hardware:
    """Hardware by name, case and spelling forgiven as far as it is unambiguous.

    Raises:
        PlanError: Unknown name; the message gives the nearest and the whole list.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    key = _ALIASES.get(key, key)
    if key == "this-machine":
        return this_machine()
    table = _table()
    if key not in table["device"]:
        near = difflib.get_close_matches(key, [*device_names(), *_ALIASES], n=1, cutoff=0.4)
        hint = f"the nearest is {_ALIASES.get(near[0], near[0])!r}; " if near else ""
        raise PlanError(f"unknown hardware {name!r}: {hint}known are {', '.join(device_names())}")
    return Hardware(
        device=Device(**{**table["device"][key], "name": key}), efficiency=Efficiency(**table["efficiency"])
    )


def this_machine() -> Hardware:
    """This machine's cores as devices, one core each; rates are guesses until a run is fitted."""
    table = _table()
    cores = available_cores()
    found: dict[str, Any] = {
        "title": f"this machine ({cores} CPU cores, one core a device)",
        "memory_bytes": available_memory() / cores,
    }
    device = Device(**table["core"], name="this-machine", devices_per_node=cores, **found)
    return Hardware(device=device, efficiency=Efficiency(**{**table["efficiency"], **table["efficiency_of_a_core"]}))
