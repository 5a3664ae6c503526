"""A small run on real text, as real processes: started, watched, killed, and looked at afterwards."""

import json
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs.run_folder import RunFolder, read_attempts
from support.preloaded import Forked, Server

COMMAND = str(Path(sys.executable).with_name("infini-llama"))
BATCH = 16
CONFIG = {
    "data": {
        "files": [
            f"{sysconfig.get_path('stdlib')}/[a-c]*.py"
        ],  # of Python's library, from a to c
        "validation_fraction": 0.05,
        "sequence_length": 32,
        "tokenizer": {"vocab_size": 512},
    },
    "model": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "segment_length": 8,
    },
    "train": {
        "max_steps": 60,
        "global_batch_size": BATCH,
        "micro_batch_size": 8,
        "warmup_steps": 5,
        "eval_steps": 20,
        "eval_tokens": 250,
        "save_steps": 10,
        "logging_steps": 10,
        "sample_tokens": 8,
    },
    "environment": {"device": "cpu", "threads": 1, "precision": "fp32"},
    "runtime": {"retries": 2, "retry_delay": 0.1, "grace_period": 20},
}
SOFTMAX_2 = ("model.attention=softmax", "environment.nproc_per_node=2")


@dataclass
class Started:
    """A running `infini-llama` command; its output is in `log`."""

    process: subprocess.Popen | Forked
    marker: str
    log: Path

    def wait(self, timeout: float = 240) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(
                f"the command did not end; its output:\n{self.log.read_text()}"
            ) from None

    def processes(self) -> dict[int, str]:
        """Every live process that descends from this command, by pid: its command line."""
        return processes_of(self.marker)


def processes_of(marker: str) -> dict[int, str]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                command = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                )
                if command and int(folder.name) != os.getpid():
                    found[int(folder.name)] = command
        except OSError:
            continue
    return found


def workers_of(marker: str) -> list[int]:
    """The ranks among these processes."""
    others = ("tasks.train.torchrun", "exec_wrapper")
    lines = processes_of(marker).items()
    return sorted(
        pid
        for pid, line in lines
        if "tasks.train.worker" in line and not any(word in line for word in others)
    )


def own_environment(home: Path) -> dict[str, str]:
    """The environment of a user whose runs and Prefect live in `home`, whatever this machine's own settings are."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PREFECT_API_URL", "PREFECT_PROFILE")
    }
    return kept | {
        "PREFECT_HOME": str(home / "prefect"),
        "INFINI_LLAMA_HOME": str(home),
    }


@dataclass
class Laboratory:
    """One home folder with one dataset, in which runs are started by name.

    Args:
        server: starts the commands, if there is one; else they are executed.
    """

    home: Path
    config: Path
    server: Server | None = None

    @classmethod
    def create(cls, home: Path, server: Server | None = None) -> "Laboratory":
        """A folder whose configuration is CONFIG."""
        home.mkdir(exist_ok=True)
        config = home / "config.yaml"
        if (
            not config.exists()
        ):  # another process of this session may have begun to read it
            config.write_text(yaml.safe_dump(CONFIG))
        return cls(home, config, server)

    def run_dir(self, name: str) -> Path:
        return self.home / "runs" / name

    def start(
        self,
        name: str,
        *overrides: str,
        command: str = "run",
        direct: bool = True,
        env: dict | None = None,
        largest_file: int | None = None,
        executed: bool = False,
    ) -> Started:
        """Start a command.

        Args:
            direct: without Prefect.
            largest_file: bytes; writing more to any file fails.
            executed: the interpreter is started, also where there is a server: torchrun and its ranks are as users have them.
        """
        marker = f"INFINI_TEST_RUN={name}-{time.time_ns()}"
        variable, value = marker.split("=")
        log = self.home / f"{name}-{time.time_ns()}.log"
        arguments = [
            COMMAND,
            command,
            str(self.config),
            f"runtime.name={name}",
            f"runtime.home={self.home}",
            *overrides,
        ]
        arguments += ["--no-prefect"] if direct and command == "run" else []
        variables = own_environment(self.home) | {variable: value} | (env or {})
        if largest_file:
            variables["PYTHONDONTWRITEBYTECODE"] = "1"  # else half a .pyc may stay
        with log.open("wb") as output:
            if self.server and not executed and not largest_file:
                return Started(
                    self.server.start(arguments, variables, output.fileno()),
                    marker,
                    log,
                )
            process = subprocess.Popen(
                arguments,
                env=variables,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=(lambda: limit_files(largest_file))
                if largest_file
                else None,
            )
        return Started(process, marker, log)

    def finish(
        self, name: str, *overrides: str, direct: bool = True, env: dict | None = None
    ) -> dict:
        """Runs the command to its end, which must be a good one with nothing left behind; returns the run's summary."""
        started = self.start(name, *overrides, direct=direct, env=env)
        code = started.wait()
        assert code == 0, started.log.read_text()
        assert not started.processes(), "processes were left behind"
        return self.summary(name)

    def kill_at(self, step: int, name: str, *overrides: str) -> None:
        """Start a command and kill it, and not its workers, once the run has reached `step`."""
        started = self.start(name, *overrides)
        self.wait_for_step(name, step, started)
        kill(started.process.pid)
        started.wait()

    def stop_at(
        self, step: int, name: str, *overrides: str, env: dict | None = None
    ) -> None:
        """Start a command and request a stop at `step`: it ends with 75 and leaves no process."""
        started = self.start(name, *overrides, env=env)
        self.wait_for_step(name, step, started)
        started.process.send_signal(signal.SIGTERM)
        assert started.wait() == 75, started.log.read_text()
        assert not started.processes()

    def summary(self, name: str) -> dict:
        return json.loads((self.run_dir(name) / "summary.json").read_text())

    def lineage(self, name: str) -> dict:
        return json.loads((self.run_dir(name) / "lineage.json").read_text())

    def metrics(self, name: str) -> list[dict]:
        return exact_metrics(self.run_dir(name))

    def attempts(self, name: str) -> list[AttemptRecord]:
        return read_attempts(RunFolder(self.run_dir(name)))

    def assert_same(self, name: str, calm: str) -> dict:
        """The summary of a run, after seeing that its weights, optimizer and metrics are those of the run `calm`."""
        one, other = self.summary(name), self.summary(calm)
        for part in ("weights_sha256", "optimizer_sha256"):
            assert one[part] == other[part], part
        assert self.metrics(name) == self.metrics(calm)
        return one

    def step(self, name: str) -> int:
        """The last step in metrics.jsonl, 0 before the first."""
        metrics = self.run_dir(name) / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return max(
            (json.loads(line)["step"] for line in lines if line.endswith("}")),
            default=0,
        )

    def wait_for_step(self, name: str, step: int, started: Started) -> None:
        while self.step(name) < step:
            assert started.process.poll() is None, (
                f"ended before step {step}:\n{started.log.read_text()}"
            )
            time.sleep(0.005)


