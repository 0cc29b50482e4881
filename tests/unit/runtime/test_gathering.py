"""Hosts of a job are asked, waited for and left out; they are played by a list of answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llamarl.errors import ConfigError
from llamarl.runtime.config import HostsConfig, Worker
from llamarl.runtime.hosts import gathering
from llamarl.runtime.hosts.connection import Answer, HostLost, HostRefuses, WorkerKey
from llamarl.runtime.hosts.gathering import Gathered, gather

GONE = HostLost("host b: nothing answers at b:22222 within 15 s")


class Hosts:
    """Each but b answers; b as often as it is asked by the next of ``b``, the last of them again and again."""

    def __init__(self, *b: Answer | HostLost) -> None:
        self.b, self.asked = list(b), list[list[str]]()

    def ask_each(self, workers: Sequence[Worker], key: WorkerKey) -> list[Answer | HostLost]:
        self.asked.append([worker.name for worker in workers])
        return [answer(worker.name) if worker.name != "b" else self._of_b() for worker in workers]

    def _of_b(self) -> Answer | HostLost:
        return self.b.pop(0) if len(self.b) > 1 else self.b[0]


def answer(name: str) -> Answer:
    inventory: Any = f"inventory of {name}"
    return inventory, f"address towards {name}"


def gathered(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str], *, begun_with: str, wait_s: float
) -> Gathered:
    (tmp_path / "key").write_text("ab" * 32)
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setattr(gathering, "ask_each", hosts.ask_each)
    monkeypatch.setattr(gathering, "_AGAIN_S", 0.01)
    config = HostsConfig(workers=("b", "a", "c"), key=str(tmp_path / "key"), absent_after_s=wait_s)
    return gather(config, WorkerKey, begun_with=begun_with, tell=told.append)


def test_a_host_that_comes_back_in_time_takes_part_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, told = Hosts(GONE, GONE, answer("b")), list[str]()
    found = gathered(hosts, tmp_path, monkeypatch, told, begun_with="abc", wait_s=30.0)
    assert [worker.name for worker in found.workers.workers] == ["b", "a", "c"] and not found.absent
    assert found.inventories == ["inventory of b", "inventory of a", "inventory of c"]
    assert found.here == "address towards b"
    assert hosts.asked == [["b", "a", "c"], ["b"], ["b"]], "who has answered is not asked again"
    assert told == [f"{GONE}\nwaited for, 30 s more (hosts.absent_after_s)"]


def test_a_host_that_does_not_is_left_out_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = gathered(Hosts(GONE), tmp_path, monkeypatch, [], begun_with="abc", wait_s=0.1)
    assert [worker.name for worker in found.workers.workers] == ["a", "c"]
    assert found.inventories == ["inventory of a", "inventory of c"] and found.here == "address towards a"
    assert found.named == ("b", "a", "c") and found.absent == {"b": str(GONE)}


@pytest.mark.parametrize("begun_with", ["", "ac"], ids=["a first start", "a resume that names it now"])
def test_a_host_that_the_run_has_not_had_must_answer_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun_with: str
) -> None:
    hosts, told = Hosts(GONE, answer("b")), list[str]()
    with pytest.raises(ConfigError, match="these hosts cannot take part:\n  - host b: nothing answers"):
        gathered(hosts, tmp_path, monkeypatch, told, begun_with=begun_with, wait_s=30.0)
    assert len(hosts.asked) == 1 and not told


def test_a_host_with_another_key_is_left_out_without_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, told = HostRefuses("host b: the worker at b:22222 does not take this key"), list[str]()
    hosts = Hosts(locked)
    found = gathered(hosts, tmp_path, monkeypatch, told, begun_with="abc", wait_s=30.0)
    assert found.absent == {"b": str(locked)} and len(hosts.asked) == 1 and not told
