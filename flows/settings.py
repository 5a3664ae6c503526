"""Prefect's settings of every process.

This is the one source that `run`, `serve` and `deploy` set them from. They are documented, except
those that begin with PREFECT__.
The files in deploy/ repeat them, since their readers do not read Python; a test compares both.
"""

import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.records.record import first_fault

if TYPE_CHECKING:
    from prefect.settings import Settings

# Seconds that a server may take to start, where the user has not set it.
HEALTHY_WITHIN = 180

START_TIMEOUT = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"

# The events that the automation for silent runs watches.
HEARTBEATS = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}  # seconds
# For every run that a worker starts, in the job variables of its deployment, and for the worker
# itself. PYTHONSAFEPATH: a folder named tasks/ in the working directory must not shadow ours.
# Retries: 2, 4, 8 ... 256 seconds apart, eight minutes in all, in which the server can be started
# again.
RUN = HEARTBEATS | {
    "DO_NOT_TRACK": "1",
    "PYTHONSAFEPATH": "1",
    "PREFECT_CLIENT_MAX_RETRIES": "8",
}
# For workers: a run never starts a server of its own where the configured one is missing.
WORKER = RUN | {"PREFECT_SERVER_EPHEMERAL_ENABLED": "false"}
# Without a pipe to the worker, whose death would otherwise be the run's; its logs are files, and
# lines on its page.
STREAM_OUTPUT = False
TAG = "infini-llama"  # of every run of this program, also beside those of others on a server

# For a process that calls flows or Prefect's client; what the user has set stays.
CLIENT = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    START_TIMEOUT: str(HEALTHY_WITHIN),
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}
# For the servers that this program starts; in memory, Prefect's default, leases end with the
# server: a healthy run would be ended at the next renewal, and its slot never be free again.
# Needed with Prefect 3.9.1. Upstream: PrefectHQ/prefect#17415 is open, and a maintainer would make
# files the default (PrefectHQ/prefect#20090). Test: `test_leases_are_kept_in_memory`.
LEASES = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    )
}
# For the embedded server only: no UI, no catalogue of blocks (a second of a first start), and no
# memo that it was written. PREFECT__SERVER_EPHEMERAL and PREFECT__SERVER_FINAL are private to
# Prefect 3.9.1, which sets both for its own temporary server.
EMBEDDED = {
    "PREFECT_SERVER_API_BASE_PATH": "/api",
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
    "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}
# For servers with a UI, here and in deploy/: the UI asks the address that it came from, whatever
# the browser calls this machine.
SERVER = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_UI_API_URL": "/api",
}
# For the server of `serve`. A worker executes what it is given. A browser sends a POST without a
# content type from any page and without asking, so that origins alone do not protect it; such a
# request has no CSRF token.
SERVED = SERVER | {"PREFECT_SERVER_API_BASE_PATH": "/api", "PREFECT__SERVER_FINAL": "1"}


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
            f"{profiles_file()}."
        ) from error
    profile = os.environ.get("PREFECT_PROFILE", profiles.active_name)
    if profile not in profiles.names:
        raise ConfigError(
            f"the Prefect profile {profile} does not exist; correct or unset PREFECT_PROFILE, or "
            f"name one of {', '.join(sorted(profiles.names))} as active in {profiles_file()}."
        )
    certificates = (
        None if settings.api.tls_insecure_skip_verify else settings.api.ssl_cert_file
    )
    try:
        ssl.create_default_context(cafile=certificates)
    except OSError as error:
        raise ConfigError(
            f"PREFECT_API_SSL_CERT_FILE or SSL_CERT_FILE names {certificates}, which holds no "
            f"certificates ({error.strerror}); Prefect's client needs it for every server. Correct "
            "or unset the variable."
        ) from error
    return settings


def profiles_file() -> Path:
    """The file with the user's profiles of Prefect."""
    return Path(
        os.environ.get("PREFECT_PROFILES_PATH", prefect_home() / "profiles.toml")
    )


def prefect_home() -> Path:
    """The folder of Prefect's own files."""
    return Path(os.environ.get("PREFECT_HOME", Path.home() / ".prefect")).expanduser()
