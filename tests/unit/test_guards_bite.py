"""Faults that a GPU would have met first, put back into a copy of the source: the test that guards against each fails.

Each is one that this code had, or that is easy to make: no GPU is needed to see it, as long as these tests bite.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import llamarl

SOURCE = Path(llamarl.__file__).parent
UNIT = Path(__file__).parent


class Fault(NamedTuple):
    file: str
    right: str
    wrong: str
    guard: str
    says: str
    """What the guard's failure names."""


FAULTS = {
    "a flag that torch 2.11 does not have": Fault(
        "models/attention.py",
        'return {"enable_gqa": grouped} if "enable_gqa" in inspect.signature(kernel).parameters else {}',
        'return {"enable_gqa": grouped}',
        "models/test_packed_attention.py::test_the_flash_kernel_is_called_as_each_torch_declares_it",
        "unexpected keyword argument 'enable_gqa'",
    ),
    "a wait with a limit on a transfer between GPUs": Fault(
        "models/collectives.py",
        "        work.wait()\n",
        "        work.wait(_WAIT_LIMIT)\n",
        "trainer/test_ranks_on_fakes.py::test_every_rank_calls_what_its_neighbours_wait_for",
        "the host would wait for a transfer between GPUs",
    ),
    "the host asks for the loss of each micro-batch": Fault(
        "trainer/step.py",
        "            loss += computed.loss\n",
        "            loss += computed.loss.item()\n",
        "trainer/test_trainer_on_meta.py::test_the_host_waits_for_a_step_and_not_for_a_micro_batch",
        "_add_gradients",
    ),
    "ranks at the corners of a mesh sum in another order": Fault(
        "trainer/step.py",
        "        loss = self.layout.sum_over_data(self.layout.sum_over_stages(loss))\n",
        "        sums = [self.layout.sum_over_stages, self.layout.sum_over_data][:: -1 if self.layout.rank % 3 else 1]\n"
        "        loss = sums[1](sums[0](loss))\n",
        "trainer/test_ranks_on_fakes.py::test_every_rank_calls_what_its_neighbours_wait_for",
        "rank 0 at",
    ),
    "a norm that nothing fuses": Fault(
        "engine/compiled_layers.py",
        "    return type(layer).forward(layer, *args, **kwargs)\n",
        "    args = (args[0] / args[0].square().cumsum(-1)[..., -1:].sqrt(), *args[1:])\n"
        "    return type(layer).forward(layer, *args, **kwargs)\n",
        "engine/test_compiled_layers.py::test_a_compiled_layer_is_fourteen_kernels_and_computes_what_it_did",
        "<= 14",
    ),
}


@pytest.mark.parametrize(
    "name", [name if number == 0 else pytest.param(name, marks=pytest.mark.long) for number, name in enumerate(FAULTS)]
)
def test_a_fault_that_is_put_back_is_caught(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    if "compiled" in fault.guard and shutil.which("g++") is None:
        pytest.skip("torch's compiler needs g++ on a CPU")
    shutil.copytree(SOURCE, tmp_path / "llamarl", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "llamarl" / fault.file
    text = file.read_text()
    assert text.count(fault.right) == 1, f"{fault.file} does not have this line any more"
    for sound in (True, False):
        file.write_text(text if sound else text.replace(fault.right, fault.wrong))
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(UNIT / fault.guard)]
        found = subprocess.run(
            words, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=140
        )
        assert found.returncode == (0 if sound else 1), found.stdout
    assert fault.says in found.stdout
