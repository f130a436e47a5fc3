"""A hub of models on this machine, in the words of the real one's HTTP interface."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

REVISION: Final = "0123456789abcdef0123456789abcdef01234567"
LARGE: Final = ".safetensors"


class FakeHub(ThreadingHTTPServer):
    """Serves one repository; notes which files were asked for."""

    daemon_threads = True

    def __init__(self, repo: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo = repo
        self.files = files
        self.served: set[str] = set()
        self.sent: dict[str, bytes] = {}
        """Content that is sent in place of a file's own."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def description(self) -> dict[str, Any]:
        return {"id": self.repo, "sha": REVISION, "siblings": [_describe(*file) for file in self.files.items()]}


def _describe(name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    described: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
    if name.endswith(LARGE):
        digest = hashlib.sha256(content).hexdigest()
        described["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
    return described


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        files = f"/{hub.repo}/resolve/{REVISION}/"
        if path == f"/api/models/{hub.repo}":
            self._send(json.dumps(hub.description()).encode(), "application/json", with_body=with_body)
        elif path.startswith(files) and path.removeprefix(files) in hub.files:
            name = path.removeprefix(files)
            hub.served.add(name)
            self._send(hub.sent.get(name, hub.files[name]), "application/octet-stream", with_body=with_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, content: bytes, kind: str, *, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""


@contextmanager
def fake_hub(repo: str, files: dict[str, bytes]) -> Iterator[FakeHub]:
    with FakeHub(repo, files) as hub:
        thread = threading.Thread(target=hub.serve_forever, name="fake hub", daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
