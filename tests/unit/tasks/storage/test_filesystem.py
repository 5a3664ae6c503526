"""Filesystems and machines that lack something: what works without it, and what is refused with the setting to change."""

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest
from numpy.lib.format import write_array_header_1_0

from infini_llama.configs.errors import ConfigError
from infini_llama.flows.cli.main import name_home
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.shards import (
    map_array,
    map_shard,
    map_targets,
)
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.storage import artifacts
from infini_llama.tasks.storage.artifacts import move_aside, set_pointer
from infini_llama.tasks.storage.files import sync
from infini_llama.tasks.storage.filesystem import examine, require_temporary_folder
from infini_llama.tasks.storage.locks import Lock, lock_holder
from support.made_up_runs import add_checkpoint


@pytest.fixture
def lacking(monkeypatch):
    """Make a system call fail with the error that filesystems without it give."""

    def fail(module, name: str, number: int) -> None:
        def refused(*arguments, **options):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(module, name, refused)

    return fail


@pytest.mark.parametrize(
    "number", [errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS]
)
def test_without_links_there_is_no_pointer_and_all_else_works(
    lacking, tmp_path, data, number
):
    lacking(os, "symlink", number)
    preprocess(data(), tmp_path)
    set_pointer(tmp_path, "latest", "x")
    assert not os.path.lexists(tmp_path / "latest") and not os.path.lexists(
        tmp_path / "datasets" / "latest"
    )
    tried = examine(tmp_path)
    assert not tried.fault and not tried.has_links


def test_a_folder_in_place_of_a_link_is_moved_aside(tmp_path):
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "kept").touch()
    set_pointer(tmp_path, "latest", "x")
    assert (tmp_path / "latest").readlink().name == "x" and (
        tmp_path / "latest.damaged-1" / "kept"
    ).exists()


def test_a_folder_in_place_of_a_link_may_be_moved_by_another_build(
    tmp_path, monkeypatch
):
    (tmp_path / "latest").mkdir()
    monkeypatch.setattr(
        artifacts, "move_aside", lambda path: move_aside(move_aside(path) and path)
    )
    set_pointer(tmp_path, "latest", "x")
    assert (tmp_path / "latest").readlink().name == "x" and (
        tmp_path / "latest.damaged-1"
    ).is_dir()


def test_a_folder_in_place_of_a_link_that_leads_nowhere_is_moved_aside(tmp_path):
    add_checkpoint(tmp_path, 8, None)
    (tmp_path / "best").mkdir()
    checkpoints.point(tmp_path)
    assert not (tmp_path / "best").exists() and (tmp_path / "best.damaged-1").is_dir()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_file_locks_the_home_folder_is_refused(lacking, tmp_path, data, number):
    with Lock(tmp_path / "lock"):
        pass
    lacking(fcntl, "flock", number)
    with pytest.raises(ConfigError, match=r"runtime\.home"):
        preprocess(data(), tmp_path / "home")
    with (
        pytest.raises(ConfigError, match="TMPDIR"),
        Lock(tmp_path / "lock", setting="TMPDIR"),
    ):
        pass
    assert (
        lock_holder(tmp_path / "lock") is None and "locked" in examine(tmp_path).fault
    )


def test_a_folder_that_cannot_be_synced_alone_is_no_fault(lacking, tmp_path):
    (tmp_path / "file").write_text("")
    lacking(os, "fsync", errno.EINVAL)
    sync(tmp_path)
    with pytest.raises(OSError, match="Invalid"):
        sync(tmp_path / "file")


def test_a_map_that_the_system_refuses_is_no_damage(few_addresses, tmp_path):
    table, shard = tmp_path / "table.npy", tmp_path / "shard.arrow"
    with table.open("wb") as file:
        write_array_header_1_0(
            file, {"descr": "<i2", "fortran_order": False, "shape": (few_addresses,)}
        )
    shard.touch()
    os.truncate(table, 2 * few_addresses + table.stat().st_size)
    os.truncate(shard, few_addresses)
    for map_file, file in (
        (map_array, table),
        (map_shard, shard),
        (map_targets, shard),
    ):
        with pytest.raises(ConfigError, match="ulimit -v") as refused:
            map_file(file)
        assert str(file) in str(refused.value)


def test_without_a_folder_for_temporary_files_the_setting_is_named(monkeypatch):
    def none_found() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_found)
    with pytest.raises(ConfigError, match="TMPDIR"):
        require_temporary_folder()


def test_a_user_without_a_home_folder_is_given_one(monkeypatch):
    import pwd

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setenv("HOME", "/kept")
    name_home()
    assert Path.home() == Path("/kept")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    name_home()
    assert Path.home() == Path("/")
