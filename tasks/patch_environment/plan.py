"""The plan of a run: what its workers run on, and why.

It follows from the configuration and the machine's facts.
"""

import logging
from collections.abc import Callable
from typing import Literal, TypeVar

from infini_llama.configs.attention_backends import ATTENTION_BACKENDS
from infini_llama.configs.errors import ConfigError
from infini_llama.configs.parallel import fault_of_compile
from infini_llama.configs.reading import JsonObject, changed
from infini_llama.configs.schema import PipelineConfig
from infini_llama.model.config import flops_per_token
from infini_llama.tasks.patch_environment import footprint
from infini_llama.tasks.patch_environment.gpus import FLASH_HEAD_SIZES
from infini_llama.tasks.patch_environment.machine import GLIBC_MEMORY
from infini_llama.tasks.patch_environment.patches import needed_patches
from infini_llama.tasks.patch_environment.plan_findings import findings_of
from infini_llama.tasks.patch_environment.worker_variables import (
    OF_THREADS,
    SET_BY_TORCHRUN,
    set_by_user,
    worker_environment,
)
from infini_llama.tasks.records.decision import Decision
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import (
    Compile,
    Device,
    EnvironmentPlan,
    PinnedSettings,
    Precision,
    finding,
)

log = logging.getLogger("infini_llama.environment")
Value = TypeVar("Value", bound=str | int)
# FLOPs of a run per core from which its layers are compiled on a CPU with AMX: a quarter of an hour
# at 2e11 a second. Steps were 1.20 to 1.29 times as fast (benchmarks/results/environment.json);
# compiling takes about a minute.
COMPILING_PAYS = 2e14
# More tokens in one forward pass make a CPU no faster (its caches are full), and a GPU only up to
# some tens of thousands.
ENOUGH_TOKENS = {"cpu": 8192, "cuda": 65536}
USUAL_MICRO_BATCH = 8  # sequences per forward pass of one worker

# Tokens of a row or segment, from and to, at which attention by `blocked` is faster than by sdpa on
# a CPU, by precision, threads of a worker, whether the softmax weights are kept and whether rows
# have documents: in every round of every shape of benchmarks/results/attention-backends.json, which
# tests/contracts compares. What is not here is slower, undecided or not measured.
BLOCKED_TOKENS: dict[tuple[Precision, int, bool, bool], tuple[int, int]] = {
    ("fp32", 1, True, False): (512, 1024),
    ("fp32", 1, False, False): (512, 512),
    ("fp32", 2, True, False): (256, 1024),
    ("fp32", 2, False, False): (512, 512),
    ("bf16", 1, True, False): (64, 4096),
    ("bf16", 1, False, False): (64, 512),
    ("bf16", 1, True, True): (512, 2048),
    ("bf16", 1, False, True): (512, 512),
    ("bf16", 2, True, False): (64, 1024),
    ("bf16", 2, False, False): (64, 512),
    ("bf16", 2, True, True): (512, 1024),
    ("bf16", 2, False, True): (512, 512),
}


def usual_micro_batch(share: int) -> int:
    """Sequences per forward pass where train.micro_batch_size is left out.

    Args:
        share: sequences of a worker in a step.
    """
    sizes = range(1, USUAL_MICRO_BATCH + 1)
    return max(size for size in sizes if share % size == 0)


