"""A run over hosts is prepared anew, as a resume does, while a worker that its configuration names is not there."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_hosts import KEY, LoopbackHost, loopback_hosts

from llamarl.config import RunConfig, load_config
from llamarl.controller.run import prepare
from llamarl.errors import ConfigError

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny.toml"


@pytest.fixture(scope="module")
def host() -> Iterator[LoopbackHost]:
    with loopback_hosts("a") as (one,):
        yield one


@pytest.fixture
def nobody() -> Iterator[str]:
    """Where no worker listens, and nobody else can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def config(tmp_path: Path, host: LoopbackHost, nobody: str, *words: str) -> RunConfig:
    (tmp_path / "key").write_text(KEY.hex())
    (tmp_path / "key").chmod(0o600)
    names = [f"127.0.0.1:{host.worker.port}", nobody]
    place = [f"--hosts.workers={json.dumps(names)}", f"--hosts.key={tmp_path / 'key'}", f"--run.dir={tmp_path / 'run'}"]
    on = ['--hosts.on.generator=["0"]', '--hosts.on.trainer=["1"]', '--hosts.on.reward=["here"]']
    return load_config(RECIPE, [*place, *on, "--hosts.absent_after_s=0", *words])


def test_a_resume_goes_on_without_the_host_and_a_first_start_does_not(
    tmp_path: Path, host: LoopbackHost, nobody: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run, there = config(tmp_path, host, nobody), f"127.0.0.1:{host.worker.port}"
    prepared = prepare(run, begun=run)
    hosts = prepared.placement.hosts
    assert (hosts["generator"], hosts["trainer"], hosts["reward"]) == ((there,), (there,), ("here",))
    assert prepared.config.hosts.workers == (there, nobody), "the next resume asks it again"
    assert prepared.hosts is not None and prepared.hosts.summary().endswith(f"; without {nobody}")
    said = capfd.readouterr().err.splitlines()
    assert said[-2:] == [
        f"left out: host {nobody}: no worker at {nobody}: Connection refused",
        f"the run goes on without {nobody}: trainer on {there}",
    ]
    prepared.hosts.close()
    with pytest.raises(ConfigError, match=f"these hosts cannot take part:\n  - host {nobody}: no worker at"):
        prepare(run)


def test_where_the_others_have_no_room_the_host_is_named_with_what_to_do(
    tmp_path: Path, host: LoopbackHost, nobody: str
) -> None:
    run = config(tmp_path, host, nobody, "--trainer.device=cuda")
    with pytest.raises(ConfigError) as caught:
        prepare(run, begun=run)
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        "these hosts do not answer, and the others have no room for their ranks:",
        f"  - host {nobody}: no worker at {nobody}: Connection refused",
    ]
    there = f"127.0.0.1:{host.worker.port}"
    assert f"  - {there}: executor 'trainer': device cuda, but this machine has no CUDA device; set device cpu" in lines
    assert lines[-1].startswith(f"Start them again (`llamarl worker`), or resume on others: --hosts {there},SPARE, or")
