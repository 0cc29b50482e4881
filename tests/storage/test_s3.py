"""A run's mirror on an S3 server that runs here (moto): real requests over HTTP, credentials by the environment."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from same_run import assert_same_run
from waiting import wait_until

pytestmark = [pytest.mark.storage, pytest.mark.timeout(900)]

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny.toml"
SETTINGS = {
    "run.num_ticks": "30",
    "checkpoint.every": "3",
    "schedule.max_staleness": "2",
    "schedule.prompts_per_step": "4",
    "generator.group_size": "4",
    "evaluation.every": "0",
    "observability.console": "plain",
}
URL = "s3://bucket/runs/x"


class Server:
    """moto's S3 on a port of its own; what it holds is gone with it, so that to be away it is stopped, not ended."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        program = os.environ.get("MOTO_SERVER", "moto_server")
        self.process = subprocess.Popen(
            [program, "-H", "127.0.0.1", "-p", str(self.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(lambda: self._answers(), 60, "the server")
        request = urllib.request.Request(f"{self.address}/bucket", method="PUT", data=b"")
        urllib.request.urlopen(request, timeout=10).close()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        return False

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(30)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("s3fs")
    server = Server()
    yield server
    server.close()


def environment(server: Server, **more: str) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": "dummy", "AWS_SECRET_ACCESS_KEY": "dummy", "AWS_DEFAULT_REGION": "us-east-1"}
    return {**os.environ, **keys, "AWS_ENDPOINT_URL": server.address, **more}


def words(*first: str, **settings: str) -> list[str]:
    given = {**SETTINGS, **settings}
    return [
        sys.executable,
        "-m",
        "llamarl.cli.main",
        "train",
        *first,
        *(w for k, v in given.items() for w in (f"--{k}", v)),
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    subprocess.run(words(str(RECIPE), **{"run.dir": str(run)}), check=True, timeout=300)
    return run


def bucket(server: Server) -> Any:
    import fsspec

    options = {"key": "dummy", "secret": "dummy", "endpoint_url": server.address, "use_listings_cache": False}
    return fsspec.filesystem("s3", **options, skip_instance_cache=True)


def manifest(server: Server) -> bytes:
    """Of the run in ``URL``; empty: there is none."""
    try:
        return bucket(server).cat_file(f"{URL}/manifest.json")
    except FileNotFoundError:
        return b""


def test_everything_killed_and_deleted_comes_back_from_s3_to_the_same_bits(
    server: Server, undisturbed: Path, tmp_path: Path
) -> None:
    env, run = environment(server), tmp_path / "run"
    running = subprocess.Popen(
        words(str(RECIPE), **{"run.dir": str(run), "run.mirror": URL}), env=env, start_new_session=True
    )
    wait_until(lambda: b"tick_000005/manifest.json" in manifest(server), 240, "two checkpoints")
    os.killpg(running.pid, signal.SIGKILL)
    running.wait(30)
    shutil.rmtree(run)
    began = time.monotonic()
    resume = [*words()[:4], "--resume", URL, "--run.dir", str(run)]
    done = subprocess.run(resume, env=env, timeout=400, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"resumed from {URL} and ran to its end in {time.monotonic() - began:.1f} s\n{done.stderr}")
    assert_same_run(undisturbed, run)

    name = f"{URL}/files/checkpoints/tick_000029/trainer/state/rank_0.safetensors"
    storage = bucket(server)
    storage.pipe_file(name, storage.cat_file(name)[:-1] + b"!")
    refused = subprocess.run(
        [*resume[:-1], str(tmp_path / "other")], env=env, timeout=120, capture_output=True, text=True
    )
    assert refused.returncode == 1 and f"{name} was altered" in refused.stderr, refused.stderr
    second = subprocess.run(
        words(str(RECIPE), **{"run.dir": str(tmp_path / "second"), "run.mirror": URL}),
        env=env, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert second.returncode == 2 and "holds another run" in second.stderr, second.stderr


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_server_that_is_away_for_a_minute_is_caught_up_with_and_for_good_is_told(
    server: Server, undisturbed: Path, tmp_path: Path, comes_back: bool
) -> None:
    url, run = f"s3://bucket/runs/{comes_back}", tmp_path / "run"
    settings = {"run.dir": str(run), "run.mirror": url, "deadlines.disk_s": "150" if comes_back else "5"}
    with open(tmp_path / "said", "wb") as said:
        running = subprocess.Popen(
            words(str(RECIPE), **settings), env=environment(server), stdout=said, stderr=subprocess.STDOUT
        )
    wait_until(lambda: (run / "checkpoints" / "tick_000002").exists(), 240, "a checkpoint")
    server.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        wait_until(
            lambda: (run / "model" / "config.json").exists(), 200, "the end of the run, while the storage is away"
        )
        print(f"the run came to its end {time.monotonic() - began:.1f} s after the storage had gone")
        if comes_back:
            time.sleep(max(0.0, 60 - (time.monotonic() - began)))
            server.process.send_signal(signal.SIGCONT)
        code = running.wait(300)
    finally:
        server.process.send_signal(signal.SIGCONT)
    text = (tmp_path / "said").read_text()
    assert_same_run(undisturbed, run)
    if comes_back:
        assert code == 0, text
        back = [*words()[:4], "--resume", url, "--run.dir", str(tmp_path / "back")]
        subprocess.run(back, env=environment(server), check=True, timeout=200)
        assert_same_run(undisturbed, tmp_path / "back")
    else:
        assert code == 1 and f"run.mirror lacks something of {run}, where all of it is" in text, text