def exact_metrics(run_dir: Path) -> list[dict]:
    """metrics.jsonl without its timing fields: what a resumed run must repeat to the bit."""
    timing = (
        "step_time",
        "data_time",
        "save_time",
        "save_write_time",
        "tokens_per_second",
        "flops_per_second",
    )
    timing += (
        "evaluation_time",
        "goodput",
        "mfu",
        "memory_peak",
        "step_time_spread",
        "report_time",
        "crc32",
    )
    lines = [
        json.loads(line)
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    return [
        {key: value for key, value in line.items() if key not in timing}
        for line in lines
    ]


def limit_files(size: int) -> None:
    """As if the disk were full for every file beyond `size` bytes, for this process and its children."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def torchrun(
    server: Server, ranks: int, log: Path, program: Path, *arguments: str
) -> None:
    """Run `program` with torchrun and gloo; it must exit with 0. What it prints is in `log`."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    tests = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": path,
    }
    code = server.run(
        [*command, str(program), *arguments], environment, log, seconds=850
    )
    assert code == 0, log.read_text()[-16000:]


# A `sitecustomize` for the workers, put on their path by the configuration's own environment.env: BODY replaces functions of
# MODULE when that is imported. Nothing in the project knows of it.
INJECTION = """
import importlib.abc, importlib.util, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            change(module)
        spec.loader.exec_module = exec_module
        return spec

FLAG = {flag!r}
def once():
    if os.path.exists(FLAG):
        return False
    open(FLAG, "w").close()
    return True

{body}
sys.meta_path.insert(0, Finder())
"""


def on_the_path(folder: Path) -> str:
    """The override that lets workers import the modules in `folder`."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return f"environment.env.PYTHONPATH={path}"


def inject(folder: Path, module: str, body: str) -> str:
    """Writes the injection into `folder`; returns the override that puts it on the workers' path.

    Args:
        body: defines change(module); `once()` is true the first time any process of any attempt calls it.
    """
    text = INJECTION.format(
        module=module, flag=str(folder / "happened"), body=textwrap.dedent(body)
    )
    (folder / "sitecustomize.py").write_text(text)
    return on_the_path(folder)


# One rank raises once, in the middle of training.
ONE_FAULT = """
def change(module):
    {before}
    step, calls = module.optimizer_step, []
    def failing(*arguments):
        calls.append(1)
        if len(calls) == 25 and os.environ["RANK"] == "1" and once():
            raise RuntimeError("the injected fault")
        return step(*arguments)
    module.optimizer_step = failing
"""
