"""Artifacts are whole or not there: damaged by every bit, committed by several at once, and killed at every step."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_llama.configs.errors import PipelineError
from infini_llama.tasks.records.manifest import AnyManifest
from infini_llama.tasks.storage import artifacts
from infini_llama.tasks.storage.artifacts import (
    MANIFEST,
    Damaged,
    OtherVersion,
    check,
    commit,
    file_checksum,
    has_all_files,
    move_aside,
    read_manifest,
    remove,
    set_pointer,
    staging,
)
from infini_llama.tasks.storage.files import write_atomic
from support.damage import flip, forge

FILES = {"a.bin": b"first", "empty": b"", "train/x/deep.bin": bytes(range(40))}
names = st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8}){0,2}\.bin", fullmatch=True)
trees = st.dictionaries(names, st.binary(max_size=200), max_size=6)


def make(
    folder: Path,
    files: dict[str, bytes] = FILES,
    meta: dict | None = None,
    content: dict | None = None,
) -> AnyManifest:
    staged = staging(folder)
    for name, data in files.items():
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_bytes(data)
    return commit(staged, folder, "dataset", meta or {}, content)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def leftovers(folder: Path) -> list[str]:
    return [name for name in names_in(folder) if name.startswith(".")]


@pytest.fixture
def folder(tmp_path) -> Path:
    """An artifact of FILES."""
    make(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def synced(monkeypatch) -> list[tuple[str, list[str]]]:
    """What fsync waited for, in order, and what its folder held at that moment; only a power cut shows what is not on the disk."""
    found: list[tuple[str, list[str]]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        found.append((path.name, names_in(path.parent if path.is_file() else path)))

    monkeypatch.setattr(os, "fsync", record)
    return found


def test_a_committed_artifact_is_synced_before_and_after_its_rename(tmp_path, synced):
    make(tmp_path / "one")
    paths = [name for name, _ in synced]
    staged, parent = synced[-2:]
    assert {"a.bin", "empty", "deep.bin", MANIFEST, "x", "train"} <= set(paths[:-2])
    assert staged[0].startswith(".") and staged[1] == sorted(
        ["a.bin", "empty", "train", MANIFEST]
    )
    assert parent == (tmp_path.name, ["one"])


def test_a_replaced_file_is_on_the_disk_before_and_after_it_gets_its_name(
    tmp_path, synced
):
    write_atomic(tmp_path / "file", "text")
    (temporary, _), parent = synced
    assert temporary.startswith(".file") and parent == (tmp_path.name, ["file"])


@settings(max_examples=30, deadline=None)
@given(files=trees)
def test_the_digest_of_a_complete_artifact_depends_on_content_only(
    tmp_path_factory, files
):
    home = tmp_path_factory.mktemp("commit")
    first = make(home / "one", files, meta={"at": 1}, content={"tokens": 3})
    second = make(
        home / "deeper" / "two",
        files,
        meta={"at": 2, "ü": "\u2028"},
        content={"tokens": 3},
    )
    assert check(home / "one", "dataset", checksums=True) == first
    assert {name: (home / "one" / name).read_bytes() for name in first.files} == files
    assert all(entry.size == len(files[name]) for name, entry in first.files.items())
    assert first.digest == second.digest and first.self_checksum != second.self_checksum
    assert make(home / "three", files, content={"tokens": 4}).digest != first.digest
    assert (
        make(home / "four", files | {"more.bin": b""}, content={"tokens": 3}).digest
        != first.digest
    )
    assert leftovers(home) == []


def test_a_flipped_bit_in_any_byte_is_found(tmp_path):
    folder = tmp_path / "data"
    # Values that some flipped bits leave equal: an exponent's letter, the last digit of a long number.
    make(
        folder,
        meta={"rate": 1e-05, "entropy": 9.491234166938838, "text": "ä\n"},
        content={"n": 0.1 + 0.2},
    )
    found = 0
    for path in [folder / name for name in FILES] + [folder / MANIFEST]:
        data = path.read_bytes()
        for byte in range(len(data)):
            path.write_bytes(data)
            flip(path, 8 * byte + byte % 8)
            with pytest.raises(Damaged, match=str(folder)):
                check(folder, "dataset", checksums=True)
            found += 1
        path.write_bytes(data)
    assert found > 600
    check(folder, "dataset", checksums=True)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_manifest_cut_short_or_overwritten_is_damaged(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("manifest") / "data"
    make(folder)
    text = (folder / MANIFEST).read_bytes()
    start = data.draw(st.integers(0, len(text) - 1))
    piece = data.draw(st.binary(max_size=20))
    damaged = (
        text[:start]
        + piece
        + data.draw(st.sampled_from([b"", text[start + len(piece) :], text[start:]]))
    )
    (folder / MANIFEST).write_bytes(damaged)
    if damaged == text:
        assert has_all_files(folder, "dataset")
    else:
        with pytest.raises(Damaged):
            read_manifest(folder, "dataset")


@settings(max_examples=60, deadline=None)
@given(files=trees.filter(bool), data=st.data())
def test_any_truncated_or_missing_file_is_found_by_size(tmp_path_factory, files, data):
    folder = tmp_path_factory.mktemp("sizes") / "data"
    make(folder, files)
    name = data.draw(st.sampled_from(sorted(files)))
    fault = data.draw(st.sampled_from(["cut", "missing"]))
    if fault == "cut" and files[name]:
        (folder / name).write_bytes(
            files[name][: data.draw(st.integers(0, len(files[name]) - 1))]
        )
        pattern = f"{folder / name} .*{len(files[name])}"
    else:
        (folder / name).unlink()
        pattern = f"{folder / name} "
    with pytest.raises(Damaged, match=pattern):
        check(folder, "dataset", checksums=False)


FAULTS = {
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), MANIFEST),
    "a manifest without end": (
        lambda folder: (folder / MANIFEST).write_text("[" * 100_000),
        MANIFEST,
    ),
    "a list": (lambda folder: (folder / MANIFEST).write_text("[1]"), MANIFEST),
    "not all fields": (
        lambda folder: (folder / MANIFEST).write_text('{"files": {}}'),
        MANIFEST,
    ),
    "a later format": (lambda folder: forge(folder, format_version=99), "version 99"),
    "a longer file": (
        lambda folder: (folder / "a.bin").write_bytes(b"longer"),
        "a.bin has 6 bytes",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_folder_names_the_file(folder, fault):
    spoil, named = FAULTS[fault]
    spoil(folder)
    with pytest.raises(Damaged, match=re.escape(named)):
        check(folder, "dataset", checksums=False)
    assert not has_all_files(folder, "dataset")


def test_a_manifest_with_fields_of_a_later_version_is_not_damaged(folder):
    forge(folder, signed_by="somebody")
    with pytest.raises(OtherVersion, match="data"):
        check(folder, "dataset", checksums=False)


def test_sizes_do_not_reveal_a_changed_byte_or_type(folder):
    with pytest.raises(Damaged, match=r"dataset.*checkpoint"):
        check(folder, "checkpoint", checksums=False)
    (folder / "a.bin").write_bytes(b"First")
    assert has_all_files(folder, "dataset")
    with pytest.raises(Damaged, match=r"a\.bin"):
        check(folder, "dataset", checksums=True)


def test_a_file_replaced_by_a_link_or_a_folder_is_missing(tmp_path, folder):
    (tmp_path / "elsewhere").write_bytes(b"first")
    (folder / "a.bin").unlink()
    (folder / "a.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Damaged, match=r"a\.bin"):
        check(folder, "dataset", checksums=True)
    (folder / "a.bin").unlink()
    (folder / "a.bin").mkdir()
    with pytest.raises(Damaged, match=r"a\.bin"):
        check(folder, "dataset", checksums=True)


@pytest.mark.parametrize(
    "name", ["../outside", "train/../../outside", "/etc/hostname", ".."]
)
def test_a_manifest_that_names_files_outside_its_folder_is_refused(
    tmp_path, folder, name
):
    (tmp_path / "outside").write_bytes(b"")
    forge(
        folder,
        files={name: {"size": 0, "checksum": file_checksum(tmp_path / "outside")}},
    )
    with pytest.raises(Damaged, match="outside"):
        read_manifest(folder, "dataset")


def test_nested_artifacts_and_what_others_put_there_are_no_damage(folder):
    make(folder / "chunks" / "k", {"rows": b"1"})
    (folder / "notes.txt").write_text("The best one so far.")
    (folder / "train" / "cache-0123456789abcdef.arrow").write_bytes(b"a user's map()")
    (folder / "train" / ".DS_Store").write_bytes(b"Finder")
    (folder / "Thumbs.db").write_bytes(b"Explorer")
    (folder / "@eaDir" / "a.bin").mkdir(parents=True)
    (folder / "@eaDir" / "a.bin" / "SYNOINDEX").write_bytes(b"of a network disk")
    check(folder, "dataset", checksums=True)


@pytest.mark.parametrize(
    "there",
    ["other content", "other bytes", "a file is missing", "no manifest", "a file"],
)
def test_a_target_that_differs_is_moved_aside_and_replaced(tmp_path, caplog, there):
    target = tmp_path / "data"
    if there == "a file":
        target.write_bytes(b"x")
    else:
        make(target, content={"step": 8 if there == "other content" else 16})
    if there == "other bytes":
        (target / "a.bin").write_bytes(b"First")
    elif there in ("a file is missing", "no manifest"):
        (target / ("a.bin" if there == "a file is missing" else MANIFEST)).unlink()
    written = make(target, content={"step": 16})
    assert check(target, "dataset", checksums=True) == written and written.content == {
        "step": 16
    }
    assert (
        names_in(tmp_path) == ["data", "data.damaged-1"]
        and str(tmp_path / "data.damaged-1") in caplog.text
    )


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": {"a.bin": 5}},
        {"files": {"a.bin": {"size": "5", "checksum": "x"}}},
        {"files": {"a.bin": {"size": -1, "checksum": "x"}}},
        {"files": {"a.bin": {"size": True, "checksum": "x"}}},
        {"files": {"a\0.bin": {"size": 5, "checksum": "x"}}},
        {"content": None},
        {"meta": [1]},
        {"digest": 7},
        {"digest": "blake3:0"},
        {"created": {}},
    ],
    ids=str,
)
def test_a_manifest_of_wrong_types_is_damaged_despite_its_checksum(folder, change):
    forge(folder, **change)
    with pytest.raises(Damaged, match=MANIFEST):
        check(folder, "dataset", checksums=True)
    assert not has_all_files(folder, "dataset")


def test_write_atomic_replaces_the_text_or_leaves_the_old_one(tmp_path):
    path = tmp_path / "status.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new" * 10_000 + "\ud800")
    assert path.read_text() == "old" and names_in(tmp_path) == ["status.json"]
    write_atomic(path, "newer ü")
    assert path.read_text(encoding="utf-8") == "newer ü"


def test_a_pointer_on_a_disk_that_is_only_read_is_left_out(tmp_path, monkeypatch):
    """As where the datasets of a team are mounted."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    make(tmp_path / "one")
    monkeypatch.setattr(Path, "unlink", refuse)
    set_pointer(tmp_path, "latest", "one")
    assert names_in(tmp_path) == ["one"]


