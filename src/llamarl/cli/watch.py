"""``llamarl watch``: the report's page, served to this machine while a run goes on."""

from __future__ import annotations

import argparse

from llamarl.cli.report import add_runs, max_bytes_of, open_runs

__all__ = ["add_arguments", "run"]

_DESCRIPTION = """\
Serves the page of llamarl report at 127.0.0.1, and keeps it up to date while the run goes on. Only this machine reaches it, and only
who has the address that it prints: a random token in it keeps out other users. To look from another machine, forward the port:
ssh -L 8765:127.0.0.1:8765 HOST; or, on a network whose users may read along (there is no TLS), --bind 0.0.0.0. The run itself is
only read, never touched.

  llamarl watch runs/tiny                  prints the address to open; Ctrl-C ends it
  llamarl watch runs                       the runs in a folder, also those that begin later
  llamarl watch runs/a runs/b --port 8765  runs side by side, at a port that stays

The page looks for news every few seconds, and keeps the view, the scroll position and what you are typing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.set_defaults(run=run)
    add_runs(parser)
    parser.add_argument("--port", type=int, default=0, help="to listen on (default: a free one)")
    parser.add_argument(
        "--bind", metavar="ADDRESS", default="127.0.0.1", help="of this machine; 0.0.0.0: all (default 127.0.0.1)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted. Raises ConfigError for what is no run and for a port that is taken."""
    from llamarl.errors import ConfigError
    from llamarl.report.page import charting_script
    from llamarl.report.server import WatchedRuns, make_server

    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {args.port}")
    charting_script()  # fails now, not at the first request
    runs = WatchedRuns(open_runs(args.runs), max_bytes_of(args))
    runs.blocks()
    with make_server(runs, args.port, args.bind) as server:
        print(f"{runs.title}: {server.url}  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
