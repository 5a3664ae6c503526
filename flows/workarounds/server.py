"""A Prefect server that this process starts, in place of Prefect's temporary one.

Prefect's outlives a `kill -9` of the flow that started it, and writes to the user's terminal. This
one is the same program in a session of its own, ended by the kernel with its parent, and logging
into a file.

Needed with Prefect 3.9.1. Upstream: no issue is known; PrefectHQ/prefect#14722 added the server.
Test: `test_a_temporary_server_outlives_its_flow`.
"""

import contextlib
import http.client
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.flows.settings import (
    HEALTHY_WITHIN,
    LEASES,
    START_TIMEOUT,
    client_settings,
    prefect_home,
)
from infini_llama.flows.workarounds.connection import adapt_clients
from infini_llama.tasks.runs import exec_wrapper
from infini_llama.tasks.storage.filesystem import require_folder
from infini_llama.tasks.storage.locks import Lock

DATABASE_URL = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
FULL = "cannot be written, since its disk is full"
_MOVE = (
    "move it away, and Prefect creates an empty one, or put back a backup. Datasets, checkpoints "
    "and results are not in it"
)
_FREE = "free space, and run the same command again"
_ALLOW = "give this user the file, or name another place in {setting}"
# What a server logs of a database that it cannot use, with the cause and what to do. The server of
# Prefect 3.9.1 ends with a traceback; PrefectHQ/prefect#10778, closed, reports the first one.
DATABASE_FAULTS = {
    "Can't locate revision": (
        "was last used by a newer version of Prefect",
        "install that version of infini-llama and Prefect, or name another place in {setting}",
    ),
    "file is not a database": ("is damaged", _MOVE),
    "database disk image is malformed": ("is damaged", _MOVE),
    "attempt to write a readonly database": ("may not be written by this user", _ALLOW),
    "unable to open database file": ("cannot be opened by this user", _ALLOW),
    "database or disk is full": (FULL, _FREE),
    "No space left on device": (FULL, _FREE),
}
# The last line of a traceback, with the class of the exception in full.
ERROR = re.compile(r"^[ |]*((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)
USER_AND_PASSWORD = re.compile(r"(?<=//)[^/@\s]+@")  # of an address
# Variables that uvicorn reads as its own options, beside those of the command line. Several workers
# of one server would create the tables of one database at once.
OF_UVICORN = re.compile(r"UVICORN_.*|WEB_CONCURRENCY|FORWARDED_ALLOW_IPS")
log = logging.getLogger("infini_llama.prefect")


class Server:
    """A Prefect server that this process starts, and that ends with it.

    Args:
        home: the project's home; the server's log is in home/prefect.
        settings: environment variables of the server.
    """

    def __init__(
        self, home: Path, host: str, port: int, settings: dict[str, str]
    ) -> None:
        self.host = host
        self.port = port
        self.settings = settings
        self.log = home / "prefect" / "server.log"
        bracketed = f"[{host}]" if ":" in host else host
        self.address = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, bracketed)
        self.process: subprocess.Popen | None = None
        self.logged_before = 0  # bytes of the log that are of earlier servers

    def refuse_taken_address(self) -> None:
        """Raise a ConfigError if nothing can listen there."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            socket.create_server((self.host, self.port), family=family).close()
        except (OSError, OverflowError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"{self.host}:{self.port} cannot be used ({reason}); choose another --port, or set "
                "PREFECT_API_URL to the server there."
            ) from error

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the server runs and PREFECT_API_URL names it."""
        os.environ["PREFECT_API_URL"] = f"http://{self.address}:{self.port}/api"
        try:
            self.start()
            yield
        finally:
            os.environ.pop("PREFECT_API_URL", None)
            if self.process is not None:
                if not self.has_ended():
                    _drain_client()
                _stop(self.process)

    def start(self) -> None:
        """Start it, or start it again after it has ended.

        Raises:
            ConfigError: PREFECT_HOME cannot be used.
            PipelineError: it does not come up.
        """
        require_folder(prefect_home(), "PREFECT_HOME")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.logged_before = self.log.stat().st_size if self.log.exists() else 0
        seconds = _start_timeout()
        # Two first starts of Prefect 3.9.1 would create the tables twice. No issue upstream is
        # known.
        with Lock(
            prefect_home() / "server-start.lock", wait=seconds, setting="PREFECT_HOME"
        ):
            process = self._spawn()
            self.process = process
            _import_client()  # which takes a second that the server needs anyway
            self._wait_until_healthy(process, seconds)

    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def restart(self) -> None:
        assert self.process is not None
        log.warning(
            "the Prefect server ended with code %d; it is started again (log: %s)",
            self.process.returncode,
            self.log,
        )
        self.start()

    def _spawn(self) -> subprocess.Popen:
        """Start the command of Prefect's SubprocessASGIServer, with a check of the host.

        The wrapper before it ties it to this process.

        Unless the origins are set, all are allowed; the UI comes from the server itself.

        Needed with Prefect 3.9.1. Upstream: PrefectHQ/prefect#15074 added the setting. Test:
        `test_a_server_allows_every_origin`.

        Unless a folder is set, the UI is unpacked beside Prefect's code. A user who may not write
        there would have no UI.

        Needed with Prefect 3.9.1. Upstream: PrefectHQ/prefect#11640, closed, reports a server that
        does not start; since PrefectHQ/prefect#21035, it starts without a UI. Test:
        `test_the_ui_is_unpacked_beside_the_code`.
        """
        command = [sys.executable, exec_wrapper.__file__, "SIGKILL", str(os.getpid())]
        # -P and --app-dir: nothing in the working directory is imported.
        command += [sys.executable, "-P", "-m", "uvicorn"]
        command += ["--app-dir", str(Path(__file__).parents[3])]
        command += [
            "--factory",
            "infini_llama.flows.workarounds.allowed_hosts:create_app",
        ]
        command += ["--host", self.host, "--port", str(self.port)]
        command += ["--log-level", "error", "--lifespan", "on"]
        defaults = {
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": (
                f"http://127.0.0.1:{self.port},http://localhost:{self.port}"
            ),
            "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(prefect_home() / "ui"),
        }
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not OF_UVICORN.fullmatch(name)
        }
        with self.log.open("ab") as output:
            return subprocess.Popen(
                command,
                env=defaults | LEASES | inherited | self.settings | _database(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def refuse_database(self) -> None:
        """Refuse a database that the server cannot use, as its log shows.

        Raises:
            ConfigError: it is damaged, of another version of Prefect, or another user's.
            PipelineError: its disk is full.
        """
        text = self._logged()
        for fault, (what, action) in DATABASE_FAULTS.items():
            if fault in text:
                error = PipelineError if what == FULL else ConfigError
                place, setting = _place_of_database()
                what_to_do = action.format(setting=setting)
                raise error(
                    f"Prefect's database {place} {what} (log: {self.log}); {what_to_do}."
                )

    def _logged(self) -> str:
        """The log of this server, without those of earlier ones and without passwords."""
        with self.log.open("rb") as log_file:
            log_file.seek(self.logged_before)
            text = log_file.read().decode(errors="replace")
        return USER_AND_PASSWORD.sub("", text)

    def _wait_until_healthy(self, process: subprocess.Popen, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if process.poll() is not None:
                self.refuse_database()
                errors = ERROR.findall(self._logged())
                cause = f" ({errors[-1]})" if errors else ""
                raise PipelineError(
                    f"the Prefect server exited with code {process.returncode}{cause}; its log is "
                    f"{self.log}. Correct the cause and try again, or use --no-prefect."
                )
            connection = http.client.HTTPConnection(self.address, self.port, timeout=5)
            try:
                connection.request("GET", "/api/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:  # not listening yet
                pass
            finally:
                connection.close()
            time.sleep(0.05)
        raise PipelineError(
            f"the Prefect server did not answer within {seconds:.0f} s; its log is {self.log}. "
            f"If this machine is busy, set {START_TIMEOUT} to more; or use --no-prefect."
        )


def _start_timeout() -> int:
    """Seconds that a server may take to start: Prefect's setting for its temporary server."""
    try:
        return int(os.environ.get(START_TIMEOUT, HEALTHY_WITHIN))
    except ValueError:
        raise ConfigError(
            f"{START_TIMEOUT}={os.environ[START_TIMEOUT]} is not a number of seconds."
        ) from None


def _import_client() -> None:
    """Import Prefect's client, for this server and with its password.

    Prefect's settings name the password of the server, wherever they are. As documented, a client
    has a setting of its own for it.
    """
    settings = client_settings()
    import prefect.main  # noqa: F401
    from prefect.context import refresh_global_settings_context

    adapt_clients()
    if password := settings.server.api.auth_string:
        os.environ["PREFECT_API_AUTH_STRING"] = password.get_secret_value()
    # For a process that had imported Prefect, and so its settings, before the URL was known.
    refresh_global_settings_context()


def _drain_client() -> None:
    """Send what the client still holds: the last log lines, and events of the last task states.

    Prefect 3.9.1 would send them when this process ends, and this server has ended by then.
    PrefectHQ/prefect#14854 does the same for the server of Prefect's tests.
    """
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (EventsWorker, APILogWorker):
        worker.drain_all(timeout=10)


def _stop(server: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _database() -> dict[str, str]:
    """The setting for the database of a Prefect home whose path has a `?` or a `%`.

    A setting of the user's stays. Prefect writes the path into the URL as it is. SQLAlchemy ends it
    at a `?`, and from 2.1 on it decodes `%`; before, a path could not be escaped. SQLite's own URIs
    can.

    Needed with Prefect 3.9.1. Upstream: no issue is known. Test:
    `test_the_path_of_the_database_ends_at_a_question_mark`.
    """
    home = prefect_home()
    if not {"?", "%"} & set(str(home)):
        return {}
    from sqlalchemy import URL

    if _database_url() != f"sqlite+aiosqlite:///{home}/prefect.db":
        return {}
    uri = URL.create(
        "sqlite+aiosqlite",
        database=f"file:{quote(str(home / 'prefect.db'))}",
        query={"uri": "true"},
    )
    return {DATABASE_URL: uri.render_as_string()}


def _place_of_database() -> tuple[str, str]:
    """The server's database without its password, and the setting that moves it."""
    from sqlalchemy import make_url

    own = f"{prefect_home()}/prefect.db"
    url = _database_url()
    if url == f"sqlite+aiosqlite:///{own}":
        return own, "PREFECT_HOME"
    return make_url(url).render_as_string(hide_password=True), DATABASE_URL


def _database_url() -> str:
    """The address of the server's database, from wherever Prefect has it, or its default."""
    from prefect.context import refresh_global_settings_context

    # For a process that had imported Prefect before the variables were set.
    refresh_global_settings_context()
    url = client_settings().server.database.connection_url
    return url.get_secret_value() if url else ""
