"""Addresses of this machine, and ways to others."""

import socket

from infini_llama.tasks.clusters.address import addresses, fault_of_reaching, interface_towards, own_address


def test_errors_of_a_location_are_reported():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert fault_of_reaching("127.0.0.1", port) is None
    assert fault_of_reaching("127.0.0.1", port) == "Connection refused"
    assert "is not known there" in str(fault_of_reaching("no-such-host.invalid", 1))


def test_the_interface_is_that_of_the_nodes_address():
    for name, address in addresses().items():
        assert interface_towards(address) == name
    assert own_address() in {None, *addresses().values()}
    assert interface_towards("127.0.0.1") is None  # nobody else comes by the loopback
