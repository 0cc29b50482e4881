"""What of two runs differs, byte for byte: weights, rollouts, metrics without times."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from llamarl.observability.metrics import METRICS_FILE, read_metrics, strip_timing
from llamarl.roles import ROLES

__all__ = ["differences"]

_PRODUCTS = tuple(product.folder for role in ROLES.values() for product in role.products)
_ROLLOUTS = "rollouts"


def differences(one: Path, other: Path) -> list[str]:
    """Names of what is not equal in two runs' folders, such as ``model/model.safetensors``; empty: the same bits.

    A file that only one of them has is a difference, and so is a run that has neither weights nor metrics. Times of metrics, and what
    restarts have cost (``recovery/*``), are the clock's, and left out.
    """
    names = sorted({name for run in (one, other) for name in _files(run)})
    found = [name for name in names if not _equal(one / name, other / name)]
    if not any(name.endswith(".safetensors") for name in names):
        found.append("weights: there are none")
    if not all((run / METRICS_FILE).is_file() for run in (one, other)):
        return [*found, f"{METRICS_FILE}: not there"]
    rows = [[strip_timing(row) for row in read_metrics(run)] for run in (one, other)]
    if rows[0] != rows[1]:
        found.append(f"{METRICS_FILE}: {_first_difference(rows[0], rows[1])}")
    return found


def _files(run: Path) -> list[str]:
    folders = [run / name for name in (*_PRODUCTS, _ROLLOUTS)]
    return [str(path.relative_to(run)) for folder in folders for path in folder.rglob("*") if path.is_file()]


def _equal(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


def _first_difference(ones: Sequence[Mapping[str, object]], others: Sequence[Mapping[str, object]]) -> str:
    for number, (one, other) in enumerate(zip(ones, others, strict=False)):
        keys = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
        if keys:
            return f"row {number}, {', '.join(keys[:3])}{' and more' if len(keys) > 3 else ''}"
    return f"{len(ones)} rows and {len(others)}"
