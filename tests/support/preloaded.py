"""Commands whose processes are forks of one that has imported torch, which takes most of the time of a short run.

The processes are real: each has its process ID, parent, session, signals, descriptors, command line and environment as if it had been
executed, and imports all of this project itself. Only the libraries are there already. Forked are `infini-llama`, torchrun and its
ranks, and `python -c` and `python -m` where a test starts them. Every other program is executed. Each fork has a stack of its own
(a greenlet): torch formats the whole stack in every step, and torchrun looks up the module of each frame.

    python preloaded.py SOCKET PADDING     serves requests on the inherited socket, one at a time, until that is closed
"""

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import logging
import multiprocessing.process
import multiprocessing.resource_tracker
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

from greenlet import greenlet

COMMAND = str(Path(sys.executable).with_name("infini-llama"))
LIBRARIES = (
    "torch.distributed.run",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.utils.tensorboard",
    "matplotlib.figure",
    "numpy",
    "pyarrow.parquet",
    "pydantic.dataclasses",
    "pydantic.json_schema",
    "pydantic.type_adapter",
    "pydantic.types",
    "rich.markdown",
    "safetensors.torch",
    "tokenizers",
    "yaml",
)
TORCHRUNS = (
    ["-m", "torch.distributed.run"],
    ["-m", "infini_llama.tasks.train.torchrun"],
)
SPACE = 30_000  # bytes for the command line, and as many for the environment, of the processes
PADDING = "PADDING"


class Forked:
    """A process that the server has started; the part of `subprocess.Popen` that tests use."""

    def __init__(self, server: "Server", pid: int) -> None:
        self.server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.server.request({"poll": self.pid}, [])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process with torch, and requests to it."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.socket, theirs = socket.socketpair()
        environment = os.environ | {PADDING: "-" * SPACE, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(theirs.fileno()), "-" * SPACE]
        self.process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def request(self, request: dict, descriptors: list[int]) -> Any:
        """The answer. A request that is interrupted ends the process: what it still answers would be taken for the next one's answer."""
        try:
            return self.exchange(request, descriptors)
        except BaseException:
            self.socket.close()
            self.process.kill()
            self.process.wait()
            self.begin()
            raise

    def exchange(self, request: dict, descriptors: list[int]) -> Any:
        payload = json.dumps(request).encode()
        ancillary = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            if descriptors
            else []
        )
        self.socket.sendmsg([len(payload).to_bytes(8, "big")], ancillary)
        self.socket.sendall(payload)
        answer = b""
        while not answer.endswith(b"\n"):
            part = self.socket.recv(4096)
            assert part, "the process with torch has ended"
            answer += part
        return json.loads(answer)

    def start(self, command: list[str], env: dict[str, str], output: int) -> Forked:
        """Start `command` in a session of its own, with nothing as its standard input.

        Args:
            output: descriptor of its standard output and standard error.
        """
        pid = self.request(
            {"command": command, "env": env, "cwd": str(Path.cwd())}, [output]
        )
        return Forked(self, pid)

    def run(
        self,
        command: list[str],
        env: dict[str, str],
        log: Path,
        folder: Path | None = None,
        seconds: float = 240,
    ) -> int:
        """The exit code of `command` in `folder`, by default the current one; what it prints is in `log`."""
        with log.open("wb") as output, contextlib.chdir(folder or Path.cwd()):
            process = self.start(command, env, output.fileno())
        try:
            return process.wait(seconds)
        except BaseException as error:  # the test's own limit of time too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise AssertionError(
                f"{command} did not end; its output:\n{log.read_text()[-4000:]}"
            ) from None

    def close(self) -> None:
        self.socket.close()
        self.process.wait(20)


def serve(connection: socket.socket) -> None:
    while True:
        length, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(4))
        if not length:
            return
        request = json.loads(
            connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
        )
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            connection.sendall(
                json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode()
                + b"\n"
            )
            continue
        (output,) = array.array("i", ancillary[0][2])
        pid = os.fork()
        if pid == 0:
            with nothing_returns():
                os.setsid()
                null = os.open(os.devnull, os.O_RDONLY)
                rewire({0: null, 1: output, 2: output}, ())
                os.chdir(request["cwd"])
                greenlet(become).switch(request["command"], request["env"])
        os.close(output)
        connection.sendall(f"{pid}\n".encode())


