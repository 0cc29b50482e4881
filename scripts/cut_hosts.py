"""Cuts hosts off from runs of several kinds, at random moments, and compares what becomes of them (as root, Linux):

    python scripts/cut_hosts.py --cuts 100                         # an hour
    python scripts/cut_hosts.py --cuts 6 --cases exact critic      # minutes

Each case is a small job over hosts that share nothing but the kernel (namespaces on a bridge, made here and removed again), with
generator, reward and trainer on different ones and one or more to spare. It is run once undisturbed, on this machine alone; then, until
enough hosts have been cut off, over hosts of which some go at seeded moments, now and then two at once:

    link     the cable is pulled, for good                    power    everything on it is killed at once
    filter   all its packets are swallowed, without a word    pause    the cable is pulled, and put back after a part or a multiple
                                                                       of the silence after which a host counts as gone

Each run must end by itself and be equal to the undisturbed one: weights, rollouts and metrics without times, byte for byte. Under the
latest weights no two runs are equal; there the struck run is replayed on this machine from its own log, and the replay must be equal to
it. When the cables are back no process of the run may be left anywhere, and on no host that still runs a file in its temporary folder
or shared memory, or an open socket. Exits 1 where a run fails in any of these. One line a run, and with ``--json`` a file of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts")]
from certificates import signed  # noqa: E402
from hosted_jobs import left_on  # noqa: E402
from kill_runs import CASES as KILLED  # noqa: E402
from kill_runs import PARTIAL  # noqa: E402
from kill_runs import Case as Job  # noqa: E402
from namespace_hosts import KEY, NamespaceHost, namespace_hosts, why_not  # noqa: E402
from tools.chaos.compare import differences  # noqa: E402
from tools.chaos.plan import Blow, Target  # noqa: E402
from tools.chaos.processes import targets  # noqa: E402
from tools.chaos.runs import play  # noqa: E402
from tools.chaos.trial import Trial, strike_and_compare  # noqa: E402

_LIMIT_S = 900.0
_CLEAN_S = 90.0
"""After a run's end and the return of its cables, until nothing is left: a worker gives its connection for files up after a minute of
silence."""
SILENCE_S = 3.0
"""After which a host of these jobs counts as gone."""
WAYS = ("link", "filter", "power", "pause")


@dataclass(frozen=True, kw_only=True)
class Case:
    job: Job
    on: Mapping[str, str]
    hosts: int
    """With those to spare; more where more are cut off."""
    tls: bool = False
    shared: bool = False
    """Whether the hosts see the run's folder."""


APART = {"generator": "0", "reward": "1", "trainer": "2", "evaluator": "0"}
CASES: Mapping[str, Case] = {
    "exact": Case(job=KILLED["exact"], on=APART, hosts=4),
    "critic": Case(job=KILLED["critic"], on=APART | {"critic": "1"}, hosts=4),
    "partial": Case(job=KILLED["partial"], on=APART, hosts=4),
    "latest": Case(job=KILLED["latest"], on=APART, hosts=4),
    "meshes": Case(job=KILLED["meshes"], on={"generator": "0,1", "trainer": "2,3", "reward": "1"}, hosts=6),
    "tls": Case(job=Job(recipe="tiny", changes=PARTIAL), on=APART, hosts=4, tls=True),
    "shared": Case(job=Job(recipe="tiny", changes=PARTIAL), on=APART, hosts=4, shared=True),
}


@dataclass
class CutHosts:
    """Implements :class:`tools.chaos.processes.Reach` for hosts of namespaces. One of them is always left alone."""

    hosts: Sequence[NamespaceHost]
    rng: random.Random
    ways: Sequence[str]
    gone: dict[str, str] = field(default_factory=dict)
    """Host that the run may count as gone -> by which way."""
    pauses: list[threading.Timer] = field(default_factory=list)
    num_cuts: int = 0

    def there(self, controller: int) -> list[Target]:
        above = [host.process.pid for host in self.hosts]
        found = targets(controller, above)
        if not found or len(self.gone) >= len(self.hosts) - 1:
            return found
        return found + [Target(name=host.name, is_host=True) for host in self.hosts if host.name not in self.gone]

    def strike(self, blow: Blow, victims: Sequence[Target]) -> str:
        told = []
        for target in victims[: len(self.hosts) - 1 - len(self.gone)]:
            host = next(host for host in self.hosts if host.name == target.name)
            way = self.rng.choice(self.ways)
            told.append(self._cut(host, way))
        return f"cut off by {' and '.join(told) or 'nothing'}:"

    def words(self, *, resumed: bool) -> list[str]:
        return []

    def restore(self) -> list[NamespaceHost]:
        """Put every cable back; the hosts that run."""
        for pause in self.pauses:
            pause.join()
        for host in self.hosts:
            match self.gone.get(host.name):
                case "link":
                    host.plug_in()
                case "filter":
                    host.let_packets_pass()
        return [host for host in self.hosts if self.gone.get(host.name) != "power"]

    def _cut(self, host: NamespaceHost, way: str) -> str:
        self.num_cuts += 1
        if way == "pause":
            seconds = self.rng.uniform(0.2, 3.0) * SILENCE_S
            if seconds > 0.5 * SILENCE_S:  # else it is there still, and may be cut off again
                self.gone[host.name] = way
            host.cut_off()
            self.pauses.append(threading.Timer(seconds, host.plug_in))
            self.pauses[-1].start()
            return f"a pause of {seconds:.1f} s"
        self.gone[host.name] = way
        {"link": host.cut_off, "filter": host.drop_packets, "power": host.kill}[way]()
        return way


