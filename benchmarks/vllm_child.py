"""vLLM in its own environment for ``generation.py``, told what to do line by line.

    parent: {"workload": "short"}        child: {"seconds": 3.1, "tokens": 2048}

The child stays up between rounds, so that all engines are measured in turn and warm.
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
        prompts: JSON file with the prompts of ``task_tail``, as tokens.
        drafts: Tokens that vLLM guesses ahead by n-grams.
    """

    def __init__(
        self, python: Path, model: Path, dtype: str, *, cpu_time: bool, prompts: Path | None = None, drafts: int = 0
    ) -> None:
        source = Path(__file__).resolve().parent.parent / "src"
        clock = "processor" if cpu_time else "wall"
        self._process = subprocess.Popen(
            [str(python), __file__, str(model.resolve()), dtype, clock, str(prompts or ""), str(drafts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(source), "VLLM_LOGGING_LEVEL": "ERROR"},
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
        raise SystemExit(f"the child ended with status {self._process.wait()}; its own words are above")


def main() -> None:
    import torch
    from workloads import long_tail_requests, sequences_of, short_requests, task_tail_sequences

    from llamarl.engine.vllm import VllmEngine, import_vllm
    from llamarl.models.loading import load_model_config
    from llamarl.settings.engine import EngineConfig

    model, dtype, clock_name, prompts, drafts = sys.argv[1:]
    clock = time.process_time if clock_name == "processor" else time.perf_counter
    started = time.monotonic()
    config = EngineConfig(dtype=dtype, kv_cache_bytes=2 << 30)  # type: ignore[arg-type]
    facts: dict[str, Any] = {"threads": torch.get_num_threads(), "dtype": dtype}
    # vLLM binds its threads to cores by itself; the number stays the parent's
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    vllm: Any = import_vllm()
    if int(drafts):
        plain = vllm.LLM
        guess = {"method": "ngram", "num_speculative_tokens": int(drafts), "prompt_lookup_max": 4}
        vllm.LLM = lambda **settings: plain(**settings, speculative_config=guess)
    engine = VllmEngine(model, config, eos_token_ids=())
    vocabulary = load_model_config(model).vocab_size
    facts["vllm"] = vllm.__version__
    workloads = {
        "short": lambda: sequences_of(short_requests(vocabulary)),
        "long_tail": lambda: sequences_of(long_tail_requests(vocabulary)),
        "task_tail": lambda: task_tail_sequences(json.loads(Path(prompts).read_text())),
    }
    print(json.dumps({**facts, "start_s": time.monotonic() - started}), flush=True)
    for line in sys.stdin:
        sequences = workloads[json.loads(line)["workload"]]()
        # forgets cached prefixes: every round has the same prompts, none may know them already
        engine.weights_updated(0)
        start = clock()
        engine.add(sequences)
        while engine.has_work:
            engine.step()
        seconds = clock() - start
        print(json.dumps({"seconds": seconds, "tokens": sum(len(s.tokens) for s in sequences)}), flush=True)


if __name__ == "__main__":
    main()
