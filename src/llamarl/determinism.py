"""What besides the configuration decides the bits of a run: library versions and the kind of processor, which are
recorded; thread count and choice of kernels, which are set; and seeds.

Seeds depend on what is drawn, never on when or where it is drawn. A sample's seed comes from (run seed, prompt index,
sample index), so it is the same whatever else shares its batch, whichever rank holds it, and after a resume.

Kernels are chosen by the processor's instruction sets, and sums are ordered by kernels; sums over threads are split by
their number, so a run pins it. The environment variables count only if they are set before torch is imported; the calls
count on the thread that makes them, so the shell makes them on the thread that will run the executor.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

import llamarl

__all__ = [
    "GPU",
    "LOOPBACK",
    "derive_seed",
    "environment",
    "import_folders",
    "joint_facts",
    "pin",
    "platform_differences",
    "platform_facts",
    "rank_environment",
]

GPU = "gpu"
"""The fact that names the kinds of GPU that ranks are on; whoever places them adds it."""
_PACKAGES = ("torch", "transformers", "numpy")
_CPUINFO = Path("/proc/cpuinfo")
_INSTRUCTION_SETS = ("asimddp", "sve", "bf16", "avx2", "avx512", "avx_vnni", "amx")
"""Beginnings of the flags by which kernels for matrix products are chosen."""


@cache
def platform_facts() -> Mapping[str, str]:
    """Package -> version, and ``processor``: its name and instruction sets. Imports none of the packages."""
    found = {"llamarl": llamarl.__version__, "python": platform.python_version(), "processor": _processor()}
    for name in _PACKAGES:
        try:
            found[name] = installed_version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def joint_facts(machines: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """Of all machines that hold ranks of a job: where they are alike, those of each; else every
    value that there is, in order."""
    names = sorted({name for facts in machines for name in facts})
    return {name: " and ".join(sorted({facts.get(name, "absent") for facts in machines})) for name in names}


def platform_differences(saved: Mapping[str, str], now: Mapping[str, str] | None = None) -> list[str]:
    """One line for each fact that is not the same.

    Args:
        now: Of the machines that hold the ranks; None: of this one, without its GPUs.
    """
    here = platform_facts() if now is None else now
    names = saved.keys() | here.keys()
    if GPU not in saved or GPU not in here:  # a device that changed is told as a key; a cluster need not say
        names -= {GPU}
    return [
        f"{name}: it has {saved.get(name, 'absent')!r}, here it is {here.get(name, 'absent')!r}"
        for name in sorted(names)
        if saved.get(name) != here.get(name)
    ]


def _processor() -> str:
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}".strip()
    return describe_processor(platform.machine(), text)


def describe_processor(machine: str, cpuinfo: str) -> str:
    """The first processor of a ``/proc/cpuinfo``: machine, model name, instruction sets."""
    fields: dict[str, str] = {}
    for line in cpuinfo.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip()
    flags = fields.get("flags", fields.get("features", "")).split()
    sets = sorted(flag for flag in flags if flag.startswith(_INSTRUCTION_SETS))
    return " ".join([machine, fields.get("model name", fields.get("cpu part", "")), *sets]).replace("  ", " ").strip()


_ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Threads that wait for the others of their team sleep. Spinning, as OpenMP has it by default, they
hold a core that another executor's thread waits for, and perhaps the very one that they wait
for."""
_SAID = bool(os.environ.keys() & _ASLEEP.keys())
"""By the user, before anything of ours could have set them."""
_CUBLAS, _CUBLAS_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"  # cuBLAS repeats itself only with fixed workspaces
# The switch between Hopper's GPUs adds up by itself, in an order that differs from call to call, with newer drivers from
# process to process (NVIDIA/nccl issues 1497 and 2360); without it NCCL's own algorithms do.
_SWITCH_SUMS = "NCCL_NVLS_ENABLE"


def environment(threads: int) -> Mapping[str, str]:
    """Variables for a process that has not imported torch yet. How threads wait changes no bit;
    what the user says of it stays, as does a wish for sums by the switch of GPUs, which are faster."""
    count = str(threads)
    waiting = _ASLEEP if threads > 1 and not _SAID else {}
    return {
        **waiting,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "NUMEXPR_NUM_THREADS": count,
        "MKL_DYNAMIC": "FALSE",  # else MKL may take fewer threads than asked, as load suits
        "OMP_DYNAMIC": "FALSE",
        _CUBLAS: _CUBLAS_WORKSPACES,
        _SWITCH_SUMS: os.environ.get(_SWITCH_SUMS, "0"),
        "TOKENIZERS_PARALLELISM": "false",
        # Memory that a step frees is kept for the next: glibc would give it back and fault every page in again, measured
        # at 400,000 to 650,000 faults and 15 to 20 % of a 135M trainer's step; the peak stays the same.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        # A heap of a thread's own is of 64 MB pieces: the activations of its micro-batch would not fit, nor be kept.
        "MALLOC_ARENA_MAX": "1",
        # oneDNN keeps what it prepared for the last 1,024 shapes, some 0.3 MB each, and torch's own layer over it as much
        # again: with packed batches, whose shapes seldom repeat, most of a gigabyte, whose coming and going tears the heap.
        # A few serve the layers of one pass, which share their shapes; preparing one takes under a millisecond.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        "LRU_CACHE_CAPACITY": "1",
    }


def pin(threads: int) -> None:
    """Pin the calling thread's torch, if torch is loaded; a later import obeys :func:`environment`.

    Takes repeatable kernels where torch has them and warns where it has none (an operator without one is named in the
    warning, the job goes on). Training demands more: see ``models/repeatable.py``.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.set_num_threads(threads)
    # read when cuBLAS is first used: in time where nothing has computed on a GPU yet
    os.environ.setdefault(_CUBLAS, _CUBLAS_WORKSPACES)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs a write of every torch.empty, adds no bits


LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of a job that stays on one machine: where process groups listen, which by themselves
ask for the host's name and take its address. A lone rank's group listens too."""


def import_folders() -> list[str]:
    """Where this process looks for modules, for those that it starts; a ``Path`` there Python itself passes over."""
    return list(dict.fromkeys(path or os.getcwd() for path in sys.path if isinstance(path, str)))


def rank_environment(threads: int) -> dict[str, str]:
    """Of a rank on this machine. What torch and the group libraries read when they are imported
    must be there from the start."""
    return {**os.environ, **environment(threads), "PYTHONPATH": os.pathsep.join(import_folders()), **LOOPBACK}


_MASK = (1 << 64) - 1


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def derive_seed(*parts: int) -> int:
    """Mix non-negative integers into one 64-bit seed (splitmix64, Steele et al. 2014, chained over the parts)."""
    state = 0
    for part in parts:
        state = _splitmix64(state ^ _splitmix64(part & _MASK))
    return state
