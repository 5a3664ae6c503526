"""Where curves are drawn beside metrics.jsonl: TensorBoard and Weights & Biases, told the same names."""

import json
import uuid
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.storage.artifacts import write_atomic


class Reporter(Protocol):
    """Draws what it is told; names are group/name, as in train/loss."""

    def scalars(self, values: dict[str, float], step: int) -> None: ...

    def texts(self, name: str, texts: list[str], step: int) -> None: ...

    def sync(self) -> None: ...

    def close(self, final: dict[str, float]) -> None: ...


class TensorBoard:
    """Event files in `tensorboard` of the run's folder."""

    def __init__(self, run_dir: Path, first_step: int, config: dict) -> None:
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
    """One W&B run a training run, over all its attempts: `wandb.json` of the run's folder has its id and the last step it was told.

    A step that is done again after a crash is not told again: its numbers are the same to the bit.
    """

    def __init__(self, run_dir: Path, config: dict) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                "train.report_to has wandb, but it is not installed; run pip install 'infini-llama[wandb]', or take it out."
            ) from error
        self.file = run_dir / "wandb.json"
        known = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}
        self.id, self.told = known.get("id") or uuid.uuid4().hex[:8], known.get("step", -1)
        # Before W&B creates its run: an attempt that ends inside init resumes that run instead of creating another.
        write_atomic(self.file, json.dumps({"id": self.id, "step": self.told}))
        try:
            self.run = wandb.init(
                project="infini-llama",
                id=self.id,
                name=run_dir.name,
                resume="allow",
                dir=run_dir,
                config=config,
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"train.report_to has wandb, but it cannot begin ({error}); log in with `wandb login`, or set "
                "environment.env.WANDB_MODE=offline."
            ) from error
        self.waiting: dict[str, Any] = {}
        self.step = self.told

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._add(dict(values), step)

    def texts(self, name: str, texts: list[str], step: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        table = wandb.Table(columns=["text"], data=[[text] for text in texts])
        self._add({name: table}, step)

    def sync(self) -> None:
        """W&B's own process keeps what it was told."""

    def send(self) -> None:
        """Tells W&B the step that is complete, once: first noted, then sent."""
        if self.waiting:
            self.told = self.step
            write_atomic(self.file, json.dumps({"id": self.id, "step": self.told}))
            self.run.log(self.waiting, step=self.step)
            self.waiting = {}

    def close(self, final: dict[str, float]) -> None:
        self.send()
        self.run.summary.update({f"final/{name}": value for name, value in final.items()})
        self.run.finish()

    def _add(self, values: dict[str, Any], step: int) -> None:
        """All that belongs to one step is sent together: W&B knows a step only once."""
        if step <= self.told:
            return
        if step != self.step:
            self.send()
        self.step = step
        self.waiting |= values


def reporters(names: list[str], run_dir: Path, first_step: int, config: dict) -> list[Reporter]:
    """Those of `train.report_to`.

    Raises:
        ConfigError: W&B is wanted and cannot be had.
    """
    found: list[Reporter] = []
    if "tensorboard" in names:
        found.append(TensorBoard(run_dir, first_step, config))
    if "wandb" in names:
        found.append(WeightsAndBiases(run_dir, config))
    return found


def flat(section: dict, prefix: str = "") -> dict[str, bool | int | float | str]:
    """{"train": {"seed": 1}} as {"train.seed": 1}; what is no number is text."""
    found: dict[str, bool | int | float | str] = {}
    for key, value in section.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return found
