"""The training loop of one rank, from process group to final checkpoint."""

import hashlib
import logging
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from infini_llama.configs.deepspeed import engine_settings
from infini_llama.configs.durations import count
from infini_llama.model.flops import flops_per_token
from infini_llama.model.llama import Llama
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.heartbeat import Heartbeat
from infini_llama.tasks.runs.signals import hangup_as_termination
from infini_llama.tasks.train.worker import checkpoint, loss_scale
from infini_llama.tasks.train.worker.build import build_model
from infini_llama.tasks.train.worker.callbacks.divergence import Skips, next_sample
from infini_llama.tasks.train.worker.callbacks.evaluate import evaluate, rows_with
from infini_llama.tasks.train.worker.callbacks.hook import ask, load_hook
from infini_llama.tasks.train.worker.callbacks.metrics import Metrics
from infini_llama.tasks.train.worker.callbacks.observe import gate_means, parameter_norm
from infini_llama.tasks.train.worker.callbacks.profiling import Profiler
from infini_llama.tasks.train.worker.callbacks.reporters import reporters
from infini_llama.tasks.train.worker.callbacks.sample import prompts_of, sample_on_the_way
from infini_llama.tasks.train.worker.callbacks.spikes import Spikes
from infini_llama.tasks.train.worker.ceiling import matmul_ceiling
from infini_llama.tasks.train.worker.compiling import compile_if_it_agrees, eager
from infini_llama.tasks.train.worker.data.loader import TrainBatches
from infini_llama.tasks.train.worker.data.prefetch import Prefetch
from infini_llama.tasks.train.worker.every import Every
from infini_llama.tasks.train.worker.failure import memory_peak
from infini_llama.tasks.train.worker.optimizer import build_optimizer, set_learning_rate
from infini_llama.tasks.train.worker.position import Position
from infini_llama.tasks.train.worker.result import write_result
from infini_llama.tasks.train.worker.saver import Saver
from infini_llama.tasks.train.worker.step import StepResult, accumulate, train_step
from infini_llama.tasks.train.worker.strategies.deepspeed import Zero
from infini_llama.tasks.train.worker.strategies.native import LossModule, distribute
from infini_llama.tasks.train.worker.strategies.ranks import Ranks

log = logging.getLogger("infini_llama.worker")


