"""The commands inspect, estimate, report, compare and runs."""

import logging
from argparse import Namespace
from pathlib import Path

from infini_llama.configs.reading import JsonObject
from infini_llama.flows.cli.paths import Answer, find, home_folder

log = logging.getLogger("infini_llama.report")


def inspect(arguments: Namespace) -> Answer:
    from infini_llama.flows.cli.tables import dataset_text, run_text

    path = find(arguments.path, "runs", "datasets")
    is_run = (path / "lineage.json").exists()
    if is_run:
        from infini_llama.tasks.runs.runs import describe_run

        description = describe_run(path)
        record, text = description.to_json(), run_text(description)
    else:
        from infini_llama.tasks.preprocess.summary import describe

        dataset = describe(path)
        record, text = dataset.to_json(), dataset_text(dataset)
    if arguments.html is not None:
        from infini_llama.tasks.report.dataset import dataset_page
        from infini_llama.tasks.report.run import run_page
        from infini_llama.tasks.runs.record import RunRecord

        return with_page(record, text, arguments.html, run_page(RunRecord(path)) if is_run else dataset_page(path))
    return record, text


def estimate(arguments: Namespace) -> Answer:
    from infini_llama.configs.loading import load_config
    from infini_llama.flows.cli.tables import estimate_text
    from infini_llama.flows.home import resolved
    from infini_llama.tasks.estimate.run import estimate

    record = estimate(resolved(load_config(arguments.config, arguments.overrides)))
    return record.to_json(), estimate_text(record)


def report(arguments: Namespace) -> Answer:
    from infini_llama.tasks.report.run import write_report

    picture, page = write_report(find(arguments.run, "runs"))
    if arguments.open:
        import webbrowser

        if not webbrowser.open(page.as_uri()):
            log.warning("no browser could be started; open the page yourself")
    return {"loss_curve": str(picture), "report": str(page)}, str(page)


def compare(arguments: Namespace) -> Answer:
    from infini_llama.flows.cli.tables import as_text
    from infini_llama.tasks.report.comparison import (
        NOT_THE_SAME,
        columns_of_runs,
        compare,
        comparison_page,
        rows_of_keys,
    )

    paths = [find(run, "runs") for run in arguments.runs]
    comparison = compare(paths)
    record = comparison.to_json()
    shown = {"differences": rows_of_keys(comparison), "results": columns_of_runs(comparison)}
    text = as_text({part: rows for part, rows in shown.items() if rows})
    if not comparison.same_validation:
        log.warning(NOT_THE_SAME)
    if arguments.html is not None:
        return with_page(record, text, arguments.html, comparison_page(paths, comparison))
    return record, text


def runs(arguments: Namespace) -> Answer:
    from infini_llama.flows.cli.tables import runs_text
    from infini_llama.tasks.runs.runs import list_runs

    found = list_runs(home_folder())
    nothing = (
        f"no run in {home_folder() / 'runs'}; call it in the folder where runs were started, or set INFINI_LLAMA_HOME"
    )
    return {"home": str(home_folder()), "runs": [run.to_json() for run in found]}, runs_text(
        found
    ) if found else nothing


def with_page(record: JsonObject, text: str, file: str, content: str) -> Answer:
    """The answer, once its page is written into `file`, and the path of that."""
    from infini_llama.tasks.storage.artifacts import write_atomic

    target = Path(file).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, content)
    return record | {"page": str(target)}, f"{text}\n\n{target}"
