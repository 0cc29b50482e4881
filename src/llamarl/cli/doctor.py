"""``llamarl doctor``: what works on this machine, and what to do about what does not."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Tries what a run needs: libraries, processes, shared memory, the bundled model, CUDA. Prints one line each:
"ok", "no" (with the fix) or "--" (optional and absent). Exit code 0 if a run can start here."""


def add_parser(verbs: Any, full: bool = True) -> None:
    parser = verbs.add_parser(
        "doctor",
        help="report what works on this machine",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    checks: list[tuple[str, bool, Callable[[], str]]] = [
        ("python", True, _python),
        ("cores", True, lambda: f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"),
        ("memory", True, _memory),
        ("torch", True, _torch),
        ("transformers", True, lambda: importlib.metadata.version("transformers")),
        ("bundled model", True, _bundled_model),
        ("monarch processes", True, _monarch),
        ("shared memory", True, _shared_memory),
        ("reward workers", True, _reward_workers),
        ("disk", True, _disk),
        ("cuda", False, _cuda),
        ("vllm", False, lambda: importlib.metadata.version("vllm")),
    ]
    results: dict[str, dict[str, Any]] = {}
    for name, required, check in checks:
        try:
            results[name] = {"ok": True, "required": required, "detail": check()}
        except Exception as error:  # a doctor reports every failure and goes on
            results[name] = {"ok": False, "required": required, "detail": f"{type(error).__name__}: {error}"}
        if not args.json:
            mark = "ok" if results[name]["ok"] else "no" if required else "--"
            print(f"{mark:<3} {name:<18} {results[name]['detail']}", flush=True)
    healthy = all(r["ok"] for r in results.values() if r["required"])
    if args.json:
        print(json.dumps({"healthy": healthy, "checks": results}))
    else:
        print("A run can start here." if healthy else "A run cannot start here until the lines marked 'no' are mended.")
    return 0 if healthy else 1


def _python() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{total / 2**30:.1f} GiB"


def _torch() -> str:
    import torch

    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    if not gloo:
        raise RuntimeError("this torch has no gloo backend; install the standard wheel")
    return f"{torch.__version__}, gloo"


def _bundled_model() -> str:
    from llamarl.models.loading import load_model_config, load_tokenizer

    config, tokenizer = load_model_config("bundled:tiny"), load_tokenizer("bundled:tiny")
    return f"bundled:tiny, {config.model_type}, {len(tokenizer)} tokens"


def _monarch() -> str:
    from llamarl.runtime.factory import probe_processes

    return f"torchmonarch {importlib.metadata.version('torchmonarch')}, a process up and back in {probe_processes(30.0):.1f} s"


def _shared_memory() -> str:
    from llamarl.channels.segments import Segment, open_segment

    segment = Segment(256 * 2**20)  # more than the 64 MB that containers give to /dev/shm
    reader = open_segment(segment.handle)
    segment.bytes[-1] = 7
    if reader.bytes[-1] != 7:
        raise RuntimeError("a second mapping does not see what the first one wrote")
    reader.close()
    segment.close()
    return f"256 MiB shared by {'a file' if segment.handle.path else 'memfd'}, /dev/shm not needed"


def _reward_workers() -> str:
    from llamarl.environments.config import TaskConfig
    from llamarl.environments.pool import RewardPool

    pool = RewardPool(TaskConfig(), seed=0)
    pool.close()
    return "a worker starts and stops"


def _disk() -> str:
    with tempfile.NamedTemporaryFile(dir=Path.cwd()):
        pass
    return f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB free here, writable"


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device; runs use the CPU")
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
