"""The commands runs, report, compare and gc."""

import logging
from argparse import Namespace
from pathlib import Path

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import JsonObject
from infini_llama.flows.cli.console import Answer
from infini_llama.flows.cli.tables import collected_text, runs_text, terminal
from infini_llama.flows.naming import find, home_folder
from infini_llama.tasks.document import markdown

log = logging.getLogger("infini_llama.report")


def runs(arguments: Namespace) -> Answer:
    from infini_llama.tasks.runs.run_reader import list_runs

    home = home_folder()
    statuses = list_runs(home)
    text = (
        f"no run in {home / 'runs'}; call it in the folder where runs were started, or set "
        "INFINI_LLAMA_HOME"
    )
    if statuses:
        text = runs_text(statuses)
    return {"home": str(home), "runs": [status.to_json() for status in statuses]}, text


def report(arguments: Namespace) -> Answer:
    """Describe a run or a dataset.

    A run's page is written into its folder, a dataset's only where --html names a file.
    """
    path = find(arguments.path, "runs", "datasets")
    described = _dataset if _is_dataset(path) else _run
    record, text, page = described(path, arguments.html)
    if arguments.open:
        import webbrowser

        if page is None:
            log.warning(
                "no page was written, so nothing was opened; --html FILE writes one"
            )
        elif not webbrowser.open(page.as_uri()):
            log.warning("no browser could be started; open the page yourself")
    return record, text


def _is_dataset(path: Path) -> bool:
    return not (path / "lineage.json").exists() and (
        (path / "manifest.json").exists() or path.parent.name == "datasets"
    )


def _run(path: Path, html: str | None) -> tuple[JsonObject, str, Path | None]:
    from infini_llama.tasks.report.run import run_document, run_page, write_report
    from infini_llama.tasks.runs.run_reader import RunReader

    run = RunReader(path)
    record = run.description.to_json()
    text = terminal(markdown(run_document(run)))
    if html is not None:
        page = written(html, run_page(run))
        return record | {"report": str(page)}, f"{text}\n\n{page}", page
    try:
        picture, page = write_report(path)
    except OSError as fault:  # it may be another user's, or on a disk that is only read
        log.warning(
            "the page cannot be written into %s (%s); name a file by --html",
            path,
            fault.strerror,
        )
        return record, text, None
    return (
        record | {"report": str(page), "loss_curve": str(picture)},
        f"{text}\n\n{page}",
        page,
    )


def _dataset(path: Path, html: str | None) -> tuple[JsonObject, str, Path | None]:
    from infini_llama.tasks.report.dataset import (
        dataset_document,
        describe,
        measured_dataset,
    )
    from infini_llama.tasks.report.page import page as as_page
    from infini_llama.tasks.storage.dataset_files import verify_dataset

    if html is None:
        verify_dataset(path)
        dataset = describe(path)
        return dataset.to_json(), terminal(markdown(dataset_document(dataset))), None
    measured = measured_dataset(path)  # which verifies the dataset
    page = written(html, as_page(measured))
    record = describe(path).to_json() | {"report": str(page)}
    return record, f"{terminal(markdown(measured))}\n\n{page}", page


def compare(arguments: Namespace) -> Answer:
    from infini_llama.tasks.report.comparison import (
        NOT_THE_SAME,
        comparison_document,
        open_runs,
    )
    from infini_llama.tasks.report.comparison import compare as compare_runs
    from infini_llama.tasks.report.page import page as as_page

    opened = open_runs([find(run, "runs") for run in arguments.runs])
    comparison = compare_runs(opened)
    document = comparison_document(opened, comparison)
    record = comparison.to_json()
    text = terminal(markdown(document))
    if not comparison.same_validation:
        log.warning(NOT_THE_SAME)
    if arguments.html is not None:
        page = written(arguments.html, as_page(document))
        return record | {"report": str(page)}, f"{text}\n\n{page}"
    return record, text


def gc(arguments: Namespace) -> Answer:
    from infini_llama.tasks.runs.gc import Rules, collect

    rules = Rules(
        arguments.older_than * 86400,
        arguments.keep_checkpoints,
        arguments.unused_datasets,
    )
    record = collect(home_folder(), rules, arguments.yes)
    return record.to_json(), collected_text(record)


def written(file: str, page: str) -> Path:
    """Write a page into `file`, and return its absolute path.

    Raises:
        ConfigError: it is a folder.
    """
    from infini_llama.tasks.storage.files import write_atomic

    target = Path(file).resolve()
    if target.is_dir():
        raise ConfigError(f"--html: {target} is a folder; name a file.")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, page)
    return target