class StopRequest:
    """SIGTERM, SIGHUP and SIGUSR1 only set a flag; the ranks agree on it and save at the next step boundary."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)
        hangup_as_termination()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the supervisor, which then sends SIGTERM

    def _note(self, number: int, frame: object) -> None:
        self.asked = True


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of the generators during one step on one rank."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{step}:{rank}".encode(), digest_size=7).digest(), "little")


def note_update(
    result: StepResult, overflow: bool, skips: Skips, spikes: Spikes, rows: Callable[[], np.ndarray]
) -> None:
    """Remembers the loss of an update that was made, or that one was left out, unless that is how fp16 finds its scale.

    Args:
        overflow: the loss scale was too high for this step.
        rows: the row numbers of its global batch.
    """
    if not result.skipped:
        spikes.note(result.loss)
    elif not overflow:
        found = (result.loss, result.grad_norm)
        log.warning(
            "step %d: loss %s, gradient norm %s; update left out, rows %s", skips.at.step, *found, rows().tolist()
        )
        skips.note()


def run(order: dict, ranks: Ranks, stop: StopRequest, heart: Heartbeat) -> tuple[str, int]:
    """Trains as the order says and returns ("done" | "preempted", last completed step)."""
    train, plan = order["config"]["train"], order["plan"]
    run_dir, dataset = Path(order["run_dir"]), Path(order["dataset"])
    hook = load_hook(train["metrics_hook"])
    reader_of = partial(TokenReader, dataset, verify_on_read=order["verify_on_read"])
    train_reader, validation_reader = (reader_of(order["chunks"], split) for split in ("train", "validation"))
    token_bytes = np.load(dataset / "token_bytes.npy", allow_pickle=False)

    model = build_model(order, ranks.device)
    ranks.share_rows(train["context_parallel"])
    module = LossModule(model, ranks.context)
    half = torch.float16 if plan["precision"] == "fp16" else torch.bfloat16
    autocast = torch.autocast(ranks.device.type, dtype=half, enabled=plan["precision"] != "fp32")
    zero = None
    if train["parallel"] == "deepspeed":
        optimizer = build_optimizer(model, train)
        settings = engine_settings(train, plan["precision"], ranks.world_size)
        wrapped = zero = Zero(module, model, optimizer, settings, ranks, autocast)
        autocast = torch.autocast(ranks.device.type, enabled=False)
    else:
        wrapped = distribute(module, train, ranks)
        optimizer = build_optimizer(model, train)
    batches = TrainBatches(
        train_reader,
        train["seed"],
        train["global_batch_size"],
        train["micro_batch_size"],
        ranks.group,
        ranks.groups,
        train["document_isolation"],
        order["weights"],
        [(reader_of(stage["chunks"], "train"), stage["until"]) for stage in order["config"]["data"]["curriculum"]],
        train["prefer_long_documents"],
    )

    def first_batch() -> float:
        torch.manual_seed(step_seed(train["seed"], 0, ranks.rank))
        first = list(batches.micro_batches(0, ranks.device))[:1]
        return accumulate(wrapped, first, batches.targets(0), ranks, autocast).item()

    # One throw-away forward and backward: DDP lays out its buckets anew after the first iteration, and a resumed run
    # would otherwise sum gradients in another order than the uninterrupted one.
    first_batch()
    if zero:
        zero.forget()
    optimizer.zero_grad(set_to_none=True)
    heart.beat("compile")
    compiled = compile_if_it_agrees(module, train["compile"], plan["precision"], first_batch, ranks, run_dir)
    heart.beat("start")

    tensors = zero.tensors if zero else partial(checkpoint.tensors, model, optimizer)
    at = Position()
    if order["resume_from"]:
        at = resume(Path(order["resume_from"]), model, optimizer, zero)
    skips, spikes = Skips(train["max_skips"], train["skip_window"], at), Spikes(train["spike_zscore"], at)
    metrics = None
    if ranks.is_first:
        metrics = Metrics(run_dir, train["log_every"], reporters(train["report_to"], run_dir, at.step, order["config"]))
    ceiling = ranks.sum(matmul_ceiling(ranks.device, half if plan["precision"] != "fp32" else torch.float32))[0]
    held_out = train["eval_sequences"]
    if train["eval_tokens"] is not None:
        held_out = rows_with(validation_reader, count(train["eval_tokens"]))
    profiler = Profiler(run_dir / "profile", train["profile_steps"], ranks.rank)
    same = {"world_size": ranks.world_size, "model": order["model"], "dataset": order["dataset_digest"]}
    evaluation_due, save_due = Every(train["eval_every"], at, ranks), Every(train["save_every"], at, ranks)
    # Of the checkpoints that are there, not of the run so far: where the best one was lost, the best of the rest is to be kept.
    lowest = ranks.sum(checkpoints.lowest_loss(run_dir / "checkpoints") if ranks.is_first else 0.0)[0]
    save_time, report_time, stopping = 0.0, 0.0, False
    heart.sample_rows = lambda: batches.rows(at.samples).tolist()

    def following(samples: int) -> int:
        return next_sample(samples + train["global_batch_size"], order["left_out"])

    with (
        Saver(run_dir / "checkpoints", train, ranks, metrics.sync if metrics else None) as saver,
        Prefetch(batches, ranks.device, following, train["dataloader_num_workers"]) as prefetch,
    ):
        while not at.ended(train["max_steps"], train["early_stopping_patience"]) and not stopping:
            profiler.before(at.step + 1)
            started = time.perf_counter()
            heart.beat("data", at.step)
            at.samples = next_sample(at.samples, order["left_out"])
            # Everything random in a step depends on these three numbers alone, so no generator's state needs saving.
            torch.manual_seed(step_seed(train["seed"], at.step, ranks.rank))
            rate = set_learning_rate(optimizer, train, at.step)
            micro_batches, targets = prefetch.step(at.samples)
            data_time = time.perf_counter() - started

            heart.beat("compute")
            result = train_step(
                wrapped,
                optimizer,
                micro_batches,
                targets,
                train["max_grad_norm"],
                ranks,
                autocast,
                lambda: stop.asked,
                spikes.is_spike,
                scale := loss_scale.current(at, plan["precision"]),
            )
            first_sample, stopping = at.samples, result.stop
            at.advance(samples=train["global_batch_size"], tokens=targets)
            overflow = plan["precision"] == "fp16" and loss_scale.adjust(at, scale, result.finite)
            note_update(result, overflow, skips, spikes, partial(batches.rows, first_sample))
            step_time, write_time = time.perf_counter() - started, saver.poll()
            profiler.after(at.step, stopping or at.step >= train["max_steps"])
            reporting = time.perf_counter()
            record = {
                "step": at.step,
                "loss": None if result.skipped else result.loss,
                "learning_rate": rate,
                "grad_norm": None if result.skipped else result.grad_norm,
                "tokens": at.tokens,
            }
            if plan["precision"] == "fp16":
                record["loss_scale"] = scale
            if at.step % train["log_every"] == 0:
                with zero.whole() if zero else nullcontext():
                    record |= {"param_norm": parameter_norm(model)}
                    record |= {"gates": gates} if (gates := gate_means(model, ranks)) else {}
                    record |= {"custom": ask(hook, train["metrics_hook"], model, record)} if hook else {}
            if metrics:
                length = batches.stage(first_sample).reader.sequence_length
                record |= {"sequence_length": length} if len(batches.stages) > 1 else {}
                flops = flops_per_token(model.config, length)
                timing = {
                    "step_time": step_time,
                    "data_time": data_time,
                    "save_time": save_time,
                    "save_write_time": write_time,
                    "report_time": report_time,  # of the step before, as save_time is
                    "tokens_per_second": targets / step_time,
                    "flops_per_second": flops * targets / step_time,
                    "mfu": flops * targets / step_time / ceiling,
                    "memory_peak": memory_peak(),
                }
                metrics.train(record | timing | {"goodput": heart.ledger.spent().to_json() if heart.ledger else {}})
            report_time = time.perf_counter() - reporting

            last, save_time = at.step >= train["max_steps"], 0.0
            if evaluation_due.due(at) or last:
                heart.beat("evaluate", at.step)
                evaluating = time.perf_counter()
                with eager(compiled):
                    measured = evaluate(
                        zero or module,
                        validation_reader,
                        token_bytes,
                        held_out,
                        train["micro_batch_size"],
                        ranks,
                        autocast,
                        train["document_isolation"],
                    )
                at.note_validation(measured.loss, train["early_stopping_min_delta"])
                last = at.ended(train["max_steps"], train["early_stopping_patience"])
                if metrics:
                    evaluation_time = time.perf_counter() - evaluating
                    metrics.validation({"step": at.step, "evaluation_time": evaluation_time} | asdict(measured))
                if train["sample_at_evaluation"] and not last:  # the last ones stand in result.json
                    texts = sample_on_the_way(zero.unhooked(model, ranks) if zero else model, order, ranks)
                    if metrics:
                        metrics.samples(at.step, prompts_of(train), texts)
            is_best = at.validation_loss is not None and at.validation_loss < lowest
            if save_due.due(at) or last or stopping or is_best:
                heart.beat("save", at.step)
                saving = time.perf_counter()
                scalars = at.scalars() | same
                saver.save(at.step, tensors(), scalars)
                lowest = at.validation_loss if is_best else lowest
                save_time = time.perf_counter() - saving

    heart.beat("finish", at.step)
    finished = at.ended(train["max_steps"], train["early_stopping_patience"])
    if metrics:
        metrics.close(finished)
    if not finished:
        return "preempted", at.step
    write_result(order, zero.unhooked(model, ranks) if zero else model, tensors(), at.step, ranks)
    return "done", at.step


def resume(source: Path, model: Llama, optimizer: torch.optim.Optimizer, zero: Zero | None) -> Position:
    """Fills model and optimizer from a checkpoint; returns where it was written."""
    if zero:
        checkpoint.load(source, state := zero.tensors())
        zero.take(state)
    else:
        checkpoint.prime(optimizer)
        checkpoint.load(source, checkpoint.tensors(model, optimizer))
    at = Position.of(asdict(checkpoints.read_state(source)))
    log.info("resumed from %s at step %d", source.name, at.step)
    return at
