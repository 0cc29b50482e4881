"""When a run is checkpointed and how many checkpoints it keeps."""

from __future__ import annotations

import importlib.util
from typing import Annotated

from pydantic import NonNegativeFloat, NonNegativeInt
from pydantic.dataclasses import dataclass

from llamarl.strict import NO_BITS, STRICT

__all__ = ["CheckpointConfig", "why_no_storage"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """Checkpoints of the whole job, in ``RUN/checkpoints``. The last is taken after the last tick: of it
    ``RUN/model`` is written, and with it the run can be prolonged."""

    every_minutes: Annotated[NonNegativeFloat, NO_BITS] = 10.0
    """Minutes from one checkpoint to the next, by the clock, while the job is up; 0 takes none by
    the clock. A killed run repeats at most what it did in them, and while the last one was still
    being written. When a state is saved changes no bit."""

    every: Annotated[NonNegativeInt, NO_BITS] = 0
    """Trainer ticks from one checkpoint to the next, besides those by the clock; 0 takes none by count."""

    keep: Annotated[NonNegativeInt, NO_BITS] = 2
    """Newest checkpoints kept, 0 for all; older ones are removed once a newer one is proved."""

    max_failed: Annotated[NonNegativeInt, NO_BITS] = 3
    """Checkpoints that may fail one after the other because the disk is full, read-only or
    gone; each is told of, and the run goes on to the next one that is due. One more ends it, since
    what it has done since the last good one is at stake. 0: the first ends it."""

    reshard: Annotated[bool, NO_BITS] = False
    """Let a run go on with another ``trainer.fsdp``, ``tp``, ``pp``, ``cp``, ``ep`` or ``threads`` than
    its checkpoint: to rounding, no longer bit for bit."""

    other_platform: Annotated[bool, NO_BITS] = False
    """Let a run go on where library versions or the kind of processor differ from its checkpoint's:
    to rounding, no longer bit for bit."""

    def is_due(self, tick: int, num_ticks: int) -> bool:
        """Whether the state after ``tick`` (from 0) is saved in a run of ``num_ticks`` ticks, whatever the clock says.

        With ``every = 10`` that is after ticks 9, 19, 29 ..: after 10, 20, 30 updates of the policy.
        """
        return tick == num_ticks - 1 or (self.every > 0 and (tick + 1) % self.every == 0)


_STORAGES = {"file": "", "memory": "", "s3": "s3fs", "gs": "gcsfs"}
"""What a storage's address begins with -> the module that it takes, besides fsspec."""


def why_no_storage(url: str, *, installed: bool = True) -> str:
    """Why ``url`` is no address of a storage, or cannot be used, as the end of a sentence that does
    not repeat it; empty: it can.

    Args:
        installed: Whether a package that is not here is such a reason.
    """
    scheme, colon, rest = url.partition("://")
    if not colon or scheme not in _STORAGES or not rest.strip("/") or (scheme == "file" and not rest.startswith("/")):
        return "must be s3://bucket/folder, gs://bucket/folder or file:///folder"
    if "@" in rest.split("/")[0] or "?" in rest:
        return "must hold no user, password or query: credentials come from the environment or the storage's own files"
    module = _STORAGES[scheme]
    if installed and module and importlib.util.find_spec(module) is None:
        return f"needs the package {module}: pip install " + ("'llamarl[storage]'" if module == "s3fs" else module)
    return ""
