"""Addresses and interfaces of this machine (IPv4)."""

import array
import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915  # the IPv4 address of an interface (netdevice(7), Linux)


def own_address_towards(host: str) -> str | None:
    """The address from which this machine reaches `host`; None where there is no route. Nothing is sent."""
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
            except OSError:  # it has none
                continue
            address = socket.inet_ntoa(bytes(request[20:24]))
            if not address.startswith("127."):
                by_interface[name] = address
    return by_interface


def interface_towards(host: str) -> str | None:
    """The interface by which this machine reaches `host`, or by which others reach it where `host` is its own name."""
    address = own_address_towards(host)
    return next((name for name, own in addresses().items() if own == address), None)


def own_address() -> str | None:
    """The address by which other machines probably reach this one; None where it has only the loopback's."""
    outward = own_address_towards("192.0.2.1")  # TEST-NET-1 (RFC 5737): takes the default route
    known = list(addresses().values())
    return outward if outward in known else next(iter(known), None)
