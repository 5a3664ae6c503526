"""Curves beside metrics.jsonl: TensorBoard and Weights & Biases, under the same names."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import JsonObject, dotted
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.storage.files import write_atomic


class WandbRecord(Record):
    """wandb.json of a run. step: the last one sent."""

    id: str
    step: int = -1


class Reporter(Protocol):
    """Draws curves; names are group/name, as in train/loss."""

    def scalars(self, values: dict[str, float], step: int) -> None: ...

    def texts(self, name: str, texts: list[str], step: int) -> None: ...

    def sync(self) -> None: ...

    def close(self, final: dict[str, float]) -> None: ...


class TensorBoard:
    """Event files in `tensorboard` of the run's folder."""

    def __init__(self, run_dir: Path, first_step: int, config: JsonObject) -> None:
        # purge_step hides what an earlier attempt wrote beyond the checkpoint this one starts from
        self.board = SummaryWriter(run_dir / "tensorboard", purge_step=first_step + 1)
        self.settings = flat(config)
        if first_step == 0:
            self.board.add_text("configuration", f"```json\n{json.dumps(config, indent=1)}\n```", 0)

    def scalars(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def texts(self, name: str, texts: list[str], step: int) -> None:
        self.board.add_text(name, "\n\n".join(f"```\n{text}\n```" for text in texts), step)

    def sync(self) -> None:
        self.board.flush()

    def close(self, final: dict[str, float]) -> None:
        if final:
            self.board.add_hparams(
                self.settings, {f"final/{name}": value for name, value in final.items()}, run_name="."
            )
        self.board.close()


class WeightsAndBiases:
    """One W&B run per training run, over all its attempts: `wandb.json` of the run's folder has its id and the last step sent.

    A step that is repeated after a crash is not sent again: its numbers are bitwise equal.
    """

    def __init__(self, run_dir: Path, config: JsonObject) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                "train.report_to has wandb, but it is not installed; run pip install 'infini-llama[wandb]', or "
                "remove it."
            ) from error
        self.file = run_dir / "wandb.json"
        text = self.file.read_bytes() if self.file.exists() else None
        self.sent = WandbRecord.model_validate_json(text) if text else WandbRecord(id=uuid.uuid4().hex[:8])
        # Before W&B creates its run: an attempt that ends inside init resumes that run instead of creating another.
        write_atomic(self.file, self.sent.model_dump_json())
        try:
            self.run = wandb.init(
                project="infini-llama",
                id=self.sent.id,
                name=run_dir.name,
                resume="allow",
                dir=run_dir,
                config=config,
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"train.report_to has wandb, but it cannot start ({error}); log in with `wandb login`, or set "
                "environment.env.WANDB_MODE=offline."
            ) from error
        self.waiting: dict[str, Any] = {}
        self.step = self.sent.step

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._add(values, step)

    def texts(self, name: str, texts: list[str], step: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        table = wandb.Table(columns=["text"], data=[[text] for text in texts])
        self._add({name: table}, step)

    def sync(self) -> None:
        """W&B's own process persists what was sent."""

    def send(self) -> None:
        """Send the complete step to W&B, once: it is recorded first."""
        if self.waiting:
            self.sent = WandbRecord(id=self.sent.id, step=self.step)
            write_atomic(self.file, self.sent.model_dump_json())
            self.run.log(self.waiting, step=self.step)
            self.waiting = {}

    def close(self, final: dict[str, float]) -> None:
        self.send()
        self.run.summary.update({f"final/{name}": value for name, value in final.items()})
        self.run.finish()

    def _add(self, values: Mapping[str, Any], step: int) -> None:
        """Collect what belongs to one step: W&B accepts a step only once."""
        if step <= self.sent.step:
            return
        if step != self.step:
            self.send()
        self.step = step
        self.waiting |= values


def reporters(names: Sequence[str], run_dir: Path, first_step: int, config: JsonObject) -> list[Reporter]:
    """The reporters that `train.report_to` names.

    Raises:
        ConfigError: W&B is requested and not available.
    """
    found: list[Reporter] = []
    if "tensorboard" in names:
        found.append(TensorBoard(run_dir, first_step, config))
    if "wandb" in names:
        found.append(WeightsAndBiases(run_dir, config))
    return found


def flat(config: JsonObject) -> dict[str, bool | int | float | str]:
    """The settings by dotted keys; what is not a number becomes text."""
    settings = dotted(config).items()
    return {key: value if isinstance(value, bool | int | float | str) else json.dumps(value) for key, value in settings}
