"""A program that becomes another command, which the kernel signals when its parent dies.

Usage: exec_wrapper.py SIGNAL PARENT_PID COMMAND...

`preexec_fn` could do the same but is unsafe beside threads; this runs in a fresh, single-threaded
interpreter and then replaces itself, so that the command keeps the process id that its parent
knows. Linux only; elsewhere it just starts the command.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT_IS_GONE = 70
# This process, for those that the command starts.
LAUNCHER = "INFINI_LLAMA_LAUNCHER_PID"


def die_with_parent(number: int, parent: int) -> None:
    """Have the kernel send this process a signal when its parent dies; end now if it has died.

    Linux only; elsewhere the process may outlive its parent.

    Args:
        number: of the signal.
        parent: process ID of the parent.
    """
    if sys.platform == "linux":
        failed = ctypes.CDLL(None, use_errno=True).prctl(
            PR_SET_PDEATHSIG, number, 0, 0, 0
        )
        if failed:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the line above could take effect
        os._exit(PARENT_IS_GONE)


def main() -> None:
    signal_name = sys.argv[1]
    parent = int(sys.argv[2])
    command = sys.argv[3:]
    die_with_parent(signal.Signals[signal_name], parent)
    os.environ[LAUNCHER] = str(os.getpid())
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
