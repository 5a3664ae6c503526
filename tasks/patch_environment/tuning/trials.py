"""Starts trials in child processes, with the environment variables that the workers of a plan would have."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from typing import Any, NamedTuple

from infini_llama.configs.schema import PipelineConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.patch_environment.tuning.attention_trial import AttentionCase
from infini_llama.tasks.records.environment import Trial
from infini_llama.tasks.records.job import StepTrial, StepTrialResult
from infini_llama.tasks.records.plan import EnvironmentPlan


class TrialFailed(Exception):
    """A trial ended without a result, or exceeded its time limit."""


class StepTiming(NamedTuple):
    """tokens_per_second: of all workers together; first, step: seconds of the first step and of a later one."""

    tokens_per_second: float
    first: float
    step: float


def attention(config: PipelineConfig, plan: EnvironmentPlan, candidates: list[str], limit: float) -> dict[str, Trial]:
    """`attention_trial.try_attention` for the shapes of this run, by candidate.

    Args:
        limit: seconds after which the trial is stopped.

    Raises:
        TrialFailed: with the reason.
    """
    model, length = config.model, config.data.sequence_length
    if model.attention != "softmax":  # segments are folded into the batch
        length = min(length, model.segment_length)
    case = AttentionCase(
        candidates=candidates,
        device=plan.device,
        precision="bf16" if plan.precision == "fp8" else plan.precision,
        batch=max(1, plan.micro_batch_size * config.data.sequence_length // length),
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads or model.num_attention_heads,
        length=length,
        head_dim=model.head_dim or model.hidden_size // model.num_attention_heads,
        documents=config.train.document_isolation,
    )
    module = "infini_llama.tasks.patch_environment.tuning.attention_trial"
    (results,) = _run(module, json.dumps(asdict(case)), plan.env, 1, limit)
    return {name: Trial(tried=f"attention_backend={name}", **result) for name, result in results.items()}


def steps(config: PipelineConfig, plan: EnvironmentPlan, seconds: float, limit: float) -> StepTiming:
    """Time training steps under this plan.

    Args:
        seconds: to spend on steps after the first.
        limit: seconds after which the trial is stopped.

    Raises:
        TrialFailed: with the reason.
    """
    train, length = config.train, config.data.sequence_length
    if train.parallel == "deepspeed":  # whose engine is not what is compared
        train = train.model_copy(update={"parallel": "ddp", "zero_stage": None, "deepspeed_config": None})
    model = LlamaConfig.from_dict(config.model.architecture(config.data.tokenizer.vocab_size, length))
    case = StepTrial(train=train, plan=plan, model=model, sequence_length=length, seconds=seconds)
    module = "infini_llama.tasks.train.worker.step_trial"
    answers = _run(module, case.model_dump_json(), plan.env, plan.nproc_per_node, limit)
    results = [StepTrialResult.from_json(answer) for answer in answers]
    step = max(result.step for result in results)
    tokens = case.micro_batches * plan.micro_batch_size * length * train.groups(plan.nproc_per_node)
    return StepTiming(tokens / step, max(result.first for result in results), step)


def _run(module: str, case: str, env: dict[str, str], workers: int, limit: float) -> list[Any]:
    """What `module.main(case)` prints as JSON in each of so many workers."""
    program = f"from {module} import main\nmain({case!r})"
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
