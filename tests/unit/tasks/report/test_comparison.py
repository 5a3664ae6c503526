"""Runs beside one another: what differs is found, what is the same is not shown, and who cannot be compared is said."""

import pytest

from infini_llama.configs.reading import changed
from infini_llama.tasks.records.machine import Cpu, MachineFacts
from infini_llama.tasks.records.plan import EnvironmentRecord
from infini_llama.tasks.report.comparison import compare, comparison_document, open_runs
from infini_llama.tasks.report.page import page as as_page
from infini_llama.tasks.runs.run_folder import RunFolder
from support.records import make_plan


@pytest.fixture
def two(make_run):
    return [
        make_run("one"),
        make_run("two", steps=40, finished=False, learning_rate=0.5),
    ]


def test_only_what_differs_is_listed(two):
    record = compare(open_runs(two))
    assert record.differences == {"train.learning_rate": {"one": 1e-3, "two": 0.5}}
    assert record.same_validation
    assert (
        record.runs["one"].state == "finished" and record.runs["two"].state == "stopped"
    )
    assert record.runs["one"].best_validation_loss == pytest.approx(5.5)
    assert record.runs["two"].tokens == 40 * 512
    assert record.runs["two"].tokens_per_second == pytest.approx(1024)


def test_another_machine_and_another_dataset(two, caplog):
    for folder, precision in zip(two, ("fp32", "bf16"), strict=True):
        run, plan = RunFolder(folder), make_plan(precision=precision)
        facts = MachineFacts(
            python="3.12", cpu=Cpu(model="one"), cores=2, versions={}, gpus=()
        )
        record = EnvironmentRecord(
            plan=plan,
            facts=facts,
            pinned=plan.pinned(),
            pinned_at="2026-01-01T00:00:00+00:00",
        )
        run.write(run.environment, record)
    run = RunFolder(two[1])
    lineage = run.require_lineage()
    run.write(
        run.lineage,
        changed(lineage, dataset=changed(lineage.dataset, digest="blake3:other")),
    )
    opened = open_runs(two)
    record = compare(opened)
    assert record.differences["plan.precision"] == {"one": "fp32", "two": "bf16"}
    assert "dataset.digest" in record.differences and not record.same_validation
    assert "are not of the same sequences" in as_page(
        comparison_document(opened, record)
    )
    assert not caplog.records
    run.environment.unlink()
    assert compare(open_runs(two)).differences["plan.precision"] == {
        "one": "fp32",
        "two": None,
    }
    assert "two: environment.json" in caplog.text


def test_the_page(two, read_page):
    opened = open_runs(two)
    page = read_page(as_page(comparison_document(opened, compare(opened))))
    assert "train.learning_rate 0.001 0.5" in page.text
    assert page.elements.count("svg") == 7  # no MFU and no gates
    assert "are not of the same sequences" not in page.text
