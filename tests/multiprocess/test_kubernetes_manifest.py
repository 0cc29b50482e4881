"""The Kubernetes manifest of docs/hosts.md, as far as it can be judged without a cluster: what its parts say of each other, and its command."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_blocks import blocks_of

import llamarl
from llamarl.runtime.config import host_settings, parse_workers

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict[str, Any]]:
    (text,) = [block.text for block in blocks_of(PAGE) if block.language == "yaml"]
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def pod(manifest: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return manifest["StatefulSet"]["spec"]["template"]["spec"]


def test_the_service_names_the_pods_of_the_set_by_dns(manifest: dict[str, dict[str, Any]]) -> None:
    service, workers = manifest["Service"], manifest["StatefulSet"]
    assert (service["apiVersion"], workers["apiVersion"]) == ("v1", "apps/v1")
    assert service["spec"]["clusterIP"] == "None", "headless, so that each pod has a name"
    assert workers["spec"]["serviceName"] == service["metadata"]["name"]
    labels = workers["spec"]["template"]["metadata"]["labels"]
    assert workers["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]


def test_the_command_names_every_pod(manifest: dict[str, dict[str, Any]]) -> None:
    workers, domain = manifest["StatefulSet"], manifest["Service"]["metadata"]["name"]
    (command,) = [b.text for b in blocks_of(PAGE) if b.language == "bash" and f".{domain}," in b.text]
    words = shlex.split(command)
    named = host_settings(words[words.index("--hosts") + 1])["workers"]
    assert named == [f"{workers['metadata']['name']}-{i}.{domain}" for i in range(workers["spec"]["replicas"])]
    assert [worker.port for worker in parse_workers(named)] == [22222] * 3
    assert workers["spec"]["podManagementPolicy"] == "Parallel", "no pod waits for another"


def test_each_mount_has_its_volume_and_shared_memory_is_memory(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}, "64 MB without it, on most runtimes"
    assert "secretName" in mounts["/secret"]["secret"]
    assert container["image"].endswith(f":{llamarl.__version__}")
    assert not {"livenessProbe", "readinessProbe"} & container.keys(), (
        "a probe holds no key: it would be refused and told"
    )


def test_its_shell_command_copies_the_key_for_its_user_alone_and_becomes_the_worker(
    pod: dict[str, Any], tmp_path: Path
) -> None:
    (container,) = pod["containers"]
    (script,) = container["args"]
    assert container["command"] == ["/bin/sh", "-c"]
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "worker.key").write_text("ab" * 32)  # as a volume shows it: everybody reads it
    (tmp_path / "llamarl").write_text(f'#!/bin/sh\nexec {sys.executable} -m llamarl.cli.main "$@"\n')
    (tmp_path / "llamarl").chmod(0o755)
    moved = script.replace("/secret", f"{tmp_path}/secret").replace("/tmp/key", f"{tmp_path}/key")
    worker = subprocess.Popen(
        [*container["command"], f"{moved} --bind 127.0.0.1 --port 0"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout is not None
        assert re.match(r"llamarl worker listens on 127\.0\.0\.1:\d+ ", worker.stdout.readline())
        assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    finally:
        worker.terminate()  # as Kubernetes does: exec has made it the first process
        assert worker.wait(20.0) == 0
        worker.stdout.close()  # type: ignore[union-attr]
