"""Address of an attempt's rendezvous, at which the torchruns of all nodes find each other.

Node 0 chooses it, and writes it into the attempt's folder for the others. A machine that is alone
uses its loopback address, whatever its name is and whether that can be resolved.
"""

import array
import fcntl
import socket
import struct
import time
from pathlib import Path

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.records.status import Endpoint
from infini_llama.tasks.storage.files import write_atomic

ENDPOINT = "rendezvous.json"
POLL_SECONDS = 0.5
LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = ("lo", "lo0")  # of its interface: Linux, macOS
JOIN_TIMEOUT = 600  # seconds that the nodes wait for each other
SIOCGIFADDR = 0x8915  # the IPv4 address of an interface (netdevice(7), Linux)


def host_rendezvous(attempt_dir: Path, plan: EnvironmentPlan) -> Endpoint:
    """Choose where this node's torchrun listens, and write it down for other nodes.

    On one machine, a free port (0) is chosen by torchrun as it begins to listen, so that no other
    program can take it before.

    Raises:
        ConfigError: this machine has no address that others reach.
        PipelineError: the port is in use.
    """
    name = socket.gethostname()
    if plan.nnodes == 1:
        port = 0 if plan.port == "auto" else _free_port(plan)
        return Endpoint(address=LOOPBACK, port=port, host=name)
    address = own_address() if plan.master_addr == "auto" else plan.master_addr
    if address is None:
        raise ConfigError(
            f"environment.master_addr=auto, but {name} has only a loopback address; "
            "set it to the address at which the other nodes reach this machine."
        )
    endpoint = Endpoint(address=address, port=_free_port(plan), host=name)
    write_atomic(attempt_dir / ENDPOINT, endpoint.model_dump_json())
    return endpoint


def _free_port(plan: EnvironmentPlan) -> int:
    try:
        with socket.create_server(
            ("", 0 if plan.port == "auto" else plan.port)
        ) as free:
            port: int = free.getsockname()[1]
    except OSError as fault:
        raise PipelineError(
            f"node 0 ({socket.gethostname()}) cannot listen at "
            f"environment.master_port={plan.port} ({fault.strerror}); "
            "end the program that listens there, choose another port or use auto."
        ) from fault
    return port


def read_endpoint(attempt_dir: Path) -> Endpoint | None:
    """The endpoint that node 0 has written.

    None before it does, or if the filesystem does not answer.
    """
    try:
        return Endpoint.model_validate_json((attempt_dir / ENDPOINT).read_bytes())
    except (OSError, ValueError):
        return None


def gloo_interface(endpoint: Endpoint) -> dict[str, str]:
    """The variable that keeps gloo to the interface by which this node reaches the others.

    Without it, gloo would look up the host's name.

    NCCL has no such variable here: it chooses among the interfaces, and looks up no name.
    """
    if endpoint.address == LOOPBACK:
        interfaces = [
            name for _, name in socket.if_nameindex() if name in LOOPBACK_NAMES
        ]
    else:
        # That of the route to node 0; on node 0 itself, which is reached by its own address, the
        # one that has it.
        address = own_address_towards(endpoint.address)
        interfaces = [name for name, value in addresses().items() if value == address]
    return {"GLOO_SOCKET_IFNAME": interfaces[0]} if interfaces else {}


def await_endpoint(attempt_dir: Path) -> Endpoint:
    """The endpoint, as soon as node 0 has written it.

    Raises:
        PipelineError: it does not within JOIN_TIMEOUT.
    """
    until = time.monotonic() + JOIN_TIMEOUT
    while (endpoint := read_endpoint(attempt_dir)) is None:
        if time.monotonic() > until:
            raise PipelineError(f"node 0 has not started within {JOIN_TIMEOUT} s.")
        time.sleep(POLL_SECONDS)
    return endpoint


def own_address_towards(host: str) -> str | None:
    """The address from which this machine reaches `host`; None where there is no route.

    Nothing is sent.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return probe.getsockname()[0]
    except OSError:
        return None


def addresses() -> dict[str, str]:
    """The address of each interface that has one, except the loopback's."""
    by_interface: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            try:
                fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                # The interface has no address.
                continue
            address = socket.inet_ntoa(bytes(request[20:24]))
            if not address.startswith("127."):
                by_interface[name] = address
    return by_interface


def own_address() -> str | None:
    """The address by which other machines probably reach this one.

    None where it has only the loopback's.
    """
    # TEST-NET-1 (RFC 5737): takes the default route.
    outward = own_address_towards("192.0.2.1")
    all_addresses = list(addresses().values())
    return outward if outward in all_addresses else next(iter(all_addresses), None)
