"""Which checkpoint serves: the newest whole one, the best one, the one that was asked for; nothing is deleted silently."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.tasks.records.manifest import AnyManifest
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.checkpoints import (
    best_of,
    checkpoint_path,
    choose_and_abandon_newer,
    committed,
    keep_under_second_name,
    latest_step,
    newest_with_damaged_moved_aside,
    point_and_prune,
    prunable,
)
from infini_llama.tasks.runs.run_folder import RunFolder, remove_staging
from infini_llama.tasks.storage import artifacts
from infini_llama.tasks.storage.artifacts import Damaged, check, remove, staging
from support.made_up_runs import add_checkpoint


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 10, 20, 30; the validation loss is lowest at 20 and was not measured at 30."""
    for step, loss in ((10, 3.0), (20, 1.0), (30, None)):
        add_checkpoint(tmp_path, step, loss)
    return tmp_path


def damage(checkpoint):
    (checkpoint / "weights").write_bytes(bytes(500) + b"\1" + bytes(499))


def steps(folder) -> list[int]:
    return [checkpoint.step for checkpoint in committed(folder)]


def test_the_newest_whole_one_serves_and_damaged_ones_are_kept_aside(folder, caplog):
    damage(checkpoint_path(folder, 30))
    (checkpoint_path(folder, 20) / "weights").unlink()
    assert newest_with_damaged_moved_aside(folder) == checkpoint_path(folder, 10)
    assert {path.name for path in folder.iterdir()} >= {
        "step-00000030.damaged-1",
        "step-00000020.damaged-1",
    }
    assert (
        "step-00000030 is damaged" in caplog.text
        and "step-00000020 is damaged" in caplog.text
    )


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_damaged_ones_that_may_not_be_moved_stay_and_the_next_one_serves(
    folder, monkeypatch, caplog, code
):
    """Of another user's run, or on a disk that is only read."""

    def refuse(path: Path) -> Path:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(checkpoints, "move_aside", refuse)
    damage(checkpoint_path(folder, 30))
    damage(checkpoint_path(folder, 20))
    assert newest_with_damaged_moved_aside(folder) == checkpoint_path(
        folder, 10
    ) and steps(folder) == [30, 20, 10]
    for step in (30, 20):
        assert f"step-000000{step} is damaged" in caplog.text
    assert (
        f"cannot be moved aside ({os.strerror(code)}); the next one is used"
        in caplog.text
    )
    assert choose_and_abandon_newer(folder, "best", None) == checkpoint_path(folder, 10)


def test_one_of_another_version_is_refused_and_stays(folder, monkeypatch):
    monkeypatch.setitem(artifacts.FORMAT_VERSIONS, "checkpoint", 99)
    other = add_checkpoint(folder, 40)
    monkeypatch.undo()
    for resume in ("auto", "must", str(other)):
        with pytest.raises(DataError, match=f"{other} .*version 99"):
            choose_and_abandon_newer(folder, resume, None)
    assert other.is_dir() and steps(folder) == [30, 20, 10]


def test_one_that_was_moved_to_another_disk_behind_a_link_serves(folder, tmp_path):
    disk = Path(shutil.move(checkpoint_path(folder, 30), tmp_path / "disk"))
    checkpoint_path(folder, 30).symlink_to(disk)
    assert steps(folder) == [30, 20, 10]
    assert newest_with_damaged_moved_aside(folder) == checkpoint_path(folder, 30)
    add_checkpoint(folder, 40)
    point_and_prune(folder, keep=1)
    assert steps(folder) == [40, 20] and not checkpoint_path(folder, 30).is_symlink()
    assert check(disk, "checkpoint", checksums=True), (
        "what a person moved is not deleted"
    )


def test_a_checkpoint_that_cannot_be_deleted_ends_no_training(tmp_path, monkeypatch):
    """As NFS answers while another process reads a file of it."""
    run = RunFolder(tmp_path)
    for step in (10, 20, 30):
        add_checkpoint(run.checkpoints, step)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr(os, "rmdir", refuse)
    point_and_prune(run.checkpoints, keep=2)
    assert steps(run.checkpoints) == [30, 20]
    remove_staging(run)  # at the start of the next attempt
    assert list(run.checkpoints.glob(".step-00000010.*"))
    monkeypatch.undo()
    remove_staging(run)
    assert not list(run.checkpoints.glob(".step-*"))


def test_leftovers_of_a_killed_save_are_not_a_checkpoint(folder):
    staging(checkpoint_path(folder, 40))
    (folder / "step-00000050").mkdir()  # no manifest
    assert steps(folder) == [30, 20, 10] and latest_step(folder) == 30


def test_of_two_equal_validation_losses_the_earlier_is_the_best(folder):
    add_checkpoint(folder, 40, 1.0)
    assert best_of(committed(folder)) == checkpoint_path(folder, 20)


def test_latest_and_best_are_names_where_no_link_can_be_made(folder, monkeypatch):
    """As on exFAT."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "symlink", refuse)
    point_and_prune(folder, keep=3)
    assert not os.path.lexists(folder / "latest") and not os.path.lexists(
        folder / "best"
    )
    other = folder / "other"
    for name, step in (("latest", 30), ("best", 20)):
        chosen = choose_and_abandon_newer(other, str(folder / name), None)
        assert chosen == checkpoint_path(folder, step)
    assert choose_and_abandon_newer(folder, str(folder / "best"), None) == chosen
    assert steps(folder) == [20, 10]


def test_a_damaged_best_checkpoint_is_replaced_by_the_next_best(folder, caplog):
    damage(checkpoint_path(folder, 20))
    assert choose_and_abandon_newer(folder, "best", None) == checkpoint_path(folder, 10)
    assert (
        "step-00000020 is damaged" in caplog.text
        and (folder / "step-00000020.damaged-1").is_dir()
    )
    assert [path.name for path in (folder / "abandoned").iterdir()] == ["step-00000030"]


def test_one_that_is_pruned_while_it_is_verified_gives_way_to_the_newer(
    folder, monkeypatch
):
    """As `evaluate` meets it beside a training that keeps one checkpoint."""

    def pruned_meanwhile(path: Path, kind: str, checksums: bool) -> AnyManifest:
        if path == checkpoint_path(folder, 30):
            add_checkpoint(folder, 40)
            remove(path)
        return check(path, kind, checksums)

    monkeypatch.setattr(checkpoints, "check", pruned_meanwhile)
    assert newest_with_damaged_moved_aside(folder) == checkpoint_path(folder, 40)
    assert not list(folder.glob("*.damaged-*"))


def test_the_one_that_a_rollback_would_go_to_stays_as_long_as_it_may_be_needed(folder):
    """The updates of steps 31 and 90 were skipped; each counts for 100 steps."""
    for step in range(40, 210, 10):
        skips = [skip for skip in (31, 90) if skip <= step]
        add_checkpoint(folder, step, 2.0, skips=skips)
        point_and_prune(folder, keep=2)
        needed = {30} if step < 190 else set()
        assert set(steps(folder)) == {step, step - 10, 20} | needed


def test_pruning_without_a_readable_state_removes_nothing(folder):
    add_checkpoint(folder, 40, 2.0, skips="none")
    assert prunable(committed(folder), keep=1) == []


def test_steps_beyond_eight_digits_still_order(folder):
    add_checkpoint(folder, 99_999_999)
    add_checkpoint(folder, 100_000_000)
    assert latest_step(folder) == 100_000_000
    assert newest_with_damaged_moved_aside(folder) == checkpoint_path(
        folder, 100_000_000
    )


def test_rules(folder, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert (
        choose_and_abandon_newer(empty, "auto", None) is None
        and choose_and_abandon_newer(empty, "never", None) is None
    )
    assert choose_and_abandon_newer(folder, "auto", None) == checkpoint_path(folder, 30)
    with pytest.raises(ConfigError, match="has checkpoints"):
        choose_and_abandon_newer(folder, "never", None)
    with pytest.raises(ConfigError, match="checkpoint"):
        choose_and_abandon_newer(empty, "must", None)
    with pytest.raises(ConfigError, match="not a folder"):
        choose_and_abandon_newer(folder, str(tmp_path / "nowhere"), None)


def test_going_back_moves_newer_ones_to_abandoned_once(folder):
    wanted = checkpoint_path(folder, 10)
    assert choose_and_abandon_newer(folder, str(wanted), None) == wanted
    assert steps(folder) == [10]
    assert sorted(path.name for path in (folder / "abandoned").iterdir()) == [
        "step-00000020",
        "step-00000030",
    ]
    add_checkpoint(folder, 20)
    assert choose_and_abandon_newer(
        folder, str(wanted), str(wanted)
    ) == checkpoint_path(folder, 20), "the second time the same command carries on"


def test_another_runs_checkpoint_starts_a_new_run_only(folder, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    theirs = checkpoint_path(folder, 20)
    assert choose_and_abandon_newer(mine, str(theirs), None) == theirs
    assert choose_and_abandon_newer(mine, str(theirs), str(theirs)) == theirs, (
        "an attempt that saved nothing does not forget it"
    )
    add_checkpoint(mine, 25)
    assert choose_and_abandon_newer(mine, str(theirs), str(theirs)) == checkpoint_path(
        mine, 25
    )
    with pytest.raises(ConfigError, match="another run"):
        choose_and_abandon_newer(mine, str(theirs), None)


def test_a_copy_under_another_number_is_not_a_checkpoint(folder, caplog):
    copy = checkpoint_path(folder, 40)
    shutil.copytree(checkpoint_path(folder, 20), copy)
    assert steps(folder) == [30, 20, 10] and latest_step(folder) == 30
    with pytest.raises(Damaged, match="step-00000040"):
        choose_and_abandon_newer(folder, str(copy), None)
    assert newest_with_damaged_moved_aside(folder) == checkpoint_path(folder, 30)
    assert (
        folder / "step-00000040.damaged-1"
    ).is_dir() and "step-00000040 is damaged" in caplog.text


def test_a_renamed_copy_is_still_valid(folder, tmp_path):
    copy = Path(
        shutil.copytree(checkpoint_path(folder, 20), tmp_path / "kept" / "the good one")
    )
    (tmp_path / "mine").mkdir()
    assert choose_and_abandon_newer(tmp_path / "mine", str(copy), None) == copy
    within = checkpoint_path(folder, 20).rename(folder / "step-20-renamed")
    assert choose_and_abandon_newer(folder, str(within), None) == within
    assert steps(folder) == [10], "the newer one is abandoned"


@pytest.mark.parametrize("resume", ["best", "a path"])
def test_going_back_moves_damaged_ones_away_too(folder, resume):
    """Training would come to their steps again."""
    add_checkpoint(folder, 40)
    (checkpoint_path(folder, 40) / "weights").write_bytes(b"short")
    wanted = checkpoint_path(folder, 20)
    assert (
        choose_and_abandon_newer(
            folder, "best" if resume == "best" else str(wanted), None
        )
        == wanted
    )
    assert {path.name for path in folder.iterdir()} - {"latest", "best"} == {
        "step-00000010",
        "step-00000020",
        "abandoned",
    }


def test_a_run_goes_back_again_after_gc_deleted_what_it_abandoned_first(folder):
    for _ in range(2):
        add_checkpoint(folder, 40)
        checkpoints.abandon_newer(folder, 30)
    checkpoints.remove(folder / "abandoned" / "step-00000040")
    add_checkpoint(folder, 40)
    checkpoints.abandon_newer(folder, 30)
    assert {path.name for path in (folder / "abandoned").iterdir()} == {
        "step-00000040",
        "step-00000040-2",
    }


def test_pointers_follow_when_the_run_goes_back(folder):
    add_checkpoint(folder, 40, 0.5)
    point_and_prune(folder, keep=4)
    checkpoints.abandon_newer(folder, 10)
    assert {
        name: (folder / name).readlink().name for name in ("latest", "best")
    } == dict.fromkeys(("latest", "best"), "step-00000010")
    checkpoints.abandon_newer(folder, 0)
    assert not [path for path in folder.iterdir() if path.is_symlink()]


def test_a_step_that_is_saved_again_always_has_a_valid_checkpoint(folder):
    assert latest_step(folder) == 30
    keep_under_second_name(checkpoint_path(folder, 30))
    assert steps(folder) == [30, 20, 10], "under a second name"
    assert (folder / "latest" / "train_state.json").exists()
    chosen = newest_with_damaged_moved_aside(folder)
    assert chosen is not None and chosen.name == "step-000000030"
    add_checkpoint(folder, 30, 0.5)
    # As the attempt after one that was killed here.
    keep_under_second_name(checkpoint_path(folder, 30))
    add_checkpoint(folder, 30, 0.5)
    point_and_prune(folder, keep=4)
    assert steps(folder) == [30, 20, 10]
    assert {path.name for path in folder.glob("step-*")} == {
        f"step-000000{step}" for step in (10, 20, 30)
    }
    assert (folder / "best").readlink().name == "step-00000030"
    keep_under_second_name(checkpoint_path(folder, 40))
    assert steps(folder) == [30, 20, 10], "there is none to move"
