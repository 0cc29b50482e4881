"""Load a weight version into an engine: map it if both ends share memory, else copy; or merge adapters.

    same host, whole model, the engine's own dtype, ─▶ the engine computes with the source's slot itself: nothing is copied
    in one piece at the source
    else                                            ─▶ the slices are pulled into the engine's parameters

A trainer that cuts its tensors by rows (fsdp >= 2) holds no whole model in one piece. What would
have to be put together anew for each version goes into the engine's own parameters, so that a
hand-over never holds the weights twice.

In place, the slot belongs to this version until the sink's tick ends. ``Served.check`` proves at
the end of the tick that it did, so a token is never sampled from bytes that were being overwritten.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from llamarl.engine.base import AdoptsWeights, Engine
from llamarl.models.adapters import AdapterReceiver, merge_adapter, read_adapter_folder
from llamarl.settings.trainer import LoraConfig
from llamarl.weight_sync.layout import AnyLayout
from llamarl.weight_sync.sink import WeightVersion

__all__ = ["Served", "VersionLoader", "load_adapter", "serve"]


@dataclass(frozen=True)
class Served:
    """A version that an engine has been given."""

    version: int
    in_place: WeightVersion | None
    """Set if the engine reads the source's memory."""
    arrived_s: float = 0.0
    """``time.monotonic`` when its bytes were there and proved; what follows is the engine's own preparation of them."""

    def check(self) -> None:
        """Prove that what the engine has computed with since is this version; asked when the tick's work is done.

        Raises:
            WeightSyncError: The source has written into the memory that was served from.
        """
        if self.in_place is not None:
            self.in_place.check_current()


class VersionLoader:
    """Made right after the engine, while that holds version 0.

    Args:
        layout: What the sink ranks hold of what is handed over, whole weights or adapters; None: each holds all of it.
        rank: Of this engine among them.
        model_path: Folder of version 0.
    """

    def __init__(
        self, engine: Engine, lora: LoraConfig, layout: AnyLayout | None = None, *, rank: int = 0, model_path: str
    ) -> None:
        self._engine = engine
        self._layout = layout
        self._adapters: AdapterReceiver | None = None
        if lora.rank and lora.hand_over == "adapter":
            self._adapters = AdapterReceiver(
                engine.parameters_for_sync(),
                rank=lora.rank,
                alpha=lora.alpha,
                targets=lora.targets,
                model_path=model_path,
                boxes=None if layout is None else {piece.parameter: piece.box for piece in layout.pieces_of(rank)},
            )

    def load(self, weights: WeightVersion) -> Served:
        """Pull, prove and serve a version."""
        if self._adapters is None:
            return serve(weights, self._engine, self._layout)
        weights.load_into(self._adapters.tensors, self._layout)
        arrived_s = time.monotonic()
        self._adapters.merge()
        self._engine.weights_updated(weights.version)
        return Served(weights.version, None, arrived_s)


def load_adapter(engine: Engine, folder: Path, *, model_path: str) -> None:
    """Merge an adapter folder into an engine that holds the model in ``model_path``.

    Raises:
        ModelError: The adapter is not a plain LoRA adapter, or not of this model.
    """
    merge_adapter(read_adapter_folder(folder), engine.parameters_for_sync(), model_path=model_path)
    engine.weights_updated(engine.policy_version)


def serve(weights: WeightVersion, engine: Engine, layout: AnyLayout | None = None) -> Served:
    """Give ``engine`` the version ``weights``, proved byte by byte.

    Args:
        layout: What the sink ranks hold; None: each holds every parameter whole.

    Raises:
        WeightSyncError, DeadlineExceeded: As ``WeightVersion.load_into``, within the channel's pull
            deadline; the engine must not be used then.
    """
    views = None
    if layout is None and isinstance(engine, AdoptsWeights):
        if engine.can_adopt({name: spec.dtype for name, spec in weights.parameters.items()}):
            views = weights.map_tensors()
        if views is not None:
            engine.adopt(views)
    if views is None:
        weights.load_into(engine.parameters_for_sync(), layout)
    arrived_s = time.monotonic()
    engine.weights_updated(weights.version)
    return Served(weights.version, weights if views is not None else None, arrived_s)
