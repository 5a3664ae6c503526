"""The Prefect server that flow runs are recorded on.

It is the user's, or one that this process starts and that ends with it. `run` starts an embedded
server for the time of the run, `serve` one with a UI, which it restarts; `deploy` needs the user's.
Prefect's own temporary server outlives a `kill -9` of its flow and writes to the user's terminal.
The ones here are the same program in a session of its own, ended by the kernel with its parent, and
logging into a file.
"""

import contextlib
import http.client
import logging
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from pydantic import ValidationError

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.flows.allowed_hosts import ALLOWED
from infini_llama.flows.connection import (
    adapt_clients,
    is_local,
    is_loopback,
    proxy_variable,
    refuse_unusable_proxy,
)
from infini_llama.flows.settings import (
    CLIENT,
    EMBEDDED,
    HEALTHY_WITHIN,
    HEARTBEATS,
    LEASES,
    SERVED,
    START_TIMEOUT,
)
from infini_llama.tasks.records.record import first_fault
from infini_llama.tasks.runs import exec_wrapper
from infini_llama.tasks.storage.filesystem import require_folder
from infini_llama.tasks.storage.locks import Lock

if TYPE_CHECKING:
    from prefect.settings import Settings

REFUSALS = (401, 403)  # HTTP
FULL = "cannot be written, since its disk is full"
_MOVE = (
    "move it away, and Prefect creates an empty one, or put back a backup. Datasets, checkpoints "
    "and results are not in it"
)
_FREE = "free space, and run the same command again"
# What a server logs of a database that it cannot use, with the cause and what to do.
DATABASE_FAULTS = {
    "Can't locate revision": (
        "was last used by a newer version of Prefect",
        "install that version of infini-llama and Prefect, or set PREFECT_HOME to another folder",
    ),
    "file is not a database": ("is damaged", _MOVE),
    "database disk image is malformed": ("is damaged", _MOVE),
    "database or disk is full": (FULL, _FREE),
    "No space left on device": (FULL, _FREE),
}
ANSWER_SECONDS = 15.0  # for a server of the user's
log = logging.getLogger("infini_llama.prefect")


@contextlib.contextmanager
def api_for_run(home: Path) -> Iterator[None]:
    """Inside, flows can be called: on the user's server, or on an embedded one without a UI.

    Raises:
        ConfigError: PREFECT_API_URL is not an address, or a setting of Prefect is wrong.
        PipelineError: the server does not start, or no longer responds.
    """
    prepare_client(home)
    if has_api():
        os.environ.update(HEARTBEATS | os.environ)
        with _user_api():
            _check_result_storage()
            yield
        return
    # A server on this machine that is gone does not come back.
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "1")
    # In seconds. A server that hangs delays the end of the run as long.
    os.environ.setdefault("PREFECT_API_REQUEST_TIMEOUT", "15")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = Server(home, "127.0.0.1", port, EMBEDDED)
    with _unreachable_explained(f"its log is {server.log}", server), server.running():
        _check_result_storage()
        yield


@contextlib.contextmanager
def api_for_serve(
    home: Path, host: str, port: int, names: Sequence[str] = ()
) -> Iterator["Server | None"]:
    """Inside, PREFECT_API_URL leads to a server with a UI and a database that stays.

    It is the user's server, or one at this address.

    Args:
        names: under which others reach this machine, beside `host` and localhost; requests to other
            hosts are refused.

    Yields:
        the server that was started here; None: it is the user's.

    Raises:
        ConfigError: the address is taken, other machines reach it and it has no password, or a
            setting of Prefect is wrong.
        PipelineError: the server does not start, or no longer responds.
    """
    prepare_client(home)
    if has_api():
        with _user_api():
            _check_result_storage()
            yield None
        return
    server = Server(home, host, port, SERVED | {ALLOWED: ",".join((host, *names))})
    if not server.is_local and not os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        raise ConfigError(
            f"--host {host} can be reached from other machines, and anyone who reaches the server "
            "can run programs here; set PREFECT_SERVER_API_AUTH_STRING=USER:PASSWORD, or use "
            "--host 127.0.0.1."
        )
    server.refuse_taken_address()
    with _unreachable_explained(f"its log is {server.log}", server), server.running():
        _check_result_storage()
        yield server


