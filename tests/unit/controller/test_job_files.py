"""What a host's ranks are told of files: where these lie on that host."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from far_files import far_host

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import load_config
from llamarl.controller.job_files import JobFiles
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.worker import WorkerPlan


def test_options_of_an_own_executor_and_an_own_transport_name_what_the_host_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "carrier.py", "judge/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "run").mkdir()
    own = 'factory = "mine.py:Judge", reads = ["scored"], writes = ["weighed"]'
    words = ["--executors.mine", f'{{ {own}, options = {{ path = "judge", weight = 0.5 }} }}']
    words += ["--executors.trainer.reads", '["weighed"]', "--schedule.transport", "carrier.py:Carrier"]
    config = load_config(None, words)
    spec = ExecutorSpec(name="mine", factory="mine.py:Judge", config=config, options=config.executors["mine"].options)
    edge = ChannelSpec(
        name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="mine", transport="carrier.py:Carrier"
    )
    with far_host(tmp_path / "b") as far:

        def ask(part: str, *words: Any) -> Future[Any]:
            return far._ask(*words)

        def call(number: int, within_s: float, work: Callable[..., Any], *words: Any) -> Any:
            return work(*words)

        cluster: Any = SimpleNamespace(nodes=[SimpleNamespace(name="b")], agent=lambda number: ask, call=call)
        files = JobFiles(tmp_path / "run", "id", cluster, {"mine": (0,)}, own_folders=False)
        files.send_content([spec])
        plan = WorkerPlan(
            spec=spec,
            rank=0,
            channels=(edge,),
            num_ranks={},
            run_dir=tmp_path / "run",
            seed=0,
            first_tick=0,
            load_from=None,
        )
        told = files.adapt(plan, 0)
    assert told.spec.factory == f"{tmp_path}/mine.py:Judge"
    assert told.spec.options == {"path": f"{tmp_path}/judge", "weight": 0.5}
    assert told.channels[0].transport == f"{tmp_path}/carrier.py:Carrier"
