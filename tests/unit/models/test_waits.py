"""Waiting for transfers between pipeline stages, with stand-ins for the transfer and for a GPU's tensor."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llamarl.engine.waves import StageLinks
from llamarl.trainer import pipeline


class _Work:
    def __init__(self) -> None:
        self.limits: list[Any] = []

    def wait(self, *limit: Any) -> None:
        self.limits += limit or [None]


@pytest.mark.parametrize(("is_cuda", "expected"), [(True, None), (False, timedelta(minutes=30))])
def test_the_host_waits_with_a_limit_on_the_cpu_and_not_at_all_on_a_gpu(is_cuda: bool, expected: Any) -> None:
    tensor: Any = SimpleNamespace(is_cuda=is_cuda)
    for_gradients: Any = _Work()
    pipeline._wait({3: (for_gradients, tensor)}, 3)
    for_waves: Any = _Work()
    links = object.__new__(StageLinks)
    links._sent = deque([(for_waves, tensor)])
    links.finish()
    assert for_gradients.limits == for_waves.limits == [expected]


def test_what_is_received_is_waited_for_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    work: Any = _Work()
    monkeypatch.setattr(torch.distributed, "irecv", lambda tensor, **_: work)
    links = object.__new__(StageLinks)
    links._group = None  # type: ignore[assignment]
    links._receive(SimpleNamespace(is_cuda=True), 0)  # type: ignore[arg-type]
    assert work.limits == [None]
