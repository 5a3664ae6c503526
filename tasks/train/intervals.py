"""Progress of intervals in minutes at the start of an attempt: they count over the whole run."""

from infini_llama.configs.durations import duration
from infini_llama.configs.schema import TrainingConfig
from infini_llama.tasks.records.metrics import MetricsLine, TrainLine, ValidationLine
from infini_llama.tasks.runs.goodput import seconds_after
from infini_llama.tasks.runs.run_folder import RunFolder


def since_evaluation(lines: list[MetricsLine], step: int) -> float:
    """Seconds of training between the last evaluation and the checkpoint of `step`.

    Args:
        lines: of metrics.jsonl; those of later steps are of work that is lost.
    """
    kept = [line for line in lines if line.step <= step]
    validated = [line.step for line in kept if isinstance(line, ValidationLine)]
    last = max(validated, default=0)
    seconds = 0.0
    for line in kept:
        if isinstance(line, TrainLine) and line.step > last:
            seconds += line.step_time + line.save_time + (line.report_time or 0.0)
    return seconds


def since_save(run: RunFolder, train: TrainingConfig, step: int) -> float:
    """Seconds of training since the checkpoint of `step`, lost attempts included.

    So a run whose attempts all end before the interval does is saved at last. 0 if no interval
    needs the number.
    """
    if duration(train.save_steps).unit != "seconds":
        return 0.0
    return seconds_after(run, step)
