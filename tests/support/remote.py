"""Servers on this machine that answer as S3 and as a web server do, the latter with faults."""

import errno
import html
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import pytest
from blake3 import blake3
from fsspec.implementations.memory import MemoryFileSystem


@contextmanager
def s3_server() -> Iterator[Any]:
    """An S3 server, named in the environment; yields the filesystem of its buckets."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
        changed.setenv("AWS_ACCESS_KEY_ID", "test")
        changed.setenv("AWS_SECRET_ACCESS_KEY", "test")
        changed.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield fsspec.filesystem("s3")
        server.stop()


class ConnectedFiles(MemoryFileSystem):
    """Files at `connected://HOST/…`. As with FTP, the server is connected to at once, and is no part of the paths.

    Attributes:
        refusals: how many of the next connections fail.
    """

    protocol, cachable = "connected", False
    store, pseudo_dirs = {}, [""]  # not those of memory://
    refusals = 0

    def __init__(self, host: str) -> None:
        super().__init__()
        assert host == "server"
        if ConnectedFiles.refusals:
            ConnectedFiles.refusals -= 1
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str | None]:
        return {"host": urlsplit(path).hostname}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + (path.split("/", 3)[3] if "://" in path else path).strip("/")


class WebServer(ThreadingHTTPServer):
    """The files of a folder, by ranges and with ETags; a folder is a page of links.

    Attributes:
        faults: of the next requests for content, one each: "503", "cut", "slow"; 403 or 404 forever where `always` has it.
        sent: bytes of each file that were sent, by its name.
        content_type: of each file.
        content_encoding: of each file; "": none.
    """

    daemon_threads = True

    def __init__(self, root: Path, ranges: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.ranges = root, ranges
        self.faults: list[str] = []
        self.always = ""
        self.content_type = "application/octet-stream"
        self.content_encoding = ""
        self.sent: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "WebServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebServer  # type: ignore[assignment]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.server.root / unquote(self.path.split("?")[0]).strip("/")
        self.server.requests[path.name] += 1
        fault = (
            self.server.faults.pop()
            if with_body and path.is_file() and self.server.faults
            else self.server.always
        )
        if fault.isdigit() or not path.exists():
            self.send_error(int(fault or 404))
            return
        if path.is_dir():
            names = sorted(
                f"{one.name}/" if one.is_dir() else one.name for one in path.iterdir()
            )
            base = self.path.rstrip("/")
            body = "".join(
                f'<a href="{base}/{html.escape(name)}">{name}</a>\n' for name in names
            ).encode()
        else:
            body = path.read_bytes()
        asked = (
            re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if self.server.ranges
            else None
        )
        self.send_response(206 if asked else 200)
        self.send_header(
            "Content-Type", "text/html" if path.is_dir() else self.server.content_type
        )
        if self.server.content_encoding and path.is_file():
            self.send_header("Content-Encoding", self.server.content_encoding)
        self.send_header("ETag", f'"{blake3(body).hexdigest()}"')
        if asked:
            first, last = int(asked[1]), min(int(asked[2]) + 1, len(body))
            self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(body)}")
            body = body[first:last]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self._send(path.name, body, fault)

    def _send(self, name: str, body: bytes, fault: str) -> None:
        if fault == "slow":
            for start in range(0, len(body), max(1, len(body) // 5)):
                time.sleep(0.05)
                self.wfile.write(body[start : start + max(1, len(body) // 5)])
        elif fault == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        else:
            self.wfile.write(body)
        self.server.sent[name] += len(body)
