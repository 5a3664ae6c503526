"""A terminal that is closed, or a connection that is lost, while a run trains in it."""

import os
import pty
import signal
import threading
from contextlib import suppress

from support.laboratory import COMMAND, SOFTMAX_2, own_environment, processes_of


def drain(terminal: int, closed: threading.Event) -> None:
    while not closed.is_set():
        with suppress(OSError):
            os.read(terminal, 4096)


def test_a_closed_terminal_is_a_request_to_stop(lab, calm_softmax_2):
    # The calm run has made the dataset.
    command = [
        COMMAND,
        "run",
        str(lab.config),
        "runtime.name=hung-up",
        f"runtime.home={lab.home}",
        "--no-prefect",
    ]
    number = str(os.getpid())
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        os.execve(
            COMMAND,
            [*command, *SOFTMAX_2],
            own_environment(lab.home) | {"HANGUP_TEST": number},
        )
    closed = threading.Event()
    reader = threading.Thread(target=drain, args=(terminal, closed))
    reader.start()
    while lab.step("hung-up") < 13:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended before step 13"
    closed.set()
    reader.join()
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    assert not processes_of(f"HANGUP_TEST={number}")
    last = lab.attempts("hung-up")[-1]
    assert last.code == 75 and last.checkpoint_step == last.step, (
        "saved where it stood: test_kills.py resumes from that"
    )
