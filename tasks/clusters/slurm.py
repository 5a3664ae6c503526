"""The workers as a Slurm job: submitted by sbatch, found again by its name, watched by scontrol, ended by scancel."""

import hashlib
import logging
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from infini_llama.configs.errors import ConfigError, TrainFailed
from infini_llama.configs.schema.launchers import SlurmConfig
from infini_llama.tasks.clusters.node_records import write_submitted
from infini_llama.tasks.clusters.rendezvous import Nodes
from infini_llama.tasks.records.cluster import SubmittedJob
from infini_llama.tasks.records.plan import EnvironmentPlan

SCRIPT = Path(__file__).with_name("slurm.sh")
ENDED = "job-ended"  # written by the script as its last act: the exit code
ASK_EVERY = 10.0  # seconds between two questions to Slurm's controller; the file above is seen at once
ASK_AT_END = 1.0  # the same, while a job completes
COMMAND_SECONDS = 60.0  # that one of Slurm's commands may take
EARLY = 60.0  # Slurm may send the warning that much earlier or later than asked for (sbatch(1), --signal)
ENDING_SECONDS = 600.0  # after which a job that does not go away is reported, not waited for
RUNNING = re.compile(
    "PENDING|CONFIGURING|RUNNING|COMPLETING|SUSPENDED|STOPPED|SIGNALING|STAGE_OUT|RESIZING|REQUEUED|REQUEUE_FED|REQUEUE_HOLD"
    "|RESV_DEL_HOLD|SPECIAL_EXIT"
)
OVER = re.compile("COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|PREEMPTED|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE|REVOKED")
log = logging.getLogger("infini_llama.train")


class Unanswered(Exception):
    """Slurm's controller did not answer; what it would have said is not known."""


def name_of(attempt_dir: Path) -> str:
    """The job's name: of run and attempt, and of their place, since other projects may have a run of that name."""
    place = hashlib.sha256(str(attempt_dir.resolve()).encode()).hexdigest()[:8]
    return f"{attempt_dir.parents[1].name}-{attempt_dir.name}-{place}"


def start(attempt_dir: Path, section: SlurmConfig, plan: EnvironmentPlan, grace_period: float) -> "SlurmJob":
    """Submits the job of an attempt. Its name is on record before, so that a job without a recorded number is found.

    Raises:
        ConfigError: Slurm refuses it, or is not there.
        TrainFailed: the controller does not answer.
    """
    submitted = SubmittedJob(launcher="slurm", name=name_of(attempt_dir))
    write_submitted(attempt_dir, submitted)
    command = ["sbatch", *options(attempt_dir, section, plan, grace_period), str(SCRIPT), sys.executable]
    environment = job_environment(dict(os.environ)) | plan.env
    try:
        number = _number(_run([*command, str(attempt_dir)], environment).strip().split(";")[0])
    except subprocess.CalledProcessError as refused:
        settings = ", ".join(f"{name}={value}" for name, value in section if value)
        raise ConfigError(
            f"environment.slurm ({settings or 'all by default'}): sbatch refused the job: {_last_line(refused.stderr)}."
        ) from refused
    except Unanswered as silence:
        found = find(submitted.name)  # it may have been accepted all the same
        if found is None:
            raise TrainFailed(f"Slurm's controller did not accept the job: {silence}.") from silence
        number = found
    write_submitted(attempt_dir, submitted.model_copy(update={"job": number}))
    log.info("Slurm job %d (%s) is submitted; its output is in %s", number, submitted.name, attempt_dir)
    return SlurmJob(attempt_dir, number)


def options(attempt_dir: Path, section: SlurmConfig, plan: EnvironmentPlan, grace_period: float) -> list[str]:
    """Of sbatch, for a job of one task a node, which gets the cores and GPUs of that node's workers."""
    workers = plan.nproc_per_node
    chosen = [
        "--parsable",
        f"--job-name={name_of(attempt_dir)}",
        f"--nodes={plan.nnodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={workers * plan.threads}",
        "--requeue",
        f"--signal=B:USR1@{math.ceil(grace_period + EARLY)}",
        f"--output={attempt_dir}/slurm-%j.log",
        "--open-mode=append",
        f"--chdir={attempt_dir}",
        "--export=ALL",
    ]
    chosen += [f"--gpus-per-node={workers}"] if plan.device == "cuda" else []
    named = {"partition": section.partition, "account": section.account, "time": section.time_limit}
    chosen += [f"--{option}={value}" for option, value in named.items() if value is not None]
    return chosen + section.options


