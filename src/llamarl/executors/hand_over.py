"""A weight version into an engine, the cheapest way that both ends allow.

    same host, whole model, the engine's own dtype ─▶ the engine computes with the source's slot itself: nothing is copied
    else                                           ─▶ the slices are pulled into the engine's parameters

In place, the slot belongs to this version until the sink's tick ends. ``Served.check`` proves at the end of the tick that
it did, so a token is never sampled from bytes that were being overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.engine.base import AdoptsWeights, Engine
from llamarl.weight_sync.layout import Layout
from llamarl.weight_sync.sink import WeightVersion

__all__ = ["Served", "serve"]


@dataclass(frozen=True)
class Served:
    """A version that an engine has been given."""

    version: int
    in_place: WeightVersion | None
    """Set if the engine reads the source's memory."""

    def check(self) -> None:
        """Prove that what the engine has computed with since is this version; asked when the tick's work is done.

        Raises:
            WeightSyncError: The source has written into the memory that was served from.
        """
        if self.in_place is not None:
            self.in_place.check_current()


def serve(weights: WeightVersion, engine: Engine, layout: Layout | None = None) -> Served:
    """Give ``engine`` the version ``weights``, proved byte by byte.

    Args:
        layout: What the sink ranks hold; None: each holds every parameter whole.

    Raises:
        WeightSyncError, DeadlineExceeded: As ``WeightVersion.load_into``; the engine must not be used then.
    """
    in_place = (
        layout is None
        and isinstance(engine, AdoptsWeights)
        and weights.can_map
        and engine.can_adopt({name: spec.dtype for name, spec in weights.parameters.items()})
    )
    if in_place:
        assert isinstance(engine, AdoptsWeights)
        engine.adopt(weights.map_tensors())
    else:
        weights.load_into(engine.parameters_for_sync(), layout)
    engine.weights_updated(weights.version)
    return Served(weights.version, weights if in_place else None)
