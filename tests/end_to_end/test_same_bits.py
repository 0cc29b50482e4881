"""Runs give the bits that were recorded for them: weights, metrics (times apart) and rollouts, by hash.

``same_bits.json`` was recorded before the code was rearranged, and holds what a rearrangement must not change. Keys that a row
or a rollout has gained since then are left out; a key that is gone fails. The kernels are pinned to AVX2, which every x86-64
machine knows; even so two makers' processors may round differently (libraries choose block sizes by the caches that they find). So each
make has a record of its own, all of them made by the code before it was rearranged. A run must equal one of them whole, and
that of its own processor where there is one; elsewhere, and under another torch, it is skipped with a word.

    PYTHONPATH=tests python tests/end_to_end/test_same_bits.py [CASE..]    # records anew: only where a change of bits is meant, and said
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from safetensors.torch import load_file

from llamarl.observability.keys import is_timing_key

RECORD = Path(__file__).with_name("same_bits.json")
PINNED = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
SMALL = {
    "run.num_ticks": 5,
    "schedule.prompts_per_step": 4,
    "generator.group_size": 4,
    "generator.threads": 1,
    "trainer.threads": 1,
    "trainer.skip_zero_advantage": "false",  # as when the record was made
    "optimizer.min_lr_ratio": 0.0,  # as when the record was made
    "evaluation.every": 2,
    "evaluation.num_prompts": 8,
    "observability.console": '"none"',
    "observability.tensorboard": "false",
    "observability.trace": "false",
}
INLINE = {"run.runtime": '"inline"'}
PARTIAL = {"generator.max_segments": 2, "generator.oversubscription": 1.5}
WHOLE = {"generator.max_segments": 1, "generator.oversubscription": 1.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "exact": ("tiny.toml", {**INLINE, **WHOLE, "schedule.max_staleness": 2}),
    "partial rollouts": ("tiny.toml", {**INLINE, **PARTIAL}),
    "processes": ("tiny.toml", {**PARTIAL}),
    "meshes": (
        "tiny.toml",
        {
            **PARTIAL,
            "run.num_ticks": 3,
            "generator.dp": 2,
            "generator.tp": 2,
            "trainer.fsdp": 2,
            "trainer.tp": 2,
            "evaluation.every": 0,
            "run.cores": 8,
        },
    ),
    "critic": ("ppo_critic.toml", {**INLINE}),
    "co-located": ("colocated.toml", {**INLINE, **PARTIAL}),
    "lora": ("tiny.toml", {**INLINE, "lora.rank": 4, "optimizer.lr": 2e-3}),
    "reward model": (
        "tiny.toml",
        {**INLINE, "reward_model.path": '"SCORER"', "reward_model.name": '"scorer"', "reward_model.weight": 0.5},
    ),
    "episodes": ("mastermind.toml", {**INLINE, "schedule.max_staleness": 2}),
    "replicas": (
        "tiny.toml",
        {
            **PARTIAL,
            "run.num_ticks": 3,
            "generator.replicas": "[{tp = 2, share = 3}, {share = 1}]",
            "evaluation.every": 0,
            "run.cores": 8,
        },
    ),
    "two trainers": ("tiny.toml", {**WHOLE, "run.num_ticks": 3, "trainer.fsdp": 2, "generator.dp": 2}),
}
RANK_0_ONLY = frozenset({"meshes"})
"""Cases in which several generator ranks reported, and the record held those of one: their metrics are not compared."""
GONE = {"kept_kv": False}
"""Keys of a rollout that went with what they told of, and what they held in every row that was recorded."""

_RUN_ALL = """\
import one_thread
import json, sys
from forked_command import forking_here, run_llamarl
from test_same_bits import write_scorer

here = forking_here()
scorer = here.Process(target=write_scorer, args=[sys.argv[2]])
scorer.start()
scorer.join()
for words in json.loads(sys.argv[1]):
    done = run_llamarl(words, context=here)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
"""


def write_scorer(folder: str) -> None:
    """Write a reward model with a seeded head over the bundled model's body; what it says is arbitrary, and always the same."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    from llamarl.models.loading import load_tokenizer, resolve_model_path

    base = resolve_model_path("bundled:tiny")
    logging.set_verbosity_error()  # it would warn of the new head
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    model.config.pad_token_id = 0
    model.save_pretrained(folder)
    load_tokenizer(base).save_pretrained(folder)


