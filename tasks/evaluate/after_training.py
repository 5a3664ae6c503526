"""The optional last stage of a run: measures what `evaluate.after_training` names, once per checkpoint."""

import logging
from pathlib import Path

from infini_llama.configs.schema import EvaluationConfig
from infini_llama.tasks.evaluate.stage import evaluate, find_passkeys
from infini_llama.tasks.records.evaluation import EvaluationRequest, Evaluations, PasskeyRetrieval, Perplexity
from infini_llama.tasks.records.metrics import EVALUATION_LINE, EvaluationLine, PerplexityLine
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.load import find_checkpoint
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.artifacts import read_manifest
from infini_llama.tasks.storage.json_lines import read_lines

log = logging.getLogger("infini_llama.evaluate")
DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]


def evaluate_trained(run_dir: Path, config: EvaluationConfig) -> Evaluations:
    """The measurements that `config.after_training` names; an earlier result for the same checkpoint and settings is reused.

    Raises:
        ConfigError, DataError: as `evaluate` and `find_passkeys` do.
    """
    found: dict[str, Perplexity | PasskeyRetrieval] = {}
    for kind in config.after_training:
        request = _request(run_dir, config)
        if (before := _measured_before(run_dir, kind, request)) is not None:
            log.info("%s of %s was already measured", kind, request.checkpoint)
            found[kind] = before
            continue
        log.info("measuring %s of %s", kind, request.checkpoint)
        if kind == "perplexity":
            found[kind] = evaluate(run_dir, request.checkpoint, sequences=config.sequences, request=request)
        else:
            lengths, samples = config.passkey_lengths, config.passkey_samples
            found[kind] = find_passkeys(run_dir, request.checkpoint, lengths, DEPTHS, samples, seed=0, request=request)
    return Evaluations.from_json({kind: result.to_json() for kind, result in found.items()})


def _request(run_dir: Path, config: EvaluationConfig) -> EvaluationRequest:
    chosen = find_checkpoint(run_dir, config.checkpoint)
    return EvaluationRequest(
        checkpoint=chosen.name,
        digest=read_manifest(chosen, checkpoints.KIND).digest,
        sequences=config.sequences,
        passkey_lengths=tuple(config.passkey_lengths),
        passkey_samples=config.passkey_samples,
    )


def _measured_before(run_dir: Path, kind: str, request: EvaluationRequest) -> EvaluationLine | None:
    """The line of an earlier command with the same request; None if there is none."""
    run = RunFolder(run_dir)
    lines = reversed(read_lines(run.evaluations, EVALUATION_LINE, run.id))
    wanted = (line for line in lines if isinstance(line, PerplexityLine) == (kind == "perplexity"))
    return next((line for line in wanted if line.asked == request), None)
