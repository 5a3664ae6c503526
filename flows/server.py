"""Where flow runs are recorded: the Prefect API that the user has, or an embedded one that lives and dies with this process.

Prefect's own temporary server outlives a `kill -9` of its flow and speaks on the user's terminal. This one is the same
program, started in a session of its own, ended by the kernel with its parent, and writing into a file.
"""

import contextlib
import http.client
import importlib.util
import ipaddress
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.flows.allowed_hosts import ALLOWED
from infini_llama.flows.settings import CLIENT, EMBEDDED, HEALTHY_WITHIN, SERVED
from infini_llama.tasks.storage.locks import Lock

ANSWER_SECONDS = 15.0  # for a server of the user's
EXEC_WRAPPER = Path(__file__).parents[1] / "tasks" / "train" / "exec_wrapper.py"
log = logging.getLogger("infini_llama.prefect")


@contextlib.contextmanager
def prefect_api(home: Path) -> Iterator[None]:
    """Inside, flows can be called: PREFECT_API_URL leads to a server that answers.

    Args:
        home: the project's home; Prefect's own files go to home/prefect where the user has no Prefect home.

    Raises:
        ConfigError: PREFECT_API_URL is not an address.
        PipelineError: the embedded server did not come up, or the user's does not answer.
    """
    for name, value in CLIENT.items():
        os.environ.setdefault(name, value)
    folder = _prefect_home(home)
    if _has_api_url(folder):
        with _answering():
            yield
        return
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "1")  # a server on this machine that is gone does not come back
    os.environ.setdefault("PREFECT_API_REQUEST_TIMEOUT", "15")  # seconds; one that hangs holds up the run's end as long
    folder.mkdir(parents=True, exist_ok=True)
    records = home / "prefect" / "server.log"
    records.parent.mkdir(parents=True, exist_ok=True)
    server = None
    try:
        with Lock(
            folder / "embedded-server.lock", wait=HEALTHY_WITHIN
        ):  # two first starts would create the tables twice
            port = _free_port()
            server = _start(records, "127.0.0.1", port, EMBEDDED)
            os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
            _bypass_proxy("127.0.0.1")
            _import_client()  # which takes a second that the server needs anyway
            _wait_until_healthy(server, "127.0.0.1", port, records)
        yield
    finally:
        os.environ.pop("PREFECT_API_URL", None)
        if server is not None:
            if server.poll() is None:
                _drain_client()
            _stop(server)


@contextlib.contextmanager
def lasting_api(home: Path, host: str, port: int, names: Sequence[str] = ()) -> Iterator["Server | None"]:
    """Inside, PREFECT_API_URL leads to the user's server, or to one with a UI and a database that stays, at this address.

    Args:
        names: under which others reach this machine, beside `host` and localhost; requests to other hosts are refused.

    Yields:
        the server that was started here; None: it is the user's.

    Raises:
        ConfigError: the address is taken, or other machines reach it and it has no password.
        PipelineError: the server did not come up.
    """
    for name, value in CLIENT.items():
        os.environ.setdefault(name, value)
    folder = _prefect_home(home)
    if _has_api_url(folder):
        with _answering():
            yield None
        return
    if password := os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        os.environ.setdefault("PREFECT_API_AUTH_STRING", password)
    elif not _is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines, and anyone who reaches the server can run programs "
            "here; set "
            "PREFECT_SERVER_API_AUTH_STRING=USER:PASSWORD, or use --host 127.0.0.1."
        )
    _refuse_taken(host, port)
    folder.mkdir(parents=True, exist_ok=True)
    records = home / "prefect" / "server.log"
    records.parent.mkdir(parents=True, exist_ok=True)
    address = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    os.environ["PREFECT_API_URL"] = f"http://{address}:{port}/api"
    _bypass_proxy(address)
    server = Server(host, address, port, records, folder / "embedded-server.lock", names)
    try:
        server.start()
        _import_client()
        yield server
    finally:
        os.environ.pop("PREFECT_API_URL", None)
        server.stop()


