"""The closing card of training on Prefect's page of the run, however training ended."""

import base64
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from infini_llama.configs.errors import Preempted
from infini_llama.tasks.best_effort import best_effort
from infini_llama.tasks.document import Document, cell, markdown
from infini_llama.tasks.report.artifact_keys import ArtifactKeys
from infini_llama.tasks.report.run import loss_picture, run_document
from infini_llama.tasks.runs.run_reader import RunReader


@contextlib.contextmanager
def closing_card(run: Path, page: ArtifactKeys) -> Iterator[Callable[[str], None]]:
    """Make the card when the block is left.

    Its last line is the error's sentence, or the block's last report.

    Args:
        run: the folder of the run.
        page: what its artifacts are called.
    """
    ended = ["Training was interrupted."]
    try:
        yield ended.append
    except BaseException as error:
        # A request to stop reaches Prefect as its own exception; its cause is what training said.
        stopped = error if isinstance(error, Preempted) else error.__cause__
        if isinstance(stopped, Preempted):
            ended.append(str(stopped))
        elif isinstance(error, Exception):
            ended.append(f"Training failed: {error}")
        raise
    finally:
        with best_effort("the training's card"):
            create_markdown_artifact(
                card(run, ended[-1]),
                key=page.key("training"),
                description=f"How run {run.name} went",
            )


def card(path: Path, ended: str) -> str:
    """The run's document as Markdown, with its loss curve inside.

    Prefect's page needs neither network nor file.

    Args:
        path: of the run's folder.
        ended: one sentence: how training ended.
    """
    if not (path / "lineage.json").exists():  # refused before it began
        return markdown(Document(f"Run {path.name}", (cell(ended),)))
    run = RunReader(path)
    picture = ""
    if run.trained:
        inside = base64.b64encode(loss_picture(run).read_bytes()).decode()
        title = "Training and validation loss against the step"
        picture = f"![{title}](data:image/png;base64,{inside})"
    return markdown(run_document(run, ended), picture)
