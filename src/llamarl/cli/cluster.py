"""``llamarl cluster up a,b,c`` and ``down``: a Ray cluster on machines that ssh reaches, started
and ended by Ray itself."""

from __future__ import annotations

import argparse
import getpass
import ipaddress
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["HEALTH", "add_arguments", "description_of_cluster", "run"]

_DESCRIPTION = """\
Starts a Ray cluster on machines of your own, by ssh, and ends it. Ray does the work: this writes its description
(cluster.yaml, which can be kept and changed), calls `ray up`, and `ray stop` on each.

  llamarl cluster up a,b,c                                      a is the head; a token is made and asked for
  ssh a RAY_AUTH_MODE=token llamarl train tiny --cluster auto   jobs start on a node of it
  llamarl cluster down

The machines need ssh without a password, from here and from a to the others, and `pip install 'llamarl[cluster]'` at the same
place as here (or --bin). On Slurm, Kubernetes and clouds their own ways are shorter: docs/hosts.md."""

HEALTH: Mapping[str, str] = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "800",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""For the head: a node that ends is known to be gone after about 2.4 s, one that is cut off after about 8.4 s."""

_TOKEN = Path("~/.ray/auth_token")
_END_S = 120.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_-]*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("hosts", nargs="?", metavar="a,b,c", help="with up: names or addresses, the head first")
    parser.add_argument(
        "--file", default="cluster.yaml", help="Ray's description of the cluster (default: %(default)s)"
    )
    parser.add_argument("--user", default="", help="of ssh (default: yours)")
    parser.add_argument("--key", default="", metavar="FILE", help="private key of ssh (default: what ssh finds itself)")
    parser.add_argument(
        "--bin", default="", metavar="DIR", help="where ray and llamarl lie on the hosts (default: as here)"
    )
    parser.set_defaults(run=run)


def description_of_cluster(hosts: Sequence[str], *, user: str, key: str = "", bin_dir: str) -> dict[str, Any]:
    """Describe machines in the words of Ray's ``local`` provider.

    Args:
        hosts: The head first.
        bin_dir: Where ``ray`` lies on each of them.
    """
    head, *workers = hosts
    health = " ".join(f"{name}={value}" for name, value in HEALTH.items())
    before, name = _name_of_head(head)
    ray = f"PATH={bin_dir}:$PATH RAY_AUTH_MODE=token {bin_dir}/ray"  # jobs that are submitted find llamarl by it
    return {
        "cluster_name": "llamarl",
        "provider": {"type": "local", "head_ip": head, "worker_ips": workers},
        "max_workers": len(workers),
        "auth": {"ssh_user": user} | ({"ssh_private_key": key} if key else {}),
        "file_mounts": {str(_TOKEN): str(_TOKEN)},
        "head_start_ray_commands": [
            f"{bin_dir}/ray stop",
            # the second generation of Ray's autoscaler loses machines of this provider (2.60)
            f"{before}{health} RAY_enable_autoscaler_v2=0 {ray} start --head {name} --port 6379 "
            "--disable-usage-stats --autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": [
            f"{bin_dir}/ray stop",
            f"{ray} start --address={head}:6379 --disable-usage-stats",  # $RAY_HEAD_IP is what the head calls itself
        ],
    }


def _name_of_head(head: str) -> tuple[str, str]:
    """A line of shell on the head, and flags of its ``ray start`` after it: what it is called and where it is reached.

    Ray takes a name for an address as it is; its own machine may call that 127.0.1.1 (Debian), where ranks would then
    listen. So an address that it has for it elsewhere counts, else the one that Ray finds.
    """
    try:
        return "", f"--node-ip-address={ipaddress.ip_address(head)}"
    except ValueError:
        found = f"own=$(getent ahostsv4 {head} | awk '/^127[.]/ {{next}} {{print $1; exit}}'); "
        return found, f"--node-name={head} ${{own:+--node-ip-address=$own}}"


def run(args: argparse.Namespace) -> int:
    import yaml

    from llamarl.errors import ConfigError

    own = Path(sys.executable).parent
    if not (own / "ray").exists():
        raise ConfigError("a cluster needs Ray, here and on its machines: pip install 'llamarl[cluster]'")
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    file = Path(args.file)
    if args.action == "down":
        if not file.exists():
            raise ConfigError(f"no file {file}: llamarl cluster up wrote it where it was called; name it by --file")
        try:
            return _end(yaml.safe_load(file.read_text(encoding="utf-8")))
        except (yaml.YAMLError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{file} describes no machines that ssh reaches, as llamarl cluster up does: {error!r}"
            ) from error
    hosts = [name.strip() for name in (args.hosts or "").split(",") if name.strip()]
    if not hosts:
        raise ConfigError("which machines? llamarl cluster up a,b,c, the head first")
    if wrong := [name for name in hosts if not _NAME.fullmatch(name)]:
        raise ConfigError(f"{wrong[0]!r} is no name or address of a machine")
    if twice := [name for name in hosts if hosts.count(name) > 1]:
        raise ConfigError(f"{twice[0]} is named twice")
    for name in hosts:
        try:
            socket.getaddrinfo(name, 22)
        except OSError as error:
            raise ConfigError(f"{name} is not known here: {error.strerror}") from error
    token = _TOKEN.expanduser()
    if not token.exists():
        make = [str(own / "ray"), "get-auth-token", "--generate"]
        subprocess.run(make, env=environment, check=True, stdout=subprocess.DEVNULL, umask=0o077)
    token.chmod(0o600)  # one that Ray made by itself can be read by every user of the machine
    bin_dir = args.bin or str(own)
    wanted = description_of_cluster(hosts, user=args.user or getpass.getuser(), key=args.key, bin_dir=bin_dir)
    if file.exists() and yaml.safe_load(file.read_text(encoding="utf-8")) != wanted:
        raise ConfigError(
            f"{file} is there already and describes other machines, or was changed: start these by ray up {file}, "
            "or have another one written by --file"
        )
    file.write_text(json.dumps(wanted, indent=2) + "\n")  # JSON is YAML
    done = subprocess.run([str(own / "ray"), "up", "--yes", "--no-config-cache", str(file)], env=environment)
    if done.returncode == 0:
        print(f"then: ssh {hosts[0]} RAY_AUTH_MODE=token {bin_dir}/llamarl train RECIPE --cluster auto")
        print(f"and:  llamarl cluster down --file {file}")
    return done.returncode


def _end(cluster: Mapping[str, Any]) -> int:
    """Stop Ray on every machine of a description, all at once. ``ray down`` stops the head of such a cluster alone."""
    provider, auth = cluster["provider"], cluster["auth"]
    key = ["-i", auth["ssh_private_key"]] if "ssh_private_key" in auth else []
    ending = {
        host: subprocess.Popen(
            ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *key, f"{auth['ssh_user']}@{host}"]
            + [cluster["head_start_ray_commands"][0]],
            stdin=subprocess.DEVNULL,
        )
        for host in (*provider["worker_ips"], provider["head_ip"])
    }
    until = time.monotonic() + _END_S
    while any(process.poll() is None for process in ending.values()) and time.monotonic() < until:
        time.sleep(0.1)
    failed = [host for host, process in ending.items() if process.poll() != 0]
    for process in ending.values():
        process.kill()
    if failed:
        print(f"Ray may still run on {', '.join(failed)}: ssh said why", file=sys.stderr)
    return bool(failed)
