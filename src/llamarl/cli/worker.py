"""``llamarl worker``: lend this host to jobs whose controllers run elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Starts processes here for controllers that hold its key: run it on each host, then `llamarl train RECIPE --hosts a,b,c`.

  llamarl worker                             on the address that leads out of this host, port 22222
  llamarl worker --bind 10.0.0.2 --port-range 20000-20100
  llamarl worker --key FILE                  the key of your own; on first use one is made, and you are told how to copy it

Whoever holds the key runs code here as you. It is proved, never sent; what travels is not encrypted without --tls-cert,
--tls-key and --tls-ca. When a controller ends, in whatever way, every process of its job here is killed."""


def add_parser(verbs: Any, full: bool = True) -> None:
    parser = verbs.add_parser(
        "worker",
        help="lend this host to jobs that run elsewhere",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--bind",
        metavar="ADDRESS",
        default="",
        help="listen on this address of this host alone (default: the one that leads out of it); 0.0.0.0 listens on all",
    )
    parser.add_argument("--port", type=int, help="listen on this port (default 22222; with --key -, any that is free)")
    parser.add_argument(
        "--port-range", metavar="A-B", default="", help="ports for the processes of a job (default: any that is free)"
    )
    parser.add_argument(
        "--key",
        metavar="FILE",
        default="",
        help="file with the key, 64 hexadecimal digits that only you may read (default ~/.config/llamarl/worker.key, made on first "
        "use); -: the first line of standard input, with whose end the worker then ends",
    )
    parser.add_argument("--tls-cert", metavar="PEM", type=Path, help="this host's certificate: then all travels by TLS")
    parser.add_argument("--tls-key", metavar="PEM", type=Path, help="its private key")
    parser.add_argument(
        "--tls-ca", metavar="PEM", type=Path, help="the authority that has signed every peer's certificate"
    )
    parser.add_argument("--space", default="", help=argparse.SUPPRESS)  # tests: two workers of one machine as two hosts
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from llamarl.runtime.hosts.worker_program import lend_this_host, worker_settings

    return lend_this_host(
        worker_settings(
            bind=args.bind,
            port=args.port,
            port_range=args.port_range,
            key=args.key,
            tls=(args.tls_cert, args.tls_key, args.tls_ca),
            space=args.space,
        )
    )
