"""The Prefect server that flow runs are recorded on.

It is the user's, or one that this process starts and that ends with it. `run` starts an embedded
server for the time of the run, `serve` one with a UI, which it restarts; `deploy` needs the user's.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.flows.settings import (
    CLIENT,
    EMBEDDED,
    HEARTBEATS,
    SERVED,
    client_settings,
    profiles_file,
)
from infini_llama.flows.workarounds.allowed_hosts import ALLOWED
from infini_llama.flows.workarounds.connection import (
    adapt_clients,
    is_local,
    is_loopback,
    proxy_variable,
    refuse_unusable_proxy,
)
from infini_llama.flows.workarounds.server import USER_AND_PASSWORD, Server
from infini_llama.tasks.storage.filesystem import require_folder

if TYPE_CHECKING:
    from httpx import Response

REFUSALS = (401, 403)  # HTTP
NOT_FOUND = 404  # HTTP
UNREACHED = "Failed to reach API"  # words of Prefect's client
ANSWER_SECONDS = 15.0  # for a server of the user's


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
    if not is_loopback(host) and not os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
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

    What the user has set stays, unless it is empty; the address is without blanks around it.
    Prefect's files go to home/prefect if the user has no Prefect home.
    """
    if url := os.environ.get("PREFECT_API_URL"):
        os.environ["PREFECT_API_URL"] = url.strip()
    # `docker compose` passes what is not set as empty; Prefect 3.9.1 would require an empty
    # password. No issue upstream is known.
    for name, value in list(os.environ.items()):
        if name.startswith("PREFECT_") and not value:
            del os.environ[name]
    os.environ.update(CLIENT | os.environ)
    profiles = Path.home() / ".prefect" / "profiles.toml"
    if "PREFECT_HOME" not in os.environ and not os.access(profiles, os.R_OK):
        os.environ["PREFECT_HOME"] = str((home / "prefect").resolve())


def log_into(home: Path, verbose: bool) -> None:
    """Send Prefect's log to a file, or with `verbose` to the console.

    Prefect intentionally leaves the root logger as it is if that has a handler with a formatter.

    Raises:
        ConfigError: `home` cannot be used.
    """
    require_folder(home)
    if verbose:
        return
    path = home / "prefect" / "client.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.getLogger().addHandler(handler)


def has_api() -> bool:
    """Whether the user has a server: environment, profile or a project file names it.

    Call `prepare_client` before. Prefect takes a second to import, and its settings are read only
    if one of the files that Prefect documents for them could name a server.

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
        profiles_file(): "",
        Path("prefect.toml"): "",
        Path(".env"): "PREFECT_",
        Path("pyproject.toml"): "[tool.prefect",
    }
    for path, mark in marks.items():
        if path.is_file() and mark in path.read_text(
            encoding="utf-8", errors="replace"
        ):
            return client_settings().api.url is not None
    return False


def _check_result_storage() -> None:
    """Refuse a server without the block that PREFECT_DEFAULT_RESULT_STORAGE_BLOCK names.

    Each run loads it, and Prefect 3.9.1 does not look for it before. No issue upstream is known.

    Raises:
        ConfigError: the server lacks the block.
    """
    block = client_settings().results.default_storage_block
    if block is None:
        return
    from prefect.results import resolve_result_storage

    try:
        # `_sync` is private to Prefect 3.9.1: its decorator's, for callers inside an event loop.
        resolve_result_storage(block, _sync=True)  # pyright: ignore[reportCallIssue]
    except ValueError as error:
        raise ConfigError(
            f"PREFECT_DEFAULT_RESULT_STORAGE_BLOCK={block} is no block of the Prefect server "
            f"({error}); create it there, or unset the variable: results are then files of "
            "PREFECT_HOME."
        ) from error


@contextlib.contextmanager
def _user_api() -> Iterator[None]:
    """Inside, an error of the user's server is explained.

    A server that takes connections and is silent is found at once: Prefect's client would wait for
    a minute, its documented default, several times.

    Raises:
        ConfigError: a proxy of the environment cannot be used.
    """
    import httpx

    settings = client_settings()
    from prefect.client.orchestration import get_client

    url = os.environ.get("PREFECT_API_URL") or str(settings.api.url)
    refuse_unusable_proxy(url)
    adapt_clients()
    proxy = proxy_variable(url)
    and_proxy = f", and the proxy that {proxy} names" if proxy else ""
    with _unreachable_explained("check PREFECT_API_URL" + and_proxy):
        # Perhaps Prefect has settings for the connection (TLS).
        with contextlib.suppress(httpx.ConnectError, httpx.ProtocolError):
            httpx.get(
                f"{url}/health", timeout=ANSWER_SECONDS, trust_env=not is_local(url)
            )
            with get_client(sync_client=True) as client:
                # Also if what answers is no API of Prefect's, or refuses the client.
                client.raise_for_api_version_mismatch()
        yield


@contextlib.contextmanager
def _unreachable_explained(
    action: str, server: "Server | None" = None
) -> Iterator[None]:
    """Turn the errors of a server that does not respond as Prefect's API does into one sentence.

    Prefect 3.9.1 has no exceptions of their own for most of them, so that its words are compared.
    No issue upstream is known.

    Args:
        server: started here; its log may have the cause.
    """
    try:
        yield
    except PipelineError:
        # It has its sentence. Where a setting of Prefect is wrong, the imports below would raise.
        raise
    except Exception as error:
        from httpx import TransportError
        from prefect.exceptions import PrefectHTTPStatusError

        cause = _without_wrapper(error)
        if server is not None and isinstance(
            cause, PrefectHTTPStatusError | TransportError
        ):
            server.refuse_database()
        words = USER_AND_PASSWORD.sub("", str(cause))
        if isinstance(cause, PrefectHTTPStatusError):
            words = words.partition(" - For more information")[0]
            if cause.response.status_code in REFUSALS:
                raise ConfigError(
                    f"the Prefect server refuses this client ({words}); {action}, and "
                    "PREFECT_API_AUTH_STRING or PREFECT_API_KEY."
                ) from error
            if not _lacks_api(cause.response):
                raise PipelineError(
                    f"the Prefect server answers with an error ({words}); {action}."
                ) from error
        is_no_api = isinstance(cause, JSONDecodeError | PrefectHTTPStatusError)
        if is_no_api or "incompatible versions" in words:
            raise ConfigError(
                f"there is no API of this version of Prefect ({words}); {action}, which ends with "
                "/api."
            ) from error
        is_of_connection = isinstance(cause, TransportError)
        if not is_of_connection and UNREACHED not in str(error):
            raise
        raise PipelineError(
            f"the Prefect server does not respond ({words}); {action}. The state of a run is in "
            "its folder: the same command reports its result, or resumes it."
        ) from error


def _lacks_api(response: "Response") -> bool:
    """Whether the server has no page with its version, which each API of Prefect has."""
    is_of_version = response.request.url.path.endswith("/admin/version")
    return is_of_version and response.status_code == NOT_FOUND


def _without_wrapper(error: Exception) -> BaseException:
    """The error that Prefect's client has put into `error`, or `error` itself."""
    from prefect.deployments.runner import DeploymentApplyError

    if UNREACHED in str(error):
        return error.__cause__ or error
    if isinstance(error, DeploymentApplyError):
        return error.__cause__ or error.__context__ or error
    return error
