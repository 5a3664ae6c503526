"""Prefect's settings of every process.

This is the one source that `run`, `serve` and `deploy` set them from.
The files in deploy/ repeat them, since their readers do not read Python; a test compares both.
"""

HEALTHY_WITHIN = 180  # seconds that a server may take to start, where the user has not set it

START_TIMEOUT = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"

# The events that the automation for silent runs watches.
HEARTBEATS = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}  # seconds
# For every run that a worker starts, in the job variables of its deployment, and for the worker
# itself. PYTHONSAFEPATH: a folder named tasks/ in the working directory must not shadow ours.
# Retries: 2, 4, 8 ... 256 seconds apart, eight minutes in all, in which the server can be started
# again.
RUN = HEARTBEATS | {"DO_NOT_TRACK": "1", "PYTHONSAFEPATH": "1", "PREFECT_CLIENT_MAX_RETRIES": "8"}
# For workers: a run never starts a server of its own where the configured one is missing.
WORKER = RUN | {"PREFECT_SERVER_EPHEMERAL_ENABLED": "false"}
# Without a pipe to the worker, whose death would otherwise be the run's; its logs are files, and
# lines on its page.
STREAM_OUTPUT = False
TAGS = ("infini-llama",)

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
LEASES = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    )
}
# For the embedded server only: no UI, no catalogue of blocks (a second of a first start), and no
# memo that it was written.
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
