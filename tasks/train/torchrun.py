"""torchrun, which stops after every signal that schedulers send, and looks up no name.

Of SIGUSR1, SIGUSR2 and SIGXCPU, torchrun itself would die, and its workers with it before they have
saved.
For its events it would look up this machine's name, which takes minutes where no name server
answers. The name is in nothing that is used: launch.py gives the address by which the nodes reach
this one.
"""

import socket

from torch.distributed.run import main  # pyright: ignore[reportUnknownVariableType]

from infini_llama.tasks.runs.signals import time_limits_as_termination


def unresolved_name(name: str = "") -> str:
    """In place of `socket.getfqdn`: the name as it is."""
    return name or socket.gethostname()


if __name__ == "__main__":
    time_limits_as_termination()
    socket.getfqdn = unresolved_name
    main()
