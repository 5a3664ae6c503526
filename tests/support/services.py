"""A free port, and a PostgreSQL server on this machine."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.waiting import wait_until

POSTGRES = (found := shutil.which("postgres")) and Path(found).resolve().parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def postgres(user: str, password: str, database: str) -> Iterator[int]:
    """The port of a database server."""
    assert POSTGRES
    account = (
        ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    )  # it does not run as root
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
        subprocess.run([*account, *create], check=True, capture_output=True, timeout=120, cwd="/")
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
