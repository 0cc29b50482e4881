"""The files of a job at a real worker: the key and TLS are asked for, the proof of the folder holds, a dead worker is told."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_hosts import KEY, LoopbackHost, loopback_hosts

from llamarl.checkpoint.written import record_files
from llamarl.config import load_config
from llamarl.controller.job_files import JobFiles, open_job_files
from llamarl.controller.run import plan_run
from llamarl.errors import CheckpointError, ConfigError, TransferError
from llamarl.runtime.hosts.connection import WorkerKey
from llamarl.transports.network import TlsFiles
from llamarl.transports.run_key import new_key
from llamarl.transports.segment_wire import client_tls

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.toml"
WHERE = {"generator": (0,), "trainer": (-1,)}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LoopbackHost]:
    with loopback_hosts("a", environment={"XDG_CACHE_HOME": str(tmp_path / "cache")}) as (one,):
        yield one


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def open_files(run_dir: Path, host: LoopbackHost, key: WorkerKey | None = None, *, own: bool = True) -> JobFiles:
    return open_job_files(run_dir, "id", {0: host.worker}, key or WorkerKey(KEY, silence_s=5), WHERE, own_folders=own)


def test_a_host_that_sees_the_folder_uses_it_and_nothing_is_left_in_it(run_dir: Path, host: LoopbackHost) -> None:
    files = open_files(run_dir, host, own=False)
    assert files.summary() == "shared with a"
    assert files.far.folder_of("generator", 0) is None
    files.end()
    assert list(run_dir.iterdir()) == []


def test_a_dry_run_says_which_hosts_share_the_place_of_the_run_and_leaves_nothing_there(
    run_dir: Path, host: LoopbackHost, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(KEY.hex())
    (tmp_path / "key").chmod(0o600)
    words = ["--hosts.workers", f'["127.0.0.1:{host.worker.port}"]', "--hosts.key", f'"{tmp_path / "key"}"']
    place = ["--run.dir", f'"{run_dir / "not" / "made"}"']
    planned = plan_run(load_config(RECIPE, [*words, *place]))
    assert f"# run folder\n127.0.0.1:{host.worker.port}: shared, ranks write into it" in planned
    own = plan_run(load_config(RECIPE, [*words, *place, "--hosts.run_folder", '"own"']))
    assert "every host gets a folder of its own" in own
    assert list(run_dir.iterdir()) == []


def test_a_dry_run_asks_the_standby_and_refuses_one_that_a_start_would(
    run_dir: Path, host: LoopbackHost, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(KEY.hex())
    (tmp_path / "key").chmod(0o600)
    words = ["--run.dir", f'"{run_dir}"', "--hosts.key", f'"{tmp_path / "key"}"', "--hosts.standby"]
    name = f"127.0.0.1:{host.worker.port}"
    assert f"# standby\n{name}: has the models, data and code" in plan_run(load_config(RECIPE, [*words, name]))
    with pytest.raises(ConfigError, match=r"hosts\.standby: .*zz\.invalid"):
        plan_run(load_config(RECIPE, [*words, "zz.invalid"]))
    other = tmp_path / "other"
    other.write_text(bytes(32).hex())
    other.chmod(0o600)
    with pytest.raises(ConfigError, match=r"hosts\.standby: .*key"):
        plan_run(load_config(RECIPE, [*words, name, "--hosts.key", f'"{other}"']))
    assert list(run_dir.iterdir()) == []


def test_a_file_travels_from_a_worker_and_its_folder_is_forgotten(run_dir: Path, host: LoopbackHost) -> None:
    files = open_files(run_dir, host)
    there = files.far.folder_of("generator", 0)
    assert there is not None and there.parents[2].stat().st_mode & 0o777 == 0o700, "nobody else looks into it"
    (there / "notes").write_bytes(b"x" * 3_000_000)
    files.far.fetch({"generator rank 0": record_files(there, [there / "notes"]), "trainer rank 0": ()}, run_dir)
    (there / "late").write_text("written while it closed")
    files.end()
    assert (run_dir / "notes").read_bytes() == b"x" * 3_000_000
    assert (run_dir / "late").read_text() == "written while it closed"
    assert not there.exists()


def test_a_worker_that_ends_with_its_controller_keeps_nothing_of_its_runs(run_dir: Path, tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache-ends")}
    with loopback_hosts("a", environment=environment) as (host,):
        files = open_files(run_dir, host)
        there = files.far.folder_of("generator", 0)
        assert there is not None and there.is_dir()
    assert list((tmp_path / "cache-ends" / "llamarl" / "worker" / "runs").iterdir()) == []


def test_who_does_not_hold_the_key_gets_no_file(run_dir: Path, host: LoopbackHost) -> None:
    with pytest.raises(TransferError, match="host a: its worker takes no connection for files"):
        open_files(run_dir, host, WorkerKey(new_key(), silence_s=5))
    assert list(run_dir.iterdir()) == []


def test_a_worker_that_died_is_told_with_what_it_had_not_sent(
    run_dir: Path, host: LoopbackHost, capfd: pytest.CaptureFixture[str]
) -> None:
    files = open_files(run_dir, host)
    there = files.far.folder_of("generator", 0)
    assert there is not None
    (there / "notes").write_text("x")
    (record,) = record_files(there, [there / "notes"])
    host.kill()
    with pytest.raises(CheckpointError, match="host a: notes: the connection for files is lost"):
        files.far.fetch({"generator rank 0": [record]}, run_dir)
    files.hurry()
    files.end()
    assert f"lies there still: a: {there}" in capfd.readouterr().err


def _certificates(folder: Path) -> TlsFiles:
    made = TlsFiles(certificate=folder / "cert.pem", private_key=folder / "key.pem", authority=folder / "cert.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        + ["-keyout", str(made.private_key), "-out", str(made.certificate), "-subj", "/CN=llamarl-test"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return made


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_files_go_inside_tls_where_the_worker_asks_for_it(run_dir: Path, tmp_path: Path) -> None:
    made = _certificates(tmp_path)
    flags = [f"--tls-cert={made.certificate}", f"--tls-key={made.private_key}", f"--tls-ca={made.authority}"]
    with loopback_hosts("a", *flags, environment={"XDG_CACHE_HOME": str(tmp_path / "cache")}) as (host,):
        files = open_files(run_dir, host, WorkerKey(KEY, client_tls(made), silence_s=5))
        there = files.far.folder_of("generator", 0)
        assert there is not None
        (there / "notes").write_bytes(b"x" * 3_000_000)
        files.end()
        assert (run_dir / "notes").read_bytes() == b"x" * 3_000_000
        with pytest.raises(TransferError, match="host a"):
            open_files(run_dir, host, WorkerKey(KEY, silence_s=5))
