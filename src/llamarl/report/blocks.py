"""Plain values as text that a page carries and opens when it is looked at: JSON, gzip, base64.

Nothing that a user or a model wrote can end a script element or begin one: base64 has no such character.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from typing import Any

__all__ = ["decode_block", "encode_block"]


def encode_block(value: Any) -> str:
    """ASCII text of plain values. Numbers that are not finite, which JSON does not have, become null."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode("ascii")


def decode_block(text: str) -> Any:
    """The values again."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
