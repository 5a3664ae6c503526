"""torch.compile, used only after it agreed with eager execution on a first batch.

That it is not used is logged.
"""

# pyright: reportUnknownMemberType=false
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._inductor.config as inductor
from torch import nn

from infini_llama.model.llama import Llama
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.tensors import local_shard
from infini_llama.tasks.train.worker.strategies.ranks import Ranks

# Largest relative difference of the loss, and of the gradients as one vector, that rounding
# explains.
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 3e-2}
ELSEWHERE = "it cannot be compiled on another rank"
log = logging.getLogger("infini_llama.worker")


class CompileRecord(Record):
    """compile.json of a run.

    Attributes:
        compile: the setting.
        reason: why compiled code is not used; "" if it is.
        seconds: that compiling and comparing took.
    """

    compile: str
    reason: str
    seconds: float
    torch: str


class Compiled:
    """The layers ("block") or the whole model and loss ("whole"), compiled or not.

    The functions replace `forward` itself, so that hooks around the modules (those of FSDP) run as
    they do without. Layers share their compiled code: it is generated once for all of them, and
    TORCHINDUCTOR_CACHE_DIR of the plan keeps it for later attempts.

    torch.compile's default mode: CUDA graphs (reduce-overhead) overwrite what the backward pass of
    an earlier layer still reads, and autotuning chooses kernels by their times.
    """

    def __init__(self, module: nn.Module, model: Llama, what: str) -> None:
        self.parts: list[nn.Module] = (
            [*model.model.layers] if what == "block" else [module]
        )
        inductor.fallback_random = True  # dropout draws as without compilation
        if model.lm_head.weight.device.type == "cuda":
            # Else kernels are chosen by their times, and a resumed run might choose others.
            inductor.deterministic = True

    def switch_on(self) -> None:
        for part in self.parts:
            # One shape each, so that no later shape changes the code of an earlier one.
            part.forward = torch.compile(part.forward, dynamic=False)

    def switch_off(self) -> None:
        for part in self.parts:
            part.__dict__.pop("forward", None)


def compile_if_it_agrees(
    module: nn.Module,
    model: Llama,
    plan: EnvironmentPlan,
    first_batch: Callable[[], float],
    ranks: Ranks,
    run_dir: Path,
) -> None:
    """Compile what `plan.compile` names, unless a first batch disagrees.

    It is undone, with a warning, unless loss and gradients of a first batch agree on all ranks. The
    result is recorded in compile.json of the run: a run that started without compiled code stays
    so, and one that can no longer use it logs that it is no longer bitwise the same.

    Args:
        module: the loss module around `model`.
        plan: what is compiled, and the precision that decides how much may differ.
        first_batch: forward and backward of this rank's part of the first micro-batch that has
            targets, from the same random state each time; returns its loss and leaves the gradients
            in the parameters of `module`.
    """
    what = plan.compile
    if what == "off":
        return
    run = RunFolder(run_dir)
    before = run.find(CompileRecord, run.compile)
    if before and before.compile == what and before.reason:
        log.warning(
            "train.compile=%s stays off, as in the first attempt: %s",
            what,
            before.reason,
        )
        return
    began = time.perf_counter()
    compiled = Compiled(module, model, what)
    reason = disagreement(
        module, compiled, first_batch, ranks, TOLERANCE[plan.precision]
    )
    seconds = time.perf_counter() - began
    if ranks.is_rank0:
        record = CompileRecord(
            compile=what,
            reason=reason,
            seconds=seconds,
            torch=torch.__version__,
        )
        run.write(run.compile, record)
    if not reason:
        log.info("train.compile=%s agrees with eager execution; %.1f s", what, seconds)
        return
    compiled.switch_off()
    # The rank whose fault it is warns of it.
    level = logging.INFO if reason == ELSEWHERE else logging.WARNING
    message = "train.compile=%s is turned off, and the run continues in eager mode: %s"
    log.log(level, message, what, reason)
    if before and not before.reason:
        log.warning(
            "it was on at an earlier attempt: "
            "the result is no longer bitwise that of an uninterrupted run."
        )


def disagreement(
    module: nn.Module,
    compiled: Compiled,
    first_batch: Callable[[], float],
    ranks: Ranks,
    tolerance: float,
) -> str:
    """Why compiled code cannot be used, empty where it can; then it is left switched on."""
    eager_loss = first_batch()
    expected = {name: gradient.clone() for name, gradient in _gradients(module)}
    module.zero_grad(set_to_none=True)
    compiled.switch_on()
    fault = ""
    try:
        loss = first_batch()
    except Exception as error:  # a missing compiler, or a defect of it
        words = next(iter(str(error).strip().splitlines()), "no message")
        fault = f"it cannot be compiled here ({type(error).__name__}: {words})"
        # DDP of the other ranks waits for this one's gradients.
        compiled.switch_off()
        loss = first_batch()
    failed_ranks = ranks.sum(float(fault != ""))[0]
    if failed_ranks:
        module.zero_grad(set_to_none=True)
        return fault or ELSEWHERE
    squared_differences: list[float] = []
    squared_sizes: list[float] = []
    for name, gradient in _gradients(module):
        squared_differences.append(float((gradient - expected[name]).square().sum()))
        squared_sizes.append(float(expected[name].square().sum()))
    module.zero_grad(set_to_none=True)
    difference, size, losses, loss_difference = ranks.sum(
        sum(squared_differences),
        sum(squared_sizes),
        eager_loss,
        abs(loss - eager_loss),
    )
    if not losses:
        return "no label of the training rows counts, so there is nothing to compare"
    gradients = (difference / size) ** 0.5 if size else difference
    log.info(
        "compiled against eager: loss differs by %.2g, gradients by %.2g",
        loss_difference / losses,
        gradients,
    )
    if loss_difference <= tolerance * losses and gradients <= tolerance:
        return ""
    return (
        "on the first batch its loss differs from eager execution's "
        f"by {loss_difference / losses:.2g} and its gradients by {gradients:.2g}, relatively, "
        f"and rounding explains {tolerance:g}"
    )


def _gradients(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """This rank's part of every gradient, by parameter name."""
    return [
        (name, local_shard(value.grad))
        for name, value in module.named_parameters()
        if value.grad is not None
    ]
