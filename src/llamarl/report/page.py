"""The page itself: one HTML file that holds its style, its scripts, the charting script and the data of the runs.

It loads nothing: its content security policy lets it run the scripts that it was made with, known
by their digests, and reach no address. Text of a run is in the data alone, in blocks of JSON, gzip
and base64, which has no character that can end a script element or begin one; it becomes text
nodes, never markup.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from llamarl.errors import ConfigError

__all__ = ["charting_script", "encode_block", "make_page", "numbered"]

_SCRIPTS = (
    "registry.js",
    "dom.js",
    "data.js",
    "charts.js",
    "views/runs.js",
    "views/summary.js",
    "views/timeline.js",
    "views/curves.js",
    "views/rollouts.js",
    "views/response.js",
    "views/failures.js",
    "views/garbage.js",
    "views/prompts.js",
    "views/staleness.js",
    "views/ledger.js",
    "views/config.js",
    "app.js",
)


@cache
def charting_script() -> str:
    """Plotly's script, as its package brings it.

    Raises:
        ConfigError: Plotly is not installed.
    """
    try:
        return (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ConfigError("charts need Plotly: pip install 'plotly>=6'") from error


@cache
def _packed_charts() -> str:
    return _pack(charting_script())


def make_page(title: str, blocks: Mapping[str, str], *, watch: bool = False) -> str:
    """The whole file.

    Args:
        title: Any text.
        blocks: Name -> encoded block, as ``run/name`` with the run's number first.
        watch: The page asks the server that it came from for blocks and charts; then it holds none.
    """
    assets = resources.files("llamarl.report") / "assets"
    script = "\n".join((assets / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'(() => {{\n"use strict";\n{script}\n}})();'
    charts = charting_script()
    reached = "'self'" if watch else "'none'"
    held = {} if watch else {**blocks, "charts": _packed_charts()}
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest(script)} {_digest(charts)}",
            "style-src 'unsafe-inline'",
            "img-src data:",
            f"connect-src {reached}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    parts = {
        "watch": "1" if watch else "0",
        "policy": html.escape(policy),
        "title": html.escape(title),
        "style": (assets / "style.css").read_text(encoding="utf-8"),
        "blocks": "\n".join(_element(name, text) for name, text in held.items()),
        "script": script,
    }
    return _fill((assets / "page.html").read_text(encoding="utf-8"), parts)


def _fill(template: str, parts: Mapping[str, str]) -> str:
    """The template with each ``{{name}}`` replaced, once: what is put in is not looked at again."""
    return re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], template)


def _element(name: str, text: str) -> str:
    return f'<script type="application/octet-stream" id="block:{html.escape(name)}">{text}</script>'


def _pack(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode("ascii")


def _digest(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return f"'sha256-{digest}'"


def numbered(runs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Blocks of several runs under one roof: ``run`` of the second becomes ``1/run``."""
    return {f"{number}/{name}": text for number, blocks in enumerate(runs) for name, text in blocks.items()}


def encode_block(value: Any) -> str:
    """ASCII text of plain values, which the page opens when it is looked at. Numbers that are not
    finite, which JSON does not have, become null."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _pack(text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
