"""Commits and pointers whose processes are killed at every step, and several that commit at once."""

import subprocess
import sys
from pathlib import Path

from infini_llama.tasks.storage.artifacts import (
    check,
)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def leftovers(folder: Path) -> list[str]:
    return [name for name in names_in(folder) if name.startswith(".")]


# The parent forks one child for each step of a commit and kills it there, for real; prints what a reader then finds.
KILLED_AT_EVERY_STEP = """
import os, signal, sys
from pathlib import Path
from infini_llama.tasks.storage.artifacts import commit, is_complete, staging
home = Path(sys.argv[1])

def child(step, target):
    count = 0
    def kill(event, arguments):
        nonlocal count
        if event == "open" or event.startswith(("os.", "shutil.")):
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(kill)
    staged = staging(target)
    (staged / "train").mkdir()
    (staged / "train" / "x").write_bytes(b"x" * 1000)
    (staged / "y").write_bytes(b"y")
    commit(staged, target, "dataset", {})

for step in range(1, 1000):
    target = home / str(step)
    pid = os.fork()
    if pid == 0:
        child(step, target)
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(step, ended, target.exists(), is_complete(target, "dataset"))
    if ended == 0:
        break
"""


def test_killed_at_any_step_of_a_commit_the_artifact_is_whole_or_not_there(tmp_path):
    child = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_STEP, str(tmp_path)], capture_output=True, text=True, check=True
    )
    steps = [line.split() for line in child.stdout.splitlines()]
    assert len(steps) > 15
    assert [ended for _, ended, _, _ in steps] == ["-9"] * (len(steps) - 1) + ["0"]
    assert all(exists == complete for _, _, exists, complete in steps)
    assert {exists for _, _, exists, _ in steps[:-1]} == {"True", "False"}  # before the rename, and after it


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
        subprocess.Popen([sys.executable, "-c", COMMITS_WITH_OTHERS, str(tmp_path), me], stdout=subprocess.PIPE)
        for me in ("a", "b")
    ]
    printed = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert printed[0] == printed[1] and len(printed[0].splitlines()) == 25
    for turn in range(25):
        check(tmp_path / str(turn), "dataset", checksums=True)
    assert leftovers(tmp_path) == []


# The parent forks one child for each step of setting a pointer and kills it there; then it sets the pointer itself.
POINTS = """
import os, signal, sys
from pathlib import Path
from infini_llama.tasks.storage.artifacts import set_pointer
home = Path(sys.argv[1])

def child(step):
    count = 0
    def kill(event, arguments):
        nonlocal count
        if event.startswith("os."):
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(kill)
    set_pointer(home, "latest", "new")

for step in range(1, 100):
    set_pointer(home, "latest", "old")
    pid = os.fork()
    if pid == 0:
        child(step)
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seen, left = os.readlink(home / "latest"), sorted(os.listdir(home))
    set_pointer(home, "latest", "old")
    print(step, ended, seen, len(left), *sorted(os.listdir(home)))
    if ended == 0:
        break
"""


def test_a_pointer_killed_at_any_step_is_old_or_new_and_the_next_call_clears_what_was_left(tmp_path):
    child = subprocess.run([sys.executable, "-c", POINTS, str(tmp_path)], capture_output=True, text=True, check=True)
    steps = [line.split() for line in child.stdout.splitlines()]
    assert [ended for _, ended, *_ in steps] == ["-9"] * (len(steps) - 1) + ["0"]
    assert [seen for _, _, seen, *_ in steps] == ["old"] * (len(steps) - 1) + ["new"]
    assert {left for _, _, _, left, *_ in steps} == {"1", "2"}  # one was killed between the link and its renaming
    assert all(step[4:] == ["latest"] for step in steps)


POINTS_WITH_OTHERS = """
import sys
from pathlib import Path
from infini_llama.tasks.storage.artifacts import set_pointer
for _ in range(3000):
    set_pointer(Path(sys.argv[1]), "latest", sys.argv[2])
"""


def test_two_that_set_a_pointer_at_once_do_not_fail_and_one_of_them_is_right(tmp_path):
    both = [subprocess.Popen([sys.executable, "-c", POINTS_WITH_OTHERS, str(tmp_path), me]) for me in ("a", "b")]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert (tmp_path / "latest").readlink() in (Path("a"), Path("b"))
    assert names_in(tmp_path) == ["latest"]
