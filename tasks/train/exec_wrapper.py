"""Becomes another command that the kernel signals when its parent dies: exec_wrapper.py SIGNAL PARENT_PID COMMAND...

`preexec_fn` could do the same but is unsafe beside threads; this runs in a fresh, single-threaded interpreter and then
replaces itself, so that the command keeps the process id that its parent knows. Linux only; elsewhere it just starts the command.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT_IS_GONE = 70
LAUNCHER = "INFINI_LLAMA_LAUNCHER_PID"  # this process, for those that the command starts


def main() -> None:
    signal_name, parent, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        number = int(signal.Signals[signal_name])
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the line above could take effect
        sys.exit(PARENT_IS_GONE)
    os.environ[LAUNCHER] = str(os.getpid())
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
