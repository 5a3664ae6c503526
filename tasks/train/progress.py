"""The supervisor's progress reports while the workers run, from the files that they write."""

import logging
import math
import re
from pathlib import Path

from infini_llama.tasks.formatting import in_time
from infini_llama.tasks.progress import Reached
from infini_llama.tasks.records.metrics import METRICS_LINE, TrainLine
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.record_files import parse_line

log = logging.getLogger("infini_llama.train")
SHORT = 60.0  # seconds: a run that ends sooner needs no announcement
# A line that worker/__main__.py logs.
WARNING = re.compile(rb"\S+ \S+ WARNING infini_llama\.[\w.]+: (.+)")


class NewLines:
    """The whole lines that are added to a file which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[bytes]:
        """Lines since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return whole.splitlines()


class Progress:
    """Follows metrics.jsonl, the checkpoints and the warnings of the first `ranks` ranks.

    It is polled a few times per second. What settings, data and model cause is logged by every
    rank: equal warnings of an attempt are reported once.
    """

    def __init__(
        self,
        run: RunFolder,
        attempt_dir: Path,
        max_steps: int,
        logging_steps: int,
        ranks: int = 1,
    ) -> None:
        self.run = run
        self.max_steps = max_steps
        self.logging_steps = logging_steps
        self.metrics = NewLines(run.metrics)
        self.rank_logs = [
            NewLines(attempt_dir / f"rank-{rank}.log") for rank in range(ranks)
        ]
        self.warnings = set[bytes]()
        self.checkpoint_step = checkpoints.latest_step(run.checkpoints)
        self.steps_seen = 0
        self.run_id = run.read_id()

    def poll(self) -> None:
        """Report what the workers have written since the last call."""
        for rank_log in self.rank_logs:
            for text in rank_log.read():
                match = WARNING.fullmatch(text)
                if match and match[1] not in self.warnings:
                    self.warnings.add(match[1])
                    log.warning("%s", match[1].decode(errors="replace"))
        for text in self.metrics.read():
            line = parse_line(text, METRICS_LINE, self.run_id)
            if line is None:
                continue
            if isinstance(line, TrainLine):
                self._report(line)
            elif line.tokens == 0:
                log.warning(
                    "step %d  validation loss is not measured: the sequences have no targets",
                    line.step,
                )
            elif line.loss is None:
                log.warning("step %d  validation loss is not finite", line.step)
            else:
                log.info(
                    "step %d  validation loss %.4f  %.3f bits per byte",
                    line.step,
                    line.loss,
                    math.nan if line.bits_per_byte is None else line.bits_per_byte,
                )
                self._new_checkpoint()
        self._new_checkpoint()

    def _report(self, line: TrainLine) -> None:
        """Report the step and, once per attempt, the time that is left.

        That time follows from the attempt's second step: the first one also warms up.
        """
        loss = "update skipped" if line.loss is None else f"{line.loss:.4f}"
        if line.targets == 0:
            loss = "no targets"
        speed = f"{line.tokens_per_second or 0.0:,.0f} tokens/s"
        if line.targets is not None and line.targets < line.input_tokens:
            speed += f" read, {line.targets:,} of {line.input_tokens:,} are targets"
        if line.mfu is not None:
            speed += f"  MFU {line.mfu:.1%}"
        text = (
            f"step {line.step}/{self.max_steps}  loss {loss}  "
            f"lr {line.learning_rate or 0.0:.3g}  {speed}"
        )
        due = line.step % self.logging_steps == 0 or line.step == self.max_steps
        drawn = math.nan if line.loss is None else line.loss
        progress = Reached(line.step, self.max_steps, "steps", due, drawn)
        log.log(
            logging.INFO if due else logging.DEBUG, text, extra={"progress": progress}
        )
        self.steps_seen += 1
        left = (self.max_steps - line.step) * line.step_time
        if self.steps_seen == 2 and left >= SHORT:
            log.info("%s remaining at the speed of step %d", in_time(left), line.step)

    def _new_checkpoint(self) -> None:
        newest = next(iter(checkpoints.named(self.run.checkpoints)), None)
        if newest is None:
            return
        step = checkpoints.step_of(newest)
        if step > self.checkpoint_step:
            self.checkpoint_step = step
            log.info(
                "checkpoint committed at step %d", step, extra={"checkpoint": step}
            )
