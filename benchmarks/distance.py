"""What distance costs a job, and what staleness hides of it: a generator far from its trainer.

    python benchmarks/distance.py --json distance.json                # as root; the bundled model, 50 ms and 100 Mbit/s
    python benchmarks/distance.py --generator-s 1.2 --trainer-s 1.2

Two hosts are namespaces that share nothing (network, processes, mounts), joined by ``slow_link.py``: on one the controller, reward
and trainer, on the other the generator. The same job runs synchronously and at staleness 1, over a link without limit or delay and
over the slow one, in turn (A B A B); its bits are the same near and far. What a job loses is its mean step far minus near.

The model is real and so is all that travels; ticks last as long as ``--generator-s`` and ``--trainer-s`` say
(``costed_executors.py``), longer than their work, so that what else the machine does is not in the result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import claim, spread, write_report
from slow_link import far_hosts, measured_link, parse_link

from llamarl.observability.metrics import read_metrics
from llamarl.runtime.hosts.worker_program import READY

KEY = bytes(range(32))
WARM_UP = 4
WHERE = {"generator": ("b",), "reward": ("a",), "trainer": ("a",)}


@contextmanager
def workers(hosts: Sequence[tuple[str, str]]) -> Iterator[list[str]]:
    """``llamarl worker`` on each host: where they listen."""
    started = []
    try:
        for name, address in hosts:
            inside = 'mount -t tmpfs tmpfs /dev/shm; cd /; exec "$0" -m llamarl.cli.main worker "$@"'
            command = ["ip", "netns", "exec", name, "unshare", "-m", "-u", "-p", "-i", "-f", "--mount-proc"]
            command += ["--kill-child", "bash", "-c", inside, sys.executable, "--key", "-", "--bind", address]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            started.append((process, address))
            assert process.stdin is not None
            process.stdin.write(KEY.hex() + "\n")
            process.stdin.flush()
        places = []
        for process, address in started:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith(READY):
                raise OSError(f"the worker at {address} did not start: {line}")
            places.append(f"{address}:{json.loads(line[len(READY) :])['port']}")
        yield places
    finally:
        for process, _ in started:
            assert process.stdin is not None
            process.stdin.close()
        for process, _ in started:
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)


def run_job(recipe: str, hosts: Sequence[tuple[str, str]], folder: Path, flags: Sequence[str]) -> None:
    """The job, its generator on the second host; with no hosts on this machine alone."""
    command = [sys.executable, "-m", "llamarl.cli.main", "train", recipe, "--run.dir", str(folder), *flags]
    command += ["--evaluation.every", "0", "--checkpoint.every", "0", "--checkpoint.at_end", "false"]
    command += ["--generator.threads", "1", "--trainer.threads", "1"]
    command += ["--generator.max_segments", "1", "--generator.oversubscription", "1.0", "--generator.group_size", "4"]
    command += ["--schedule.prompts_per_step", "8", "--generator.sampling.max_new_tokens", "48"]
    for role in ("generator", "trainer"):
        command += [f"--executors.{role}.factory", f"{Path(__file__).parent}/costed_executors.py:Costed{role.title()}"]
    if not hosts:
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        return
    key = folder.parent / "key"
    key.write_text(KEY.hex())
    key.chmod(0o600)
    with workers(hosts) as places:
        command = ["ip", "netns", "exec", hosts[0][0], *command, "--hosts", ",".join(places), "--hosts.key", str(key)]
        command += ["--on", "generator=1", "--on", "reward=0", "--on", "trainer=0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise OSError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def mean_step_s(folder: Path) -> float:
    """After the first ticks; a mean, because at staleness 1 steps come in pairs."""
    steps = [float(row["time/step_s"] or 0.0) for row in read_metrics(folder)][WARM_UP:]
    return statistics.fmean(steps)


def distance(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Near and far, synchronous and at staleness 1."""
    link, near = parse_link(args.link), parse_link("none")
    os.environ |= {"COSTED_GENERATOR_S": str(args.generator_s), "COSTED_TRAINER_S": str(args.trainer_s)}
    flags = ["--run.num_ticks", str(args.ticks)]
    steps: dict[str, list[float]] = {f"{where} {level}": [] for level in (0, 1) for where in ("near", "far")}
    links: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="llamarl-distance-") as made:
        for round_number in range(args.rounds):
            for level in (0, 1):
                for where, over in (("near", near), ("far", link)):
                    folder = Path(made) / f"{where}-{level}-{round_number}"
                    with far_hosts(2, over) as hosts:
                        if where not in links:
                            links[where] = measured_link(hosts)
                        run_job("tiny", hosts, folder, [*flags, "--schedule.max_staleness", str(level)])
                    steps[f"{where} {level}"].append(mean_step_s(folder))
                    print(f"{where} staleness {level}: {steps[f'{where} {level}'][-1]:.3f} s a step", flush=True)
    middle = {name: statistics.median(values) for name, values in steps.items()}
    lost = {level: middle[f"far {level}"] - middle[f"near {level}"] for level in (0, 1)}
    results = {
        "link": link.words,
        "measured_link": links,
        "generator_s": args.generator_s,
        "trainer_s": args.trainer_s,
        "step_s": {name: spread(values) for name, values in steps.items()},
        "lost_s": lost,
    }
    what = "what staleness 1 loses of what the synchronous job loses"
    claims = [claim(what, lost[1] / lost[0], 1 / 3, at_least=False)]
    return results, claims


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write the results")
    parser.add_argument("--link", default="100mbit:50ms", help="rate, and round trip as ping tells it")
    parser.add_argument("--ticks", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--generator-s", type=float, default=1.0, help="of decoding, a tick")
    parser.add_argument("--trainer-s", type=float, default=1.4, help="of a trainer's tick")
    args = parser.parse_args()
    if os.geteuid() != 0:
        print("as root: hosts are namespaces", file=sys.stderr)
        return 1
    results, claims = distance(args)
    assert all(math.isfinite(entry["value"]) for entry in claims)
    write_report(args.json, results, claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())
