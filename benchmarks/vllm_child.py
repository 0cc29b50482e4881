"""vLLM's side of ``generation.py --engines vllm``: runs in vLLM's own environment, told what to do line by line.

    parent: {"workload": "short"}        child: {"seconds": 3.1, "tokens": 2048}

The child stays up between rounds, so that both engines are measured in turn and warm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["VllmChild"]


class VllmChild:
    """The parent's handle.

    Args:
        python: The interpreter of an environment with vllm, torch and transformers; llamarl is taken from this checkout.
    """

    def __init__(self, python: Path, model: Path, dtype: str, *, cpu_time: bool) -> None:
        source = Path(__file__).resolve().parent.parent / "src"
        environment = {**os.environ, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        command = [str(python), __file__, str(model.resolve()), dtype, "processor" if cpu_time else "wall"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.facts = self._read()

    def run(self, workload: str) -> tuple[float, int]:
        """Seconds, and tokens sampled."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"workload": workload}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _read(self) -> dict[str, Any]:
        """The next line that is an answer; vLLM prints others."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"vLLM's process ended with status {self._process.wait()}; its own words are above")


def main() -> None:
    import torch
    from generation import long_tail_requests, sequences_of, short_requests

    from llamarl.engine.config import EngineConfig
    from llamarl.engine.vllm import VllmEngine, import_vllm

    model, dtype, clock_name = sys.argv[1:]
    clock = time.process_time if clock_name == "processor" else time.perf_counter
    started = time.monotonic()
    # vLLM binds its threads to cores by itself; the number stays the parent's
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    engine = VllmEngine(model, EngineConfig(dtype=dtype, kv_cache_bytes=2 << 30), eos_token_ids=())  # type: ignore[arg-type]
    vocabulary = engine.vocabulary
    workloads = {"short": short_requests(vocabulary), "long_tail": long_tail_requests(vocabulary)}
    facts = {
        "vllm": import_vllm().__version__,
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "start_s": time.monotonic() - started,
    }
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        sequences = sequences_of(workloads[json.loads(line)["workload"]])
        engine.weights_updated(
            0
        )  # forgets cached prefixes: every round has the same prompts, none may know them already
        start = clock()
        engine.add(sequences)
        while engine.has_work:
            engine.step()
        seconds = clock() - start
        print(json.dumps({"seconds": seconds, "tokens": sum(len(s.tokens) for s in sequences)}), flush=True)


if __name__ == "__main__":
    main()
