"""The training loop of one rank, from process group to final checkpoint."""

import hashlib
import json
import logging
import signal
import time
from pathlib import Path

import numpy as np
import torch

from model.config import LlamaConfig
from model.flops import flops_per_token
from model.llama import Llama
from tasks.artifacts import write_atomic
from tasks.preprocess.reader import TokenReader
from tasks.train import checkpoints
from tasks.train.worker import checkpoint
from tasks.train.worker.data import TrainBatches
from tasks.train.worker.divergence import Skips, next_sample
from tasks.train.worker.evaluate import evaluate
from tasks.train.worker.heartbeat import Heartbeat
from tasks.train.worker.metrics import Metrics
from tasks.train.worker.optimizer import build_optimizer, learning_rate_factor, set_learning_rate
from tasks.train.worker.parallel import LossModule, Ranks
from tasks.train.worker.sample import sample_text
from tasks.train.worker.step import accumulate, train_step

log = logging.getLogger("infini_llama.worker")


class StopRequest:
    """SIGTERM and SIGUSR1 only set a flag; the ranks agree on it and save at the next step boundary."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the supervisor, which then sends SIGTERM

    def _note(self, number: int, frame: object) -> None:
        self.asked = True


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of the generators during one step on one rank."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{step}:{rank}".encode(), digest_size=7).digest(), "little")


def gate_means(model: Llama) -> dict[str, list[float]]:
    """Mean share of memory in the output of each layer's heads: {"gates": […]} for Infini-attention, else {}."""
    gates = [gate.detach().sigmoid().mean().item() for name, gate in model.named_parameters() if name.endswith(".gate")]
    return {"gates": gates} if gates else {}


