"""Settings chosen by trials: attention is checked and timed, the rest timed by steps, for a small part of the run's time."""

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.model.flops import flops_per_token
from infini_llama.tasks.patch_environment.planning import estimate
from infini_llama.tasks.patch_environment.planning.pin import requested, with_settings
from infini_llama.tasks.patch_environment.planning.plan import resolve
from infini_llama.tasks.patch_environment.planning.speed import (
    HALF_ONLY,
    compile_fault,
    cuda_graph_fault,
    half_weights_fault,
)
from infini_llama.tasks.patch_environment.tuning import trials
from infini_llama.tasks.patch_environment.tuning.trials import StepTiming, TrialFailed
from infini_llama.tasks.records.environment import Trial, TuneResult
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.record_file import read_record, write_record

log = logging.getLogger("infini_llama.environment")
VERSION = 3
SHARE = 0.05  # of the time that the run is estimated to take
WORTH = 1.05  # times the speed that a setting must bring to be taken
START = {"cpu": 8.0, "cuda": 20.0}  # seconds of a trial before its first step: importing torch, starting CUDA
COMPILING = 90.0  # seconds that are set aside for a cold compilation
# Floating-point operations per second of a core or a GPU, assumed before anything is measured.
SPEED = {"cpu": 5e10, "cuda": 1e14}
# Keys of the section train that change what is measured.
TRAIN_KEYS = (
    "global_batch_size",
    "compile",
    "compile_mode",
    "parallel",
    "context_parallel",
    "loss_chunk",
    "activation_checkpointing",
)


def tune(config: PipelineConfig, facts: MachineFacts, home: Path) -> TuneResult:
    """What `environment.tune` chooses for this run, beyond the plan of the facts alone."""
    plan = resolve(config, facts)
    path = home / "tune-cache" / f"{_key(config, facts, plan)}.json"
    if path.exists():
        try:
            return read_record(TuneResult, path).model_copy(update={"cached": True})
        except Damaged as fault:
            log.warning("%s Its trials are repeated.", fault)
    began = time.monotonic()
    budget = SHARE * _seconds_of(config, plan, facts)
    search = _Search(config, facts, began + budget)
    search.attention()
    if config.environment.tune == "full":
        search.steps()
    else:
        search.allocators()
    result = TuneResult(
        settings=search.settings,
        reasons=search.reasons,
        trials=tuple(search.trials),
        seconds=round(time.monotonic() - began, 1),
        budget=round(budget, 1),
    )
    if not search.cut_short:  # a longer run of the same shapes may have time for what was left out
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, result)
    return result


