"""Prefect's server with a check of the Host header before it, as `uvicorn --factory` starts it.

A page of any site can have its own name resolve to this machine (DNS rebinding). Its requests are
then of the server's own origin, so CORS and CSRF tokens do not stop them; only the name in the Host
header shows where the page came from.

Needed with Prefect 3.9.1. Upstream: no issue is known. Test: `test_a_server_answers_to_any_host`.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

# In the environment of the server: names beside LOOPBACK, separated by commas.
ALLOWED = "INFINI_LLAMA_ALLOWED_HOSTS"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def create_app() -> "ASGIApp":
    """Prefect's application, which only requests to allowed hosts reach."""
    from prefect.server.api.server import create_app as create_prefect_app

    names = [name for name in os.environ.get(ALLOWED, "").split(",") if name]
    return AllowedHosts(create_prefect_app(), names)


class AllowedHosts:
    """Answers 400 to requests for other hosts than this server.

    Allowed are the names in LOOPBACK and in `names`, and the address that the request arrived at.
    """

    def __init__(self, app: "ASGIApp", names: list[str]) -> None:
        self.app = app
        self.hosts = {*LOOPBACK, *map(_bracketed, names)}

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await send(
                {"type": "http.response.start", "status": 400, "headers": headers}
            )
            await send(
                {
                    "type": "http.response.body",
                    "body": b"Host not allowed; see infini-llama serve --allow-host.",
                }
            )

    def _is_allowed(self, scope: "Scope") -> bool:
        sent = [
            value.decode("latin-1")
            for name, value in scope["headers"]
            if name == b"host"
        ]
        if len(sent) != 1:
            return False
        address = scope.get("server") or ("",)
        arrived_at = _bracketed(str(address[0]))
        return _without_port(sent[0]) in {*self.hosts, arrived_at}


def _without_port(host: str) -> str:
    """The name in a Host header, in lower case; empty if what follows the name is no port."""
    end = host.find("]") + 1 or host.find(":")
    name = host[:end] if end > 0 else host
    rest = host[end:] if end > 0 else ""
    is_port = rest.startswith(":") and rest[1:].isdigit()
    return name.lower() if is_port or not rest else ""


def _bracketed(name: str) -> str:
    """The address as a Host header has it: IPv6 in brackets."""
    return (
        f"[{name.lower()}]"
        if ":" in name and not name.startswith("[")
        else name.lower()
    )