@contextlib.contextmanager
def api_for_deploy(home: Path) -> Iterator[None]:
    """Inside, Prefect's client can be used on the user's own server.

    Raises:
        ConfigError: none is named.
        PipelineError: none responds there.
    """
    prepare_client(home)
    if not has_api():
        raise ConfigError(
            "PREFECT_API_URL is not set; 'infini-llama serve' or 'prefect server start' starts a "
            "server and prints its address."
        )
    with _user_api():
        yield


def prepare_client(home: Path) -> None:
    """Set Prefect's settings of this process, before Prefect is imported.

    What the user has set stays, unless it is empty. Prefect's files go to home/prefect if the user
    has no Prefect home.
    """
    # `docker compose` passes what is not set as empty; Prefect would require an empty password.
    for name, value in list(os.environ.items()):
        if name.startswith("PREFECT_") and not value:
            del os.environ[name]
    os.environ.update(CLIENT | os.environ)
    profiles = Path.home() / ".prefect" / "profiles.toml"
    if "PREFECT_HOME" not in os.environ and not os.access(profiles, os.R_OK):
        os.environ["PREFECT_HOME"] = str((home / "prefect").resolve())


def log_into(home: Path, verbose: bool) -> None:
    """Send Prefect's log to a file, or with `verbose` to the console.

    Prefect leaves the root logger as it is if that has a handler.

    Raises:
        ConfigError: `home` cannot be used.
    """
    require_folder(home)
    if verbose:
        return
    path = home / "prefect" / "client.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


def has_api() -> bool:
    """Whether the user has a server: environment, profile or a project file names it.

    Call `prepare_client` before. Prefect takes a second to import, and its settings are read only
    if one of these files could name a server.

    Raises:
        ConfigError: PREFECT_API_URL is not an address, or a setting of Prefect is wrong.
    """
    if url := os.environ.get("PREFECT_API_URL"):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"PREFECT_API_URL={url} is not an address such as http://127.0.0.1:4200/api."
            )
        return True
    marks = {
        _profiles(): "",
        Path("prefect.toml"): "",
        Path(".env"): "PREFECT_",
        Path("pyproject.toml"): "[tool.prefect",
    }
    for path, mark in marks.items():
        if path.is_file() and mark in path.read_text(encoding="utf-8", errors="replace"):
            return client_settings().api.url is not None
    return False


def client_settings() -> "Settings":
    """Import Prefect's settings, and return them.

    Raises:
        ConfigError: one of them is wrong, from wherever Prefect has it.
    """
    try:
        from prefect.settings import get_current_settings, load_profiles

        settings = get_current_settings()
        profiles = load_profiles()
    except ValueError as error:  # also of files that are no TOML, or no UTF-8
        fault = first_fault(error) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(
            f"a setting of Prefect is wrong ({fault}); correct it where it is set: in the "
            "environment, in .env, prefect.toml or pyproject.toml of this folder, or in "
            f"{_profiles()}."
        ) from error
    profile = os.environ.get("PREFECT_PROFILE", profiles.active_name)
    if profile not in profiles.names:
        raise ConfigError(
            f"the Prefect profile {profile} does not exist; correct or unset PREFECT_PROFILE, or "
            f"name one of {', '.join(sorted(profiles.names))} as active in {_profiles()}."
        )
    certificates = None if settings.api.tls_insecure_skip_verify else settings.api.ssl_cert_file
    try:
        ssl.create_default_context(cafile=certificates)
    except OSError as error:
        raise ConfigError(
            f"PREFECT_API_SSL_CERT_FILE or SSL_CERT_FILE names {certificates}, which holds no "
            f"certificates ({error.strerror}); Prefect's client needs it for every server. Correct "
            "or unset the variable."
        ) from error
    return settings


def _check_result_storage() -> None:
    """Refuse a server without the block that PREFECT_DEFAULT_RESULT_STORAGE_BLOCK names.

    Each run loads it.

    Raises:
        ConfigError: the server lacks the block.
    """
    block = client_settings().results.default_storage_block
    if block is None:
        return
    from prefect.results import resolve_result_storage

    try:
        # `_sync` is its decorator's, for callers inside an event loop.
        resolve_result_storage(block, _sync=True)  # pyright: ignore[reportCallIssue]
    except ValueError as error:
        raise ConfigError(
            f"PREFECT_DEFAULT_RESULT_STORAGE_BLOCK={block} is no block of the Prefect server "
            f"({error}); create it there, or unset the variable: results are then files of "
            "PREFECT_HOME."
        ) from error


