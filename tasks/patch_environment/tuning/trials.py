"""Starts trials in child processes, under the environment that the workers of a plan would have."""

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from infini_llama.configs.architecture import architecture
from infini_llama.configs.ranks import groups_of


class TrialFailed(Exception):
    """A trial ended without an answer, or took more than its time."""


def attention(config: dict, plan: dict, candidates: list[str], seconds: float) -> dict[str, dict[str, Any]]:
    """`attention_trial.try_attention` for the shapes of this run.

    Raises:
        TrialFailed: with the reason.
    """
    model, length = config["model"], config["data"]["sequence_length"]
    heads = model["num_attention_heads"]
    if model["attention"] == "infini":  # segments are folded into the batch
        length = model["segment_length"]
    case = {
        "candidates": candidates,
        "device": plan["device"],
        "precision": plan["precision"],
        "batch": max(1, plan["micro_batch_size"] * config["data"]["sequence_length"] // length),
        "heads": heads,
        "kv_heads": model["num_key_value_heads"] or heads,
        "length": length,
        "head_dim": model["hidden_size"] // heads,
        "documents": False,
    }
    return _run("infini_llama.tasks.patch_environment.tuning.attention_trial", case, plan["env"], 1, seconds)[0]


def steps(config: dict, plan: dict, seconds: float, limit: float) -> dict[str, float]:
    """{"tokens_per_second" of all workers together, "first", "step"} under this plan.

    Args:
        seconds: to spend on steps after the first; limit: after which the trial is given up.

    Raises:
        TrialFailed: with the reason.
    """
    train, length = config["train"], config["data"]["sequence_length"]
    if train["parallel"] == "deepspeed":  # whose engine is not what is compared
        train = train | {"parallel": "ddp"}
    fields = architecture(config["model"], config["data"]["tokenizer"]["vocab_size"], length)
    order = {"config": {"train": train}, "plan": plan, "model": fields, "init_from": None}
    case = {"order": order, "length": length, "seconds": seconds}
    answers = _run("infini_llama.tasks.train.worker.step_trial", case, plan["env"], plan["nproc_per_node"], limit)
    step = max(answer["step"] for answer in answers)
    tokens = plan["micro_batch_size"] * length * groups_of(train, plan["nproc_per_node"])
    return {"tokens_per_second": tokens / step, "first": max(answer["first"] for answer in answers), "step": step}


def _run(trial: str, case: dict[str, Any], env: dict[str, str], workers: int, limit: float) -> list[dict[str, Any]]:
    program = f"from {trial} import main\nmain({json.dumps(case)!r})"
    common = os.environ | env | {"PYTHONSAFEPATH": "1"}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    children = []
    try:
        for rank in range(workers):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
            children.append(
                subprocess.Popen(
                    [sys.executable, "-c", program],
                    env=common | place,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,  # compilers that it starts end with it
                )
            )
        answers = []
        for child in children:
            out, err = child.communicate(timeout=limit)
            if child.returncode:
                last = (err.strip().splitlines() or [f"it ended with code {child.returncode}"])[-1]
                raise TrialFailed(last)
            answers.append(json.loads(out.splitlines()[-1]))
        return answers
    except subprocess.TimeoutExpired as late:
        raise TrialFailed(f"it took more than {limit:.0f} s") from late
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
