"""What the supervisor tells people while the workers run, read from the files that they write."""

import json
import logging

from infini_llama.tasks.formatting import in_time
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import RunFolder

log = logging.getLogger("infini_llama.train")
SHORT = 60.0  # seconds: a run that ends sooner needs no announcement


class Progress:
    """Follows metrics.jsonl and the checkpoints; polled a few times a second."""

    def __init__(self, run: RunFolder, max_steps: int, log_every: int) -> None:
        self.run, self.max_steps, self.log_every = run, max_steps, log_every
        self.offset = run.metrics.stat().st_size if run.metrics.exists() else 0
        self.checkpoint_step = checkpoints.latest_step(run.checkpoints)
        self.steps_seen = 0

    def poll(self) -> None:
        for record in self._new_records():
            if record["kind"] == "train":
                loss = "not finite, update skipped" if record["loss"] is None else f"{record['loss']:.4f}"
                speed = f"{record['tokens_per_second']:,.0f} tokens/s"
                if (mfu := record.get("mfu")) is not None:
                    speed += f"  MFU {mfu:.1%}"
                text = f"step {record['step']}/{self.max_steps}  loss {loss}  lr {record['learning_rate']:.3g}  {speed}"
                due = record["step"] % self.log_every == 0 or record["step"] == self.max_steps
                progress = {"done": record["step"], "total": self.max_steps, "unit": "steps", "loss": record["loss"]}
                log.log(logging.INFO if due else logging.DEBUG, text, extra={"progress": progress | {"due": due}})
                self._how_long(record)
            elif record["loss"] is None:
                log.warning("step %d  validation loss is not finite", record["step"])
            else:
                log.info(
                    "step %d  validation loss %.4f  %.3f bits per byte",
                    record["step"],
                    record["loss"],
                    record["bits_per_byte"],
                )
                self._new_checkpoint()
        self._new_checkpoint()

    def _how_long(self, record: dict) -> None:
        """Once an attempt: the time that is left, by its second step (the first one also warms up)."""
        self.steps_seen += 1
        left = (self.max_steps - record["step"]) * record["step_time"]
        if self.steps_seen == 2 and left >= SHORT:
            log.info("%s remaining at the speed of step %d", in_time(left), record["step"])

    def _new_records(self) -> list[dict]:
        if not self.run.metrics.exists():
            return []
        with self.run.metrics.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _new_checkpoint(self) -> None:
        pointer = self.run.checkpoints / "latest"
        # It may still name a checkpoint that was moved aside.
        if (
            pointer.is_symlink()
            and pointer.exists()
            and (step := checkpoints.step_of(pointer.readlink())) > self.checkpoint_step
        ):
            self.checkpoint_step = step
            log.info("checkpoint committed at step %d", step, extra={"checkpoint": step})