@contextlib.contextmanager
def nothing_returns():
    """A forked process ends here as an interpreter does, whatever happens in it; the code of its parent below is not returned to."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = (
            error.code if isinstance(error.code, int) else int(error.code is not None)
        )
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def rewire(descriptors: dict[int, int], kept: tuple[int, ...]) -> None:
    """`descriptors` by number (-1: as it is), and those in `kept`; all others are closed."""
    high = {
        number: os.dup(source) for number, source in descriptors.items() if source >= 0
    }
    while any(source <= 2 for source in high.values()):
        high = {number: os.dup(source) for number, source in high.items()}
    for number, source in high.items():
        os.dup2(source, number)
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(entry) > 2 and int(entry) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(entry))
    for number in kept:
        os.set_inheritable(number, True)


def forget_this_process() -> None:
    """What an interpreter would not have when it starts: this project's modules, handlers, threads, signal handlers."""
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("infini_llama", "support", "sitecustomize")
    ]:
        del sys.modules[name]
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if type(finder).__module__ != "sitecustomize"
    ]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__spec__ = None
    atexit._clear()
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    for name in [
        name
        for name in logging.root.manager.loggerDict
        if name.startswith(("infini_llama", "prefect"))
    ]:
        del logging.root.manager.loggerDict[name]
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(
                number,
                signal.default_int_handler
                if number == signal.SIGINT
                else signal.SIG_DFL,
            )
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    tempfile.tempdir = None
    # torchrun looks at its stack; a file that is not known is searched for in all modules.
    inspect.modulesbyfile["<frozen runpy>"] = "runpy"
    multiprocessing.process._children.clear()  # pyright: ignore[reportAttributeAccessIssue]
    tracker = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww")
    )
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def show(command: list[str], env: dict[str, str]) -> None:
    """Write the command line and the environment to where /proc shows them from, which the padding has made large enough."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    starts = [(int(fields[45]), int(fields[46])), (int(fields[47]), int(fields[48]))]
    for (start, end), words in zip(
        starts,
        (command, [f"{name}={value}" for name, value in env.items()]),
        strict=True,
    ):
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        assert len(text) < end - start, "SPACE is too small"
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


def become(command: list[str], env: dict[str, str]) -> None:
    """Run `command`, one of those that are forked, in this process."""
    forget_this_process()
    former = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(env)
    show(command, env)
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in former)]
    importlib.invalidate_caches()
    if any((Path(path) / "sitecustomize.py").exists() for path in paths):
        importlib.import_module("sitecustomize")
    if command[0] == COMMAND:
        sys.argv = command
        sys.exit(importlib.import_module("infini_llama.flows.cli.main").main())
    words = [word for word in command[1:] if word != "-u"]
    if words[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *words[2:]], [""]
        exec(words[1], sys.modules["__main__"].__dict__)
        return
    # exec_wrapper.py.
    execvp, os.execvp = (
        os.execvp,
        lambda _, command: greenlet(become).switch(command, env),
    )
    if words[0] == "-m":
        os.execvp = execvp
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)  # else runpy warns
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def is_forked(command: list[str], env: dict[str, str]) -> bool:
    """Whether `command` is `infini-llama`, torchrun or what torchrun starts; exec_wrapper.py is what it becomes."""
    words = [word for word in command[1:] if word != "-u"]
    if command[0] != sys.executable or not words:
        return command[0] == COMMAND
    if words[0].endswith("/exec_wrapper.py"):
        return is_forked(words[3:], env)
    return words[:2] in TORCHRUNS or "TORCHELASTIC_RUN_ID" in env


class Popen(subprocess.Popen):
    """Forks what `is_forked`, and executes everything else."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
    ):
        _, _, shell, p2cread, _, _, c2pwrite, _, errwrite = rest[:9]
        start_new_session = rest[14]
        words = (
            [args] if isinstance(args, str) else [os.fsdecode(word) for word in args]
        )
        environment = dict(os.environ if env is None else env)
        if shell or preexec_fn or executable or not is_forked(words, environment):
            execute = super()._execute_child  # pyright: ignore[reportAttributeAccessIssue]
            return execute(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
        self.pid = os.fork()
        if self.pid == 0:
            with nothing_returns():
                if start_new_session:
                    os.setsid()
                rewire({0: p2cread, 1: c2pwrite, 2: errwrite}, tuple(pass_fds))
                os.chdir(cwd or ".")
                greenlet(become).switch(words, environment)
        self._child_created = True
        self._close_pipe_fds(*rest[3:9])  # pyright: ignore[reportAttributeAccessIssue]


def hash_in_one_thread() -> None:
    """BLAKE3's threads do not exist in a fork of a process that has used them. The hash is the same without them."""
    import blake3

    class OneThread:
        AUTO = 1

        def __new__(cls, *arguments: Any, max_threads: int = 1, **options: Any) -> Any:
            return original(*arguments, **options)

    original, blake3.blake3 = blake3.blake3, OneThread


if __name__ == "__main__":
    subprocess.Popen = Popen
    hash_in_one_thread()
    for library in LIBRARIES:
        importlib.import_module(library)
    # No module of the tests is importable but by PYTHONPATH.
    sys.path.remove(str(Path(__file__).parent))
    gc.freeze()  # else a collection in a fork copies the memory of all that is there
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
