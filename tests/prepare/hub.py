"""A small hub: the routes that the hub's client asks to find a model and to download it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MODEL = re.compile(r"/api/models/([\w-]+/[\w-]+)(?:/revision/\w+)?(?:\?.*)?")
FOLDER = re.compile(r"/api/models/([\w-]+/[\w-]+)/tree/")
FILE = re.compile(r"/([\w-]+/[\w-]+)/resolve/(\w+)/(.+)")


class Hub:
    """Serves each folder `root/OWNER/NAME` as a model, whose commit changes with its files. Commits that it named stay."""

    def __init__(self, root: Path):
        self.root = root
        self.gated: set[str] = set()
        self.broken: set[str] = set()  # files whose download ends in the middle
        self.stuck: set[str] = set()  # files whose download stops in the middle and does not end
        self.url = ""
        self.requests: list[str] = []  # files that were downloaded
        self.commits: dict[str, dict[str, bytes]] = {}

    def revision(self, repo: str) -> str:
        """Return the commit of a model: a digest of its files."""
        files = {path.name: path.read_bytes() for path in sorted((self.root / repo).iterdir())}
        commit = hashlib.sha1(b"".join(name.encode() + content for name, content in files.items())).hexdigest()
        self.commits[commit] = files
        return commit

    @contextmanager
    def running(self) -> Iterator[Hub]:
        """Serve until the block ends."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def answer(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body[: len(body) // 2] if cut else body)

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                model, file = MODEL.fullmatch(self.path), FILE.fullmatch(self.path)
                found = model or file or FOLDER.match(self.path)
                repo = found[1] if found else ""
                if not (hub.root / repo).is_dir() or not repo:
                    self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                elif model:
                    files = sorted((hub.root / repo).iterdir())
                    siblings = [{"rfilename": path.name, "size": path.stat().st_size} for path in files]
                    body = {"id": repo, "modelId": repo, "sha": hub.revision(repo), "siblings": siblings}
                    self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
                elif file is None:
                    self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                elif repo in hub.gated:
                    self.answer(401, b"{}", {"X-Error-Code": "GatedRepo"})
                else:
                    self.file(hub.revision(repo) if file[2] == "main" else file[2], file[3])

            def file(self, commit: str, name: str) -> None:
                headers, content = {"X-Repo-Commit": commit}, hub.commits[commit].get(name)
                if content is None:
                    self.answer(404, b"{}", headers | {"X-Error-Code": "EntryNotFound"})
                    return
                if self.command == "GET":
                    hub.requests.append(name)
                etag = f'"{hashlib.sha1(content).hexdigest()}"'
                self.answer(200, content, headers | {"ETag": etag}, cut=name in hub.broken | hub.stuck)
                if self.command == "GET" and name in hub.stuck:
                    time.sleep(60)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