def _profiles() -> Path:
    return Path(os.environ.get("PREFECT_PROFILES_PATH", _prefect_home() / "profiles.toml"))


def _prefect_home() -> Path:
    return Path(os.environ.get("PREFECT_HOME", Path.home() / ".prefect")).expanduser()


def _database() -> dict[str, str]:
    """The setting for the database of a Prefect home whose path has a `?` or a `%`.

    A setting of the user's stays. Prefect writes the path into the URL as it is. SQLAlchemy ends it
    at a `?`, and from 2.1 on it decodes `%`; before, a path could not be escaped. SQLite's own URIs
    can.
    """
    home = _prefect_home()
    if not {"?", "%"} & set(str(home)):
        return {}
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings
    from sqlalchemy import URL

    refresh_global_settings_context()
    url = get_current_settings().server.database.connection_url
    if url is None or url.get_secret_value() != f"sqlite+aiosqlite:///{home}/prefect.db":
        return {}
    uri = URL.create(
        "sqlite+aiosqlite",
        database=f"file:{quote(str(home / 'prefect.db'))}",
        query={"uri": "true"},
    )
    return {"PREFECT_SERVER_DATABASE_CONNECTION_URL": uri.render_as_string()}


@contextlib.contextmanager
def _user_api() -> Iterator[None]:
    """Inside, an error of the user's server is explained.

    A server that takes connections and is silent is found at once: Prefect's client would wait for
    minutes, several times.

    Raises:
        ConfigError: a proxy of the environment cannot be used.
    """
    import httpx

    settings = client_settings()
    url = os.environ.get("PREFECT_API_URL") or str(settings.api.url)
    refuse_unusable_proxy(url)
    adapt_clients()
    proxy = proxy_variable(url)
    and_proxy = f", and the proxy that {proxy} names" if proxy else ""
    with _unreachable_explained("check PREFECT_API_URL" + and_proxy):
        # Perhaps Prefect has settings for the connection (TLS).
        with contextlib.suppress(httpx.ConnectError, httpx.ProtocolError):
            httpx.get(f"{url}/health", timeout=ANSWER_SECONDS, trust_env=not is_local(url))
            _check_version()
        yield


def _check_version() -> None:
    """Raise Prefect's error if the server is not usable.

    That is so if what answers is not its API, or one of another major version, or refuses the
    client.
    """
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        client.raise_for_api_version_mismatch()


@contextlib.contextmanager
def _unreachable_explained(action: str, server: "Server | None" = None) -> Iterator[None]:
    """Turn the errors of a server that does not respond as Prefect's API does into one sentence.

    Args:
        server: started here; its log may have the cause.
    """
    try:
        yield
    except Exception as error:
        from httpx import TransportError
        from prefect.exceptions import PrefectHTTPStatusError

        if server is not None and isinstance(error, PrefectHTTPStatusError | TransportError):
            server.refuse_database()
        cause = (
            error.__cause__ if "Failed to reach API" in str(error) and error.__cause__ else error
        )
        words = re.sub(r"(?<=//)[^/@\s]+@", "", str(cause))  # name and password of an address
        if isinstance(cause, PrefectHTTPStatusError):
            words = words.partition(" - For more information")[0]
            if cause.response.status_code in REFUSALS:
                raise ConfigError(
                    f"the Prefect server refuses this client ({words}); {action}, and "
                    "PREFECT_API_AUTH_STRING or PREFECT_API_KEY."
                ) from error
            raise PipelineError(
                f"the Prefect server answers with an error ({words}); {action}."
            ) from error
        if isinstance(cause, JSONDecodeError) or "incompatible versions" in words:
            raise ConfigError(
                f"there is no API of this version of Prefect ({words}); {action}, which ends with "
                "/api."
            ) from error
        is_of_connection = isinstance(cause, TransportError) or cause is not error
        if not is_of_connection and "Failed to reach API" not in words:
            raise
        raise PipelineError(
            f"the Prefect server does not respond ({words}); {action}. The state of a run is in "
            "its folder: the same command reports its result, or resumes it."
        ) from error


