"""``trained/tick_000012.trainer.0.npz``: what the trainer made of each token of a batch, the first time that it saw it.

Rollouts are written before the trainer sees them; this is the other half: the policy's own
log-probability before the tick's updates reach the token, whether the loss's bound acted on it, and
the response's advantage. One file an executor's rank and tick, arrays only (nothing is unpickled),
there whole or not at all.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llamarl.errors import DataError, FileError
from llamarl.observability.rollouts import tick_files
from llamarl.observability.writing import Patience
from llamarl.reading import read_bytes

__all__ = ["TRAINED_FOLDER", "TrainedResponse", "read_trained", "read_trained_files", "trained_files", "write_trained"]

TRAINED_FOLDER = "trained"

_MAX_BYTES = 256 << 20
_ARRAYS = ("prompt_index", "sample_index", "num_tokens", "advantage", "policy_logprobs", "clipped")


@dataclass(frozen=True, kw_only=True)
class TrainedResponse:
    """One response as the trainer saw it. T is the number of its trained tokens: those whose loss
    mask is set, in order."""

    prompt_index: int
    sample_index: int
    advantage: float
    """Of the response; the mean over its tokens where they differ."""
    policy_logprobs: npt.NDArray[np.float32]
    """[T] nats, of the weights that the update of the token began from; [0] where the response was not computed
    (``trainer.skip_zero_advantage``)."""
    clipped: npt.NDArray[np.bool_]
    """[T] whether the loss's own bound acted (``ratio/clipped_fraction``)."""


def write_trained(
    run_dir: Path,
    tick: int,
    executor: str,
    rank: int,
    responses: list[TrainedResponse],
    patience: Patience | None = None,
) -> Path:
    """Write what one rank saw in a tick; returns the file.

    Args:
        patience: With a disk that refuses it; None: none.

    Raises:
        LlamaRLError: The disk is full or not writable.
    """
    path = run_dir / TRAINED_FOLDER / f"tick_{tick:06d}.{executor}.{rank}.npz"
    arrays = {
        "prompt_index": np.array([r.prompt_index for r in responses], np.int64),
        "sample_index": np.array([r.sample_index for r in responses], np.int64),
        "num_tokens": np.array([len(r.policy_logprobs) for r in responses], np.int64),
        "advantage": np.array([r.advantage for r in responses], np.float64),
        "policy_logprobs": np.concatenate([np.zeros(0, np.float32), *(r.policy_logprobs for r in responses)]),
        "clipped": np.concatenate([np.zeros(0, np.bool_), *(r.clipped for r in responses)]),
    }
    data = io.BytesIO()
    np.savez(data, allow_pickle=False, **arrays)
    (patience or Patience()).replace(path, data.getvalue())
    return path


def read_trained(run_dir: Path, tick: int) -> list[TrainedResponse]:
    """What all ranks saw in a tick; none where nothing was written.

    Raises:
        DataError: A file is torn or of another kind; the message names it.
    """
    return read_trained_files(trained_files(run_dir).get(tick, ()))


def read_trained_files(paths: Iterable[Path]) -> list[TrainedResponse]:
    """What the ranks saw that wrote these files. Raises as ``read_trained``."""
    found = []
    for path in paths:
        try:
            data = read_bytes(path)
            if sum(member.file_size for member in zipfile.ZipFile(io.BytesIO(data)).infolist()) > _MAX_BYTES:
                raise ValueError(f"it unpacks to more than {_MAX_BYTES >> 20} MiB")
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                arrays = {name: file[name] for name in _ARRAYS}
            ends = np.cumsum(arrays["num_tokens"])
            logprobs, clipped = (np.split(arrays[name], ends[:-1]) for name in ("policy_logprobs", "clipped"))
            for i in range(len(ends)):
                found.append(
                    TrainedResponse(
                        prompt_index=int(arrays["prompt_index"][i]),
                        sample_index=int(arrays["sample_index"][i]),
                        advantage=float(arrays["advantage"][i]),
                        policy_logprobs=logprobs[i].astype(np.float32),
                        clipped=clipped[i].astype(np.bool_),
                    )
                )
        except (FileError, ValueError, KeyError, IndexError, EOFError, OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} is not what a trainer wrote: {error}") from error
    return found


def trained_files(run_dir: Path) -> dict[int, list[Path]]:
    """Tick -> its files, one a rank that wrote any."""
    found: dict[int, list[Path]] = {}
    for tick, path in tick_files(run_dir / TRAINED_FOLDER):
        found.setdefault(tick, []).append(path)
    return found
