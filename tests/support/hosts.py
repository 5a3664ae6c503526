"""A host without a network: its own name is in no file, and its name server does not answer."""

import shutil
import subprocess
import sys
from pathlib import Path

UNSHARE = [
    "unshare",
    "--map-root-user",
    "--uts",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
NAME_SERVER = """
import socket
questions = socket.socket(type=socket.SOCK_DGRAM)
questions.bind(("127.0.0.53", 53))
while True:
    print(questions.recv(512), flush=True)
"""
BEGIN = """
ip link set lo up && hostname nosuch.invalid
mount --bind "$1/resolv.conf" /etc/resolv.conf && mount --bind "$1/hosts" /etc/hosts
"$2" -c "$3" > "$1/name-server.log" 2>&1 &
shift 3
exec "$@"
"""


def can_make_hosts() -> bool:
    """Whether this user can make a host on this machine."""
    if sys.platform != "linux" or not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return (
        subprocess.run(
            [*UNSHARE, "ip", "link", "set", "lo", "up"],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )


def on_nameless_host(
    folder: Path, command: list[str], hosts: str = "127.0.0.1 localhost\n"
) -> list[str]:
    """What runs `command` on such a host, which ends with it.

    Args:
        folder: of the host's files; name-server.log has a line for each question to its name server.
        hosts: /etc/hosts.
    """
    (folder / "resolv.conf").write_text("nameserver 127.0.0.53\n")
    (folder / "hosts").write_text(hosts)
    return [
        *UNSHARE,
        "sh",
        "-ec",
        BEGIN,
        "sh",
        str(folder),
        sys.executable,
        NAME_SERVER,
        *command,
    ]