def run_cases(cases: Sequence[str], folder: Path) -> None:
    """Run each into ``folder / case``, all as forks of one process that has imported torch with the kernels pinned."""
    program = folder / "run_all.py"
    program.write_text(_RUN_ALL)
    jobs = []
    for case in cases:
        recipe, changes = CASES[case]
        settings = {**SMALL, **changes, "run.dir": json.dumps(str(folder / case))}
        words = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        words = [word.replace("SCORER", str(folder / "scorer")) for word in words]
        jobs.append(["train", str(REPOSITORY / "recipes" / recipe), *words])
    tests = os.pathsep.join([str(Path(__file__).parent), str(REPOSITORY / "tests")])
    path = os.pathsep.join([str(REPOSITORY / "src"), tests, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(jobs), str(folder / "scorer")],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **PINNED, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not is_timing_key(key)} for line in lines]


def rollout_rows(run_dir: Path) -> list[dict[str, Any]]:
    files = sorted((run_dir / "rollouts").glob("*.jsonl"))
    assert files
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def digest_of_rows(rows: list[dict[str, Any]], keys: list[str]) -> str:
    """Of ``keys`` alone; a key that no row has any more would change it, but for those of ``GONE``."""
    rows = [GONE | row for row in rows] if "kept_kv" in keys else rows
    kept = [{key: row[key] for key in keys if key in row} for row in rows]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def digest_of_weights(run_dir: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(run_dir.glob("*/*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            digest.update(f"{file.parent.name} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def processor() -> str:
    """Maker, family and model, as ``AuthenticAMD 26.2``."""
    said: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        said[key.strip()] = value.strip()
    return f"{said.get('vendor_id', platform.machine())} {said.get('cpu family', '?')}.{said.get('model', '?')}"


def torch_version() -> str:
    return torch.__version__.split("+")[0]


def record(case: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / case
        run_cases([case], Path(folder))
        entry: dict[str, Any] = {"weights": digest_of_weights(run_dir)}
        kinds = {"rollouts": rollout_rows(run_dir)}
        if case not in RANK_0_ONLY:
            kinds["metrics"] = metric_rows(run_dir)
        for kind, rows in kinds.items():
            keys = sorted({key for row in rows for key in row})
            entry[kind] = {"keys": keys, "digest": digest_of_rows(rows, keys)}
        return entry


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each case that is asked for."""
    folder = tmp_path_factory.mktemp("same_bits")
    asked = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    run_cases(asked, folder)
    return folder


@pytest.mark.timeout(960)  # all of them run in the first
@pytest.mark.parametrize("case", CASES)
def test_weights_metrics_and_rollouts_are_those_recorded(case: str, request: pytest.FixtureRequest) -> None:
    records = json.loads(RECORD.read_text())
    mine, here = records.get(processor()), torch_version()
    known = [record for record in records.values() if record["torch"] == here and case in record["cases"]]
    if not known:
        pytest.skip(f"recorded with torch {sorted({r['torch'] for r in records.values()})}, this is {here}")
    mine = mine if mine in known else None
    run_dir = request.getfixturevalue("ran") / case
    found = [equal_parts(run_dir, record["cases"][case]) for record in ([mine] if mine else known)]
    if not mine and not any(all(parts.values()) for parts in found):
        pytest.skip(f"recorded on {', '.join(records)}; this is {processor()}, which rounds differently")
    assert any(all(parts.values()) for parts in found), found


def equal_parts(run_dir: Path, expected: dict[str, Any]) -> dict[str, bool]:
    """Weights, rollouts, metrics -> whether they are those of a record."""
    parts = {"weights": digest_of_weights(run_dir) == expected["weights"]}
    for kind, rows in (("rollouts", rollout_rows), ("metrics", metric_rows)):
        if kind in expected:
            parts[kind] = digest_of_rows(rows(run_dir), expected[kind]["keys"]) == expected[kind]["digest"]
    return parts


if __name__ == "__main__":
    held = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    own = held.setdefault(processor(), {"cases": {}})
    own["torch"] = torch_version()
    for name in sys.argv[1:] or CASES:
        own["cases"][name] = record(name)
        print(name, own["cases"][name]["weights"][:12])
    RECORD.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n")