class _Search:
    """The best settings so far, and the trials that led to them."""

    def __init__(self, config: PipelineConfig, facts: MachineFacts, until: float) -> None:
        self.config, self.facts, self.until = config, facts, until
        self.settings: dict[str, str | int] = {}
        self.reasons: dict[str, str] = {}
        self.trials: list[Trial] = []
        self.cut_short = False

    def left(self) -> float:
        return self.until - time.monotonic()

    def plan(self, changes: Mapping[str, str | int] | None = None) -> EnvironmentPlan:
        return resolve(with_settings(self.config, self.settings | dict(changes or {})), self.facts)

    def _keep(self, changes: Mapping[str, str | int], reason: str) -> None:
        self.settings |= changes
        self.reasons |= dict.fromkeys(changes, reason)

    def attention(self) -> None:
        """Choose the fastest function that computes correctly at these shapes."""
        if requested(self.config, "attention_backend") != "auto":
            return
        plan = self.plan()
        candidates = ["sdpa", "blocked"]
        if plan.device == "cuda" and plan.precision in ("bf16", "fp8"):
            candidates += [name for name in HALF_ONLY if not self.facts.attention.get(name)]
        if self.config.model.attention_dropout:
            candidates = ["sdpa"]
        if len(candidates) < 2 or not self._is_affordable(START[plan.device] + 4, "attention functions"):
            return
        try:
            results = trials.attention(self.config, plan, candidates, max(60.0, self.left()))
        except TrialFailed as failed:
            self.trials.append(Trial(tried="attention functions", error=str(failed)))
            return
        self.trials += results.values()
        timed = {name: trial.seconds for name, trial in results.items() if trial.seconds is not None}
        if "sdpa" not in timed:
            return
        best = min(timed, key=lambda name: timed[name])
        gain = timed["sdpa"] / timed[best]
        if gain < WORTH:
            best, gain = "sdpa", 1.0
        why = f"computes correctly, and {gain:.2f}x as fast as torch's at these shapes"
        self._keep({"attention_backend": best}, why)

    def allocators(self) -> None:
        """Try each allocator that is installed for about a second; the fastest is kept."""
        plan = self.plan()
        if plan.device == "cpu" and (candidates := self._allocators(plan)):
            self._try_each(plan, candidates, seconds=1.0)

    def steps(self) -> None:
        """Try threads or workers, precision, fused projections, half weights, allocator and compilation in turn; keep what is faster."""
        plan = self.plan()
        if (base := self._try_each(plan, self._candidates(plan))) is not None:
            self._compile(base)

    def _try_each(
        self, plan: EnvironmentPlan, candidates: list[tuple[str, dict[str, str | int]]], seconds: float | None = None
    ) -> StepTiming | None:
        """Time steps of the plan and of each change of it, and keep the changes that are worth it.

        Args:
            seconds: of the steps of one trial; None: a share of the time that is left.

        Returns:
            the time with all that is kept; None: it was not measured.
        """
        if not self._is_affordable(START[plan.device] * 2, "steps"):
            return None
        base = self._measure({}, seconds)
        if base is None:
            return None
        for name, changes in candidates:
            if not self._is_affordable(START[plan.device] + 6 * base.step, name):
                continue
            measured = self._measure(changes, seconds)
            if measured is None:
                continue
            gain = measured.tokens_per_second / base.tokens_per_second
            if gain >= WORTH:
                self._keep(changes, f"measured: {gain:.2f}x the speed without")
                base = measured
        return base

    def _candidates(self, plan: EnvironmentPlan) -> list[tuple[str, dict[str, str | int]]]:
        found: list[tuple[str, dict[str, str | int]]] = []
        if plan.device != "cpu":
            return found
        cores, train = self.facts.cores, self.config.train
        both = requested(self.config, "nproc_per_node") == requested(self.config, "threads") == "auto"
        for workers, threads in ((cores, 1), (1, cores)):
            per_step = plan.micro_batch_size * train.groups(workers)
            is_divisible = workers % train.context_parallel == 0 and train.global_batch_size % per_step == 0
            if both and cores > 1 and is_divisible and workers != plan.nproc_per_node:
                found.append((f"{workers} worker(s)", {"nproc_per_node": workers, "threads": threads}))
        if requested(self.config, "precision") == "auto" and self.facts.cpu.bf16:
            other = "fp32" if plan.precision == "bf16" else "bf16"
            found.append((f"precision={other}", {"precision": other}))
        if requested(self.config, "fuse_projections") == "auto" and train.parallel != "deepspeed":
            found.append(("fuse_projections=on", {"fuse_projections": "on"}))
        can = plan.accumulation_steps > 1 and not half_weights_fault(self.config, plan.world_size, plan.precision)
        if requested(self.config, "half_weights") == "auto" and can:
            found.append(("half_weights=on", {"half_weights": "on"}))
        return found + self._allocators(plan)

    def _allocators(self, plan: EnvironmentPlan) -> list[tuple[str, dict[str, str | int]]]:
        """Those other than the plan's; the system's is glibc's, which then keeps freed memory."""
        if requested(self.config, "allocator") != "auto":
            return []
        others = [name for name in ("system", *self.facts.allocators) if name != plan.allocator]
        return [(f"allocator={name}", {"allocator": name}) for name in others]

    def _compile(self, base: StepTiming) -> None:
        plan, train = self.plan(), self.config.train
        if requested(self.config, "compile") != "auto" or compile_fault(plan.device, self.facts):
            return
        if train.parallel == "deepspeed":
            return
        for what in ("block", "whole"):
            if what == plan.compile or (what == "whole" and train.parallel != "ddp"):
                continue
            if not self._is_affordable(START[plan.device] + COMPILING, f"compile={what}"):
                continue
            measured = self._measure({"compile": what})
            if measured is None:
                continue
            saved = _tokens_of(self.config) * (1 / base.tokens_per_second - 1 / measured.tokens_per_second)
            gain = measured.tokens_per_second / base.tokens_per_second
            if gain >= WORTH and saved > measured.first:
                why = f"measured: {gain:.2f}x the speed without, and the {measured.first:.0f} s of compiling come back"
                self._keep({"compile": what}, why)
                base = measured
        self._cuda_graphs(base)

    def _cuda_graphs(self, base: StepTiming) -> None:
        plan = self.plan()
        is_open = requested(self.config, "compile_mode") == "auto"
        if not is_open or cuda_graph_fault(self.config, plan.device, plan.compile):
            return
        if not self._is_affordable(START[plan.device] + COMPILING, "CUDA graphs"):
            return
        measured = self._measure({"compile_mode": "reduce-overhead"})
        if measured is not None and measured.tokens_per_second >= WORTH * base.tokens_per_second:
            gain = measured.tokens_per_second / base.tokens_per_second
            self.settings["compile_mode"] = "reduce-overhead"
            self.reasons["compile_mode"] = f"measured: {gain:.2f}x the speed without CUDA graphs"

    def _measure(self, changes: Mapping[str, str | int], seconds: float | None = None) -> StepTiming | None:
        tried = ", ".join(f"{name}={value}" for name, value in changes.items()) or "the plan"
        log.info("trying %s", tried)
        share, limit = max(2.0, self.left() / 8), max(60.0, self.left())
        try:
            timing = trials.steps(self.config, self.plan(changes), seconds or share, limit)
        except (TrialFailed, ConfigError) as failed:  # a plan refuses what an earlier choice does not allow
            self.trials.append(Trial(tried=tried, error=str(failed)))
            return None
        self.trials.append(Trial(tried=tried, **timing._asdict()))
        return timing

    def _is_affordable(self, seconds: float, what: str) -> bool:
        if seconds <= self.left():
            return True
        self.cut_short = True
        self.trials.append(Trial(tried=what, error="skipped: it would take more than 5 % of the run's time"))
        return False