def job_environment(variables: dict[str, str]) -> dict[str, str]:
    """Without what a job of Slurm that this process itself may be in says about itself, or about how to submit."""
    kept = {name: value for name, value in variables.items() if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    kept |= {"SLURM_CONF": variables["SLURM_CONF"]} if "SLURM_CONF" in variables else {}
    return kept | {"PYTHONSAFEPATH": "1"}  # a folder named tasks/ where the user stands must not shadow ours


def attach(attempt_dir: Path, submitted: SubmittedJob) -> "SlurmJob | None":
    """The job of an attempt, living or ended; None where it was never submitted.

    Raises:
        TrainFailed: the controller does not answer, so the state is unknown.
    """
    try:
        number = submitted.job or find(submitted.name)
    except Unanswered as silence:
        raise TrainFailed(
            f"cannot determine whether {attempt_dir} is still running as a Slurm job: {silence}."
        ) from silence
    if number is None:
        return None
    write_submitted(attempt_dir, submitted.model_copy(update={"job": number}))
    return SlurmJob(attempt_dir, number)


def find(name: str) -> int | None:
    """Number of the newest job of that name that the controller remembers.

    Raises:
        Unanswered: the controller does not answer.
    """
    found = _run(["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%A"]).split()
    return max(map(_number, found), default=None)


class SlurmJob(Nodes):
    """The job `number` of an attempt."""

    detached = True

    def __init__(self, attempt_dir: Path, number: int) -> None:
        self.attempt_dir, self.number = attempt_dir, number
        self.state, self.code = "PENDING", 1
        self.polled, self.silent_since = -math.inf, None

    @property
    def has_ended(self) -> bool:
        """By the newest answer of Slurm's controller."""
        return OVER.fullmatch(self.state) is not None

    def poll(self) -> int | None:
        if not self.has_ended:
            every = ASK_AT_END if (self.attempt_dir / ENDED).exists() else ASK_EVERY
            if time.monotonic() - self.polled >= every:
                self._ask()
        if not self.has_ended:
            return None
        try:
            return int((self.attempt_dir / ENDED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return self.code

    def stop(self, grace_period: float) -> None:
        self._ask()
        if self.state == "RUNNING":  # the script passes it on; scancel without a signal would kill after KillWait
            self._command(["scancel", "--batch", "--signal=TERM", str(self.number)])
            until = time.monotonic() + grace_period
            while self.poll() is None and time.monotonic() < until:
                time.sleep(0.2)
        self.end()

    def end(self) -> None:
        began = time.monotonic()
        while self.poll() is None:
            self._command(["scancel", str(self.number)])
            self._ask()
            if time.monotonic() - began > ENDING_SECONDS:
                raise TrainFailed(
                    f"Slurm job {self.number} did not end (state {self.state}); check its nodes, and run the same "
                    "command again."
                )
            if not self.has_ended:
                time.sleep(1)

    def cancelled(self) -> str | None:
        return f"Slurm job {self.number} was cancelled (scancel)" if self.state == "CANCELLED" else None

    def _ask(self) -> None:
        """Learns the job's state; while the controller is silent, the job is taken to run on."""
        self.polled = time.monotonic()
        try:
            self.state, self.code = state_of(self.number)
            self.silent_since = None
        except Unanswered as silence:
            if self.silent_since is None:
                self.silent_since = self.polled
                log.warning(
                    "Slurm's controller does not answer (%s); job %d may still be running", silence, self.number
                )

    def _command(self, command: list[str]) -> None:
        try:
            _run(command)
        except (
            Unanswered,
            subprocess.CalledProcessError,
        ) as error:  # it has ended meanwhile, or the next question will tell
            log.info("%s: %s", " ".join(command), error)


def state_of(number: int) -> tuple[str, int]:
    """A job's state and exit code, from the controller, and from the accounting once that has forgotten it.

    Returns:
        state: of RUNNING or OVER, COMPLETED if Slurm has no record of the job; code: negative for a signal.

    Raises:
        Unanswered: neither answers, or not in a form that is known.
    """
    try:
        shown = _run(["scontrol", "--oneliner", "show", "job", str(number)])
        found = re.findall(r"(?:^|\s)(JobId|JobState|ExitCode)=(\S+)", shown)
        job, state, code = (dict(found).get(name, "") for name in ("JobId", "JobState", "ExitCode"))
        if len(found) != 3 or job != str(number):
            raise Unanswered(f"scontrol shows job {number} in an unknown form: {shown[:200]!r}")
        return _state(state), _code(code)
    except subprocess.CalledProcessError as error:
        if "Invalid job id" not in error.stderr:
            raise Unanswered(_last_line(error.stderr)) from error
    try:
        command = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=State,ExitCode", f"--jobs={number}"]
        lines = _run(command).splitlines()
    except subprocess.CalledProcessError:  # no accounting here
        lines = []
    if not lines:
        return "COMPLETED", 1  # the ranks' own last words decide
    state, code = lines[-1].split("|")
    return _state(state.split()[0]), _code(code)  # "CANCELLED by 1000"


def _state(word: str) -> str:
    if not (RUNNING.fullmatch(word) or OVER.fullmatch(word)):
        raise Unanswered(f"a state that is not known: {word!r}")
    return word


def _code(words: str) -> int:
    """Of Slurm's `code:signal`."""
    match = re.fullmatch(r"(\d+):(\d+)", words)
    if not match:
        raise Unanswered(f"an exit code that is not known: {words!r}")
    code, number = map(int, match.groups())
    return -number if number else code


def _number(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise Unanswered(f"the number of a job was expected, and {text[:80]!r} came")
    return int(text)


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """What one of Slurm's commands prints.

    Raises:
        ConfigError: it is not installed.
        Unanswered: the controller was not reached.
        subprocess.CalledProcessError: it refuses.
    """
    environment = environment or job_environment(dict(os.environ))
    try:
        done = subprocess.run(
            command,
            env=environment | {"LC_ALL": "C"},
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise ConfigError(
            f"environment.launcher=slurm, but there is no {command[0]} on this machine's PATH; run this on a machine that may "
            "submit jobs, or use environment.launcher=local."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise Unanswered(f"{command[0]} took more than {COMMAND_SECONDS:.0f} s") from error
    if done.returncode and re.search(r"[Uu]nable to contact|timed out|[Cc]onnection refused|[Tt]ry again", done.stderr):
        raise Unanswered(_last_line(done.stderr))
    done.check_returncode()
    return done.stdout


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was said"])[-1]
