"""torchrun without a look-up of this machine's name for its events.

Where no name server answers, that look-up takes minutes. The name is in nothing that is used:
launch.py gives the address by which the nodes reach this one.
"""

import socket

from torch.distributed.run import main  # pyright: ignore[reportUnknownVariableType]


def unresolved_name(name: str = "") -> str:
    """In place of `socket.getfqdn`: the name as it is."""
    return name or socket.gethostname()


if __name__ == "__main__":
    socket.getfqdn = unresolved_name
    main()
