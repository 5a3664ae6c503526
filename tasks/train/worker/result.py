"""What a finished run leaves beside its checkpoints: result.json with hashes of its state and texts by its model."""

from infini_llama.tasks.records.resolved_run import ResolvedRun
from infini_llama.tasks.records.summary import TrainingResult
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.tensors import state_hash
from infini_llama.tasks.train.worker.callbacks.samples import texts_of
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from infini_llama.tasks.train.worker.strategies.strategy import Strategy


def write_result(resolved: ResolvedRun, strategy: Strategy, step: int, ranks: Ranks) -> None:
    """Write result.json on the first rank. A collective call."""
    tensors = strategy.tensors()
    weights, moments = state_hash(tensors, "model."), state_hash(tensors, "optimizer.")
    model = strategy.to_plain_model()
    if model is not None:
        run = RunFolder(resolved.run_dir)
        result = TrainingResult(
            steps=step,
            stopped_early=resolved.config.train.early_stopping_patience if step < resolved.max_steps else None,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            weights_sha256=weights,
            optimizer_sha256=moments,
            checkpoint_digest=checkpoints.digest_at(run.checkpoints, step),
            samples=tuple(texts_of(resolved, model)),
        )
        run.write(run.result, result)
    ranks.barrier()