def plan_environment(
    config: PipelineConfig, facts: MachineFacts, pinned: PinnedSettings | None = None
) -> EnvironmentPlan:
    """The plan of a run.

    An explicit setting of the configuration is used or refused, never replaced.

    Args:
        pinned: of the run's first attempt, None before it: kept wherever the configuration leaves a
            setting open and this machine supports it. What it does not support is logged as a
            warning. Where the run goes to another device, nothing is kept, as it was chosen for the
            other one.

    Raises:
        ConfigError: one line per setting that this machine cannot run.
    """
    planner = Planner(config, facts, pinned)
    plan = planner.plan()
    if planner.problems:
        raise ConfigError("this machine cannot run the configuration", planner.problems)
    for sentence in planner.given_up:
        log.warning("this machine cannot use the run's original plan: %s", sentence)
    variables = worker_environment(config, plan, facts)
    replacements = config.environment.env
    findings = findings_of(config, plan, facts)
    for name, value in variables.items():
        if replacements.get(name, value) != value:
            key = f"environment.env.{name}"
            sentence = f"It replaces the plan's {value}."
            findings.append(finding(key, replacements[name], "note", sentence))
    return changed(plan, env=variables | replacements, findings=tuple(findings))


def explicit(config: PipelineConfig) -> JsonObject:
    """Pinned settings that the configuration sets, by name."""
    settings = config.train.model_dump(mode="json") | config.environment.model_dump(
        mode="json"
    )
    requested = {name: settings[name] for name in PinnedSettings.model_fields}
    return {
        name: value for name, value in requested.items() if value not in ("auto", None)
    }