class Server:
    """The server of `serve`, which is started again if it ends: the runs and the worker wait for it meanwhile."""

    def __init__(
        self, host: str, address: str, port: int, records: Path, lock: Path, names: Sequence[str] = ()
    ) -> None:
        self.host, self.address, self.port, self.records, self.lock = host, address, port, records, lock
        self.names = (host, *names)
        self.process: subprocess.Popen | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it, so that all its runs are executed here."""
        return _is_loopback(self.host)

    def start(self) -> None:
        with Lock(self.lock, wait=HEALTHY_WITHIN):
            self.process = _start(self.records, self.host, self.port, SERVED | {ALLOWED: ",".join(self.names)})
            _wait_until_healthy(self.process, self.address, self.port, self.records)

    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def restart(self) -> None:
        """Raises PipelineError if it does not come up again."""
        assert self.process is not None
        log.warning("the Prefect server ended with code %d; it is started again (log: %s)", self.process.returncode,
                    self.records)  # fmt: skip
        self.start()

    def stop(self) -> None:
        if self.process is not None:
            _stop(self.process)


@contextlib.contextmanager
def given_api(home: Path) -> Iterator[None]:
    """Inside, Prefect's client can be used on the user's own server.

    Raises:
        ConfigError: none is named.
        PipelineError: none answers there.
    """
    for name, value in CLIENT.items():
        os.environ.setdefault(name, value)
    if not _has_api_url(_prefect_home(home)):
        raise ConfigError(
            "PREFECT_API_URL is not set; 'infini-llama serve' or 'prefect server start' starts a server and prints "
            "its address."
        )
    with _answering():
        yield


def log_into(home: Path, verbose: bool) -> None:
    """Send Prefect's log to a file, or with `verbose` to the console: it leaves the root logger alone if that has a handler."""
    if verbose:
        return
    path = home / "prefect" / "client.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Turns the errors of a server that does not answer into one sentence.

    One that takes connections and is silent is tried first: Prefect's own client would wait for minutes, several times.
    """
    import httpx
    from prefect.settings import get_current_settings

    try:
        with contextlib.suppress(httpx.ConnectError, httpx.ProtocolError):  # perhaps Prefect has settings for it (TLS)
            url = os.environ.get("PREFECT_API_URL") or get_current_settings().api.url
            httpx.get(f"{url}/health", timeout=ANSWER_SECONDS)
        yield
    except Exception as error:
        if not unreachable(error):
            raise
        raise PipelineError(f"the Prefect server does not respond ({error}); check PREFECT_API_URL.") from error


def unreachable(error: BaseException) -> bool:
    """Whether `error` is that of a server which does not answer."""
    from httpx import TransportError

    return isinstance(error, TransportError) or "Failed to reach API" in str(error)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refuse_taken(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{host}:{port} cannot be used ({error.strerror}); choose another --port, or set PREFECT_API_URL to the server there."
            ) from error


def _prefect_home(home: Path) -> Path:
    """Prefect's home: the user's if there is one, else the project's own."""
    if "PREFECT_HOME" not in os.environ and not (Path.home() / ".prefect" / "profiles.toml").exists():
        os.environ["PREFECT_HOME"] = str((home / "prefect").resolve())
    return Path(os.environ.get("PREFECT_HOME", Path.home() / ".prefect")).expanduser()


def has_api(home: Path) -> bool:
    """Whether the user has a Prefect server: PREFECT_API_URL, a profile or a project file names it."""
    return _has_api_url(_prefect_home(home))


def prepare_client(home: Path) -> None:
    """Prefect's settings of this process, before Prefect is imported."""
    for name, value in CLIENT.items():
        os.environ.setdefault(name, value)
    _prefect_home(home)


def _has_api_url(prefect_home: Path) -> bool:
    """Whether environment, profile or a project file names an API; Prefect, slow to import, is asked only if one could."""
    if url := os.environ.get("PREFECT_API_URL"):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"PREFECT_API_URL={url} is not an address such as http://127.0.0.1:4200/api.")
        return True
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH", prefect_home / "profiles.toml"))
    speaks_of_prefect = {
        profiles: "",
        Path("prefect.toml"): "",
        Path(".env"): "PREFECT_",
        Path("pyproject.toml"): "[tool.prefect",
    }
    for path, mark in speaks_of_prefect.items():
        if path.is_file() and mark in path.read_text(encoding="utf-8", errors="replace"):
            from prefect.settings import get_current_settings

            return get_current_settings().api.url is not None
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(records: Path, host: str, port: int, settings: dict[str, str]) -> subprocess.Popen:
    """The command of Prefect's SubprocessASGIServer, behind the wrapper that ties it to this process and a check of the host."""
    spec = importlib.util.find_spec("prefect")
    if spec is None or spec.origin is None:
        raise PipelineError("prefect is not installed; install it, or use --no-prefect.")
    command = [sys.executable, str(EXEC_WRAPPER), "SIGKILL", str(os.getpid()), sys.executable, "-m", "uvicorn"]
    command += ["--app-dir", str(Path(spec.origin).parents[1])]  # before the working directory
    command += ["--factory", "infini_llama.flows.allowed_hosts:create_app"]
    command += ["--host", host, "--port", str(port), "--log-level", "error", "--lifespan", "on"]
    # Prefect's default is every origin; the UI comes from the server itself.
    origins = {"PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://127.0.0.1:{port},http://localhost:{port}"}
    with records.open("ab") as log_file:
        return subprocess.Popen(
            command,
            env=origins | os.environ | settings,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )


def _bypass_proxy(host: str) -> None:
    """Keeps a proxy of the environment out of the way to this machine itself."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [entry for entry in os.environ.get(name, "").split(",") if entry]
        if host not in hosts:
            os.environ[name] = ",".join([*hosts, host])


def _import_client() -> None:
    """Prefect's client, for this server."""
    import prefect.main  # noqa: F401
    from prefect.context import refresh_global_settings_context

    refresh_global_settings_context()  # for a process that had imported Prefect before the URL was known


def _wait_until_healthy(server: subprocess.Popen, host: str, port: int, records: Path) -> None:
    deadline = time.monotonic() + HEALTHY_WITHIN
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise PipelineError(
                f"the Prefect server exited with code {server.returncode}; its log is {records}. Try again, or use --no-prefect."
            )
        connection = http.client.HTTPConnection(host, port, timeout=5)
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
        f"the Prefect server did not answer within {HEALTHY_WITHIN:.0f} s; its log is {records}. Try again, or use --no-prefect."
    )


def _drain_client() -> None:
    """Sends what the client still holds: the last log lines and the events that carry the last task states."""
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
