"""A Hub of Hugging Face on this machine, with one dataset."""

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

DATASET = "owner/name"
COMMIT = "0123456789" * 4


class Hub(ThreadingHTTPServer):
    """Serves `files`, by their paths in the dataset.

    Attributes:
        received: bytes that were sent of each file.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.received: dict[str, int] = {}
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def entry(self, path: str) -> dict[str, Any]:
        oid = hashlib.sha1(self.files[path]).hexdigest()
        return {"type": "file", "path": path, "size": len(self.files[path]), "oid": oid}


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        is_json = "json" in self.headers.get("Content-Type", "")
        paths = json.loads(body)["paths"] if is_json else parse_qs(body)["paths"]
        self._json(
            [self.server.entry(path) for path in paths if path in self.server.files]
        )

    def _answer(self) -> None:
        url = urlsplit(unquote(self.path))
        if url.path.startswith(f"/api/datasets/{DATASET}/tree/{COMMIT}"):
            prefix = url.path.removeprefix(
                f"/api/datasets/{DATASET}/tree/{COMMIT}"
            ).strip("/")
            self._json(self._listing(prefix, "recursive=true" in url.query.lower()))
        elif url.path.startswith(f"/api/datasets/{DATASET}"):
            siblings = [{"rfilename": path} for path in self.server.files]
            self._json({"id": DATASET, "sha": COMMIT, "siblings": siblings, "tags": []})
        elif url.path.startswith(f"/datasets/{DATASET}/resolve/"):
            self._file(url.path.split("/", 6)[6])
        else:
            self._send(404, b"{}", {})

    def _listing(self, prefix: str, recursive: bool) -> list[dict[str, Any]]:
        base = f"{prefix}/" if prefix else ""
        below = [path for path in self.server.files if path.startswith(base)]
        folders = {
            base + path.removeprefix(base).rpartition("/")[0]
            for path in below
            if "/" in path.removeprefix(base)
        }
        entries = [
            {"type": "directory", "path": path, "oid": "0"} for path in sorted(folders)
        ]
        shown = [
            path for path in below if recursive or "/" not in path.removeprefix(base)
        ]
        return entries + [self.server.entry(path) for path in shown]

    def _file(self, path: str) -> None:
        content = self.server.files.get(path)
        if content is None:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
            self._send(404, b"", headers)
            return
        headers = {
            "ETag": f'"{self.server.entry(path)["oid"]}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        status = 200
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = min(int(last or len(content) - 1), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{end}/{len(content)}"
            content = content[int(first) : end + 1]
            status = 206
        if self.command == "GET":
            self.server.received[path] = self.server.received.get(path, 0) + len(
                content
            )
        self._send(status, content, headers)

    def _json(self, value: Any) -> None:
        self._send(
            200, json.dumps(value).encode(), {"Content-Type": "application/json"}
        )

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