def test_a_pointer_in_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        set_pointer(tmp_path / "nowhere", "latest", "x")


def test_moving_aside_loses_nothing_and_removing_leaves_nothing(tmp_path):
    for number in (1, 2):
        make(tmp_path / "data")
        (tmp_path / "data" / "a.bin").write_bytes(bytes([number]))
        assert move_aside(tmp_path / "data") == tmp_path / f"data.damaged-{number}"
    assert [
        (tmp_path / f"data.damaged-{number}" / "a.bin").read_bytes()
        for number in (1, 2)
    ] == [
        b"\1",
        b"\2",
    ]
    remove(tmp_path / "data.damaged-1")
    assert names_in(tmp_path) == ["data.damaged-2"]
    (tmp_path / "link").symlink_to("data.damaged-2")
    remove(tmp_path / "link")
    assert names_in(tmp_path) == ["data.damaged-2"], (
        "what was moved behind a link stays where it is"
    )


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE])
def test_a_temporarily_unreadable_file_is_not_damaged(folder, monkeypatch, number):
    def denied(path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(artifacts, "file_checksum", denied)
    with pytest.raises(OSError, match=os.strerror(number)):
        check(folder, "dataset", checksums=True)
    assert issubclass(Damaged, PipelineError) and Damaged.exit_code == 65


# The parent forks one child for each step of an action and kills it there, for real; prints what a reader then finds.
KILLED_AT_EVERY_STEP = """
import os, signal, sys
from pathlib import Path
from infini_llama.tasks.storage.artifacts import commit, has_all_files, set_pointer, staging
home = Path(sys.argv[1])

def killed_at(step, events, action):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    count = 0
    def kill(event, arguments):
        nonlocal count
        if event.startswith(events):
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(kill)
    action()
    os._exit(0)
"""
COMMITS = """
def write(target):
    staged = staging(target)
    (staged / "train").mkdir()
    (staged / "train" / "x").write_bytes(b"x" * 1000)
    (staged / "y").write_bytes(b"y")
    commit(staged, target, "dataset", {})

for step in range(1, 1000):
    target = home / str(step)
    ended = killed_at(step, ("open", "os.", "shutil."), lambda: write(target))
    print(step, ended, target.exists(), has_all_files(target, "dataset"))
    if ended == 0:
        break
"""


def steps_of(program: str, home: Path) -> list[list[str]]:
    """What it prints of each step."""
    command = [sys.executable, "-c", KILLED_AT_EVERY_STEP + program, str(home)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split() for line in child.stdout.splitlines()]


def test_a_commit_killed_at_any_step_leaves_a_whole_artifact_or_none(tmp_path):
    steps = steps_of(COMMITS, tmp_path)
    assert len(steps) > 15
    assert [ended for _, ended, _, _ in steps] == ["-9"] * (len(steps) - 1) + ["0"]
    assert all(exists == complete for _, _, exists, complete in steps)
    # Before the rename, and after it.
    assert {exists for _, _, exists, _ in steps[:-1]} == {
        "True",
        "False",
    }


COMMITS_WITH_OTHERS = """
import json, sys, time
from pathlib import Path
from infini_llama.tasks.storage.artifacts import commit, staging
home, me = Path(sys.argv[1]), sys.argv[2]
for turn in range(25):
    target = home / str(turn)
    staged = staging(target)
    (staged / "x").write_bytes(b"same")
    (home / f"ready-{turn}-{me}").touch()
    while len(list(home.glob(f"ready-{turn}-*"))) < 2:
        time.sleep(0)
    print(commit(staged, target, "dataset", {"by": me}).model_dump_json())
"""


def test_of_two_committers_at_once_one_wins_and_both_get_its_manifest(tmp_path):
    both = [
        subprocess.Popen(
            [sys.executable, "-c", COMMITS_WITH_OTHERS, str(tmp_path), me],
            stdout=subprocess.PIPE,
        )
        for me in ("a", "b")
    ]
    printed = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert printed[0] == printed[1] and len(printed[0].splitlines()) == 25
    for turn in range(25):
        check(tmp_path / str(turn), "dataset", checksums=True)
    assert leftovers(tmp_path) == []


# The parent sets the pointer itself after each kill.
POINTS = """
for step in range(1, 100):
    set_pointer(home, "latest", "old")
    ended = killed_at(step, "os.", lambda: set_pointer(home, "latest", "new"))
    seen, left = os.readlink(home / "latest"), sorted(os.listdir(home))
    set_pointer(home, "latest", "old")
    print(step, ended, seen, len(left), *sorted(os.listdir(home)))
    if ended == 0:
        break
"""


def test_a_pointer_killed_at_any_step_is_old_or_new_and_cleaned_up(tmp_path):
    steps = steps_of(POINTS, tmp_path)
    assert [ended for _, ended, *_ in steps] == ["-9"] * (len(steps) - 1) + ["0"]
    assert [seen for _, _, seen, *_ in steps] == ["old"] * (len(steps) - 1) + ["new"]
    # One was killed between the link and its renaming.
    assert {left for _, _, _, left, *_ in steps} == {
        "1",
        "2",
    }
    assert all(step[4:] == ["latest"] for step in steps)


POINTS_WITH_OTHERS = """
import sys
from pathlib import Path
from infini_llama.tasks.storage.artifacts import set_pointer
for _ in range(3000):
    set_pointer(Path(sys.argv[1]), "latest", sys.argv[2])
"""


def test_concurrent_set_pointer_leaves_one_of_the_targets(tmp_path):
    both = [
        subprocess.Popen([sys.executable, "-c", POINTS_WITH_OTHERS, str(tmp_path), me])
        for me in ("a", "b")
    ]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert (tmp_path / "latest").readlink() in (Path("a"), Path("b"))
    assert names_in(tmp_path) == ["latest"]
