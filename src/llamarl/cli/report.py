"""``llamarl report``: runs as one HTML file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from llamarl.errors import ConfigError

__all__ = ["add_arguments", "add_runs", "max_bytes_of", "open_runs", "run"]

_DESCRIPTION = """\
Writes what a run did as one HTML file that needs nothing else: no network, no server. Open it in any browser, keep it,
send it on.

It begins with what looks wrong (a constant reward, a judge that fails, responses cut by length, a policy that runs away
from its data, executors that wait) and what to change. Then: curves, the timeline with every idle gap and what it waited
for, staleness, all responses with filters, groups side by side, each token with its log-probability and version, failures
by cause, where every token went, garbage, the same prompt over versions, the configuration.

From a slow run to its reason: Timeline, click an idle gap, its tick, a group, a response, its tokens."""

_EPILOG = """\
examples:
  llamarl report runs/tiny                        writes runs/tiny/report.html
  llamarl report runs/a runs/b --out compare.html runs side by side, with what differs in their settings
  llamarl report runs                             the newest 16 runs in a folder: writes runs/report.html
  llamarl report runs/long --max-mb 20            carry the text of more responses
  llamarl watch runs/tiny                         the same page while the run goes on

It is made of the files that a run writes anyway: metrics.jsonl, trace.json, rollouts/, warnings.jsonl, job.json,
config.toml. What is missing is said on the page. Numbers cover every response; where the text of all of them would
take more than --max-mb, the page carries whole groups sampled over all ticks, those with failures and garbage first.
More: docs/report.md"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.set_defaults(run=run)
    add_runs(parser)
    parser.add_argument("--out", metavar="FILE.html", help="file to write (default: report.html in the first RUN)")


def add_runs(parser: argparse.ArgumentParser) -> None:
    """What ``report`` and ``watch`` share."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or of runs: its newest 16")
    parser.add_argument(
        "--max-mb", type=float, default=5.0, help="room for the runs' data on the page, in MB (default: %(default)g)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page. Raises ConfigError for what is no run and for a file that cannot be written."""
    from llamarl.observability.writing import replace_file
    from llamarl.report.page import make_page, numbered
    from llamarl.report.run_data import RunReader
    from llamarl.report.run_files import runs_of, title_of

    opened, max_bytes = open_runs(args.runs), max_bytes_of(args)
    out = Path(args.out).expanduser() if args.out else opened[0] / "report.html"
    runs, title = runs_of(opened), title_of(opened)
    blocks = numbered([RunReader(path).blocks(max_bytes // len(runs)) for path in runs])
    page = make_page(title, blocks)
    try:
        replace_file(out, page.encode(), writer=str(os.getpid()))
    except OSError as error:
        raise ConfigError(
            f"--out {out}: cannot be written ({error.strerror}); give a file in a folder that exists"
        ) from error
    data = sum(map(len, blocks.values()))
    print(f"{out}: {len(page) / 1e6:.1f} MB, of which {data / 1e6:.2f} MB are the data of {title}")
    if data > max_bytes:
        print(
            f"llamarl report: the numbers alone take more than --max-mb {args.max_mb:g}; no text is left out for it to fit",
            file=sys.stderr,
        )
    return 0


def open_runs(named: Sequence[str]) -> list[Path]:
    """The folders, of runs or of folders of runs.

    Raises:
        ConfigError: One holds no run, a run is named twice, or there are too many.
    """
    from llamarl.report.run_files import MAX_RUNS, open_run, runs_of

    opened = [open_run(name) for name in named]
    runs = runs_of(opened)
    if len(runs) > MAX_RUNS:
        raise ConfigError(f"{len(runs)} runs: a page holds at most {MAX_RUNS}; leave some out")
    if len({path.resolve() for path in runs}) < len(runs):
        raise ConfigError("a run is named twice: name each once")
    return opened


def max_bytes_of(args: argparse.Namespace) -> int:
    """``--max-mb`` in bytes.

    Raises:
        ConfigError: It is not a positive number.
    """
    if not 0.1 <= args.max_mb <= 1000:
        raise ConfigError(f"--max-mb must be between 0.1 and 1000, got {args.max_mb:g}")
    return int(args.max_mb * 1e6)
