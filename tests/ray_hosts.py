"""A Ray cluster on hosts that share nothing but the kernel (``namespace_hosts``): the first is its head, a token is asked for."""

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from namespace_hosts import NamespaceHost, bare_hosts

__all__ = ["HEALTH", "RayHosts", "ray_hosts", "why_no_ray"]

HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "800",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""So that a node that is gone is known after 3 s, and one that is cut off after 9 s."""
_PORT = 6379
_START_S = 90.0


@dataclass
class RayHosts:
    """A cluster; node number ``i`` is called ``n<i>``."""

    hosts: list[NamespaceHost]
    token: str

    @property
    def address(self) -> str:
        return f"{self.hosts[0].address}:{_PORT}"

    def words(self, *command: str, host: int = 0, token: str | None = None) -> list[str]:
        """A command on one of the nodes.

        Args:
            token: Instead of the cluster's; empty: none.
        """
        token = self.token if token is None else token
        given = [f"RAY_AUTH_TOKEN={token}"] if token else ["-u", "RAY_AUTH_TOKEN"]
        env = ["env", *given, "RAY_AUTH_MODE=token", "PYTHONPATH=", f"HOME=/tmp/home-{host}"]
        return self.hosts[host].words(*env, *command)

    def llamarl(self, *words: str, host: int = 0, token: str | None = None) -> list[str]:
        """A command of ours on one of the nodes."""
        return self.words(sys.executable, "-m", "llamarl.cli.main", *words, host=host, token=token)

    def alive(self) -> int:
        """Nodes that the cluster counts as such."""
        status = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", self.address]
        done = subprocess.run(self.words(*status), capture_output=True, text=True, timeout=30.0)
        return done.stdout.partition("Pending:")[0].count("node_")


@contextmanager
def ray_hosts(
    count: int,
    net: str = "10.85.0",
    *,
    cores: int = 2,
    environment: dict[str, str] | None = None,
    before: Mapping[int, str] | None = None,
) -> Iterator[RayHosts]:
    """A cluster of ``count`` nodes with ``cores`` each; nothing of it is left afterwards.

    Args:
        before: What the shell of a node does before its Ray starts, by its number.
    """
    token = secrets.token_hex(32)
    given = {
        **HEALTH,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        **(environment or {}),
    }

    def program(name: str, address: str) -> Sequence[str]:
        number = int(address.rpartition(".")[2]) - 1
        role = (
            ["--head", f"--port={_PORT}", "--include-dashboard=false"] if not number else [f"--address={net}.1:{_PORT}"]
        )
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *role]
        start += [f"--node-ip-address={address}", f"--num-cpus={cores}", f"--node-name=n{number}", "--num-gpus=0"]
        start += ["--object-store-memory=200000000"]
        ask = f'until "$0" -m ray.scripts.scripts status --address {net}.1:{_PORT} > /dev/null 2>&1; do sleep 0.5; done'
        wait = f"{(before or {}).get(number, ':')}; {ask if number else ':'}"
        return [
            "env",
            *(f"{key}={value}" for key, value in given.items()),
            "bash",
            "-c",
            f'{wait}; exec "$0" "$@"',
            *start,
        ]

    with bare_hosts(count, program, net, output=subprocess.DEVNULL) as hosts:
        cluster = RayHosts(hosts, token)
        until = time.monotonic() + _START_S
        while cluster.alive() < count:
            for host in hosts:
                assert host.process.poll() is None, f"{host.name}: its Ray ended"
            assert time.monotonic() < until, f"{cluster.alive()} of {count} nodes after {_START_S:g} s"
            time.sleep(0.5)
        yield cluster


def why_no_ray() -> str:
    """Why there can be no such cluster here; empty if there can."""
    from importlib.util import find_spec

    return "" if find_spec("ray") else "needs Ray (pip install 'llamarl[cluster]')"
