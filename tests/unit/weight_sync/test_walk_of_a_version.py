"""A version of the weights passes the files that docs/walks.md names, and no other."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch

import llamarl
from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.executors.version_loader import VersionLoader
from llamarl.settings.trainer import LoraConfig
from llamarl.weight_sync.source import whole_on_each

ROOT = Path(llamarl.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "walks.md"
ENDS = {"executors/trainer.py", "runtime/worker.py"}
"""Who makes the payload, and who sends and receives for every executor: not called here."""
BELOW = ("transports/", "running_time.py", "weight_sync/layout.py")
SPEC = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator", delay=1, capacity=2)


class Engine:
    """Holds the weights that it serves."""

    def __init__(self) -> None:
        self.tensors, self.version = {"w": torch.zeros(600, 1024)}, 0

    def parameters_for_sync(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def weights_updated(self, version: int) -> None:
        self.version = version


@contextmanager
def followed(walked: set[str]) -> Iterator[None]:
    def note(frame: FrameType, event: str, argument: Any) -> None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        if event == "call" and code.co_name != "<module>" and path.is_relative_to(ROOT):
            walked.add(path.relative_to(ROOT).as_posix())

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(before)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_version_passes_the_files_that_the_page_names(in_background: bool) -> None:
    counts = {"rank": 0, "num_source_ranks": 1, "num_sink_ranks": 1}
    sender, receiver, engine = WeightsSender(SPEC, **counts), WeightsReceiver(SPEC, **counts), Engine()
    loader = VersionLoader(cast(Any, engine), LoraConfig(), model_path="")
    layout, walked = whole_on_each(engine.tensors, 1), set[str]()

    def hand_over(version: int) -> None:
        tensors = {"w": torch.full((600, 1024), float(version))}
        released = threading.Event() if in_background else None
        payload = WeightsPayload(version=version, tensors=tensors, layout=layout, released=released)
        weights = receiver.receive((sender.send(version, payload),), 30.0)
        assert weights is not None
        loader.load(weights)
        assert engine.version == version and torch.equal(engine.tensors["w"], tensors["w"])

    hand_over(0)
    hand_over(1)  # both slots are laid out now
    with followed(walked):
        hand_over(2)
    receiver.close()
    sender.close()
    section = PAGE.read_text(encoding="utf-8").partition("## A version of the weights")[2].partition("##")[0]
    named = re.findall(r"`(\S+\.py)`", section.partition("Below them")[0])
    assert len(named) == len(set(named)) == 8
    assert {path for path in walked if not path.startswith(BELOW)} == set(named) - ENDS
