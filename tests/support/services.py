"""A free port, a server that gives one answer, and a PostgreSQL server on this machine."""

import http.server
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support.waiting import wait_until

POSTGRES = (found := shutil.which("postgres")) and Path(found).resolve().parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def answering(
    answer: Callable[[str], tuple[int, str]],
    headers: Mapping[str, str] | None = None,
    port: int = 0,
) -> Iterator[str]:
    """Host and port of an HTTP server: `answer` has the status and the body for a path."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path)
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def postgres(user: str, password: str, database: str) -> Iterator[int]:
    """The port of a database server."""
    assert POSTGRES
    # It does not run as root.
    account = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(
        prefix="postgres-"
    ) as folder:  # not pytest's, which only its own user may enter
        secret, data, port = Path(folder, "password"), f"{folder}/data", free_port()
        secret.write_text(password)
        for path in (folder, secret) if account else ():
            shutil.chown(path, "postgres")
        create = [
            str(POSTGRES / "initdb"),
            "-D",
            data,
            "-U",
            user,
            "-A",
            "scram-sha-256",
            f"--pwfile={secret}",
        ]
        subprocess.run(
            [*account, *create], check=True, capture_output=True, timeout=120, cwd="/"
        )
        start = [
            str(POSTGRES / "postgres"),
            "-D",
            data,
            "-p",
            str(port),
            "-k",
            folder,
            "-h",
            "127.0.0.1",
        ]
        server = subprocess.Popen([*account, *start], start_new_session=True, cwd="/")
        try:
            there = ["-h", "127.0.0.1", "-p", str(port)]
            ready = [POSTGRES / "pg_isready", *there]
            wait_until(
                lambda: (
                    server.poll() is not None
                    or not subprocess.run(ready, capture_output=True).returncode
                )
            )
            assert server.poll() is None, "PostgreSQL ended"
            if database != "postgres":
                with_password = os.environ | {"PGPASSWORD": password}
                subprocess.run(
                    [POSTGRES / "createdb", *there, "-U", user, database],
                    env=with_password,
                    check=True,
                )
            yield port
        finally:
            os.killpg(server.pid, signal.SIGINT)
            server.wait(30)
