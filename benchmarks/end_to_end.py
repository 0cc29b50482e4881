"""Seconds a training step, llamarl against TRL's GRPOTrainer: same model, prompts, group size, length and cores, one run.

    python benchmarks/end_to_end.py --model path/to/SmolLM2-135M-Instruct --json OUT

TRL runs in an environment of its own, which this script makes (``--trl-env``). The two alternate (A B A B); each side's
first step is warm-up. llamarl runs its true asynchronous job: generator, reward and trainer in processes of their own,
sharing the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import claim, core_seconds, spread, write_report

if TYPE_CHECKING:
    from llamarl.config import RunConfig

TASK = "reasoning_gym:gsm_symbolic"
BARS = {"float32": 0.25, "bfloat16": 0.2}
"""Precision -> at most so much of TRL's step."""
TRL_PACKAGES = ("torch==2.13.0", "transformers==5.23.0", "trl==1.16.0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", required=True, help="Hugging Face folder of SmolLM2-135M-Instruct (examples/smollm2)"
    )
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--trl-env", default="runs/trl-env", help="virtual environment for TRL; made if missing")
    parser.add_argument("--rounds", type=int, default=2, help="A B rounds")
    parser.add_argument("--trl-steps", type=int, default=2, help="timed TRL steps a round, after one of warm-up")
    parser.add_argument(
        "--llamarl-steps", type=int, default=6, help="timed llamarl steps a round, after two of warm-up"
    )
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[8, 16], help="TRL micro-batch sizes; the best counts"
    )
    parser.add_argument(
        "--precisions", nargs="+", choices=list(BARS), default=["float32"], help="of both sides, compared one by one"
    )
    args = parser.parse_args()
    sizes = {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 64}
    cores = len(os.sched_getaffinity(0))
    python = trl_python(Path(args.trl_env))
    prompts = export_prompts(args.model, sizes["prompts_per_step"] * (args.trl_steps + 1))
    ours: dict[str, list[dict[str, Any]]] = {precision: [] for precision in args.precisions}
    theirs: dict[str, list[dict[str, Any]]] = {precision: [] for precision in args.precisions}
    for round_number in range(args.rounds):
        for precision in args.precisions:
            print(f"round {round_number + 1}, {precision}: llamarl ...", flush=True)
            named = json.dumps(precision)
            settings = {"trainer.dtype": named, "generator.engine.dtype": named}
            ours[precision].append(run_llamarl(args.model, sizes, args.llamarl_steps, settings=settings))
            print(f"  {ours[precision][-1]['step_s']}", flush=True)
            micro_batch = args.micro_batches[round_number % len(args.micro_batches)]
            print(f"round {round_number + 1}, {precision}: TRL, micro-batch {micro_batch} ...", flush=True)
            job = {**sizes, "model": args.model, "prompts": prompts, "threads": cores, "micro_batch": micro_batch}
            job |= {"num_steps": args.trl_steps + 1, "precision": precision}
            theirs[precision].append(run_trl(python, job) | {"micro_batch": micro_batch})
            print(f"  {theirs[precision][-1]['step_s']}", flush=True)
    results: dict[str, Any] = {"sizes": sizes, "task": TASK}
    claims = []
    for precision, bar in BARS.items():
        if precision in args.precisions:
            llamarl = spread([s for run in ours[precision] for s in run["step_s"]])
            trl = min((spread(run["step_s"]) for run in theirs[precision]), key=lambda s: s["median"])
            ratio = llamarl["median"] / trl["median"]
            print(f"{precision}: llamarl {llamarl['median']:.1f} s, TRL {trl['median']:.1f} s, ratio {ratio:.3f}")
            results[precision] = {
                "llamarl_step_s": llamarl,
                "trl_step_s": trl,
                "llamarl_runs": ours[precision],
                "trl_runs": theirs[precision],
            }
            claims.append(claim(f"{precision}: llamarl's step over TRL's best step", ratio, bar, at_least=False))
    write_report(args.json, results, claims)