class Server:
    """A Prefect server that this process starts, and that ends with it.

    Args:
        home: the project's home; the server's log is in home/prefect.
        settings: environment variables of the server.
    """

    def __init__(self, home: Path, host: str, port: int, settings: dict[str, str]) -> None:
        self.host = host
        self.port = port
        self.settings = settings
        self.log = home / "prefect" / "server.log"
        bracketed = f"[{host}]" if ":" in host else host
        self.address = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, bracketed)
        self.process: subprocess.Popen | None = None
        self.logged_before = 0  # bytes of the log that are of earlier servers

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it, so that all its runs are executed here."""
        return is_loopback(self.host)

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
        require_folder(_prefect_home(), "PREFECT_HOME")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        _prefect_home().mkdir(parents=True, exist_ok=True)
        self.logged_before = self.log.stat().st_size if self.log.exists() else 0
        seconds = _start_timeout()
        # Two first starts would create the tables twice.
        with Lock(_prefect_home() / "server-start.lock", wait=seconds, setting="PREFECT_HOME"):
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
        """
        command = [sys.executable, exec_wrapper.__file__, "SIGKILL", str(os.getpid())]
        # -P and --app-dir: nothing in the working directory is imported.
        command += [sys.executable, "-P", "-m", "uvicorn"]
        command += ["--app-dir", str(Path(__file__).parents[2])]
        command += ["--factory", "infini_llama.flows.allowed_hosts:create_app"]
        command += ["--host", self.host, "--port", str(self.port)]
        command += ["--log-level", "error", "--lifespan", "on"]
        defaults = {
            # Prefect's own is every origin; the UI comes from the server itself.
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": (
                f"http://127.0.0.1:{self.port},http://localhost:{self.port}"
            ),
            # Prefect unpacks the UI beside its code, where this user may not write: then there
            # would be none.
            "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(_prefect_home() / "ui"),
        }
        with self.log.open("ab") as output:
            return subprocess.Popen(
                command,
                env=defaults | LEASES | os.environ | self.settings | _database(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def refuse_database(self) -> None:
        """Refuse a database that the server cannot use, as its log shows.

        Raises:
            ConfigError: it is damaged, or of another version of Prefect.
            PipelineError: its disk is full.
        """
        with self.log.open("rb") as log_file:
            log_file.seek(self.logged_before)
            text = log_file.read().decode(errors="replace")
        words = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
        place = f"that {words} names" if words in os.environ else _prefect_home() / "prefect.db"
        for fault, (what, action) in DATABASE_FAULTS.items():
            if fault in text:
                error = PipelineError if what == FULL else ConfigError
                raise error(f"Prefect's database {place} {what} (log: {self.log}); {action}.")

    def _wait_until_healthy(self, process: subprocess.Popen, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if process.poll() is not None:
                self.refuse_database()
                raise PipelineError(
                    f"the Prefect server exited with code {process.returncode}; its log is "
                    f"{self.log}. Try again, or use --no-prefect."
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
    """Seconds that a server may take to start."""
    try:
        return int(os.environ.get(START_TIMEOUT, HEALTHY_WITHIN))
    except ValueError:
        raise ConfigError(
            f"{START_TIMEOUT}={os.environ[START_TIMEOUT]} is not a number of seconds."
        ) from None


def _import_client() -> None:
    """Import Prefect's client, for this server and with its password.

    Prefect's settings name the password, wherever they are.
    """
    settings = client_settings()
    import prefect.main  # noqa: F401
    from prefect.context import refresh_global_settings_context

    adapt_clients()
    if password := settings.server.api.auth_string:
        os.environ["PREFECT_API_AUTH_STRING"] = password.get_secret_value()
    # For a process that had imported Prefect before the URL was known.
    refresh_global_settings_context()


def _drain_client() -> None:
    """Send what the client still holds: the last log lines, and events of the last task states."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (EventsWorker, APILogWorker):
        worker.drain_all(timeout=10)


def _stop(server: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        log.debug("the Prefect server did not stop within 10 s and was killed")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