def run(order: dict, ranks: Ranks, stop: StopRequest, heart: Heartbeat) -> tuple[str, int]:
    """Trains as the order says and returns ("done" | "preempted", last completed step)."""
    train, plan = order["config"]["train"], order["plan"]
    run_dir, dataset = Path(order["run_dir"]), Path(order["dataset"])
    train_reader = TokenReader(dataset, order["chunks"], "train", verify_on_read=order["verify_on_read"])
    validation_reader = TokenReader(dataset, order["chunks"], "validation", verify_on_read=order["verify_on_read"])
    token_bytes = np.load(dataset / "token_bytes.npy", allow_pickle=False)

    torch.manual_seed(train["seed"])
    model = Llama(LlamaConfig.from_dict(order["model"])).to(ranks.device)
    module = LossModule(model)
    wrapped = ranks.wrap(module)
    optimizer = build_optimizer(model, train)
    autocast = torch.autocast(ranks.device.type, dtype=torch.bfloat16, enabled=plan["precision"] == "bf16")
    batches = TrainBatches(
        train_reader, train["seed"], train["global_batch_size"], train["micro_batch_size"], ranks.rank, ranks.world_size
    )
    sequence_length = order["sequence_length"]

    # One throw-away forward and backward: DDP lays out its buckets anew after the first iteration, and a resumed run
    # would otherwise sum gradients in another order than the uninterrupted one.
    accumulate(wrapped, list(batches.micro_batches(0, ranks.device))[:1], batches.targets(0), ranks, autocast)
    optimizer.zero_grad(set_to_none=True)

    step, samples, tokens, best = 0, 0, 0, None
    skips = Skips(train["max_skips"], train["skip_window"])
    if order["resume_from"]:
        checkpoint.prime(optimizer)
        source = Path(order["resume_from"])
        checkpoint.load(source, checkpoint.tensors(model, optimizer))
        scalars = checkpoints.read_state(source)
        step, samples, tokens = scalars["step"], scalars["samples"], scalars["tokens"]
        best = scalars["best_validation_loss"]
        skips.steps = scalars["skips"]
        log.info("resumed from %s at step %d", source.name, step)

    metrics = Metrics(run_dir, step, train["log_every"]) if ranks.is_first else None
    flops = flops_per_token(model.config, sequence_length)
    save_time, validation_loss, stopping = 0.0, None, False

    while step < train["max_steps"] and not stopping:
        started = time.perf_counter()
        heart.beat("data", step)
        samples = next_sample(samples, order["left_out"])
        # Everything random in a step depends on these three numbers alone, so no generator's state needs saving.
        torch.manual_seed(step_seed(train["seed"], step, ranks.rank))
        set_learning_rate(
            optimizer,
            learning_rate_factor(step, train["warmup_steps"], train["max_steps"], train["min_learning_rate_ratio"]),
        )
        rate = optimizer.param_groups[0]["lr"]
        micro_batches = list(batches.micro_batches(samples, ranks.device))
        global_tokens = batches.targets(samples)
        tokens += global_tokens
        data_time = time.perf_counter() - started
        heart.beat("compute")
        result = train_step(
            wrapped,
            optimizer,
            micro_batches,
            global_tokens,
            train["max_grad_norm"],
            ranks,
            autocast,
            lambda: stop.asked,
        )
        step, samples, stopping = step + 1, samples + train["global_batch_size"], result.stop
        if result.skipped:
            rows = batches.rows(samples - train["global_batch_size"]).tolist()
            log.warning(
                "step %d: loss %s, gradient norm %s; update left out, rows %s",
                step,
                result.loss,
                result.grad_norm,
                rows,
            )
            skips.note(step, samples)
        step_time = time.perf_counter() - started
        if metrics:
            record = {
                "step": step,
                "loss": None if result.skipped else result.loss,
                "learning_rate": rate,
                "grad_norm": None if result.skipped else result.grad_norm,
                "tokens": tokens,
            }
            timing = {
                "step_time": step_time,
                "data_time": data_time,
                "save_time": save_time,
                "tokens_per_second": global_tokens / step_time,
                "flops_per_second": flops * global_tokens / step_time,
            }
            metrics.train(record | gate_means(model) | timing)
        save_time, last = 0.0, step == train["max_steps"]
        validation_loss = None
        if last or step % train["eval_every"] == 0:
            heart.beat("evaluate", step)
            measured = evaluate(
                module,
                validation_reader,
                token_bytes,
                train["eval_sequences"],
                train["micro_batch_size"],
                ranks,
                autocast,
            )
            validation_loss = measured.loss
            best = measured.loss if best is None else min(best, measured.loss)
            if metrics:
                metrics.validation(
                    {
                        "step": step,
                        "loss": measured.loss,
                        "bits_per_byte": measured.bits_per_byte,
                        "tokens": measured.tokens,
                    }
                )
        if last or stopping or step % train["save_every"] == 0:
            heart.beat("save", step)
            saving = time.perf_counter()
            if metrics:
                metrics.sync()
            _save(order, ranks, model, optimizer, step, samples, tokens, validation_loss, best, skips.steps)
            save_time = time.perf_counter() - saving

    heart.beat("finish", step)
    if metrics:
        metrics.close()
    if step < train["max_steps"]:
        return "preempted", step
    if ranks.is_first:
        _summarize(order, model, optimizer, step, dataset)
    ranks.barrier()
    return "done", step


def _save(
    order: dict,
    ranks: Ranks,
    model: Llama,
    optimizer: torch.optim.Optimizer,
    step: int,
    samples: int,
    tokens: int,
    loss: float | None,
    best: float | None,
    skips: list[int],
) -> None:
    """Commits a checkpoint, moves the pointers, drops old ones."""
    folder = Path(order["run_dir"]) / "checkpoints"
    state = checkpoint.tensors(model, optimizer)
    scalars = {
        "step": step,
        "samples": samples,
        "tokens": tokens,
        "validation_loss": loss,
        "best_validation_loss": best,
        "skips": skips,
        "world_size": ranks.world_size,
        "model": order["model"],
        "dataset": order["dataset_digest"],
    }
    target = checkpoint.save(folder, step, state, scalars, ranks)
    if ranks.is_first:
        checkpoints.point_and_prune(folder, order["config"]["train"]["save_total_limit"])
        log.info("committed %s", target.name)


def _summarize(order: dict, model: Llama, optimizer: torch.optim.Optimizer, step: int, dataset: Path) -> None:
    """Writes result.json: hashes of the final state and a text by the finished model."""
    train = order["config"]["train"]
    state = checkpoint.tensors(model, optimizer)
    result = {
        "steps": step,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights_sha256": checkpoint.state_hash(state, "model."),
        "optimizer_sha256": checkpoint.state_hash(state, "optimizer."),
        "sample": sample_text(
            model, dataset / "tokenizer.json", train["sample_prompt"], train["sample_tokens"], train["seed"]
        ),
    }
    write_atomic(Path(order["run_dir"]) / "result.json", json.dumps(result, indent=1))
