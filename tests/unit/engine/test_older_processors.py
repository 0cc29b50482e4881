"""Parts of the suite once more as older processors compute: without AVX-512 and VNNI, and with torch's plainest code.

What a run computes with is chosen by the processor, when torch is loaded; so each is a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[1]
ENGINES = (
    "engine/test_linears.py",
    "engine/test_quantized_engine.py",
    "engine/test_parked_engine.py::test_tokens_after_parking_are_those_of_an_engine_that_was_never_parked",
)
REPLICAS = "executors/test_unlike_replicas.py::test_each_replica_samples_what_it_would_beside_others_of_its_kind"
MASKS = {
    "AVX2 alone": ({"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}, (*ENGINES, REPLICAS)),
    "torch's plainest code": ({"ATEN_CPU_CAPABILITY": "default"}, ENGINES),
}


@pytest.mark.parametrize("mask", MASKS)
def test_engines_compute_the_same_on_processors_with_fewer_instructions(mask: str) -> None:
    environment, chosen = MASKS[mask]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command += [str(UNIT / name) for name in chosen]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=UNIT.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