class Planner:
    """Chooses one setting after the other.

    That is the configuration's value, else the first attempt's, else one by rule.

    Attributes:
        problems: why this machine cannot run the configuration, one sentence per problem.
        choices: settings that the configuration leaves open, with the reason for their values.
        given_up: why settings of the run's first attempt are not kept here, one sentence per
            setting.
    """

    def __init__(
        self, config: PipelineConfig, facts: MachineFacts, pinned: PinnedSettings | None
    ) -> None:
        self.config = config
        self.settings = config.environment
        self.train = config.train
        self.facts = facts
        self.pinned = pinned
        self.problems: list[str] = []
        self.choices: list[Decision] = []
        self.given_up: list[str] = []

    def choose(
        self,
        name: str,
        requested: Value | Literal["auto"],
        rule: Callable[[], tuple[Value, str]],
        fault: Callable[[Value], str] = lambda _: "",
    ) -> Value:
        """The value of a setting. What the configuration sets is taken or refused, never replaced.

        Args:
            requested: by the configuration.
            rule: gives the value where neither configuration nor first attempt has a usable one,
                and the reason for it.
            fault: why this machine cannot have a value; "" where it can.
        """
        if requested != "auto":
            self.refuse(fault(requested))
            return requested
        pinned: Value | None = getattr(self.pinned, name, None)
        if pinned is not None:
            sentence = fault(pinned)
            if not sentence:
                self.record(name, pinned, "pinned by an earlier attempt of this run")
                return pinned
            self.given_up.append(sentence)
        value, reason = rule()
        self.record(name, value, reason)
        self.refuse(fault(value))
        return value

    def record(self, setting: str, value: str | int, reason: str) -> None:
        self.choices.append(Decision(setting=setting, value=str(value), reason=reason))

    def refuse(self, sentence: str) -> None:
        """Add a problem, once; "" is none."""
        if sentence and sentence not in self.problems:
            self.problems.append(sentence)

    def plan(self) -> EnvironmentPlan:
        """The plan without variables and findings; it is valid only if there are no problems."""
        settings = self.settings
        facts = self.facts
        device = self.device()
        if self.pinned is not None and self.pinned.device != device:
            self.pinned = None
        gpus, workers = self.workers(device)
        precision = self.precision(device, gpus)
        has = footprint.memory_per_worker(facts, gpus, workers)
        threads = self.threads(workers)
        no_space = self._why_weights_do_not_fit(device, workers, precision, has)
        backend = self.attention_backend(device, precision, threads, no_space)
        keeps_weights = backend == "blocked" and not no_space
        if backend == "blocked":
            reason = no_space or "they fit into memory by the estimate"
            self.record("keep_attention_weights", keeps_weights, reason)
        micro = self.micro_batch_size(device, workers, precision, keeps_weights, has)
        micro_tokens = (
            micro * self.config.data.sequence_length // self.train.context_parallel
        )
        self._refuse_contradictions(device, threads)
        return EnvironmentPlan(
            device=device,
            gpus=gpus,
            nproc_per_node=workers,
            nnodes=settings.nnodes,
            master_addr=settings.master_addr,
            precision=precision,
            attention_backend=backend,
            keep_attention_weights=keeps_weights,
            allocator=self.allocator(device),
            compile=self.compile(device, precision),
            loss_chunk=self.loss_chunk(device, micro_tokens),
            threads=threads,
            distributed_backend=self.distributed_backend(device),
            port=settings.master_port,
            micro_batch_size=micro,
            choices=tuple(self.choices),
            patches=tuple(patch.name for patch in needed_patches(facts.versions)),
        )

    def _refuse_contradictions(self, device: Device, threads: int) -> None:
        """Refuse addresses that cannot be used, and variables that contradict the plan."""
        settings = self.settings
        facts = self.facts
        if facts.loopback_fault and settings.nnodes == 1:
            self.refuse(
                f"this machine does not reach itself at 127.0.0.1 ({facts.loopback_fault}); "
                "bring its loopback interface up (ip link set lo up)."
            )
        if settings.master_port == facts.occupied_port:
            self.refuse(
                f"environment.master_port={facts.occupied_port}, "
                "but another program listens there; end it, choose another port or use auto."
            )
        for name, value in settings.env.items():
            if name in SET_BY_TORCHRUN:
                self.refuse(
                    f"environment.env.{name}={value}, "
                    f"but torchrun sets {name} for each worker; remove it."
                )
            # A worker sets them by itself.
            if name in OF_THREADS and value != str(threads):
                self.refuse(
                    f"environment.env.{name}={value}, but a worker has {threads} threads "
                    "by environment.threads; set that instead."
                )
        visible = settings.env.get("CUDA_VISIBLE_DEVICES")
        if device == "cuda" and visible is not None:
            # The plan would be of other GPUs than the workers'.
            self.refuse(
                f"environment.env.CUDA_VISIBLE_DEVICES={visible}, but the plan chooses the GPUs; "
                "use environment.gpus or environment.device=cpu instead, "
                "or export the variable before the command."
            )

    def device(self) -> Device:
        """A GPU if torch can use one, else the CPU."""
        gpus = self.facts.gpus
        gpu_fault = self.facts.gpu_fault

        def rule() -> tuple[Device, str]:
            if gpus:
                return "cuda", f"{len(gpus)} GPU(s) found"
            return "cpu", gpu_fault or "no GPU found"

        def fault(device: Device) -> str:
            if device == "cpu" or gpus:
                return ""
            why = (
                f"torch cannot use the GPU here ({gpu_fault})"
                if gpu_fault
                else "no GPU is available on this machine"
            )
            return f"environment.device=cuda, but {why}; use auto or cpu, or repair the driver."

        return self.choose("device", self.settings.device, rule, fault)

    def workers(self, device: Device) -> tuple[tuple[int, ...], int]:
        """The numbers of the GPUs, one per worker and none on a CPU, and the workers per node."""
        settings = self.settings
        all_gpus = self.facts.gpus
        usable = self._usable_gpus(device)

        workers = self.choose(
            "nproc_per_node",
            settings.nproc_per_node,
            rule=lambda: self._workers_by_rule(device, usable),
            fault=lambda workers: self._fault_of_workers(workers, device, usable),
        )
        if settings.gpus == "auto" and workers > len(usable):
            # Also those that are busy, the free ones first.
            usable = sorted(
                range(len(all_gpus)), key=lambda number: all_gpus[number].is_busy
            )
        gpus = tuple(sorted(usable[:workers])) if device == "cuda" else ()
        return gpus, workers

    def _workers_by_rule(self, device: Device, usable: list[int]) -> tuple[int, str]:
        """The number of workers per node that the rule gives, and the reason for it."""
        sequences = self.train.global_batch_size
        group = self.train.context_parallel
        micro = self.train.least_micro_batch
        if device == "cpu" or not usable:
            if group > 1:
                return group, "as many workers as share each sequence"
            return group, "one worker with all threads"
        most = len(usable) // group * group
        fitting = (
            workers
            for workers in range(most, 0, -group)
            if not self._indivisible(micro, workers)
        )
        workers = next(fitting, group)
        if workers == len(usable):
            return workers, "one worker per GPU"
        return workers, (
            f"of {len(usable)} GPUs, as many as share train.global_batch_size={sequences} "
            f"in parts of train.micro_batch_size={micro}"
        )

    def _fault_of_workers(self, workers: int, device: Device, usable: list[int]) -> str:
        """Why this machine cannot run so many workers; "" if it can."""
        settings = self.settings
        group = self.train.context_parallel
        available = len(usable) if settings.gpus != "auto" else len(self.facts.gpus)
        if device == "cuda" and usable and workers > available:
            source = (
                f"environment.gpus names {available}"
                if settings.gpus != "auto"
                else f"there are {available} GPU(s)"
            )
            return (
                f"environment.nproc_per_node={workers}, "
                f"but {source} and each takes one worker; use auto or at most {available}."
            )
        if workers % group:
            return (
                f"train.context_parallel={group}, but {workers} worker(s) cannot be divided "
                f"into groups of {group}; change one of them."
            )
        world = workers * settings.nnodes
        shards = self.train.shards(world, workers)
        if world > 1 and world % shards:
            return (
                f"train.shard_size={shards}, but {world} worker(s) cannot be divided "
                f"into groups of {shards}; choose a divisor, or train.parallel=fsdp."
            )
        return self._indivisible(self.train.least_micro_batch, workers)

    def _usable_gpus(self, device: Device) -> list[int]:
        """Numbers of the GPUs that the configuration names, else of free ones, else of all."""
        requested = self.settings.gpus
        count = len(self.facts.gpus)
        if requested != "auto":
            for number in requested:
                if number >= count:
                    have = (
                        f"there are {count}, 0 to {count - 1}"
                        if count
                        else "no GPU is available on this machine"
                    )
                    self.refuse(
                        f"environment.gpus names GPU {number}, but {have}; "
                        "use auto, or numbers of those."
                    )
            if device == "cpu":
                self.refuse(
                    f"environment.gpus={requested}, but training runs on the CPU; "
                    "set environment.gpus=auto."
                )
            return sorted({number for number in requested if number < count})
        if device == "cpu":
            return []
        busy = [number for number, gpu in enumerate(self.facts.gpus) if gpu.is_busy]
        if 0 < len(busy) < count:
            free = [number for number in range(count) if number not in busy]
            reason = f"GPU {', '.join(map(str, busy))} is in use by other processes"
            self.record("gpus", ", ".join(map(str, free)), reason)
            return free
        return list(range(count))

    def _indivisible(self, micro: int, workers: int) -> str:
        """Why the global batch cannot be divided into micro-batches of `workers` workers per node.

        "" if it can.
        """
        sequences = self.train.global_batch_size
        group = self.train.context_parallel
        nodes = self.settings.nnodes
        if sequences % (micro * workers * nodes // group) == 0:
            return ""
        shared = "" if group == 1 else f" / {group} that share each sequence"
        parts = f"train.micro_batch_size={micro} x "
        if self.train.micro_batch_size is None:
            parts = ""
        return (
            f"train.global_batch_size={sequences} is not a multiple of "
            f"{parts}{workers} worker(s){f' x {nodes} nodes' if nodes > 1 else ''}{shared}; "
            "change one of them."
        )

    def precision(self, device: Device, gpus: tuple[int, ...]) -> Precision:
        """bf16 where it is computed in hardware, else fp32."""
        cpu = self.facts.cpu
        used = [self.facts.gpus[number] for number in gpus]
        without = [gpu.name for gpu in used if not gpu.bf16]

        def rule() -> tuple[Precision, str]:
            if gpus and not without:
                return "bf16", "every GPU used has bf16"
            if device == "cpu" and cpu.bf16:
                return (
                    "bf16",
                    f"this processor multiplies bf16 ({'AMX' if cpu.amx else 'vector units'})",
                )
            return "fp32", "exact and available everywhere"

        def fault(precision: Precision) -> str:
            if precision == "bf16" and without:
                return (
                    f"environment.precision=bf16, but {', '.join(without)} has no bf16; "
                    "use fp32 or auto."
                )
            return ""

        return self.choose("precision", self.settings.precision, rule, fault)

    def attention_backend(
        self,
        device: Device,
        precision: Precision,
        threads: int,
        no_space: str,
    ) -> str:
        """Flash attention if it works here; on a CPU blocked where it is the faster one; else sdpa.

        Args:
            no_space: of `_why_weights_do_not_fit`.
        """
        model = self.config.model
        flash_fault = self.facts.flash_attention
        head_size = model.head_dim or model.hidden_size // model.num_attention_heads

        def rule() -> tuple[str, str]:
            if device == "cpu":
                return self._attention_on_cpu(precision, threads, no_space)
            if model.attend_previous_segment:
                return "sdpa", "flash2 does not support model.attend_previous_segment"
            if precision != "bf16":
                reason = f"flash attention is tried in bf16 only, and this run has {precision}"
            elif head_size not in FLASH_HEAD_SIZES:
                reason = f"flash attention is not tried at a head size of {head_size}"
            elif flash_fault != "":
                reason = f"flash2: {'it was not tried' if flash_fault is None else flash_fault}"
            else:
                return (
                    "flash2",
                    "it can be imported, and agrees with torch's own attention in a trial",
                )
            return (
                "sdpa",
                f"torch's scaled_dot_product_attention chooses the kernel; {reason}",
            )

        return self.choose(
            "attention_backend",
            self.settings.attention_backend,
            rule,
            fault=lambda backend: self._fault_of_backend(backend, device, precision),
        )

    def _fault_of_backend(
        self, backend: str, device: Device, precision: Precision
    ) -> str:
        """Why the backend cannot be used here; "": it can."""
        model = self.config.model
        flash_fault = self.facts.flash_attention
        key = f"environment.attention_backend={backend}"
        if ATTENTION_BACKENDS[backend].is_for_gpus and device != "cuda":
            return (
                f"{key}, but it needs a GPU and training runs on the CPU; "
                "use auto, sdpa or blocked."
            )
        if ATTENTION_BACKENDS[backend].is_for_gpus and precision == "fp32":
            return (
                f"{key}, but it computes in half precision only; "
                "set environment.precision=bf16 or use sdpa."
            )
        if backend == "flash2" and flash_fault:
            return (
                f"{key}, but it cannot be used here: {flash_fault}; use auto or sdpa."
            )
        if (
            model.attend_previous_segment
            and not ATTENTION_BACKENDS[backend].has_earlier_tokens
        ):
            return f"{key}, but it cannot have model.attend_previous_segment; use auto or sdpa."
        if model.attention_dropout and not ATTENTION_BACKENDS[backend].has_dropout:
            return (
                f"{key}, but it does not support attention dropout; "
                "set model.attention_dropout=0 or use sdpa."
            )
        return ""

    def _attention_on_cpu(
        self, precision: Precision, threads: int, no_space: str
    ) -> tuple[str, str]:
        """The faster function for the rows or segments of this run, and the reason.

        Args:
            no_space: of `_why_weights_do_not_fit`.
        """
        if self.config.model.attention_dropout:
            return "sdpa", "blocked does not support model.attention_dropout"
        model = footprint.model_of(self.config)
        tokens = model.attended_tokens(self.config.data.sequence_length)
        documents = self.train.document_masking
        where = (
            f"at {tokens:,} tokens{' with documents' if documents else ''} in {precision} "
            f"with {threads} thread(s)"
        )
        first, last = BLOCKED_TOKENS.get(
            (precision, threads, not no_space, documents), (1, 0)
        )
        if first <= tokens <= last:
            return "blocked", f"faster than sdpa {where}"
        without = (
            f", and cannot keep its softmax weights: {no_space}" if no_space else ""
        )
        return "sdpa", f"blocked is not known to be faster {where}{without}"

    def _why_weights_do_not_fit(
        self,
        device: Device,
        workers: int,
        precision: Precision,
        has: int,
    ) -> str:
        """Why `blocked` cannot keep its softmax weights for the backward pass; "" if it can.

        Args:
            has: bytes of memory of one worker.
        """
        if self.train.activation_checkpointing == "selective":
            return "train.activation_checkpointing=selective does not keep them"
        need = footprint.bytes_needed(
            self.config,
            self.train.least_micro_batch,
            precision,
            device,
            workers,
            self.settings.nnodes,
            keeps_attention_weights=True,
        )
        return (
            ""
            if footprint.fits(need, has)
            else f"they need {footprint.describe(need, has)}"
        )

    def micro_batch_size(
        self,
        device: Device,
        workers: int,
        precision: Precision,
        keeps_attention_weights: bool,
        has: int,
    ) -> int:
        """Sequences per forward pass, a divisor of a worker's share.

        auto: the most that fit and still help, at least 1. Left out: the most up to
        USUAL_MICRO_BATCH.

        Args:
            has: bytes of memory of one worker.
        """
        config = self.config
        train = self.train
        nodes = self.settings.nnodes

        def fits(size: int) -> bool:
            need = footprint.bytes_needed(
                config, size, precision, device, workers, nodes, keeps_attention_weights
            )
            return footprint.fits(need, has)

        share = max(1, train.global_batch_size // train.groups(workers * nodes))

        def usual() -> tuple[int, str]:
            return (
                usual_micro_batch(share),
                f"the most, up to {USUAL_MICRO_BATCH}, that divide a worker's {share}",
            )

        def rule() -> tuple[int, str]:
            length = config.data.sequence_length // train.context_parallel
            useful = [
                size
                for size in range(2, share + 1)
                if share % size == 0 and size * length <= ENOUGH_TOKENS[device]
            ]
            size = max(filter(fits, useful), default=1)
            if size != max(useful, default=1):
                return size, "the largest that fits into memory by the estimate"
            if size == share:
                return size, "all sequences of a step"
            reason = f"more than {ENOUGH_TOKENS[device]:,} tokens per forward pass are no faster"
            return size, reason

        return self.choose(
            "micro_batch_size",
            train.micro_batch_size or "auto",
            rule=usual if train.micro_batch_size is None else rule,
            fault=lambda size: self._indivisible(size, workers),
        )

    def allocator(self, device: Device) -> str:
        """glibc, set to keep freed memory, or system; only a CPU's memory comes from it."""
        glibc = bool(self.facts.glibc)
        mine = set_by_user(GLIBC_MEMORY, self.config, self.facts)

        def rule() -> tuple[str, str]:
            if device == "cpu" and glibc and mine:
                return "system", f"{mine} is set, and is not replaced"
            if device == "cpu" and glibc:
                reason = "glibc's, which keeps freed memory instead of returning it to the kernel"
                return "glibc", reason
            reason = (
                "training runs on a GPU"
                if device == "cuda"
                else "this system has no glibc"
            )
            return "system", reason

        def fault(allocator: str) -> str:
            if allocator == "glibc" and not glibc:
                return (
                    "environment.allocator=glibc, but this system has another C library; "
                    "use auto or system."
                )
            return ""

        return self.choose("allocator", self.settings.allocator, rule, fault)

    def compile(self, device: Device, precision: Precision) -> Compile:
        """block for GPUs that can, and on CPUs with AMX for a run that is long enough; else off."""
        compilers = self.facts.compilers
        lacking = ""
        if device == "cpu" and not compilers.cxx:
            lacking = "no C++ compiler is installed (for example apt install g++)"
        if device == "cuda" and "triton" not in self.facts.versions:
            lacking = "triton is not installed (pip install triton)"
        if device == "cuda" and not compilers.cc:
            lacking = "no C compiler is installed (for example apt install gcc)"

        def rule() -> tuple[Compile, str]:
            if self.train.parallel == "deepspeed":
                return "off", "it cannot be combined with train.parallel=deepspeed"
            if device == "cpu" and not (precision == "bf16" and self.facts.cpu.amx):
                # Some percent in bf16 without AMX (benchmarks/results/training.json); in fp32
                # hardly faster, of which no result is stored.
                reason = (
                    "only on a GPU, and on a processor with AMX in bf16, "
                    "it is known to be worth its time"
                )
                return "off", reason
            if lacking:
                return "off", lacking
            if device == "cpu" and self._flops() < COMPILING_PAYS * self.facts.cores:
                return (
                    "off",
                    "the run is too short to make up for the time that it takes",
                )
            if device == "cpu":
                reason = (
                    "it makes long runs on a processor with AMX faster, "
                    "and is checked against eager execution"
                )
                return "block", reason
            reason = "it makes the steps of a GPU faster, and is checked against eager execution"
            return "block", reason

        def fault(compile: Compile) -> str:
            if compile != "off" and lacking:
                return f"train.compile={compile}, but {lacking}; install it or use off."
            # What is pinned may be of another strategy.
            unlike = fault_of_compile(compile, self.train.parallel)
            return f"train.{unlike}." if unlike else ""

        return self.choose("compile", self.train.compile, rule, fault)

    def _flops(self) -> float:
        """Approximate number of floating-point operations of the run."""
        length = self.config.data.sequence_length
        model = footprint.model_of(self.config)
        of_token = flops_per_token(model, length, self.train.frozen_layers)
        return of_token * self.train.planned_tokens(length)

    def loss_chunk(self, device: Device, tokens: int) -> int:
        """Tokens of a micro-batch (of `tokens` tokens) whose logits exist at a time; 0: all."""
        vocab_size = self.config.data.tokenizer.vocab_size

        def rule() -> tuple[int, str]:
            chunk = footprint.chunk_of(self.config, device, tokens)
            size = f"{4 * tokens * vocab_size / 2**20:,.0f} MiB, {'many' if chunk else 'few'}"
            return chunk, f"the logits of a micro-batch are {size}"

        return self.choose("loss_chunk", self.train.loss_chunk, rule)

    def threads(self, workers: int) -> int:
        """The cores, divided between the workers; anew for another number of workers."""
        cores = self.facts.cores
        before = self.pinned.nproc_per_node if self.pinned else workers

        def rule() -> tuple[int, str]:
            return max(
                1, cores // workers
            ), f"{cores} usable core(s) over {workers} worker(s)"

        if self.settings.threads == "auto" and before != workers:
            value, reason = rule()
            self.record("threads", value, reason)
            return value
        return self.choose("threads", self.settings.threads, rule)

    def distributed_backend(self, device: Device) -> str:
        """nccl between GPUs where torch has it, else gloo."""
        nccl = device == "cuda" and self.facts.nccl

        def rule() -> tuple[str, str]:
            if nccl:
                return "nccl", "GPUs"
            return "gloo", "CPU" if device == "cpu" else "torch has no NCCL"

        def fault(backend: str) -> str:
            if backend == "gloo" or nccl:
                return ""
            return (
                "environment.distributed_backend=nccl, "
                "but it needs GPUs and a torch built with NCCL; use auto or gloo."
            )

        return self.choose(
            "distributed_backend", self.settings.distributed_backend, rule, fault
        )