class CoresAtRows:
    """Reads the cores' own clocks whenever a file has a line more.

    with CoresAtRows(path) as cores: ...
    cores.idle(1, 4)  # share of all core time that was idle between line 2 and line 5 (counted from zero: 1 and 4)
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CoresAtRows:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(timeout=10)

    def idle(self, first: int, last: int) -> float:
        (busy_before, all_before), (busy, every) = self._seen[first], self._seen[last]
        return 1 - (busy - busy_before) / (every - all_before)

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            lines = self._path.read_bytes().count(b"\n") if self._path.exists() else 0
            self._seen += [core_seconds()] * (lines - len(self._seen))


def trl_python(folder: Path) -> Path:
    """Python of TRL's environment; made from the package index on first use."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder} with {', '.join(TRL_PACKAGES)} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        # torch first and alone: then no other package asks for another build of it.
        for packages in (TRL_PACKAGES[:1], TRL_PACKAGES[1:]):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True, timeout=1800)
    return python


def export_prompts(model: str, count: int, config: RunConfig | None = None) -> list[dict[str, str]]:
    """The first ``count`` prompts of llamarl's own stream (of ``TASK``, or of a run's task), as text, for TRL."""
    from llamarl.config import validate
    from llamarl.data.prompts import PromptStream
    from llamarl.environments.factory import make_task
    from llamarl.models.loading import load_tokenizer

    config = config or validate({"task": {"name": TASK}})
    stream = PromptStream(make_task(config.task, config.run.seed), load_tokenizer(model), config.data, config.run.seed)
    prompts = [stream.get(index) for index in range(count)]
    return [{"text": p.text, "answer": p.answer or ""} for p in prompts]


def run_llamarl(
    model: str,
    sizes: dict[str, int],
    steps: int,
    *,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One run of ``steps`` timed steps; ``settings`` and ``environment`` are beside what the comparison fixes."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        all_settings: dict[str, Any] = {
            "run.dir": json.dumps(str(run_dir)),
            "run.num_ticks": steps + 3,
            "model.path": json.dumps(model),
            "task.name": json.dumps(TASK),
            "task.options": "{}",
            "schedule.prompts_per_step": sizes["prompts_per_step"],
            "generator.group_size": sizes["group_size"],
            "generator.sampling.max_new_tokens": sizes["max_new_tokens"],
            "generator.max_segments": 1,
            "generator.oversubscription": 1.0,
            "optimizer.lr": 1e-6,
            "evaluation.every": 0,
            "checkpoint.every": 0,
            "checkpoint.every_minutes": 0,
            "observability.console": '"none"',
            **(settings or {}),
        }
        # An empty value leaves a key out: an older llamarl may not know it.
        words = [word for key, value in all_settings.items() if value != "" for word in (f"--{key}", str(value))]
        recipe = Path(__file__).resolve().parents[1] / "recipes" / "smollm2.toml"
        with CoresAtRows(run_dir / "metrics.jsonl") as cores:
            subprocess.run(
                [sys.executable, "-m", "llamarl.cli.main", "train", str(recipe), *words],
                check=True,
                timeout=3600,
                env={**os.environ, **(environment or {})},
            )
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # The last steps run with the generator already idle: they are left out, as are the two of warm-up.
    timed = rows[2 : 2 + steps]
    keys = ("time/generator_s", "time/trainer_s", "time/reward_s", "response/length_mean")
    return {
        "step_s": [row["time/step_s"] for row in timed],
        "idle": cores.idle(1, 1 + len(timed)),
        **{key: [row.get(key) for row in timed] for key in keys},
    }


def run_trl(python: Path, job: dict[str, Any], limit_s: int = 3600) -> dict[str, Any]:
    """What TRL's process answers. Its first step is warm-up."""
    script = Path(__file__).with_name("trl_baseline.py")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(python), str(script)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=environment,
    )
    if done.returncode:
        raise SystemExit(f"TRL failed:\n{done.stderr[-4000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return result | {"step_s": result["step_s"][1:]}


if __name__ == "__main__":
    main()
