"""A small Hugging Face Hub on loopback: the parts of its protocol that the real client uses, over files in memory.

    hub = Hub(); commit = hub.commit("org/name", {"config.json": b"{}"}); HF_ENDPOINT = hub.url

A commit's id is made of its files. Files of ``_LFS`` come by a redirect to another path, as large files of the Hub do.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest
from huggingface_hub import constants

_LFS = (".safetensors", ".bin", ".parquet")


class Hub:
    """Repositories by name (``datasets/org/name`` for those of data), and what has been asked."""

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self.branches: dict[tuple[str, str], str] = {}
        self.gated: set[str] = set()
        self.cut: dict[str, int] = {}
        """File name -> bytes after which its first transfer breaks off."""
        self.asked: list[str] = []
        """``METHOD path`` of every request."""
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def commit(self, repo: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """The commit that ``branch`` then points to."""
        digest = hashlib.sha1(json.dumps({k: hashlib.sha1(v).hexdigest() for k, v in sorted(files.items())}).encode())
        self.commits[repo, digest.hexdigest()] = dict(files)
        self.branches[repo, branch] = digest.hexdigest()
        return digest.hexdigest()

    def fetched(self) -> set[str]:
        """Names of the files of which bytes have been asked for."""
        return {line.rpartition("/")[2] for line in self.asked if line.startswith("GET") and "/resolve/" in line}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    try:
        yield hub
    finally:
        hub.close()


@contextmanager
def serving_here(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Hub]:
    """Serve one that this process asks, and whose answers it keeps, below ``folder``, where it stands."""
    with serving() as hub:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield hub


def files_of(folder: Path) -> dict[str, bytes]:
    """What ``Hub.commit`` takes, from a folder."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_POST(self) -> None:  # which of these paths are there?
        size = int(self.headers.get("Content-Length") or 0)
        asked = json.loads(self.rfile.read(size) or b"{}")
        path = unquote(urlparse(self.path).path)
        repo, _, revision = path.removeprefix("/api/").removeprefix("models/").partition("/paths-info/")
        files = self._files(repo, revision)
        names = asked.get("paths", []) if isinstance(asked, dict) else []
        self._json([_entry(name, files[name]) for name in names if files and name in files])

    def _answer(self, body: bool) -> None:
        path = unquote(urlparse(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if path.startswith("/api/"):
            self._api(path.removeprefix("/api/").removeprefix("models/"))
            return
        repo, _, rest = path.removeprefix("/").partition("/resolve/")
        if path.startswith("/cdn/"):
            repo, _, rest = path.removeprefix("/cdn/").partition("/at/")
        revision, _, name = rest.partition("/")
        files = self._files(repo, revision)
        if files is None:
            return
        if name not in files:
            self._refuse(404, "EntryNotFound")
            return
        data = files[name]
        etag = hashlib.sha256(data).hexdigest()
        commit = revision if (repo, revision) in self.hub.commits else self.hub.branches[repo, revision]
        if name.endswith(_LFS) and not path.startswith("/cdn/"):
            headers = {"Location": f"{self.hub.url}/cdn/{repo}/at/{commit}/{name}", "X-Repo-Commit": commit}
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data)), "Content-Length": "0"}
            self._send(302, headers)
            return
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0] or 0)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Content-Length": str(len(data) - first)}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self._send(206 if first else 200, headers)
        if body:
            most = self.hub.cut.pop(name, None)
            self.wfile.write(data[first:] if most is None else data[first : first + most])
            if most is not None:
                self.close_connection = True
                self.wfile.flush()
                self.connection.shutdown(2)

    def _api(self, path: str) -> None:
        for word in ("/revision/", "/tree/"):
            repo, found, revision = path.partition(word)
            if found:
                break
        else:
            repo, word, revision = path, "/revision/", "main"
        revision = revision.partition("/")[0]
        files = self._files(repo, revision, whole=False)
        if files is None:
            return
        if word == "/tree/":
            self._json([_entry(name, data) for name, data in sorted(files.items())])
            return
        commit = revision if (repo, revision) in self.hub.commits else self.hub.branches[repo, revision]
        name = repo.removeprefix("datasets/")
        facts: dict[str, Any] = {"_id": "0", "id": name, "modelId": name, "sha": commit, "private": False}
        facts |= {"gated": "manual" if repo in self.hub.gated else False, "tags": [], "downloads": 0, "likes": 0}
        self._json(facts | {"siblings": [{"rfilename": name} for name in sorted(files)]})

    def _files(self, repo: str, revision: str, whole: bool = True) -> dict[str, bytes] | None:
        """Of a commit; None where the question has been answered by an error."""
        known = {name for name, _ in self.hub.commits}
        if repo not in known:
            self._refuse(401, "RepoNotFound")
            return None
        if whole and repo in self.hub.gated and "Authorization" not in self.headers:
            self._refuse(403, "GatedRepo")
            return None
        commit = self.hub.branches.get((repo, revision), revision)
        if (repo, commit) not in self.hub.commits:
            self._refuse(404, "RevisionNotFound")
            return None
        return self.hub.commits[repo, commit]

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, {"X-Error-Code": code, "X-Error-Message": code, "Content-Length": "0"})

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self._send(200, {"Content-Type": "application/json", "Content-Length": str(len(data))})
        if self.command != "HEAD":
            self.wfile.write(data)

    def _send(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _entry(name: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "file",
        "path": name,
        "size": len(data),
        "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
    }
    if name.endswith(_LFS):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry
