"""What may go and what never does: a run's newest checkpoints, what somebody works on, what another run was started from."""

import errno
import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infini_llama.configs.reading import changed
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.runs import gc
from infini_llama.tasks.runs.checkpoints import (
    abandon_newer,
    newest_with_damaged_moved_aside,
    step_of,
)
from infini_llama.tasks.runs.gc import Collected, Rules, collect
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.runs.run_reader import list_runs
from infini_llama.tasks.runs.start_records import StartRecord
from infini_llama.tasks.storage.artifacts import move_aside, staging
from infini_llama.tasks.storage.locks import Lock
from infini_llama.tasks.storage.record_files import write_record
from support.made_up_runs import add_checkpoint

ALL = Rules(older_than=0.0)
NOTES = ("parts", "tokenizers")


def paths(found: Collected) -> list[str]:
    return sorted(file.path for file in found.files)


@pytest.fixture
def home(make_run, built):
    make_run()
    # The copy of the home has none that a dataset links to.
    shutil.rmtree(built[0] / "units")
    return built[0]


@pytest.fixture
def half_saved(home) -> Path:
    """A checkpoint whose save was cut short by a kill."""
    return staging(home / "runs" / "run" / "checkpoints" / "step-00000120")


def test_nothing_to_do_in_a_home_without_leftovers(home):
    assert collect(home, ALL, yes=True) == Collected(
        removed=True, bytes=0, files=(), in_use=()
    )
    assert collect(home / "nowhere", ALL, yes=False).files == ()


def test_leftovers_of_kills_and_rollbacks_are_listed_and_removed(
    home, dataset, row_table
):
    run = home / "runs" / "run"
    add_checkpoint(run / "checkpoints", 80)
    add_checkpoint(run / "checkpoints", 100)
    abandon_newer(run / "checkpoints", 80)
    aside = move_aside(run / "checkpoints" / "step-00000080")
    left = [
        run / "checkpoints" / "abandoned" / "step-00000100",
        aside,
        staging(run / "checkpoints" / "step-00000120"),
        staging(dataset),
        staging(row_table),
    ]
    half = run / ".summary.json.123-0123abcd.tmp"
    half.write_text("{")
    expected = sorted(path.relative_to(home).as_posix() for path in [*left, half])
    listed = collect(home, ALL, yes=False)
    assert (
        paths(listed) == expected
        and listed.bytes > 2000
        and all(path.exists() for path in left)
    )
    assert paths(collect(home, ALL, yes=True)) == expected
    assert not any(path.exists() for path in [*left, half])
    assert paths(collect(home, ALL, yes=False)) == []
    assert step_of(newest_with_damaged_moved_aside(run / "checkpoints")) == 60


def test_an_export_that_is_being_written_is_kept(home):
    run = RunFolder(home / "runs" / "run")
    staged = staging(run.export)
    with Lock(run.export_lock):
        collect(home, ALL, yes=True)
        assert staged.exists()
    collect(home, ALL, yes=True)
    assert not staged.exists()


def test_records_of_starts_go_with_their_runs_and_names_of_no_run(home):
    (home / "starts").mkdir()
    for name in ("run", "removed", "never-began"):
        write_record(home / "starts" / f"{name}.json", StartRecord(name=name))
    (home / "runs" / "never-began").mkdir()
    left = ["runs/never-began", "starts/removed.json"]
    assert paths(collect(home, ALL, yes=False)) == left
    collect(home, ALL, yes=True)
    assert paths(collect(home, ALL, yes=True)) == ["starts/never-began.json"]
    assert [path.name for path in (home / "starts").iterdir()] == ["run.json"]


def test_space_is_freed_on_a_full_disk(home, half_saved):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        found = collect(home, ALL, yes=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (
        paths(found) == [half_saved.relative_to(home).as_posix()]
        and not half_saved.exists()
    )


def test_what_the_file_system_keeps_is_named_and_the_rest_is_removed(home, monkeypatch):
    """As NFS answers while another process reads a file of it."""
    first, second = (
        staging(home / "runs" / "run" / "checkpoints" / f"step-0000012{digit}")
        for digit in "01"
    )
    rmtree = shutil.rmtree

    def refuse(path: Path, **settings: Any) -> None:
        if path == first:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        rmtree(path, **settings)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    found = collect(home, ALL, yes=True)
    assert paths(found) == [second.relative_to(home).as_posix()] and not second.exists()
    assert [kept.path for kept in found.in_use] == [
        first.relative_to(home).as_posix()
    ] and first.exists()


def test_a_run_of_another_user_hides_no_other_and_is_kept(
    home, make_run, monkeypatch, half_saved
):
    theirs = make_run("theirs")
    read_bytes, iterdir = Path.read_bytes, Path.iterdir

    def refuse(path: Path) -> None:
        if theirs in (path, *path.parents):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def read(path: Path) -> bytes:
        refuse(path)
        return read_bytes(path)

    def entries(path: Path) -> Iterator[Path]:
        refuse(path)
        return iterdir(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    monkeypatch.setattr(Path, "iterdir", entries)
    assert [run.run for run in list_runs(home)] == ["run"]
    assert paths(collect(home, Rules(0.0, unused_datasets=True), yes=True)) == [
        half_saved.relative_to(home).as_posix()
    ]


def test_younger_files_are_kept(home, half_saved):
    assert (
        paths(collect(home, Rules(older_than=3600), yes=True)) == []
        and half_saved.exists()
    )


def test_files_that_vanish_meanwhile_are_ignored(home, monkeypatch, half_saved):
    """A lease is renewed by way of a temporary file every few seconds."""
    listed, half = gc._of_run, home / "runs" / "run" / ".lease.123-0123abcd.tmp"

    def listed_and_gone(run, rules):
        half.write_text("{")
        found = list(listed(run, rules))
        half.unlink()
        return found

    monkeypatch.setattr(gc, "_of_run", listed_and_gone)
    assert (
        paths(collect(home, ALL, yes=True)) == [half_saved.relative_to(home).as_posix()]
        and not half_saved.exists()
    )


def test_locked_folders_are_kept(home, dataset, half_saved):
    half, key = staging(dataset), dataset.name.rpartition("-")[2]
    with (
        Lock(home / "runs" / "run" / "lock"),
        Lock(home / "locks" / f"dataset-{key}.lock"),
    ):
        for yes in (False, True):
            record = collect(home, ALL, yes)
            assert record.files == () and len(record.in_use) == 2
            assert all(f"process {os.getpid()}" in kept.by for kept in record.in_use)
    assert half_saved.exists() and half.exists()


def test_the_newest_best_and_permanent_checkpoints_stay(home):
    folder = RunFolder(home / "runs" / "run")
    for step, loss in ((10, 9.0), (15, 0.1), (80, 7.0), (100, 8.0)):
        add_checkpoint(folder.checkpoints, step, loss)
    lineage = folder.require_lineage()
    folder.write(
        folder.lineage,
        changed(lineage, train=changed(lineage.train, save_permanent_every=40)),
    )
    record = collect(home, Rules(0.0, keep_checkpoints=2), yes=True)
    gone = [f"runs/run/checkpoints/step-000000{step}" for step in (10, 20)]
    # 100 and 60 are the newest that pass, 15 the best, 40 and 80 permanent.
    assert paths(record) == gone
    assert collect(home, Rules(0.0, keep_checkpoints=2), yes=True).files == ()


def test_the_checkpoint_that_another_run_was_started_from_stays(home, make_run):
    other = RunFolder(make_run("other"))
    start = home / "runs" / "run" / "checkpoints" / "step-00000020"
    assert f"{start.relative_to(home)}" in paths(
        collect(home, Rules(0.0, keep_checkpoints=2), yes=False)
    )
    other.write(
        other.lineage, changed(other.require_lineage(), resumed_from=str(start))
    )
    left = paths(collect(home, Rules(0.0, keep_checkpoints=2), yes=True))
    assert left == ["runs/other/checkpoints/step-00000020"] and start.exists()


def test_a_dataset_is_deleted_only_on_request_and_when_unreferenced(home, dataset):
    rules = Rules(0.0, unused_datasets=True)
    assert collect(home, rules, yes=True).files == ()
    shutil.rmtree(home / "runs")
    assert collect(home, ALL, yes=True).files == () and dataset.exists()
    assert paths(collect(home, rules, yes=True)) == [
        dataset.relative_to(home).as_posix()
    ]
    assert not dataset.exists() and not (home / "datasets" / "latest").is_symlink()


@pytest.mark.parametrize(
    "moved",
    [
        "runs",
        "runs/run",
        "datasets",
        "datasets/{dataset}",
        "units",
        "runs/run/checkpoints",
    ],
)
def test_what_was_moved_to_another_disk_behind_a_link_is_used(
    make_run, data, built, dataset, tmp_path, moved
):
    """Another disk has copies of linked files."""
    home, path = built[0], built[0] / moved.format(dataset=dataset.name)
    make_run()
    (before,) = list_runs(home)
    shutil.copytree(path, tmp_path / "disk" / path.name, symlinks=True)
    shutil.rmtree(path)
    path.symlink_to(tmp_path / "disk" / path.name)
    (after,) = list_runs(home)
    assert changed(after, age=before.age) == before
    removed = collect(home, Rules(0.0, unused_datasets=True), yes=True).files
    assert not [file for file in removed if file.kind != "note on text"]
    assert preprocess(data(), home).built == ()


def test_runs_are_listed_the_last_one_first(home, make_run):
    other = make_run("other", steps=20, finished=False)
    old = time.time() - 5000
    for file in other.iterdir():
        os.utime(file, (old, old))
    first, second = list_runs(home)
    assert (first.run, first.state, first.step, first.max_steps) == (
        "run",
        "finished",
        60,
        60,
    )
    assert (second.run, second.state, second.step) == ("other", "stopped", 20)
    assert second.age == pytest.approx(5000, abs=60) and second.bytes > 1000
    assert second.validation_loss == pytest.approx(5.9)


def test_unlinked_units_and_notes_go_unless_text_is_being_prepared(
    data, tmp_path, small_parts
):
    reference = preprocess(data(), tmp_path)
    assert not [
        path
        for path in paths(collect(tmp_path, ALL, yes=False))
        if "parts" not in path and "tokenizers" not in path
    ]
    units = sorted(
        path.parent.relative_to(tmp_path).as_posix()
        for path in tmp_path.glob("units/*/*/manifest.json")
    )
    notes = sorted(
        path.relative_to(tmp_path).as_posix()
        for path in tmp_path.glob("units/*/*.json")
        if path.parent.name in NOTES
    )
    half = staging(tmp_path / units[0])
    shutil.rmtree(tmp_path / reference.path)
    with Lock(tmp_path / "locks" / "prepare-0123456789ab.lock"):
        assert (
            collect(tmp_path, ALL, yes=True).files == ()
            and (tmp_path / units[0]).exists()
        )
    with Lock(
        tmp_path / "locks" / "units.lock", shared=True
    ):  # a preparation that began since the list was made
        assert (
            collect(tmp_path, ALL, yes=True).files == ()
            and (tmp_path / units[0]).exists()
        )
    assert len(units) > 3
    assert paths(collect(tmp_path, ALL, yes=True)) == sorted(
        [*units, *notes, half.relative_to(tmp_path).as_posix()]
    )
    assert not (tmp_path / units[0]).exists() and not half.exists()
    assert preprocess(data(), tmp_path) == reference


def test_a_home_is_gone_through_once_for_each_lock_and_not_for_each_file(
    home, monkeypatch
):
    """Of 2,000 units that no dataset has, all manifests would be read 2,000 times."""
    for number in range(9):
        (home / "units" / "parts").mkdir(parents=True, exist_ok=True)
        (home / "units" / "parts" / f"{number}.json").write_text("{}")
    listed, leftovers = list[Path](), gc.leftovers
    monkeypatch.setattr(
        gc,
        "leftovers",
        lambda home, rules: [listed.append(home), leftovers(home, rules)][1],
    )
    assert len(collect(home, ALL, yes=True).files) == 9 and len(listed) == 2
