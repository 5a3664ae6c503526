"""A request to stop ends `run`, `train` and `preprocess` with 75, whatever they do at that moment; other commands with 130 and 143."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from support.laboratory import (
    COMMAND,
    Laboratory,
    Started,
    kill,
    own_environment,
    workers_of,
)
from support.waiting import wait_until

# Learning a unigram tokenizer of Python's library takes seconds.
SLOW_TEXT = ["data.tokenizer.kind=unigram", "data.tokenizer.vocab_size=8000"]
SHORT = [
    "train.max_steps=10",
    "train.warmup_steps=2",
    "train.save_steps=5",
    "train.eval_steps=100",
]
LONG_EVALUATION = [
    "evaluate.after_training=[perplexity,passkey]",
    "evaluate.passkey_lengths=[4096,16384,65536]",
]
# After the message that training is tried again, SIGTERM arrives where Python loses it: while an
# object is freed, what a handler raises is ignored; in another thread, it interrupts no sleep.
LOST = """
import logging, os, signal, threading, time

class Asks:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

def ask_elsewhere():
    time.sleep(2)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(600)

handle = logging.Handler.handle
asked = []

def handle_and_ask(self, record):
    result = handle(self, record)
    if "retrying in" in record.getMessage() and not asked:
        asked.append(record)
        if os.environ["LOST"] == "ignored":
            Asks()
        else:
            threading.Thread(target=ask_elsewhere, daemon=True).start()
    return result

logging.Handler.handle = handle_and_ask
"""
SCRIPT = Path(__file__).parents[4] / "deploy" / "train.sbatch"
SIGNALS = [
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
]
# Below nohup, SIGHUP stays ignored; test_hangup.py asserts it in a terminal.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    SIGNALS.remove(signal.SIGHUP)


def wait_for_line(started: Started, words: str) -> None:
    def is_there() -> bool:
        text = started.log.read_text()
        assert started.process.poll() is None, text
        return words in text

    wait_until(is_there, 120, f"never said {words!r}")


def stop(started: Started, number: int = signal.SIGTERM) -> str:
    """Send the request; the command ends with 75 and leaves no process. Returns what it has printed."""
    started.process.send_signal(number)
    code = started.wait(60)
    text = started.log.read_text()
    assert code == 75, (code, text)
    assert not started.processes()
    assert "Traceback" not in text
    return text


@pytest.fixture
def slow_lab(tmp_path) -> Laboratory:
    """Nothing is prepared here yet."""
    return Laboratory.create(tmp_path)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_while_text_is_prepared(slow_lab, number):
    started = slow_lab.start("early", *SLOW_TEXT)
    wait_for_line(started, "training the tokenizer")
    text = stop(started, number)
    assert "the same command" in text
    assert (f"received {number.name}" in text) == (
        number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
    )


@pytest.mark.parametrize("direct", [True, False])
def test_while_text_is_prepared_by_preprocess_or_under_prefect(slow_lab, direct):
    command = "preprocess" if direct else "run"
    started = slow_lab.start("early", *SLOW_TEXT, command=command, direct=False)
    wait_for_line(started, "training the tokenizer")
    stop(started)


@pytest.mark.parametrize("direct", [True, False])
def test_in_the_delay_of_a_retry(lab, direct):
    name = f"delayed-{direct}"
    slow = ["train.max_steps=100000", "train.save_total_limit=2"]
    started = lab.start(name, *slow, "runtime.retry_delay=600", direct=direct)
    lab.wait_for_step(name, 12, started)
    kill(workers_of(started.marker)[0])
    wait_for_line(started, "retrying in 600 s")
    stop(started)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("how", ["ignored", "elsewhere"])
def test_where_python_loses_it(lab, direct, how, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(LOST)
    name = f"{how}-{direct}"
    settings = ["train.max_steps=100000", "runtime.retry_delay=600"]
    env = {"PYTHONPATH": str(tmp_path), "LOST": how}
    started = lab.start(name, *settings, direct=direct, env=env)
    lab.wait_for_step(name, 12, started)
    kill(workers_of(started.marker)[0])
    assert started.wait(60) == 75, started.log.read_text()


@pytest.mark.parametrize("direct", [True, False])
def test_while_the_trained_model_is_evaluated(lab, direct):
    name = f"evaluated-{direct}"
    settings = [*SHORT, *LONG_EVALUATION]
    started = lab.start(name, *settings, direct=direct)
    wait_for_line(started, "measuring passkey")
    stop(started)
    assert lab.summary(name)["steps"] == 10
    again = lab.start(name, *settings, direct=direct)
    wait_for_line(again, "perplexity of step-00000010 was already measured")
    stop(again)


def test_commands_that_do_not_go_on_keep_the_codes_of_signals(lab):
    lab.finish("measured", *SHORT)
    arguments = [
        COMMAND,
        "evaluate",
        str(lab.run_dir("measured")),
        "--passkey",
        "--lengths=65536",
    ]
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = subprocess.Popen(arguments, env=own_environment(lab.home))
        try:
            maps = Path(f"/proc/{process.pid}/maps")
            wait_until(lambda maps=maps: "libtorch_cpu" in maps.read_text(), 60)
            process.send_signal(number)
            assert process.wait(60) == code
        finally:
            process.kill()


@pytest.mark.parametrize("moment", ["preparation", "evaluation"])
def test_a_job_whose_time_is_nearly_up_goes_back_into_the_queue(slow_lab, moment):
    """`deploy/train.sbatch` with a `scontrol` that notes its arguments and an `srun` that runs the command here."""
    folder = slow_lab.home
    scontrol = f'#!/bin/sh\necho "$@" >> {folder}/scontrol.log\n'
    srun = (
        '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\n'
        'export SLURM_NODEID=0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_ID=0\nexec "$@"\n'
    )
    programs = {
        "scontrol": scontrol,
        "srun": srun,
        "squeue": "#!/bin/sh\n",
        "scancel": "#!/bin/sh\n",
    }
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder}/bin:{Path(COMMAND).parent}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1"}
    settings = [
        f"runtime.home={folder}",
        *(SLOW_TEXT if moment == "preparation" else SHORT),
    ]
    log = folder / "job.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", str(SCRIPT), str(slow_lab.config), *settings, *LONG_EVALUATION],
            env=own_environment(folder) | job | {"PATH": path},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    words = "training the tokenizer" if moment == "preparation" else "measuring passkey"
    try:
        wait_until(lambda: words in log.read_text() or process.poll() is not None, 120)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (folder / "scontrol.log").read_text() == "requeue 4711\n"