def clean(hosts: Sequence[NamespaceHost]) -> list[str]:
    """What is left of a run on hosts, once it has had its time to go."""
    until = time.monotonic() + _CLEAN_S
    while True:
        left = [f"{host.name}: {one}" for host in hosts for one in (*left_on(host), *host.held_sockets())]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.2)


def strike(
    case: Case, undisturbed: Path, alone_s: float, folder: Path, args: argparse.Namespace, cuts: int, seed: int
) -> dict[str, Any]:
    """One run, over hosts of its own: what it was, in plain data."""
    key = folder / "key"
    key.write_text(KEY.hex())
    key.chmod(0o600)
    with ExitStack() as stack:
        flags, tls = [], []
        if case.tls:
            files = signed(Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))) / "tls")
            named = {"cert": files.certificate, "key": files.private_key, "ca": files.authority}
            flags = [word for name, path in named.items() for word in (f"--tls-{name}", str(path))]
            tls = [f"--hosts.tls_{name}={json.dumps(str(path))}" for name, path in named.items()]
        if case.shared:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp", prefix="cut-hosts-")))
        hosts = stack.enter_context(namespace_hosts(max(case.hosts, cuts + 1), args.net, flags=flags))
        reach = CutHosts(hosts, random.Random(seed), args.ways)
        over = ["--hosts", ",".join(host.at for host in hosts), "--hosts.key", str(key), *tls]
        over += [word for name, at in case.on.items() for word in ("--on", f"{name}={at}")]
        over += ["--deadlines.host_silence_s", f"{SILENCE_S:g}"]
        trial = Trial(
            recipe=case.job.recipe,
            overrides=(*case.job.words(), *over),
            kills=0,
            cuts=cuts,
            seed=seed,
            limit_s=_LIMIT_S,
        )
        outcome, unlike = strike_and_compare(trial, undisturbed, alone_s, folder / "struck", lambda line: None, reach)
        left = [f"process {pid}" for pid in outcome.left_over] + clean(reach.restore())
        if not case.job.repeats:
            words = ["--replay", str(folder / "struck"), "--run.dir", str(folder / "replayed"), "--hosts", "here"]
            play(words, folder / "replayed.log", limit_s=_LIMIT_S)
            unlike = differences(folder / "replayed", folder / "struck")
        if args.keep and (outcome.failures or left or unlike):
            kept = args.keep / f"seed{seed}.log"
            kept.write_bytes((folder / "struck.log").read_bytes())
    return {
        "struck": [hit.describe() for hit in outcome.struck],
        "cuts": reach.num_cuts,
        "seconds": round(outcome.seconds, 1),
        "failures": outcome.failures,
        "left_over": left,
        "differences": unlike,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=6, help="over all runs (default 6)")
    parser.add_argument("--a-run", type=int, default=3, metavar="N", help="of them in each run, at most (default 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--net", default="10.85.0", help="of the hosts (default 10.85.0)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="append each run to this file, a line of JSON each")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep the output of runs that fail here")
    parser.add_argument(
        "--until", type=float, metavar="S", default=float("inf"), help="begin no run after this many seconds"
    )
    args = parser.parse_args()
    if trouble := why_not("nft", "ss", "openssl"):
        parser.error(trouble)
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    done, bad, number, began = 0, 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cut-hosts-", dir="/tmp") as name:  # a host has a /tmp of its own
        folder, undisturbed, alone_s = Path(name), dict[str, Path](), dict[str, float]()
        for number, case_name in enumerate(itertools.cycle(args.cases)):
            if done >= args.cuts or time.monotonic() - began > args.until:
                break
            case = CASES[case_name]
            if case_name not in undisturbed:
                undisturbed[case_name] = folder / f"undisturbed_{case_name}"
                words = [case.job.recipe, *case.job.words(), "--run.dir", str(undisturbed[case_name])]
                alone_s[case_name] = play(words, folder / f"undisturbed_{case_name}.log", limit_s=_LIMIT_S)
            cuts, seed = min(args.cuts - done, args.a_run), args.seed + number
            with tempfile.TemporaryDirectory(dir=folder) as run:
                result = strike(case, undisturbed[case_name], alone_s[case_name], Path(run), args, cuts, seed)
            done += result["cuts"]
            failed = bool(result["failures"] or result["left_over"] or result["differences"])
            bad += failed
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps({"case": case_name, "seed": seed, **result}) + "\n")
            words_of = "; ".join([*result["failures"], *result["left_over"], *result["differences"]])
            print(
                f"{case_name:8} seed {seed:4}: {'; '.join(result['struck'])}; {result['seconds']:5.1f} s: "
                f"{words_of if failed else 'equal'}",
                flush=True,
            )
    print(
        f"{done} hosts cut off in {number} runs, {bad} of the runs with a difference, a failure or something left over"
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