def _seconds_of(config: PipelineConfig, plan: EnvironmentPlan, facts: MachineFacts) -> float:
    """About how long the run takes, before anything is measured."""
    units = facts.cores if plan.device == "cpu" else plan.nproc_per_node
    flops = flops_per_token(estimate.model_of(config), config.data.sequence_length) * _tokens_of(config)
    return flops / (SPEED[plan.device] * units)


def _tokens_of(config: PipelineConfig) -> int:
    """How many tokens the run trains on."""
    length = config.data.sequence_length
    return config.train.planned_steps(length) * config.train.global_batch_size * length


def _key(config: PipelineConfig, facts: MachineFacts, plan: EnvironmentPlan) -> str:
    """A hash of machine, versions and shapes: if any of them changes, trials are measured again."""
    train, data = config.train.model_dump(mode="json"), config.data
    content = {
        "version": VERSION,
        "machine": [facts.cpu.model, facts.cores, [gpu.name for gpu in facts.gpus], facts.allocators],
        "versions": facts.versions,
        "compilers": facts.compilers.to_json(),
        "model": config.model.model_dump(mode="json"),
        "data": [data.sequence_length, data.tokenizer.vocab_size],
        "train": {name: train[name] for name in TRAIN_KEYS},
        "steps": len(str(config.train.planned_steps(data.sequence_length))),  # compilation pays off in long runs only
        "environment": config.environment.model_dump(mode="json", exclude={"env", "port"}),
        "plan": [plan.micro_batch_size, plan.nproc_per_node, plan.precision],
    }
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).hexdigest()
