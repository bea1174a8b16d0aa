"""A hub on loopback, with the part of the Hugging Face hub's interface that downloads use."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit


class FakeHub:
    """Repositories {"org/name": {file: bytes}} at .url, as a context manager.

    gated: repositories whose files are refused. requests: (method, path) of each request so far.
    broken: every request is answered by 503.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        self.repositories = repositories
        self.gated: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.broken = False

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def fetched(self) -> list[str]:
        """The files whose bytes were sent."""
        paths = [path for method, path in self.requests if method == "GET"]
        return [
            path.partition("/resolve/")[2].partition("/")[2] for path in paths if "/api" not in path
        ]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append((request.command, path))
        if self.broken:
            return self._send(request, 503, b"")
        if path.startswith("/api/models/"):
            return self._describe(request, path.removeprefix("/api/models/"))
        repo, _, rest = path.strip("/").partition("/resolve/")
        data = self.repositories.get(repo, {}).get(rest.partition("/")[2])
        if repo in self.gated:
            return self._send(request, 403, b"", {"X-Error-Code": "GatedRepo"})
        if data is None:
            code = "EntryNotFound" if repo in self.repositories else "RepoNotFound"
            return self._send(request, 404, b"", {"X-Error-Code": code})
        self._send(request, 200, data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'})
        return None

    def _describe(self, request: BaseHTTPRequestHandler, rest: str) -> None:
        repo = "/".join(rest.split("/")[:2])
        files = self.repositories.get(repo)
        if files is None:
            return self._send(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
        if "/tree/" in rest:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": self._commit(repo)}
                for name, data in files.items()
            ]
            return self._send(request, 200, json.dumps(tree).encode())
        said = {
            "id": repo,
            "sha": self._commit(repo),
            "private": False,
            "downloads": 0,
            "tags": [],
            "siblings": [{"rfilename": name} for name in files],
        }
        self._send(request, 200, json.dumps(said).encode())
        return None

    def _commit(self, repo: str) -> str:
        names = repo + "".join(sorted(self.repositories[repo]))
        return hashlib.sha1(names.encode()).hexdigest()

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        request.send_response(status)
        repo = request.path.removeprefix("/api/models/").strip("/").split("/resolve/")[0]
        if repo in self.repositories:
            request.send_header("X-Repo-Commit", self._commit(repo))
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(data)
