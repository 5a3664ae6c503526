"""Addresses of this machine, and ways to others."""

import socket

from infini_llama.tasks.clusters.address import Listener, addresses, fault_of_reaching, interface_towards, own_address


def test_the_one_who_listens_is_known_by_its_greeting():
    with Listener(0, "run a") as listener:
        assert fault_of_reaching("127.0.0.1", listener.port, "run a") is None
        assert fault_of_reaching("127.0.0.1", listener.port, "run b") == "something else answers there"
    assert fault_of_reaching("127.0.0.1", listener.port, "run a") == "Connection refused"


def test_what_is_wrong_with_a_way_is_said():
    assert "is not known there" in str(fault_of_reaching("no-such-host.invalid", 1, "x"))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes calls and says nothing
        assert "no answer within 3 s" in str(fault_of_reaching("127.0.0.1", silent.getsockname()[1], "x"))


def test_the_port_is_free_again_at_once():
    with Listener(0, "x") as first:
        pass
    with Listener(first.port, "x") as second:
        assert second.port == first.port


def test_the_interface_of_an_own_address_is_its_own():
    for name, address in addresses().items():
        assert interface_towards(address) == name
    assert own_address() in {None, *addresses().values()}
    assert interface_towards("127.0.0.1") is None  # nobody else comes by the loopback
