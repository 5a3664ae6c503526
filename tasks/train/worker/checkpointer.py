"""Checkpoints of a rank: when one is due, its content, and saving while training continues.

The state is copied, and a thread commits the copy.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
import errno
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from infini_llama.configs.errors import Diverged
from infini_llama.configs.reading import JsonObject
from infini_llama.configs.schema import TrainingConfig
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.checkpoints import KIND, STATE_FILE, checkpoint_path
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.artifacts import commit, staged
from infini_llama.tasks.storage.tensors import TensorWriter, local_shard
from infini_llama.tasks.train.worker.callbacks.callback import (
    Callback,
    Interval,
    Training,
)
from infini_llama.tasks.train.worker.strategies.native import replica_of
from infini_llama.tasks.train.worker.strategies.ranks import Ranks

Tensors = dict[str, torch.Tensor]
# Fields of a train state that follow from the losses of its run.
OF_LOSSES = {
    "validation_loss",
    "best_validation_loss",
    "stale_validations",
    "evaluation_due",
    "skips",
    "losses",
}
log = logging.getLogger("infini_llama.worker")


class Checkpointer:
    """The checkpoints of one training. Loading, `advance` and `save` are collective calls.

    Args:
        callbacks: whose state is saved and loaded with the train state.
        before_commit: called before a checkpoint is visible: flushes what led to it to disk.

    Attributes:
        save_time: seconds that training waited for a save after the latest step; 0 without one.
    """

    def __init__(
        self,
        training: Training,
        callbacks: Sequence[Callback],
        before_commit: Callable[[], None],
    ) -> None:
        train = training.attempt.config.train
        self.folder = RunFolder(training.attempt.run_dir).checkpoints
        self.training = training
        self.ranks = training.ranks
        self.callbacks = callbacks
        self.writer = BackgroundSave(self.folder, train, self.ranks, before_commit)
        self.interval = Interval(train.save_steps, self.ranks)
        self.lowest_loss = 0.0
        self.permanent_every = train.save_permanent_every
        self.save_time = 0.0

    def load_into(self, state: TrainState) -> None:
        """Fill model, optimizer, train state and callbacks from the attempt's verified checkpoint.

        The losses of another run's checkpoint are not compared with those of this run, which may be
        of other text. Without a checkpoint, they stay as they are.
        """
        source = self.training.attempt.resume_from
        if source is not None:
            loaded = checkpoints.read_state(source)
            has_own_optimizer = loaded.optimizer in (None, state.optimizer)
            anew = self.training.strategy.load_tensors(source, has_own_optimizer)
            if anew and self.ranks.is_rank0:
                log.warning(
                    "%s has no state of train.optimizer=%s for %d tensor(s), such as %s; "
                    "it begins at zero.",
                    source.name,
                    state.optimizer,
                    len(anew),
                    anew[0],
                )
            # World size, model, dataset and optimizer are those of this attempt.
            left_out = {"world_size", "model", "dataset", "optimizer"}
            is_own = source.parent.resolve() == self.folder.resolve()
            if not is_own:
                left_out |= OF_LOSSES
            for name in vars(loaded).keys() - left_out:
                setattr(state, name, getattr(loaded, name))
            if self._is_taken_back_to(source):
                # Early stopping has ended the run here, and begins to count anew.
                state.stale_validations = 0
            for callback in self.callbacks:
                callback.load_state(state)
            log.info("resumed from %s at step %d", source.name, state.step)
        self.interval.start(state, self.training.attempt.since_save)
        # Over the existing checkpoints, not the run so far: if the best one was lost, the best of
        # the rest is kept.
        lowest = checkpoints.lowest_loss(self.folder) if self.ranks.is_rank0 else 0.0
        self.lowest_loss = self.ranks.sum(lowest)[0]

    def _is_taken_back_to(self, source: Path) -> bool:
        """Whether runtime.resume names this checkpoint, with which early stopping ended the run."""
        lineage = self.training.attempt.lineage
        named = lineage.resumed_checkpoint
        patience = lineage.train.early_stopping_patience
        if named is None or patience is None:
            return False
        is_named = Path(named).resolve() == source.resolve()
        return is_named and checkpoints.read_state(source).stale_validations >= patience

    def advance(self, state: TrainState) -> bool:
        """Count one more step; return whether a checkpoint is due after it.

        It is due where `train.save_steps` or a multiple of `train.save_permanent_every` is reached,
        or the validation loss is the lowest of all checkpoints.
        """
        self.save_time = 0.0
        permanent = (
            self.permanent_every is not None and state.step % self.permanent_every == 0
        )
        interval_ends = self.interval.advance(state)
        return interval_ends or permanent or self.is_best(state)

    def save(self, state: TrainState) -> None:
        """Copy the state and commit it in the background, once the previous save is complete.

        Raises:
            Diverged: a weight is not finite; no checkpoint is written.
        """
        self.training.heartbeat.beat("save", state.step)
        started = time.perf_counter()
        tensors = self.training.strategy.tensors()
        self._refuse_non_finite(tensors, state)
        for callback in self.callbacks:
            callback.save_state(state)
        self.writer.save(state.step, tensors, state.to_json())
        if self.is_best(state) and state.validation_loss is not None:
            self.lowest_loss = state.validation_loss
        self.save_time = time.perf_counter() - started

    def _refuse_non_finite(self, tensors: Tensors, state: TrainState) -> None:
        bad: list[torch.Tensor] = []
        for name, tensor in tensors.items():
            if not name.startswith("model."):
                continue
            weight = local_shard(tensor)
            if weight.numel():
                # The extremes propagate NaN, and need no memory of the size of the weights.
                extremes = torch.stack(torch.aminmax(weight))
                bad.append(~extremes.isfinite().all())
        bad_here = torch.stack(bad).sum() if bad else 0.0
        bad_on_all_ranks = self.ranks.sum(bad_here)[0]
        if bad_on_all_ranks:
            raise Diverged(
                f"the weights after step {state.step} are not finite",
                state.step,
                state.samples,
            )

    def is_best(self, state: TrainState) -> bool:
        """Whether the state's validation loss is the lowest of all checkpoints."""
        return (
            state.validation_loss is not None
            and state.validation_loss < self.lowest_loss
        )

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for the pending save, also after a failure: the next attempt can start from it."""
        if error is not None:
            # First: the wait may be cut off.
            log.error("training failed; waiting for the pending save", exc_info=error)
        with self.training.heartbeat.during("save"):
            self.writer.__exit__(kind, error, traceback)


class BackgroundSave:
    """Commits checkpoints of one run, at most one at a time in the background.

    Leaving its context waits for that one.
    """

    def __init__(
        self,
        folder: Path,
        train: TrainingConfig,
        ranks: Ranks,
        before_commit: Callable[[], None],
    ) -> None:
        self.folder = folder
        self.train = train
        self.ranks = ranks
        self.before_commit = before_commit
        self.thread = (
            ThreadPoolExecutor(1, thread_name_prefix="save")
            if train.async_save
            else None
        )
        self.pending: Future[float] | None = None
        self.unreported = 0.0
        self.copies: Tensors = {}

    def save(self, step: int, tensors: Tensors, scalars: JsonObject) -> None:
        """Commit the tensors as they are now.

        In the background, return after one copy and the end of the previous save.

        Raises:
            Exception: whatever made this save, or the pending one, fail.
        """
        tensors = self._owned(tensors)
        if self.thread is None:
            self._write(step, tensors, scalars)
            return
        self.unreported += self.wait()
        copies = self._copy(tensors)
        self.pending = self.thread.submit(self._write, step, copies, scalars)

    def wait(self) -> float:
        """Wait for the pending save; return the seconds it took, 0 without one.

        Raises:
            Exception: what the save failed with.
        """
        pending = self.pending
        self.pending = None
        return pending.result() if pending else 0.0

    def poll(self) -> float:
        """Seconds of the saves that have completed since the last call, 0 of none.

        Raises:
            Exception: what the save failed with.
        """
        seconds = self.unreported
        self.unreported = 0.0
        if self.pending and self.pending.done():
            seconds += self.wait()
        return seconds

    def __enter__(self) -> "BackgroundSave":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.thread is None:
            return
        try:
            self.wait()
        except BaseException:
            if error is None:
                raise
            log.exception("the pending save failed as well")
        finally:
            self.thread.shutdown(wait=False)

    def _owned(self, tensors: Tensors) -> Tensors:
        """The tensors that this rank writes.

        One rank writes each of several equal copies, so that all write about as many bytes.
        """
        loads: dict[tuple[int, int], int] = {}
        owned: Tensors = {}
        for name, value in tensors.items():
            index, count = replica_of(value, self.ranks)
            owner = min(
                range(count), key=lambda replica: loads.get((count, replica), 0)
            )
            loads[count, owner] = loads.get((count, owner), 0) + value.nbytes
            if owner == index:
                owned[name] = value
        return owned

    def _copy(self, tensors: Tensors) -> Tensors:
        """A copy of the tensors in host memory, the same memory each time."""
        if self.copies.keys() != tensors.keys():
            self.copies = {name: _empty_like(value) for name, value in tensors.items()}
        for name, value in tensors.items():
            local_shard(self.copies[name]).copy_(local_shard(value), non_blocking=True)
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        return self.copies

    def _write(self, step: int, tensors: Tensors, scalars: JsonObject) -> float:
        began = time.perf_counter()
        self.before_commit()
        # Not made again: another run may have this name by now.
        if self.ranks.is_rank0 and not self.folder.is_dir():
            raise FileNotFoundError(
                errno.ENOENT,
                "the folder of the run was moved or removed",
                str(self.folder),
            )
        target = save_checkpoint(
            self.folder, step, tensors, scalars, self.ranks.saving_group
        )
        if self.ranks.is_rank0:
            checkpoints.point_and_prune(
                self.folder,
                self.train.save_total_limit,
                self.train.save_permanent_every,
            )
            log.info("committed %s", target.name)
        return time.perf_counter() - began


def _empty_like(value: torch.Tensor) -> torch.Tensor:
    """Host memory for the same part of the same tensor; pinned if it is copied from a GPU."""
    local = local_shard(value)
    memory = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
    if not isinstance(value, DTensor):
        return memory
    # `from_local` would move it to the mesh's device.
    return DTensor(memory, value._spec, requires_grad=False)  # pyright: ignore[reportPrivateUsage]


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Tensors,
    scalars: JsonObject,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Commit `step-XXXXXXXX`.

    Every rank of `group` writes its part into a staging folder, then the first one commits it
    whole.

    Args:
        tensors: of this rank; of equal tensors on several ranks one is written.
    """
    target = checkpoint_path(folder, step)
    first = dist.get_rank(group) == 0
    with staged(target) if first else nullcontext() as staging:
        box = [str(staging)]
        dist.broadcast_object_list(box, group=group, group_src=0)
        shared = Path(box[0])
        writer = TensorWriter(shared)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        dcp_save(tensors, storage_writer=writer, planner=planner, process_group=group)
        if first:
            (shared / STATE_FILE).write_text(
                json.dumps(scalars, indent=1), encoding="utf-8"
            )
            meta = {"torch": torch.__version__}
            checkpoints.keep_under_second_name(target)
            content = {"step": step, "validation_loss": scalars.get("validation_loss")}
            commit(shared, target, KIND, meta, content, writer.checksums)
    dist.barrier(group)
    return target
