"""The connection to Prefect's server, with or without a proxy.

A server on this machine is reached without a proxy, one on another machine through the
environment's proxy. Downloads and the training's own programs need a proxy all the same, so its
variables stay as the user has set them.
"""

import ipaddress
import os
import socket
from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from infini_llama.configs.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches this address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_local(url: str) -> bool:
    """Whether a server at this address is on this machine."""
    return _is_own(urlsplit(url).hostname or "")


@cache
def _is_own(host: str) -> bool:
    """Whether this machine has the address: a program can only listen at addresses of its own."""
    if not host:
        return False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except (OSError, UnicodeError):
        # A name that is not known here is at most known to a proxy.
        return False
    return True


@cache
def adapt_clients(patient: bool = False) -> None:
    """Change Prefect's clients of this process in what Prefect has no settings for.

    The clients of a server on this machine use no proxy.

    Needed with Prefect 3.9.1. Upstream: PrefectHQ/prefect#9917, open, asks for a proxy of Prefect's
    own; PrefectHQ/prefect#16537, closed, has web sockets follow NO_PROXY, as requests do. Test:
    `test_a_server_on_this_machine_is_asked_through_the_proxy`.

    A first connection that fails is tried again, if `patient`.

    Needed with Prefect 3.9.1. Upstream: PrefectHQ/prefect#20462, open. Test:
    `test_a_first_connection_is_not_tried_again`.

    The module `prefect._internal.websockets` and the attribute `_has_connected` are private to that
    version.

    Args:
        patient: a request is also tried again where the client has not reached the server before;
            it may be about to start again.
    """
    from prefect._internal import websockets
    from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient

    def adapted(init: Callable[..., None]) -> Callable[..., None]:
        def initialize(self: Any, *arguments: Any, **settings: Any) -> None:
            local = is_local(str(settings.get("base_url", "")))
            defaults: dict[str, Any] = {"trust_env": False} if local else {}
            init(self, *arguments, **(defaults | settings))
            self._has_connected = patient

        return initialize

    for client in (PrefectHttpxSyncClient, PrefectHttpxAsyncClient):
        client.__init__ = adapted(client.__init__)
    connect: Any = websockets.connect  # pyright: ignore[reportPrivateImportUsage]

    def adapted_connect(uri: str, **settings: Any) -> Any:
        defaults = {"proxy": None} if is_local(uri) else {}
        return connect(uri, **(defaults | settings))

    websockets.connect = adapted_connect  # pyright: ignore


def proxy_variable(url: str) -> str | None:
    """The environment variable whose proxy is used for `url`."""
    address = urlsplit(url)
    if is_local(url) or proxy_bypass(address.netloc):
        return None
    for name in (f"{address.scheme}_proxy", "all_proxy"):
        if getproxies().get(name.removesuffix("_proxy")):
            return name if os.environ.get(name) else name.upper()
    return None


def refuse_unusable_proxy(url: str) -> None:
    """Refuse a proxy of the environment that Prefect's client cannot be made with.

    One for another kind of address is enough: a client prepares its proxies before it is asked for
    an address. Prefect 3.9.1 raises the error of httpx as it is. No issue upstream is known.

    Raises:
        ConfigError: `url` is on another machine, and there is such a proxy.
    """
    import httpx

    if is_local(url):
        return
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        proxy = getproxies().get(name.removesuffix("_proxy")) or None
        if proxy and "://" not in proxy:
            proxy = f"http://{proxy}"
        try:
            httpx.Client(proxy=proxy, trust_env=False).close()
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            name = name if os.environ.get(name) else name.upper()
            raise ConfigError(
                f"{name} names a proxy that Prefect's client cannot use, and PREFECT_API_URL={url} "
                "is on another machine; set it to http://HOST:PORT, or to socks5://HOST:PORT after "
                "'pip install httpx[socks]', or unset it."
            ) from error
