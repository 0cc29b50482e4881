"""How an executor that samples takes a new version into its engine: whole weights, or adapters that it merges itself."""

from __future__ import annotations

import time

from llamarl.engine.base import Engine
from llamarl.executors.hand_over import Served, begin_version, serve
from llamarl.models.adapters import AdapterReceiver
from llamarl.trainer.config import LoraConfig
from llamarl.weight_sync.layout import Layout
from llamarl.weight_sync.sink import WeightVersion

__all__ = ["VersionLoader"]


class VersionLoader:
    """Made right after the engine, while that holds version 0.

    Args:
        layout: What the sink ranks hold of whole weights; None: each holds every parameter whole.
        keep_kv: Sequences go on over the KV cache of the version before; needs an engine that ``KeepsKV``.
    """

    def __init__(
        self, engine: Engine, lora: LoraConfig, layout: Layout | None = None, *, keep_kv: bool = False
    ) -> None:
        self._engine = engine
        self._layout = layout
        self._keep_kv = keep_kv
        self._adapters: AdapterReceiver | None = None
        if lora.rank and lora.hand_over == "adapter":
            self._adapters = AdapterReceiver(
                engine.parameters_for_sync(), rank=lora.rank, alpha=lora.alpha, targets=lora.targets
            )

    def load(self, weights: WeightVersion) -> Served:
        """Pull, prove and serve a version."""
        if self._adapters is None:
            return serve(weights, self._engine, self._layout, keep_kv=self._keep_kv)
        weights.load_into(self._adapters.tensors)
        arrived_s = time.monotonic()
        self._adapters.merge()
        begin_version(self._engine, weights.version, keep_kv=self._keep_kv)
        return Served(weights.version, None, arrived_s)
