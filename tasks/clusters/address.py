"""Addresses of this machine, and whether another one can be reached."""

import array
import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915  # the IPv4 address of an interface (netdevice(7), Linux)
SECONDS = 3.0  # that a connection may take


def own_address_towards(host: str) -> str | None:
    """The address from which this machine reaches `host`; None where no way leads there. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return probe.getsockname()[0]
    except OSError:
        return None


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one, the loopback's aside."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            try:
                fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            address = socket.inet_ntoa(bytes(request[20:24]))
            if not address.startswith("127."):
                found[name] = address
    return found


def interface_towards(host: str) -> str | None:
    """The name of the interface by which this machine reaches `host`, or by which others reach it where `host` is its own name."""
    address = own_address_towards(host)
    return next((name for name, own in addresses().items() if own == address), None)


def own_address() -> str | None:
    """The address by which other machines probably reach this one; None where it has none but the loopback's."""
    outward = own_address_towards("192.0.2.1")  # TEST-NET-1 (RFC 5737): the way that everything unknown takes
    known = list(addresses().values())
    return outward if outward in known else next(iter(known), None)


def fault_of_reaching(host: str, port: int) -> str | None:
    """What is wrong with the way to host:port, in words; None where something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=SECONDS):
            return None
    except socket.gaierror as error:
        return f"the name {host} is not known there ({error.strerror})"
    except TimeoutError:
        return f"no answer within {SECONDS:.0f} s; a firewall may drop the packets"
    except OSError as error:
        return f"{error.strerror or error}"
